"""The CPU core's own product of few tokens with the head, which `linear_cross_entropy` makes chunk by chunk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_fast.kernels.backends import cpp

FEW = cpp._core.FEW_TOKENS

pytestmark = pytest.mark.skipif(cpp.why_not(torch.device("cpu")) is not None, reason="the compiled core is missing")


def logits_of(hidden, head, bias=None, threads=1):
    out = torch.full((len(hidden), len(head)), torch.nan)
    matrices = [cpp._matrix(tensor) for tensor in (hidden, head)]
    cpp._core.few_tokens_logits(*matrices, cpp._address(bias), cpp._matrix(out), threads)
    return out


# A hidden size over 512 is summed in parts; classes come 64 and 4 at a time, tokens a register at a time.
@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, FEW),
    size=st.sampled_from([0, 1, 7, 64, 512, 513, 1100]),
    classes=st.integers(1, 300),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_it_is_the_product(tokens, size, classes, with_bias, seed):
    torch.manual_seed(seed)
    # Rows of larger matrices, as chunks and blocks are.
    hidden = torch.randn(tokens, size + 3)[:, 2 : size + 2]
    head = torch.randn(classes, size + 5)[:, :size]
    bias = torch.randn(classes) if with_bias else None
    exact = hidden.double() @ head.double().T + (0 if bias is None else bias.double())
    bound = 2e-7 * (size + 1) * (hidden.abs().double() @ head.abs().double().T + 1)
    assert ((logits_of(hidden, head, bias) - exact).abs() <= bound).all()


def test_into_a_matrix_whose_tokens_lie_side_by_side():
    hidden, head = torch.randn(13, 40), torch.randn(130, 40)
    across = torch.empty(130, 13).T
    cpp._logits(hidden, head, None, across)
    assert torch.equal(across, logits_of(hidden, head))


def test_bits_do_not_depend_on_threads_or_on_the_tokens_beside():
    torch.manual_seed(0)
    hidden, head = torch.randn(FEW, 700), torch.randn(1000, 700)
    together = logits_of(hidden, head)
    for threads in (2, 3, 8):
        assert torch.equal(logits_of(hidden, head, threads=threads), together)
    for tokens in (slice(0, 1), slice(5, 22), slice(17, 64)):
        assert torch.equal(logits_of(hidden[tokens], head), together[tokens])
    assert torch.equal(logits_of(hidden, head[100:103]), together[:, 100:103])
