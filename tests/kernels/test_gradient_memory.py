"""Where the CPU backend's large gradients live: memory that is used again, and lent before it is needed."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn import functional as F

from prism_fast import cross_entropy, linear_cross_entropy
from prism_fast.kernels import use_backend
from prism_fast.kernels.backends import recycled

LARGE = torch.Size((1 << 10, 1 << 12))  # float32: 16 MiB


@pytest.fixture(autouse=True)
def nothing_idle():
    gc.collect()
    recycled.empty_cache()
    yield
    recycled.empty_cache()


def test_memory_is_used_again_by_the_next_tensor_like_it_and_by_no_other():
    first = recycled.empty(LARGE, torch.float32)
    address = first.data_ptr()
    alive = recycled.empty(LARGE, torch.float32)
    assert alive.data_ptr() != address
    view = first[3:]
    del first
    assert recycled.empty(LARGE, torch.float32).data_ptr() != address  # a view still holds it
    recycled.empty_cache()
    del view
    assert recycled.empty(torch.Size((1 << 10,)), torch.float32).data_ptr() != address  # far too small for it
    again = recycled.empty(LARGE, torch.float32)
    assert again.data_ptr() == address and again.shape == LARGE and again.is_contiguous()


def test_gradients_of_two_steps_that_are_both_kept_do_not_share_memory():
    torch.manual_seed(0)
    logits = torch.randn(LARGE, requires_grad=True)
    target = torch.randint(0, LARGE[1], (LARGE[0],))
    with use_backend("cpp"):
        (one,) = torch.autograd.grad(cross_entropy(logits, target), logits)
        kept = one.clone()
        (two,) = torch.autograd.grad(cross_entropy(logits, target.flip(0)), logits)
    assert torch.equal(one, kept) and not torch.equal(one, two)


@pytest.mark.parametrize("tokens", [96, 160, 200])  # all, most and half of them fit where the head's gradient will be
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tokens_that_borrow_the_heads_gradient_get_the_gradients_of_the_others(tokens, with_bias, dtype):
    torch.manual_seed(tokens)
    vocab, width = 4133, 96
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    head = (torch.randn(vocab, width) * 0.2).to(dtype).requires_grad_()
    bias = torch.randn(vocab).to(dtype).requires_grad_() if with_bias else None
    target = torch.randint(0, vocab, (tokens,))
    target[5] = -100
    inputs = [tensor for tensor in (hidden, head, bias) if tensor is not None]
    with use_backend("cpp"):
        loss = linear_cross_entropy(hidden, head, target, bias=bias, label_smoothing=0.1)
        grads = torch.autograd.grad(loss, inputs)
        chunked = torch.autograd.grad(
            linear_cross_entropy(hidden, head, target, bias=bias, label_smoothing=0.1, chunk_tokens=48), inputs
        )
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = F.cross_entropy(F.linear(*exact_inputs), target, label_smoothing=0.1)
    wanted = torch.autograd.grad(exact, exact_inputs)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    loss, exact = loss.detach().double(), exact.detach()
    assert float((loss - exact).abs()) <= tolerance * float(exact)
    for grad, other, want in zip(grads, chunked, wanted, strict=True):
        scale = float(want.abs().max())
        assert float((grad.double() - want).abs().max()) <= tolerance * scale
        assert float((other.double() - want).abs().max()) <= tolerance * scale
