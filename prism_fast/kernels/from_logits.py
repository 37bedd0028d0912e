"""Cross-entropy from logits: one read of them for the loss, one more read and one write for the gradient, or all of
it in one go where the upstream gradient is known in advance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from prism_fast.kernels.backends import LossOptions
from prism_fast.kernels.backends.torch import accumulation_dtype, loss_rows
from prism_fast.kernels.dispatch import backend_for
from prism_fast.kernels.operators import operator
from prism_fast.kernels.reduction import check_reduction, mean_divisor
from prism_fast.kernels.shapes import as_logit_rows, check_same_device


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    inplace_grad: bool = False,
) -> Tensor:
    """Cross-entropy of logits and class ids; arguments are those of `torch.nn.functional.cross_entropy`.

    With z = softcap * tanh(logits / softcap), lse = ln sum_v exp(z_v), class weights w and smoothing eps, a row's
    loss is

        (1 - eps) * w_t * (lse - z_t)  +  eps / V * sum_v w_v * (lse - z_v)  +  z_loss * lse^2

    (label smoothing: Szegedy et al. 2016, as torch weights it; z-loss: Chowdhery et al. 2022; softcap: Gemma 2, 2024).

    Args:
        logits: `[..., V]`, or torch's `[N, C, d1...]`; float64, float32, bfloat16 or float16, any strides.
        target: integer class ids, `[...]` (or `[N, d1...]`).
        weight: class weights `[V]`, or None for 1.
        ignore_index: targets with this id count nowhere; their logits are not read, their gradient is 0.
        reduction: "none", "sum", or "mean": over targets that are not ignored, each counted by its class weight. If
            all are ignored, sum gives 0 and mean NaN, as in torch; the gradient is 0 either way.
        inplace_grad: let the backward pass overwrite `logits` with their gradient, which saves a buffer of their
            size. The logits are overwritten in this call already, and a second `backward` raises. Under
            `torch.compile`, which plans buffers itself, the logits stay as they are.

    Returns:
        float32 (float64 for float64 logits), whatever narrower dtype the logits have.

    Raises:
        IndexError: on the CPU, a target outside [0, V) that is not `ignore_index`. On a GPU, where looking would
            stall, such a row gives NaN and is counted (`faults` of `torch.ops.prism_fast.cross_entropy`).
        ValueError, TypeError: shapes, dtypes or options that do not fit.

    Sums run in an order fixed by the shape alone: same input, same bits, whatever the number of threads. The gradient
    can be taken once; for second derivatives use `use_backend("torch")`.
    """
    shape = target.shape
    rows, ids = as_logit_rows(logits, target, class_dim_1=True)
    options = check_options(rows, weight, rows.shape[1], ignore_index, reduction, label_smoothing, z_loss, softcap)
    accumulator = accumulation_dtype(rows.dtype)
    divisor = mean_divisor(ids, options, accumulator) if reduction == "mean" else None
    wants_grad = torch.is_grad_enabled() and rows.requires_grad

    if uses_reference(rows):
        loss = loss_rows(rows, ids, options)[0]
        total = loss.sum() if reduction != "none" else loss
    elif wants_grad and (inplace_grad or rows.device.type == "cpu") and runs_eagerly(rows):
        expected = torch.ones((), dtype=accumulator, device=rows.device)
        if divisor is not None:
            expected = expected / divisor
        loss = _Rows.apply(rows, ids, options, expected.expand(len(ids)), inplace_grad)
        total = torch.ops.prism_fast.sum_rows(loss) if reduction != "none" else loss
    else:
        loss = torch.ops.prism_fast.cross_entropy(rows, ids, *options_as_arguments(options))[0]
        total = torch.ops.prism_fast.sum_rows(loss) if reduction != "none" else loss
    if reduction == "none":
        return loss.view(shape)
    return total if divisor is None else total / divisor


def check_options(
    rows: Tensor,
    weight: Tensor | None,
    vocab: int,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> LossOptions:
    """The options as backends take them. Raises ValueError or TypeError for what no loss has."""
    check_reduction(reduction)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"softcap must be positive or None, got {softcap}")
    if weight is not None:
        check_same_device(logits=rows, weight=weight)
        if tuple(weight.shape) != (vocab,) or not weight.is_floating_point():
            raise ValueError(f"weight must hold {vocab} class weights, got {weight.dtype} {list(weight.shape)}")
        weight = weight.detach().to(accumulation_dtype(rows.dtype)).contiguous()
    return LossOptions(ignore_index, float(label_smoothing), float(z_loss), softcap, weight)


def options_as_arguments(options: LossOptions) -> tuple[Tensor | None, int, float, float, float | None]:
    """The options in the order in which the registered operators take them."""
    return options.class_weight, options.ignore_index, options.label_smoothing, options.z_loss, options.softcap


def uses_reference(rows: Tensor) -> bool:
    """Whether the loss is made of plain torch operations: where that backend is chosen, and under torch.func, whose
    transforms do not go through registered operators.
    """
    if torch._C._are_functorch_transforms_active():
        return not torch.compiler.is_compiling()
    return runs_eagerly(rows) and backend_for(rows.device).name == "torch"


def runs_eagerly(*tensors: Tensor) -> bool:
    """Whether numbers are at hand and nobody looks: not while torch.compile traces, nor for fake and other kinds of
    tensors, nor under a mode that watches operators (a FLOP counter, say), for which there are the registered ones.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and all(type(tensor) in (Tensor, Parameter) for tensor in tensors)
    )


def fuses(rows: Tensor) -> bool:
    """Whether the gradient may be made ahead of `backward`, for a guess at the upstream gradient.

    Not in float16: there the upstream gradient is often a loss scale, which must come in before the gradient is
    rounded, or it comes too late to keep small ones from becoming 0.
    """
    return rows.dtype != torch.float16


class _Once(torch.autograd.Function):
    """Passes a gradient on; differentiating it again raises, where leaving it out of the graph would give 0."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, attached: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(_TWICE)


_TWICE = (
    "the gradient of a fused prism_fast loss cannot be differentiated again: compute the loss under "
    'prism_fast.kernels.use_backend("torch")'
)


def once(grad: Tensor) -> Tensor:
    """A gradient that a backward pass returns: where a graph of it is wanted, one that refuses to be used."""
    if not torch.is_grad_enabled():
        return grad
    return _Once.apply(grad, torch.zeros(0, device=grad.device, requires_grad=True))


def raise_twice(ctx: Any, *_: Any) -> Any:
    """The backward of a registered backward."""
    raise RuntimeError(_TWICE)


class _Rows(torch.autograd.Function):
    """Row losses whose gradient is made with them, for the upstream gradient `expected`, and mended if that was wrong.

    On the CPU this is how every gradient is made: its buffer is written once either way, and a read of the logits is
    saved. Elsewhere only the gradient in place is: to tell whether the guess was right would be a synchronisation.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, target: Tensor, options: LossOptions, expected: Tensor, inplace: bool
    ) -> Tensor:
        backend = backend_for(rows.device)
        overlapping = any(stride == 0 and size > 1 for stride, size in zip(rows.stride(), rows.shape, strict=True))
        ctx.inplace = inplace and not overlapping
        ctx.options = options
        ctx.grad = None
        ctx.done = False
        if not fuses(rows):
            loss, lse, _ = backend.cross_entropy_forward(rows.detach(), target, options)
            ctx.save_for_backward(expected, rows, target, lse)
            return loss
        ctx.grad = rows.detach() if ctx.inplace else backend.gradient_like(rows.detach())
        loss, lse, _ = backend.cross_entropy_forward_backward(rows.detach(), target, expected, options, ctx.grad)
        if ctx.inplace:
            # Whoever else saved these logits for a backward pass gets torch's error, not a wrong gradient.
            torch.autograd.graph.increment_version(rows)
            ctx.save_for_backward(expected)
        else:
            ctx.save_for_backward(expected, rows, target, lse)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.inplace and ctx.done:
            raise RuntimeError(
                "second backward through a cross_entropy with inplace_grad=True: the first one's gradient took the "
                "place of the logits; call it with inplace_grad=False"
            )
        expected, *inputs = ctx.saved_tensors
        grad, ctx.grad, ctx.done = ctx.grad, None, True
        upstream = upstream.detach()
        if not inputs:
            backend_for(grad.device).scale_rows(grad, correction(upstream, expected))
        elif grad is None or not _same_numbers(upstream, expected):
            rows, target, lse = inputs
            rows = rows.detach()
            if grad is None:
                grad = rows if ctx.inplace else backend_for(rows.device).gradient_like(rows)
            backend_for(rows.device).cross_entropy_backward(rows, target, lse, upstream, ctx.options, grad)
        return once(grad), None, None, None, None


def correction(upstream: Tensor, expected: Tensor) -> Tensor:
    """What a gradient made for the upstream gradient `expected` is to be multiplied by.

    `expected` is infinite for the mean of no targets; the gradient is 0 then, and stays it.
    """
    return torch.where(expected.isfinite(), upstream / expected, 1.0)


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether two row vectors on the CPU hold the same numbers; scalars that were expanded compare as scalars."""
    if a.stride(0) == 0 and b.stride(0) == 0:
        a, b = a[:1], b[:1]
    return torch.equal(a, b)


@operator("cross_entropy")
def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> loss [N], lse [N] float64, faults int32 [1]."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, weight)
    return backend_for(logits.device).cross_entropy_forward(logits, target, options)


@_cross_entropy.register_fake
def _(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    return (
        logits.new_empty(rows, dtype=accumulation_dtype(logits.dtype)),
        logits.new_empty(rows, dtype=torch.float64),
        logits.new_empty(1, dtype=torch.int32),
    )


@operator("cross_entropy_backward")
def _cross_entropy_backward(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    grad_loss: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    """-> d/dlogits [N, V] of sum_i grad_loss[i] * loss[i], in the dtype of the logits."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, weight)
    backend = backend_for(logits.device)
    out = backend.gradient_like(logits)
    backend.cross_entropy_backward(logits, target, lse, grad_loss, options, out)
    return out


@_cross_entropy_backward.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, weight, *ctx.options = inputs
    ctx.save_for_backward(logits, target, output[1], weight)
    ctx.mark_non_differentiable(output[1], output[2])


def _backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    logits, target, lse, weight = ctx.saved_tensors
    grad = torch.ops.prism_fast.cross_entropy_backward(logits, target, lse, grad_loss, weight, *ctx.options)
    return grad, None, None, None, None, None, None


_cross_entropy.register_autograd(_backward, setup_context=_setup)
_cross_entropy_backward.register_autograd(raise_twice)
