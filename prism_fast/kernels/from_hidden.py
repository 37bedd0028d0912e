"""Cross-entropy from hidden states and the head that turns them into logits: [N, V] is never held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prism_fast.kernels.backends import LossOptions
from prism_fast.kernels.backends.torch import accumulation_dtype, loss_rows
from prism_fast.kernels.dispatch import backend_for
from prism_fast.kernels.from_logits import (
    check_options,
    correction,
    fuses,
    once,
    options_as_arguments,
    raise_twice,
    runs_eagerly,
    uses_reference,
)
from prism_fast.kernels.operators import operator
from prism_fast.kernels.reduction import mean_divisor
from prism_fast.kernels.shapes import as_hidden_rows, autocast_head


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_tokens: int | str = "auto",
) -> Tensor:
    """`cross_entropy(hidden @ weight.T + bias, target)` without the logits ever existing as a whole.

    Args:
        hidden: `[..., H]`, float64, float32, bfloat16 or float16.
        weight, bias: the head, `[V, H]` and `[V]`, in the dtype of `hidden`; under autocast all are cast to its dtype
            and gradients come back in the parameters' own.
        target: integer class ids, `[...]`.
        class_weight: `[V]`, what `cross_entropy` calls `weight`.
        ignore_index, reduction, label_smoothing, z_loss, softcap: as in `cross_entropy`.
        chunk_tokens: tokens whose logits exist at a time while a gradient is made; "auto" keeps them below 1/20 of
            [N, V]. The gradient of the head sums in float32 (float64), so its error does not grow with the chunks.

    Returns, raises: as `cross_entropy`; ValueError too for a weight that is not a whole [V, H] here (sharded,
    flattened or emptied).

    With a "mean" or "sum", the gradient is made with the loss, so that the logits are multiplied out once: that takes
    the time of a backward pass even if none follows; score under `torch.no_grad()`. "none" makes it afterwards.
    """
    shape = target.shape
    hidden, weight, bias = autocast_head(hidden, weight, bias)
    rows, weight, bias, ids = as_hidden_rows(hidden, weight, bias, target)
    vocab = len(weight)
    options = check_options(rows, class_weight, vocab, ignore_index, reduction, label_smoothing, z_loss, softcap)
    chunk = _chunk(chunk_tokens)
    accumulator = accumulation_dtype(rows.dtype)
    divisor = mean_divisor(ids, options, accumulator) if reduction == "mean" else None
    needs = tuple(tensor is not None and tensor.requires_grad for tensor in (rows, weight, bias))
    wants_grad = torch.is_grad_enabled() and any(needs)

    if uses_reference(rows):
        loss = loss_rows(torch.nn.functional.linear(rows, weight, bias), ids, options)[0]
        total = loss.sum() if reduction != "none" else loss
    elif wants_grad and reduction != "none" and fuses(rows):
        expected = torch.ones((), dtype=accumulator, device=rows.device)
        if divisor is not None:
            expected = expected / divisor
        if not runs_eagerly(rows, weight):
            total = torch.ops.prism_fast.linear_cross_entropy_fused(
                rows, weight, bias, ids, expected, *options_as_arguments(options), chunk, *needs
            )[0]
        else:
            total = _Fused.apply(rows, weight, bias, ids, expected, options, chunk, needs)
    else:
        loss = torch.ops.prism_fast.linear_cross_entropy(
            rows, weight, bias, ids, *options_as_arguments(options), chunk
        )[0]
        total = torch.ops.prism_fast.sum_rows(loss) if reduction != "none" else loss
    if reduction == "none":
        return loss.view(shape)
    return total if divisor is None else total / divisor


def _chunk(chunk_tokens: int | str) -> int:
    """0 for the backend's own choice."""
    if chunk_tokens == "auto":
        return 0
    if isinstance(chunk_tokens, int) and chunk_tokens > 0:
        return chunk_tokens
    raise ValueError(f"chunk_tokens must be a positive integer or 'auto', got {chunk_tokens!r}")


class _Fused(torch.autograd.Function):
    """Sum of the row losses, whose gradients are made with it for the upstream gradient `expected`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        expected: Tensor,
        options: LossOptions,
        chunk: int,
        needs: tuple[bool, bool, bool],
    ) -> Tensor:
        backend = backend_for(hidden.device)
        loss, lse, _, *grads = backend.linear_cross_entropy_forward_backward(
            hidden.detach(),
            weight.detach(),
            None if bias is None else bias.detach(),
            target,
            expected.expand(len(target)),
            options,
            chunk,
            needs,
        )
        ctx.save_for_backward(hidden, weight, bias, target, expected, lse)
        ctx.grads, ctx.options, ctx.chunk, ctx.needs = grads, options, chunk, needs
        return backend.sum_rows(loss)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, expected, lse = ctx.saved_tensors
        hidden, weight, upstream = hidden.detach(), weight.detach(), upstream.detach()
        bias = None if bias is None else bias.detach()
        grads, ctx.grads = ctx.grads, None
        backend = backend_for(hidden.device)
        if grads is None:  # handed out already: a second backward through a retained graph
            grads = backend.linear_cross_entropy_backward(
                hidden, weight, bias, target, lse, upstream.expand(len(target)), ctx.options, ctx.chunk, ctx.needs
            )
        else:
            factor = correction(upstream, expected)
            for grad in grads:
                if grad is not None:
                    lines = grad.view(1, -1) if grad.dim() == 1 else grad
                    backend.scale_rows(lines, factor.expand(len(lines)))
        grads = [None if grad is None else once(grad) for grad in grads]
        return *grads, None, None, None, None, None


@operator("linear_cross_entropy_fused")
def _linear_cross_entropy_fused(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    expected: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    chunk_tokens: int,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> sum of the losses, and expected times its gradients (empty where not needed), for torch.compile."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, class_weight)
    backend = backend_for(hidden.device)
    loss, _, _, *grads = backend.linear_cross_entropy_forward_backward(
        hidden,
        weight,
        bias,
        target,
        expected.expand(len(target)),
        options,
        chunk_tokens,
        (needs_hidden, needs_weight, needs_bias),
    )
    total = backend.sum_rows(loss)
    one, two, three = (hidden.new_empty(0) if grad is None else grad for grad in grads)
    return total, one, two, three


@_linear_cross_entropy_fused.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return hidden.new_empty((), dtype=accumulation_dtype(hidden.dtype)), *_fake_gradients(hidden, weight, rest[-3:])


def _fake_gradients(hidden: Tensor, weight: Tensor, needs: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Of hidden, weight and bias; empty where not needed."""
    one, two, three = (
        hidden.new_empty(shape if needed else 0)
        for shape, needed in zip((hidden.shape, weight.shape, weight.shape[:1]), needs, strict=True)
    )
    return one, two, three


def _setup_fused(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needs = inputs[-3:]
    ctx.save_for_backward(inputs[4], *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward_fused(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    expected, *grads = ctx.saved_tensors
    factor = correction(upstream, expected)
    scaled = [(grad * factor).to(grad.dtype) if needed else None for grad, needed in zip(grads, ctx.needs, strict=True)]
    return *scaled, *([None] * 11)


_linear_cross_entropy_fused.register_autograd(_backward_fused, setup_context=_setup_fused)


@operator("linear_cross_entropy")
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> loss [N], lse [N] float64, faults int32 [1]."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, class_weight)
    return backend_for(hidden.device).linear_cross_entropy_forward(hidden, weight, bias, target, options, chunk_tokens)


@_linear_cross_entropy.register_fake
def _(hidden: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens = hidden.shape[0]
    return (
        hidden.new_empty(tokens, dtype=accumulation_dtype(hidden.dtype)),
        hidden.new_empty(tokens, dtype=torch.float64),
        hidden.new_empty(1, dtype=torch.int32),
    )


@operator("linear_cross_entropy_backward")
def _linear_cross_entropy_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    grad_loss: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    chunk_tokens: int,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> gradients of hidden, weight and bias of sum_i grad_loss[i] * loss[i]; empty where not needed."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, class_weight)
    needs = (needs_hidden, needs_weight, needs_bias)
    grads = backend_for(hidden.device).linear_cross_entropy_backward(
        hidden, weight, bias, target, lse, grad_loss, options, chunk_tokens, needs
    )
    one, two, three = (hidden.new_empty(0) if grad is None else grad for grad in grads)
    return one, two, three


@_linear_cross_entropy_backward.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_gradients(hidden, weight, rest[-3:])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, bias, target, class_weight, *ctx.options = inputs
    ctx.save_for_backward(hidden, weight, bias, target, output[1], class_weight)
    ctx.mark_non_differentiable(output[1], output[2])


def _backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, target, lse, class_weight = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    grads = torch.ops.prism_fast.linear_cross_entropy_backward(
        hidden, weight, bias, target, lse, grad_loss, class_weight, *ctx.options, *needs
    )
    return *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), *([None] * 7)


_linear_cross_entropy.register_autograd(_backward, setup_context=_setup)
_linear_cross_entropy_backward.register_autograd(raise_twice)
