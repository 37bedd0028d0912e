"""What a probe compares, and where it cuts."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism_fast.harness.probes import FIRST_PROBE_WITHIN, ProbePlan, same_prefix, with_other_suffix


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
