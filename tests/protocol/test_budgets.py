"""Budgets: their order, and the FLOPs that no bundle can steer."""

import pytest

from prism_fast.protocol.budgets import budget_reached, steps_at_most, training_flops
from prism_fast.protocol.run_spec import RunSpec


def spec(**budgets) -> RunSpec:
    return RunSpec(
        engine_version="0",
        bundle_digest="b",
        seal="sealed",
        isolation="none",
        tokenizer="gpt2",
        tokenizer_fingerprint="t",
        corpus_fingerprint="c",
        val_corpus_fingerprint=None,
        vocab_size=50304,
        torch_threads=1,
        **{"token_budget": None, **budgets},
    )


def test_training_flops_are_six_for_a_parameter_and_a_token():
    assert training_flops(1_000_000, 20_000) == 1.2e11


@pytest.mark.parametrize(
    ("budgets", "tokens", "steps", "reason"),
    [
        ({}, 10**12, 10**9, None),
        ({"token_budget": 100}, 99, 5, None),
        ({"token_budget": 100, "step_budget": 5, "flops_budget": 1.0}, 100, 5, "token_budget"),
        ({"token_budget": 101, "step_budget": 5, "flops_budget": 1.0}, 100, 5, "step_budget"),
        ({"token_budget": 101, "step_budget": 6, "flops_budget": 6 * 7 * 100}, 100, 5, "flops_budget"),
        ({"flops_budget": 6 * 7 * 100 + 1}, 100, 5, None),
    ],
)
def test_tokens_bind_before_steps_and_steps_before_flops(budgets, tokens, steps, reason):
    assert budget_reached(spec(**budgets), tokens, steps, parameters=7) == reason


@pytest.mark.parametrize("budgets", [{"token_budget": 1001}, {"step_budget": 11}, {"flops_budget": 6.0 * 7 * 1001}])
def test_the_steps_foreseen_are_the_steps_taken(budgets):
    held, steps = spec(**budgets), 0
    while budget_reached(held, steps * 100, steps, parameters=7) is None:
        steps += 1
    assert steps == 11 == steps_at_most(held, 100, parameters=7)
