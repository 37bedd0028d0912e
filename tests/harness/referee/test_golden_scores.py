"""Scores of the examples, as they were when they were last meant to change.

A commit that moves one of these figures says why. The tolerance covers other CPUs' matrix products (about 1e-6 seen),
not other arithmetic.
"""

from pathlib import Path

import pytest

from tests.harness.conftest import ROOT

EXAMPLES = Path(ROOT) / "examples"
OPTIONS = ("--seq-len=128", "--step-budget=8", "--val-byte-budget=3000")

# example, ranks -> (prequential bpb, held-out delta, parameters)
GOLDEN = {
    ("transformer_tiny", 1): (5.038197711688918, 0.19682324972696508, 3326592),
    ("fused_loss", 1): (5.038197712249213, 0.19682324850974808, 3326592),
    ("ssm_tiny", 1): (5.015860272627668, 0.195945999241931, 3310864),
    ("transformer_tiny", 2): (5.127200077210676, 0.07065817685382081, 3326592),
}

# Scored by tests/campaign/test_ray.py, one rank each, in one campaign: a campaign must score what `score` does.
GOLDEN_IN_CAMPAIGN = {
    "gated_delta_tiny": (5.032005955369093, 0.18412658219335087, 3328328),
    "moe_tiny": (5.012359422249707, 0.21599621473147668, 3523712),
    "looped_tiny": (5.031845505389021, 0.19583411263431794, 3285632),
    "hybrid_tiny": (5.018768378846292, 0.20542231410594036, 3315592),
}


@pytest.mark.parametrize(("example", "ranks"), GOLDEN)
def test_example_scores_what_it_scored(score, example, ranks):
    bpb, delta, parameters = GOLDEN[example, ranks]
    options = (*OPTIONS, f"--nproc={ranks}", f"--step-budget={8 // ranks}")
    run = score(bundle=EXAMPLES / example, options=options)
    assert run.code == 0, run.stderr
    manifest = run.manifest()
    assert manifest.score.prequential_bpb == pytest.approx(bpb, rel=2e-5)
    assert manifest.score.heldout_delta == pytest.approx(delta, abs=1e-4)
    assert manifest.metrics.model_params == parameters
    assert manifest.run.world_size == ranks
    assert manifest.metrics.tokens_seen == 4096
    assert manifest.score.flags == []


def test_the_fast_loss_trains_the_same_model_as_torchs():
    plain, fused = GOLDEN["transformer_tiny", 1], GOLDEN["fused_loss", 1]
    assert fused[0] == pytest.approx(plain[0], rel=1e-7) and fused[1] == pytest.approx(plain[1], abs=1e-6)
