"""What a probe compares, and where it cuts."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism_fast.harness.referee import evaluator_client
from prism_fast.harness.referee.evaluator_client import Head, Prediction
from prism_fast.harness.referee.probes import (
    FIRST_PROBE_WITHIN,
    ProbePlan,
    same_answers,
    same_prefix,
    with_other_suffix,
)
from prism_fast.kernels import token_nll


@given(st.integers(1, 5), st.integers(2, 9), st.data())
def test_only_what_lies_after_the_cut_is_replaced(rows, width, data):
    tokens = np.arange(rows * width).reshape(rows, width)
    other = -np.arange(1, data.draw(st.integers(2, 60)))[None]
    cut = ProbePlan(10).cut(tokens.size)
    assert 1 <= cut < tokens.size
    variant = with_other_suffix(tokens, other, cut).reshape(-1)
    assert (variant[:cut] == tokens.reshape(-1)[:cut]).all() and (variant[cut:] < 0).all()


def test_every_run_is_probed_early_and_about_one_batch_in_sixteen_is():
    for batches in (1, 2, 5, 1000):
        plan = ProbePlan(batches)
        assert any(plan.probes(i) for i in range(min(batches, FIRST_PROBE_WITHIN)))
    plan = ProbePlan(10**6)
    probed = sum(plan.probes(i) for i in range(100, 20_100))
    assert 1000 < probed < 1500


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_prefixes_are_compared_up_to_the_cut(dtype):
    first = torch.randn(2, 3, 5, dtype=dtype)
    first[0, 0, 0] = float("nan")
    second = first.clone()
    second[1, 0, 0] += 1  # flattened position 3
    assert same_prefix(first, second, 3) and not same_prefix(first, second, 4)
    zero, minus_zero = torch.zeros(1, 1, 2, dtype=dtype), -torch.zeros(1, 1, 2, dtype=dtype)
    assert same_prefix(zero, minus_zero, 1)  # a tolerance above the bits
    assert not same_prefix(first, first[:, :, :4], 1)


@pytest.mark.parametrize("kept", [False, True])
def test_an_answer_is_read_once_and_scored_the_same_whether_it_is_probed_or_not(kept, monkeypatch):
    logits, targets = torch.randn(3, 7, 11), torch.randint(0, 11, (3, 7))
    monkeypatch.setattr(evaluator_client, "PIECE_BYTES", 5 * 11 * 4)  # five positions: the last piece is short
    shared = logits.clone()
    answer = Prediction(shared, None, lambda size: torch.empty(size, dtype=torch.uint8), 0.0)
    if kept:
        answer.keep()
    assert torch.equal(answer.nll(targets), token_nll(logits, targets))
    shared.zero_()  # the evaluator goes on writing
    if kept:
        assert torch.equal(answer.logits, logits)
    else:
        with pytest.raises(RuntimeError, match="are gone"):
            _ = answer.logits


def test_answers_by_head_are_the_same_where_their_logits_are():
    weight = torch.randn(11, 4)
    weight[:, 3] = 0.0

    def answer(hidden):
        return Prediction(None, Head(hidden, weight, None, 1), None, 0.0)

    hidden = torch.randn(2, 5, 4)
    blind, seen = hidden.clone(), hidden.clone()
    blind[..., 3] += 1.0  # of no consequence to any logit
    seen[1, 0, 0] += 1.0  # flattened position 5
    assert same_answers(answer(hidden), answer(blind), 10)
    assert same_answers(answer(hidden), answer(seen), 5) and not same_answers(answer(hidden), answer(seen), 6)
    logits = Prediction(answer(hidden).logits.clone(), None, lambda n: torch.empty(n, dtype=torch.uint8), 0.0)
    assert same_answers(answer(hidden), logits, 10)
