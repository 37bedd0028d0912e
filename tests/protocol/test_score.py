"""The score fold against its formulas, and what can never enter it."""

import inspect
import math

import pytest

from prism_fast.protocol.errors import BundleFailed
from prism_fast.protocol.score import CodeLength, HeldOut, compute_score, uniform_bpb

LN2 = math.log(2.0)


def code(bpb: float, n_bytes: int = 1000, tokens: int = 250) -> CodeLength:
    return CodeLength(nats=bpb * LN2 * n_bytes, bytes=n_bytes, tokens=tokens)


def heldout(trained=2.0, twin=3.5, prefix=1.9, n_vocab=50257) -> HeldOut:
    return HeldOut(code(trained), code(twin), code(prefix) if prefix is not None else None, n_vocab)


def fold(online=None, *, step0=10.8, width=50304, faults=0, held=None, **more):
    return compute_score(online or code(3.0), step0_loss=step0, head_width=width, faults=faults, heldout=held, **more)


def test_bits_per_byte_of_a_uniform_model_is_tokens_times_log2_v_over_bytes():
    tokens, n_bytes, v = 777, 3210, 50304
    uniform = CodeLength(nats=tokens * math.log(v), bytes=n_bytes, tokens=tokens)
    assert uniform.bpb == pytest.approx(tokens * math.log2(v) / n_bytes, rel=1e-15)
    assert uniform_bpb(v, tokens, n_bytes) == pytest.approx(uniform.bpb, rel=1e-15)


def test_final_score_is_100_plus_delta_plus_a_secondary_that_only_breaks_ties():
    score = fold(held=heldout())
    assert score.heldout_delta == pytest.approx(1.5)
    assert score.final_score == pytest.approx(100 + 1.5 + 1e-3 / (1 + 3.0), rel=1e-12)
    assert score.flags == []


def test_secondary_is_below_the_smallest_difference_that_counts():
    better_bpb = fold(code(0.01), held=heldout(trained=2.0))
    better_delta = fold(code(60.0), held=heldout(trained=1.998))
    assert better_delta.final_score > better_bpb.final_score


def test_a_twin_that_is_bad_on_purpose_gains_nothing():
    honest = fold(held=heldout(twin=3.9))
    cheat = fold(held=heldout(twin=300.0))
    uniform = uniform_bpb(50257, 250, 1000)
    assert honest.heldout_delta == pytest.approx(min(3.9, uniform) - 2.0)
    assert cheat.heldout_delta == pytest.approx(uniform - 2.0)
    assert cheat.final_score - honest.final_score < 0.01
    uncapped = fold(held=heldout(twin=300.0), cap_twin_at_uniform=False)
    assert uncapped.heldout_delta == pytest.approx(298.0)


def test_a_train_to_val_gap_above_one_bit_halves_the_score():
    score = fold(held=heldout(trained=2.5, prefix=1.4))
    assert score.memorization_flag and score.memorization_penalty == 0.5
    assert score.final_score == pytest.approx((100 + 1.0) * 0.5 + 0.5e-3 / 4.0, rel=1e-9)
    assert not fold(held=heldout(trained=2.5, prefix=1.51)).memorization_flag


def test_a_first_loss_below_half_of_ln_v_zeroes_the_score():
    threshold = 0.5 * math.log(50304)
    low = fold(step0=threshold * 0.999, held=heldout())
    assert low.step0_anomaly and low.final_score == 0.0 and "step0_anomaly" in low.flags
    assert not fold(step0=threshold, held=heldout()).step0_anomaly
    assert fold(step0=math.nan, held=heldout()).final_score == 0.0


def test_a_broken_rule_zeroes_the_score_and_is_flagged_by_name():
    score = fold(held=heldout(), violations=["prism:noncausal"])
    assert score.final_score == 0.0 and score.flags == ["prism:noncausal"]


def test_without_held_out_the_score_is_degraded():
    score = fold()
    assert score.degraded and score.heldout_delta is None
    assert score.final_score == pytest.approx(1 / 4)


@pytest.mark.parametrize("bad", [code(0.0), code(-1.0), code(math.nan), code(math.inf), CodeLength(5.0, 0, 0)])
def test_degenerate_runs_are_refused_not_ranked(bad):
    with pytest.raises(BundleFailed) as caught:
        fold(bad, held=heldout())
    assert caught.value.rule == "prism:degenerate"


def test_a_twin_that_is_not_finite_is_refused():
    with pytest.raises(BundleFailed):
        fold(held=heldout(twin=math.nan))


def test_implausible_bits_per_byte_and_faults_are_flagged():
    assert fold(code(64.5), faults=2, held=heldout()).flags[:2] == ["nan_inf", "implausible_bpb"]


def test_a_model_that_did_not_learn_is_flagged():
    assert "no_learning" in fold(held=heldout(trained=3.6)).flags


def test_nothing_observed_can_be_passed_to_the_score():
    allowed = {"online", "step0_loss", "head_width", "faults", "heldout", "violations", "cap_twin_at_uniform"}
    assert set(inspect.signature(compute_score).parameters) == allowed
    source = inspect.getsource(inspect.getmodule(compute_score))
    for word in ("import time", "gpu_count", "perf_counter", "monotonic"):
        assert word not in source
