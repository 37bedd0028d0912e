from __future__ import annotations

import itertools

import pytest
import reference
import torch
from torch.nn import functional as F

from prism_fast import cross_entropy

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
OPTIONS = [
    {"label_smoothing": eps, "z_loss": z, "softcap": cap, "weighted": weighted}
    for eps, z, cap, weighted in itertools.product((0.0, 0.1), (0.0, 1e-3), (None, 5.0), (False, True))
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_loss_and_gradient_equal_float64_for_every_option(backend, dtype, reduction):
    torch.manual_seed(0)
    for options, vocab, inplace in itertools.product(OPTIONS, (7, 509, 5000), (False, True)):
        options = dict(options)
        weight = torch.rand(vocab) if options.pop("weighted") else None
        logits = (torch.randn(9, vocab) * 3).to(dtype)
        target = torch.randint(0, vocab, (9,))
        target[3] = -100
        upstream = torch.randn(9) if reduction == "none" else torch.tensor(0.3)

        exact = logits.double().clone().requires_grad_()
        want = reference.loss(exact, target, reduction=reduction, weight=weight, **options)
        want.backward(upstream.double())

        leaf = logits.clone().requires_grad_()
        got = cross_entropy(leaf.view_as(leaf), target, weight, reduction=reduction, inplace_grad=inplace, **options)
        got.backward(upstream.to(got.dtype))
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)
        error = (leaf.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()
        assert error <= TOLERANCE[dtype], (options, vocab, inplace)


def test_takes_the_shapes_of_torch(backend):
    torch.manual_seed(0)
    logits, target = torch.randn(2, 7, 3, 4), torch.randint(0, 7, (2, 3, 4))
    torch.testing.assert_close(cross_entropy(logits, target), F.cross_entropy(logits, target))
    torch.testing.assert_close(
        cross_entropy(logits.permute(0, 2, 3, 1), target, reduction="none"),
        F.cross_entropy(logits, target, reduction="none"),
    )
    torch.testing.assert_close(
        cross_entropy(logits[0, :, 0, 0], target[0, 0, 0]), -logits[0, :, 0, 0].log_softmax(0)[target[0, 0, 0]]
    )


def test_refuses_a_shape_that_fits_two_readings():
    with pytest.raises(ValueError, match="flatten"):
        cross_entropy(torch.randn(2, 5, 5), torch.zeros(2, 5, dtype=torch.long))


def test_target_out_of_range_raises_on_the_cpu(backend):
    with pytest.raises(IndexError, match="row 1 is 7"):
        cross_entropy(torch.randn(2, 7), torch.tensor([0, 7]))


def test_second_backward_in_place_raises(backend):
    if backend == "torch":
        pytest.skip("the reference keeps the logits")
    logits = torch.randn(3, 11, requires_grad=True)
    loss = cross_entropy(logits * 1, torch.tensor([1, 2, 3]), inplace_grad=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()
