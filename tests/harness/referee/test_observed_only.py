"""The same ledger gives the same score, whatever was observed beside it: GPUs, times, memory, the miner's own words."""

from pathlib import Path

import numpy as np
import pytest

from prism_fast.harness.referee.ledger import Ledger, pack_record
from prism_fast.harness.referee.results import RunFacts, build_documents
from prism_fast.protocol import constants as c
from prism_fast.protocol.ledger import OBSERVATIONS_DTYPE
from prism_fast.protocol.manifest import RunManifest
from prism_fast.protocol.run_spec import RunSpec
from prism_fast.protocol.score import compute_score

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
    ledger = Ledger(run_dir, 1)
    for index in range(20):
        ledger.add(0, pack_record(index, (1000.0 - index, 0.0, 400, 100, 4, 0), 104, 1, 0, 2))
        observation = np.zeros(1, OBSERVATIONS_DTYPE)
        observation["index"], observation["step_s"], observation["wall_s"] = index, seen["step_s"], index
        ledger.observe(0, observation.tobytes())
    ledger.close()
    score = compute_score(
        ledger.code_length, step0_loss=ledger.step0_loss, head_width=50304, faults=ledger.faults, heldout=None
    )
    facts = RunFacts(
        spec=spec,
        submission_id="s",
        run_id="r",
        run_dir=run_dir,
        data_dir="d",
        data_source="d",
        shard_count=1,
        available_bytes=10_000,
        hello={0: {"device": seen["device"], "machine": {**MACHINE, **seen["machine"]}}},
        started={},
        model={
            "plan": {"corpus_bytes": 10_000, "corpus_tokens": 2_500},
            "model_params": 7,
            "head_width": 50304,
            "backends": {},
            "basis": "tokens",
            "batch_size": 2,
            "seq_len": 52,
        },
        done={
            0: {
                "peak_rss_bytes": seen["memory"],
                "peak_vram_bytes": seen["memory"],
                "peak_vram_reserved_bytes": seen["memory"],
                "forward_flops": seen["memory"],
                "returned": seen["returned"],
            }
        },
        stopped_reason="step_budget",
        startup_s={},
        train_s=seen["wall_s"],
        wall_s=seen["wall_s"],
        heldout_s=None,
        ineligible_reasons=[],
        probes=0,
        script_sha256={"architecture.py": "a", "training.py": "t"},
    )
    return build_documents(facts, ledger, score)[0]


def test_gpu_count_and_everything_else_observed_leaves_the_score_as_it_is(tmp_path):
    one, other = manifest_of(tmp_path / "one", SEEN), manifest_of(tmp_path / "other", OTHERWISE)
    assert (one.compute.gpu_count, other.compute.gpu_count) == (0, 1)
    assert one.compute != other.compute and one.run.device != other.run.device
    assert one.score == other.score and one.anti_cheat == other.anti_cheat
    assert one.score.final_score == pytest.approx(1 / (1 + one.score.prequential_bpb))
    assert (one.metrics.model_dump(exclude={"train_series"})) == other.metrics.model_dump(exclude={"train_series"})
    assert other.miner_reported_ignored == {"rank0": "final_score=1000"}
