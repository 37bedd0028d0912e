"""Pins: their numbers, what may carry a public claim, and that nothing between pin and context changes a size."""

from dataclasses import replace

import pytest

from prism_fast.protocol import PrismContext
from prism_fast.protocol.errors import UsageError
from prism_fast.protocol.scale import (
    SCALE_PHASES,
    ProtocolPin,
    assert_public_multi_seed_pin,
    assert_scale_pin_floor,
    explore_protocol_pin,
    prism_context_from_protocol_pin,
    protocol_pin,
    scale_p0_protocol_pin,
    scale_p1_protocol_pin,
    scale_p2_protocol_pin,
    scale_p3_protocol_pin,
    scale_pin_public_ok,
)


@pytest.mark.parametrize(
    ("make", "stage", "cap", "mode", "seq_len", "token_budget"),
    [
        (scale_p0_protocol_pin, "explore", 124_000_000, "gpu_proxy_eval", 128, 500_000),
        (scale_p1_protocol_pin, "explore", 124_000_000, "gpu_proxy_eval", 256, 1_000_000),
        (scale_p2_protocol_pin, "promote", 350_000_000, "gpu_proxy_eval", 256, 1_000_000),
        (scale_p3_protocol_pin, "promote", 350_000_000, "full_scale_eval", 256, 1_000_000),
    ],
)
def test_a_rungs_pin_has_the_contracts_numbers(make, stage, cap, mode, seq_len, token_budget):
    pin = make()
    assert pin == ProtocolPin(
        protocol_id="prism_official_compare.v1",
        mode=mode,
        param_ladder_stage=stage,
        param_cap=cap,
        seq_len=seq_len,
        token_budget=token_budget,
        seeds=(1337, 2027, 4242),
        batch_size=4,
        tokenizer="gpt2",
        vocab_size=50304,
        scored_nproc=1,
        primary_form="heldout_delta",
    )
    assert scale_pin_public_ok(pin).ok


def test_p1_may_be_raised_to_its_targets_and_not_lowered_below_its_floors():
    raised = scale_p1_protocol_pin(seq_len=512, token_budget=2_000_000)
    assert (raised.seq_len, raised.token_budget) == (512, 2_000_000)
    assert (SCALE_PHASES["p1"].seq_len_target, SCALE_PHASES["p1"].token_budget_high) == (512, 2_000_000)
    with pytest.raises(UsageError, match="seq_len 128 is below 256"):
        scale_p1_protocol_pin(seq_len=128)
    with pytest.raises(UsageError, match="token_budget 999,999 is below 1,000,000"):
        scale_p1_protocol_pin(token_budget=999_999)
    assert scale_p1_protocol_pin(seq_len=128, require_floor=False).seq_len == 128


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seeds": (1337,)}, "seed_count_below_public_min"),
        ({"seeds": (1337, 2027)}, "seed_count_below_public_min"),
        ({"seeds": ()}, "seed_count_below_public_min"),
        ({"seeds": (1337, 2027, 4242, 1337)}, "duplicate_seeds"),
        ({"primary_form": "accuracy"}, "unknown_primary_form"),
        ({"token_budget": 0}, "non_positive_token_budget"),
        ({"seq_len": -1}, "non_positive_seq_len"),
    ],
)
def test_a_pin_that_cannot_carry_a_public_claim_says_why(change, reason):
    pin = replace(scale_p0_protocol_pin(), **change)
    guard = scale_pin_public_ok(pin)
    assert not guard.ok and [r.partition(":")[0] for r in guard.reasons] == [reason]
    with pytest.raises(UsageError, match=reason):
        assert_public_multi_seed_pin(pin)


def test_one_seed_three_times_is_one_seed():
    guard = scale_pin_public_ok(replace(scale_p0_protocol_pin(), seeds=(7, 7, 7)))
    assert guard.as_dict() == {
        "ok": False,
        "seed_count": 1,
        "min_public_seeds": 3,
        "reasons": ["seed_count_below_public_min:K=1<3", "duplicate_seeds"],
    }


def test_fewer_seeds_must_be_asked_for_as_provisional():
    with pytest.raises(UsageError, match="at least 3 distinct seeds"):
        scale_p2_protocol_pin(seeds=(1337,))
    assert scale_p2_protocol_pin(seeds=(1337,), require_public_k=False).seeds == (1337,)


def test_any_second_primary_form_of_the_contract_is_public():
    assert_public_multi_seed_pin(replace(scale_p0_protocol_pin(), primary_form="val_bpb_trained"))


@pytest.mark.parametrize(("seq_len", "token_budget"), [(256, 1_000_000), (512, 2_000_000), (129, 500_001)])
def test_a_pins_sizes_reach_the_context_unchanged(seq_len, token_budget):
    pin = explore_protocol_pin(seeds=(9,), seq_len=seq_len, token_budget=token_budget)
    context = prism_context_from_protocol_pin(pin)
    assert (context.sequence_length, context.max_seq_len) == (seq_len, seq_len)
    assert context.token_budget == token_budget
    assert (context.seed, context.vocab_size, context.step_budget) == (9, 50304, None)


def test_a_promote_pin_gives_a_promote_context():
    context = prism_context_from_protocol_pin(scale_p2_protocol_pin(), seed=4242, rank=1, world_size=2)
    assert (context.param_ladder_stage, context.ladder_stage) == ("promote", "promote")
    assert (context.max_parameters, context.max_params) == (350_000_000, 350_000_000)
    assert (context.seed, context.rank, context.world_size) == (4242, 1, 2)
    assert isinstance(context, PrismContext)


def test_an_unset_explore_pin_keeps_the_short_default():
    context = prism_context_from_protocol_pin(explore_protocol_pin())
    assert (context.sequence_length, context.token_budget) == (128, 500_000)


def test_a_context_is_not_made_for_a_stage_the_ladder_does_not_have():
    with pytest.raises(UsageError, match="unknown parameter ladder stage 'explor'"):
        prism_context_from_protocol_pin(replace(scale_p0_protocol_pin(), param_ladder_stage="explor"))


def test_an_explore_pin_is_no_promote_pin():
    with pytest.raises(UsageError, match=r"param_ladder_stage is 'explore'.*param_cap is 124,000,000"):
        assert_scale_pin_floor(scale_p1_protocol_pin(), "p2")
    with pytest.raises(UsageError, match="mode is 'gpu_proxy_eval'"):
        assert_scale_pin_floor(scale_p2_protocol_pin(), "p3")


def test_an_unknown_pin_is_refused_by_name():
    with pytest.raises(UsageError, match="unknown pin 'p4'; expected p0, p1, p2, p3"):
        protocol_pin("p4")


def test_equal_pins_have_equal_digests_and_any_change_shows():
    assert scale_p1_protocol_pin().digest == scale_p1_protocol_pin().digest
    digests = {scale_p1_protocol_pin(seq_len=n).digest for n in (256, 257, 512)}
    assert len(digests | {scale_p2_protocol_pin().digest, scale_p3_protocol_pin().digest}) == 5


def test_a_pins_document_says_that_wall_clock_never_ranks():
    document = scale_p3_protocol_pin().as_dict()
    assert document["wall_clock_never_ranks"] is True
    assert document["seeds"] == [1337, 2027, 4242]
