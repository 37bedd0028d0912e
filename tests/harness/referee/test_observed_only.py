"""The same ledger gives the same score, whatever was observed beside it: GPUs, times, memory, the miner's own words."""

from pathlib import Path

import numpy as np
import pytest

from prism_fast.harness.process import jobs
from prism_fast.harness.referee.ledger import Ledger, pack_record
from prism_fast.harness.referee.results import RunFacts, write_documents
from prism_fast.protocol import constants as c
from prism_fast.protocol import receipts
from prism_fast.protocol.canonical import sha256_hex
from prism_fast.protocol.ledger import OBSERVATIONS_DTYPE
from prism_fast.protocol.manifest import RunManifest
from prism_fast.protocol.run_spec import RunSpec

MACHINE = {
    "cpu": "one",
    "cpu_count": 1,
    "memory_bytes": 1,
    "gpus": [],
    "gpu_memory_bytes": None,
    "driver": None,
    "os": "o",
    "python": "3",
    "torch": "2",
    "triton": None,
    "backends": {},
}
SEEN = {"device": "cpu", "step_s": 0.1, "memory": 1, "wall_s": 1.0, "returned": None, "machine": {}}
OTHERWISE = {
    "device": "cuda:0",
    "step_s": 9.0,
    "memory": 10**9,
    "wall_s": 1e6,
    "returned": "final_score=1000",
    "machine": {"gpus": ["a"] * 8, "gpu_memory_bytes": 1 << 40, "driver": "d"},
}


def manifest_of(run_dir: Path, seen: dict) -> RunManifest:
    run_dir.mkdir()
    (run_dir / c.WEIGHTS_FILE).write_bytes(b"weights")
    (run_dir / c.ARTIFACTS_DIR).mkdir()
    spec = RunSpec(
        engine_version="0",
        bundle_digest="b",
        seal="sealed",
        isolation="bwrap",
        tokenizer="gpt2",
        tokenizer_fingerprint="t",
        corpus_fingerprint="c",
        val_corpus_fingerprint=None,
        vocab_size=50304,
        torch_threads=1,
    )
    genesis = receipts.Genesis(
        run_spec_sha256=spec.hash,
        submission_id="s",
        run_id="r",
        script_sha256={"architecture.py": "a", "training.py": "t"},
        data_dir="d",
        data_source="d",
        shard_count=1,
        available_bytes=10_000,
        programs=[],
        initial_state_sha256=None,
        pin=None,
        distributed_contract=None,
    )
    ledger = Ledger(run_dir, 1)
    ledger.bind(bytes.fromhex(sha256_hex(receipts.document_bytes(genesis))))
    for index in range(20):
        ledger.add(0, pack_record(index, (1000.0 - index, 0.0, 400, 100, 4, 0), 104, 1, 0, 2))
        observation = np.zeros(1, OBSERVATIONS_DTYPE)
        observation["index"], observation["step_s"], observation["wall_s"] = index, seen["step_s"], index
        ledger.observe(0, observation.tobytes())
    ledger.close()
    done = jobs.Done(
        rank=0,
        stopped_reason="step_budget",
        returned=seen["returned"],
        peak_rss_bytes=seen["memory"],
        peak_vram_bytes=seen["memory"],
        peak_vram_reserved_bytes=seen["memory"],
        forward_flops=seen["memory"],
        save_s=seen["wall_s"],
    )
    facts = RunFacts(
        spec=spec,
        genesis=genesis,
        run_dir=run_dir,
        hello=jobs.Hello(
            rank=0,
            pid=1,
            secret="",
            device=seen["device"],
            machine={**MACHINE, **seen["machine"]},
            import_s=0.0,
            prepare_s=0.0,
        ),
        done={0: done},
        model={
            "plan": {"corpus_bytes": 10_000, "corpus_tokens": 2_500},
            "model_params": 7,
            "head_width": 50304,
            "backends": {},
            "basis": "tokens",
            "batch_size": 2,
            "seq_len": 52,
        },
        stopped_reason="step_budget",
        heldout=None,
        startup_s={},
        train_s=seen["wall_s"],
        wall_s=seen["wall_s"],
        heldout_s=None,
    )
    return write_documents(facts, ledger)


def test_gpu_count_and_everything_else_observed_leaves_the_score_as_it_is(tmp_path):
    one, other = manifest_of(tmp_path / "one", SEEN), manifest_of(tmp_path / "other", OTHERWISE)
    assert (one.compute.gpu_count, other.compute.gpu_count) == (0, 1)
    assert one.compute != other.compute and one.run.device != other.run.device
    assert one.score == other.score and one.anti_cheat == other.anti_cheat
    assert one.score.final_score == pytest.approx(1 / (1 + one.score.prequential_bpb))
    assert (one.metrics.model_dump(exclude={"train_series"})) == other.metrics.model_dump(exclude={"train_series"})
    assert other.miner_reported_ignored == {"rank0": "final_score=1000"}
