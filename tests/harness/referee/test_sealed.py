"""Sealed scoring of honest bundles: the bits of open mode, with no data where the bundle runs."""

import pytest

from prism_fast.harness.process.isolation import bwrap_fault
from tests.harness.conftest import ROOT, TINY_ARCHITECTURE, TINY_TRAINING

SEALED = ("--seal=sealed", "--isolation=auto")
BUFFERED = (
    TINY_ARCHITECTURE.replace(
        "self.mix = nn.Linear(width, width)", "self.mix = nn.Linear(width, width); self.norm = nn.BatchNorm1d(width)"
    )
    .replace("x = self.embedding(tokens)", "x = self.embedding(tokens); x = self.norm(x.flatten(0, 1)).view_as(x)")
    .replace("return self.head(x", "return self.head(torch.dropout(x, 0.3, self.training)")
)
# An autocast around the whole loop must not cache weights: they change in it.
AUTOCAST = TINY_TRAINING.replace(
    "    for batch in", "    torch.autocast('cpu', torch.bfloat16, cache_enabled=False).__enter__()\n    for batch in"
)
COMPILED = TINY_TRAINING.replace(
    "model = build_model(ctx).to(ctx.device)", "model = torch.compile(build_model(ctx).to(ctx.device), backend='eager')"
)
LOOKS_AROUND = """
import os, socket
seen = [os.path.join(d, f) for d, _, fs in os.walk('/') for f in fs if f.endswith(('.prsh', '.jsonl', '.jsonl.gz'))
        and not d.startswith(('/proc', '/sys')) and os.path.getsize(os.path.join(d, f))]
try:
    socket.create_connection(('127.0.0.2', 9), timeout=1)
except OSError as error:
    seen.append(type(error).__name__)
open(os.environ['PRISM_ARTIFACT_OUTPUT_PATH'] + '/seen', 'w').write('\\n'.join(seen))
"""


def fields(run) -> dict:
    assert run.code == 0, run.stderr
    dump = run.manifest().model_dump()
    del dump["metrics"]["train_series"]["sha256"]
    keep = ("final_score", "prequential_bpb", "heldout_delta", "val_bpb_trained", "val_bpb_random_init", "flags")
    return {"metrics": dump["metrics"], **{k: dump["score"][k] for k in keep}}


@pytest.mark.parametrize(
    ("architecture", "training"),
    [
        (TINY_ARCHITECTURE, TINY_TRAINING),
        (BUFFERED, AUTOCAST),
        pytest.param(TINY_ARCHITECTURE, COMPILED, marks=pytest.mark.long),
    ],
    ids=["plain", "buffers, dropout and autocast", "compiled"],
)
def test_sealed_gives_the_bits_of_open(score, architecture, training):
    sealed = score(architecture, training, options=SEALED, out="sealed")
    opened = score(architecture, training, out="open")
    assert fields(sealed) == fields(opened)
    engine = sealed.manifest().engine
    assert engine.seal == "sealed" and engine.probes > 0
    assert engine.weights_sha256 == opened.manifest().engine.weights_sha256


@pytest.mark.long
@pytest.mark.parametrize("example", sorted(p.parent.name for p in (ROOT / "examples").glob("*/architecture.py")))
def test_an_example_scores_sealed_what_it_scores_open(score, example):
    options = ("--seq-len=128", "--step-budget=4", "--val-byte-budget=1500")
    runs = [
        score(bundle=ROOT / "examples" / example, options=(*options, *seal), out=f"run{len(seal)}")
        for seal in ((), SEALED)
    ]
    assert [run.code for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert fields(runs[0]) == fields(runs[1])


def test_two_sealed_ranks_give_the_bits_of_two_open_ranks(score):
    options = ("--nproc=2", "--seq-len=128", "--step-budget=2")
    example = ROOT / "examples" / "ssm_tiny"
    sealed = score(bundle=example, options=(*SEALED, *options), out="sealed")
    opened = score(bundle=example, options=options, out="open")
    assert fields(sealed) == fields(opened)


@pytest.mark.skipif(bwrap_fault() is not None, reason=f"needs bubblewrap: {bwrap_fault()}")
def test_the_sandboxed_trainer_finds_no_text_and_no_network(score):
    run = score(training=LOOKS_AROUND + TINY_TRAINING, options=SEALED)
    assert run.code == 0, run.stderr
    seen = (run.seed_dir() / "artifacts" / "seen").read_text().splitlines()
    assert seen and all(line.endswith("Error") for line in seen), seen
    manifest = run.manifest()
    (reason,) = manifest.score.emission_ineligible_reasons  # nothing but that it is written for one GPU
    assert reason.startswith("the distributed contract is not met")


def test_weights_that_training_brings_along_are_rejected(score):
    training = TINY_TRAINING.replace(
        "    optimizer = ", "    torch.nn.init.constant_(model.head.bias, 0.5)\n    optimizer = "
    )
    run = score(training=training, options=SEALED)
    assert run.code == 3 and run.status()["rule"] == "prism:forced-init"
    assert "head.bias" in run.status()["message"]


def test_a_forward_that_writes_to_its_weights_behind_autograd_is_rejected(score):
    architecture = TINY_ARCHITECTURE.replace(
        "x = self.embedding(tokens)", "x = self.embedding(tokens)\n        self.mix.weight.data.mul_(1.0)"
    )
    run = score(architecture, options=SEALED)
    assert run.code == 3 and run.status()["rule"] == "prism:not-exportable"
    assert ".data of a parameter" in run.status()["message"]


@pytest.mark.long
def test_a_model_that_looks_ahead_after_an_honest_start_is_flagged_and_zeroed(score):
    architecture = TINY_ARCHITECTURE.replace(
        "return self.head(", "x = x + x.roll(-1, 1) * (self.mix.bias.abs().sum() > 0.03)\n        return self.head("
    ).replace("nn.init.normal_(self.head.weight", "nn.init.zeros_(self.mix.bias); nn.init.normal_(self.head.weight")
    run = score(architecture, options=(*SEALED, "--step-budget=40"))
    assert run.code == 0, run.stderr
    manifest = run.manifest()
    assert "prism:noncausal" in manifest.score.flags and manifest.score.final_score == 0.0


def test_an_evaluator_that_hangs_ends_with_the_watchdog(score):
    architecture = TINY_ARCHITECTURE.replace("x = self.embedding(tokens)", "x = __import__('time').sleep(600)")
    run = score(architecture, options=(*SEALED, "--budget-seconds=2", "--watchdog-grace=2"))
    assert run.code == 7 and run.status()["rule"] == "prism:budget-exceeded"
