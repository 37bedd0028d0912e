"""Accounting prism-v2 against the original's rules written out plainly (prism_v2_reference.py)."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest

from prism_fast.data.contiguous import ContiguousStream, WholeBytes
from prism_fast.data.corpus import resolve_data
from prism_fast.data.tokenizers import reference_tokenizer
from prism_fast.harness.audits.verify import verify_run
from prism_fast.harness.trainer.prism_v2 import cut_in_rows
from prism_fast.protocol.errors import UsageError
from prism_fast.protocol.manifest import RunSummary
from prism_fast.report.rank import rank_runs
from tests.harness.conftest import ROOT, TINY_ARCHITECTURE, TINY_TRAINING, score_command, seed_training, write_bundle
from tests.report.conftest import write_run

from .prism_v2_reference import documents

REFERENCE = Path(__file__).with_name("prism_v2_reference.py")
# Dropout, so that the mode and the random state of a prediction show; a vocabulary that ids must be folded into.
DROPS_OUT = TINY_ARCHITECTURE.replace("self.mix = ", "self.drop = nn.Dropout(0.3)\n        self.mix = ").replace(
    "return self.head(x", "return self.head(self.drop(x)"
)
TRAINS_ON_BYTES = TINY_TRAINING.replace("tokenizer=tokenizer", "seq_len=33").replace(
    'ctx.reference_tokenizer("gpt2")', "None"
)
FIGURES = (
    "prequential_bpb",
    "val_bpb_trained",
    "val_bpb_random_init",
    "heldout_delta",
    "train_bpb_converged",
    "final_score",
)


@pytest.fixture(scope="module")
def original_layout(tmp_path_factory) -> Path:
    """train-00000.jsonl, train-00001.jsonl and val-00000.jsonl under a manifest that is not ours."""
    folder = tmp_path_factory.mktemp("original")
    (folder / "MANIFEST.json").write_text('{"schema": "prism_locked_data.v1"}')
    for name, count in (("train-00000", 40), ("train-00001", 25), ("val-00000", 12)):
        texts = (
            "" if i == 3 else f"{name}: naïve number {i} is told of, {'日本 ' * (i % 4)}again. " * 4
            for i in range(count)
        )
        lines = [orjson.dumps({"id": f"{name}-{i}", "text": text}) for i, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return folder


@pytest.mark.parametrize(
    ("training", "vocab_size", "token_budget"),
    [
        (seed_training(), 1000, None),
        pytest.param(TRAINS_ON_BYTES, 200, 2500, marks=pytest.mark.slow),
    ],
    ids=["the original script on tokens to the end", "bytes to a budget"],
)
def test_the_originals_figures_are_reproduced(tmp_path, original_layout, cache_dir, training, vocab_size, token_budget):
    bundle = write_bundle(tmp_path / "bundle", DROPS_OUT, training)
    job = {
        "bundle": str(bundle),
        "data": str(original_layout),
        "vocab_size": vocab_size,
        "sequence_length": 64,
        "token_budget": token_budget,
        "seed": 1337,
        "held_out_bytes": 65536,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = subprocess.run([sys.executable, REFERENCE, tmp_path / "job.json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = json.loads(done.stdout)

    out = tmp_path / "run"
    options = ("--accounting=prism-v2", f"--data={original_layout}", f"--vocab-size={vocab_size}")
    options += (f"--token-budget={token_budget or 0}",)
    command = [
        part
        for part in score_command(bundle, out, cache_dir, *options)
        if not part.startswith(("--step-budget", "--val-byte-budget", "--seal", "--data=sample"))
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    seed_dir = out / "seed-1337"
    manifest = json.loads((seed_dir / "prism_run_manifest.v2.json").read_bytes())
    metrics = manifest["metrics"]
    assert {name: manifest["score"][name] for name in FIGURES} == pytest.approx(
        {name: wanted[name] for name in FIGURES}, rel=1e-4
    )
    for name in ("covered_bytes", "predicted_tokens"):
        assert metrics[name] == wanted[name]
    assert metrics["consumed_batches"] == wanted["batches"]
    assert manifest["run"]["stopped_reason"] == wanted["stopped_reason"]
    assert (metrics["step0_loss"], metrics["online_loss"]) == pytest.approx(
        (wanted["step0_loss"], wanted["online_loss"]), rel=1e-4
    )

    # marked wherever it is shown
    assert manifest["engine"]["accounting"] == "prism-v2" and manifest["engine"]["seal"] == "open"
    assert "accounting is prism-v2" in manifest["score"]["emission_ineligible_reasons"]
    assert RunSummary.model_validate_json((out / "summary.json").read_bytes()).accounting == "prism-v2"
    assert "accounting prism-v2" in done.stdout and "accounting prism-v2" in done.stderr
    assert json.loads((seed_dir / "heldout.json").read_bytes())["accounting"] == "prism-v2"
    assert list(verify_run(seed_dir, data=str(original_layout), cache_dir=cache_dir)) == []


@pytest.mark.parametrize("seq_len", [128, pytest.param(100, marks=pytest.mark.long)])
def test_a_model_with_a_table_of_positions_has_its_held_out_figure(score, seq_len):
    # 100: the byte budget is no multiple of a row
    options = ("--accounting=prism-v2", "--step-budget=2", "--val-byte-budget=1500", f"--seq-len={seq_len}")
    run = score(bundle=ROOT / "examples" / "transformer_tiny", options=options)
    assert run.code == 0, run.stderr
    found, heldout = run.manifest(), run.json("heldout.json")
    assert found.score.heldout_delta is not None and "degraded" not in run.stderr
    assert {heldout[part]["bytes"] for part in ("twin", "trained", "train_prefix")} == {1500}


def test_a_model_that_fails_on_held_out_text_has_no_figure_and_the_run_a_score(score):
    fails = "assert self.training or tokens.max() > 255\n        "  # held-out text is bytes
    breaks = TINY_ARCHITECTURE.replace("x = self.embedding", f"{fails}x = self.embedding")
    run = score(architecture=breaks, options=("--accounting=prism-v2", "--step-budget=2"))
    assert run.code == 0, run.stderr
    assert run.manifest().score.heldout_delta is None
    assert "no held-out figure, the score is degraded: the model's forward failed" in run.stderr


@pytest.mark.parametrize(
    ("count", "shapes"),
    [
        (0, []),
        (1, []),
        (2, [(1, 2)]),
        (16, [(1, 16)]),
        (17, [(1, 16)]),
        (128, [(8, 16)]),
        (128 + 16 * 3 + 5, [(8, 16), (3, 16), (1, 5)]),
    ],
)
def test_held_out_rows_are_never_wider_than_the_sequence_length(count, shapes):
    cut = list(cut_in_rows(np.arange(count), 16))
    assert [rows.shape for rows in cut] == shapes
    dropped = 1 if count in (1, 17) else 0
    assert [i for rows in cut for i in rows.reshape(-1).tolist()] == list(range(count - dropped))


@pytest.mark.parametrize("option", [("--seal", "sealed"), ("--nproc", "2", "--policy", "off")])
def test_the_original_had_one_process_and_no_seal(score, option):
    run = score(options=("--accounting", "prism-v2", *option))
    assert run.code == 2 and "use --seal open --nproc 1" in run.stderr


def test_only_the_originals_rules_fold_ids(score):
    run = score(options=("--vocab-size", "1000"))
    assert run.code == 2 and "--vocab-size 1000" in run.stderr and "50257 ids" in run.stderr


def test_accountings_are_not_ranked_together(tmp_path):
    old = write_run(tmp_path / "old", bundle="old", spec={"accounting": "prism-v2"})
    new = write_run(tmp_path / "new", bundle="new")
    with pytest.raises(UsageError, match="exact, prism-v2"):
        rank_runs([old, new])
    assert rank_runs([old])["rows"][0]["accounting"] == "prism-v2"


# ------------------------------------------------------------------------------------------------------------ the rows


def plain(folder: Path, basis: str) -> tuple[list[int], list[float]]:
    encoding = reference_tokenizer("gpt2").encoding
    ids, shares = [], []
    for text in documents(folder, "train"):
        raw = text.encode()
        own = list(raw) if basis == "bytes" else encoding.encode(text)
        ids += own
        shares += [len(raw) / len(own)] * len(own)
    return ids, shares


@pytest.mark.parametrize("basis", ["tokens", "bytes"])
@pytest.mark.parametrize("budget", [None, 0, 1000, 1001, 1024, 10**9])
def test_rows_are_contiguous_and_carry_every_tokens_share(original_layout, cache_dir, basis, budget):
    split = resolve_data(original_layout, "gpt2", cache_dir).split("train")
    ids, shares = plain(original_layout, basis)
    stream = ContiguousStream(split, 16, 4, basis=basis, token_budget=budget)
    at, whole, given = 0, WholeBytes(), 0
    for batch in stream:
        count = batch.tokens.size
        assert batch.tokens.shape == ((4, 16) if count == 64 else (1, count))
        assert batch.tokens.reshape(-1).tolist() == ids[at : at + count]
        assert batch.utf8_bytes == pytest.approx(sum(shares[at : at + count]), rel=1e-12)
        at += count
        given += whole(batch.utf8_bytes)
    enough = budget is not None and budget <= len(ids)
    assert at == (budget // 64 * 64 if enough else len(ids))
    assert stream.stopped == ("token_budget" if enough else "data_exhausted")
    assert given == round(sum(shares[:at]))
    assert stream.corpus_tokens == len(ids) and stream.corpus_bytes == split.bytes
