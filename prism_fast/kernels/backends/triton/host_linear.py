"""Backend functions on hidden states and a head. [N, V] is never held.

bfloat16 and float16: the forward pass makes logits tile by tile in registers (`linear_forward`). The backward pass goes
over ranges of classes rather than of tokens: a range's gradient [N, C] is multiplied out again (`linear_gradient`), and
the matrix library makes its two products from it, for it has the tuned ones. The head's gradient of a class is then a
single product over all N tokens, summed in float32 inside it: no second buffer of the head's size, nothing added up
between chunks, an error that does not grow with their number. Only the hidden states' gradient is added up, in
float32, range after range in order.

float32 and float64: the products are all the matrix library's (Triton's float32 product without TF32 runs on the plain
arithmetic units), and the row kernels fold the logits of a range while they are in cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prism_fast.kernels.backends import LossOptions, RowNll
from prism_fast.kernels.backends.torch import accumulation_dtype
from prism_fast.kernels.backends.triton import launch
from prism_fast.kernels.backends.triton.fold import geometry
from prism_fast.kernels.backends.triton.host import Parts, Scores, class_weight, flags, fold_rows, load, write_gradient
from prism_fast.kernels.backends.triton.linear_forward import linear_forward
from prism_fast.kernels.backends.triton.linear_gradient import linear_gradient

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


def _in_registers(hidden: Tensor) -> bool:
    return hidden.dtype in (torch.bfloat16, torch.float16)


def _product(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: LossOptions, rule: launch.Linear
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments and constants of the kernels that multiply."""
    size = hidden.shape[1]
    arguments = {
        "hidden": hidden,
        "weight": weight,
        "bias": hidden if bias is None else bias,
        "N": len(hidden),
        "V": len(weight),
        "H": size,
        "hidden_stride": hidden.stride(0),
        "weight_stride": weight.stride(0),
        "ignore_index": options.ignore_index,
        "softcap": options.softcap or 0.0,
    }
    constants = {
        "ROWS": rule.rows,
        "COLUMNS": rule.columns,
        "DEPTH": rule.depth,
        "GROUP": rule.group,
        "WHOLE_DEPTH": size % rule.depth == 0,
        "BIASED": bias is not None,
        "SOFTCAP": options.softcap is not None,
        # The interpreter would multiply the bit patterns of bfloat16 as integers.
        "WIDEN": hidden.dtype == torch.bfloat16 and launch.device_of(hidden).kind == "interpreter",
    }
    return arguments, constants


def _neighbours(matrix: Tensor) -> Tensor:
    """Rows whose numbers lie side by side, as the kernels read them (only the row stride is free)."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def _range(n: int, vocab: int, chunk_tokens: int, multiple: int) -> int:
    """Classes at a time: a buffer of chunk_tokens * vocab numbers, 1/20 of [N, V] for 0, in whole tiles."""
    wanted = vocab // 20 if chunk_tokens == 0 else chunk_tokens * vocab // max(n, 1)
    return min(vocab, max(multiple, wanted // multiple * multiple))


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: LossOptions,
    scores: Scores,
    chunk_tokens: int,
) -> None:
    n, vocab = len(hidden), len(weight)
    if n == 0:
        return
    if not _in_registers(hidden):
        segment = geometry(vocab).segment
        classes = _range(n, vocab, chunk_tokens, segment)
        parts = Parts(hidden, n, -(-vocab // segment))
        for first in range(0, vocab, classes):
            logits = _logits(hidden, weight, bias, first, classes)
            fold_rows(
                logits, target, options, scores, parts=parts, first_part=first // segment, vocab_start=first,
                fresh=first == 0, relative=False,
            )  # fmt: skip
        parts.finish(scores, target, options, vocab, relative=False)
        return
    hidden, weight = _neighbours(hidden), _neighbours(weight)
    device = launch.device_of(hidden)
    extras = scores.correct is not None or scores.entropy is not None
    rule = launch.linear(device, hidden.shape[1], load(hidden, options, extras=extras))
    spans = -(-vocab // (rule.span_tiles * rule.columns))
    parts = Parts(hidden, n, spans)
    arguments, constants = _product(hidden, weight, bias, options, rule)
    chosen = scores.constants(options)
    del chosen["Z_LOSS"]
    launch.run(
        linear_forward,
        (-(-n // rule.rows) * spans,),
        {
            **arguments,
            **parts.arguments(),
            "target": target,
            "class_weight": class_weight(options, target)["class_weight"],
            "spans": spans,
        },
        {**constants, **chosen, "SPAN_TILES": rule.span_tiles},
        launch.options(device, rule.num_warps, num_stages=rule.num_stages),
    )
    parts.finish(scores, target, options, vocab, relative=False)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, first: int, classes: int) -> Tensor:
    part = None if bias is None else bias[first : first + classes]
    return torch.nn.functional.linear(hidden, weight[first : first + classes], part)


def linear_token_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    with_correct: bool,
    with_entropy: bool,
) -> RowNll:
    lse = accumulation_dtype(hidden.dtype)
    scores = Scores(hidden, len(hidden), lse=lse, correct=with_correct, entropy=with_entropy)
    _forward(hidden, weight, bias, target, LossOptions(ignore_index=ignore_index), scores, 0)
    return scores.row_nll()


def linear_cross_entropy_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: LossOptions, chunk_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    scores = Scores(hidden, len(hidden), lse=torch.float64)
    _forward(hidden, weight, bias, target, options, scores, chunk_tokens)
    return scores.loss, scores.lse, scores.faults


def linear_cross_entropy_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    grad_loss: Tensor,
    options: LossOptions,
    chunk_tokens: int,
    needs: tuple[bool, bool, bool],
) -> Grads:
    n, vocab = len(hidden), len(weight)
    accumulator = accumulation_dtype(hidden.dtype)
    hidden_sum = torch.zeros(hidden.shape, dtype=accumulator, device=hidden.device) if needs[0] else None
    weight_grad = torch.zeros_like(weight, memory_format=torch.contiguous_format) if needs[1] else None
    bias_grad = torch.zeros(vocab, dtype=weight.dtype, device=weight.device) if needs[2] else None
    if n == 0:
        return hidden_sum if hidden_sum is None else hidden_sum.to(hidden.dtype), weight_grad, bias_grad
    rule = launch.linear(launch.device_of(hidden), hidden.shape[1], load(hidden, options))
    classes = _range(n, vocab, chunk_tokens, rule.columns)
    tiles = -(-classes // rule.columns)
    buffer = torch.empty((n, tiles * rule.columns), dtype=hidden.dtype, device=hidden.device)
    for first in range(0, vocab, classes):
        here = min(classes, vocab - first)
        if _in_registers(hidden):
            grad = buffer[:, :here]
            _gradient_of_range(hidden, weight, bias, target, lse, grad_loss, options, rule, first, here, buffer)
        else:
            grad = _logits(hidden, weight, bias, first, here)
            write_gradient(grad, target, lse, grad_loss, options, grad, vocab, first)
        head = weight[first : first + here]
        if weight_grad is not None:
            torch.mm(grad.t(), hidden, out=weight_grad[first : first + here])
        if bias_grad is not None:
            bias_grad[first : first + here] = grad.sum(0, dtype=accumulator)
        if hidden_sum is not None:
            _add_product(hidden_sum, grad, head)
    hidden_grad = None if hidden_sum is None else hidden_sum.to(hidden.dtype)
    return hidden_grad, weight_grad, bias_grad


def _gradient_of_range(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    grad_loss: Tensor,
    options: LossOptions,
    rule: launch.Linear,
    first: int,
    classes: int,
    out: Tensor,
) -> None:
    """d/dlogits of classes [first, first + classes) into `out`, whose rows are whole tiles."""
    device = launch.device_of(hidden)
    arguments, constants = _product(_neighbours(hidden), _neighbours(weight), bias, options, rule)
    column_tiles = -(-classes // rule.columns)
    launch.run(
        linear_gradient,
        (-(-len(hidden) // rule.rows) * column_tiles,),
        {
            **arguments,
            **class_weight(options, target),
            "target": target,
            "lse": lse,
            "grad_loss": grad_loss,
            "grad_loss_stride": grad_loss.stride(0),
            "out": out,
            "out_stride": out.stride(0),
            "first": first,
            "classes": classes,
            "column_tiles": column_tiles,
            "label_smoothing": options.label_smoothing,
            "z_loss": options.z_loss,
        },
        {**constants, **flags(options)},
        launch.options(device, rule.num_warps, num_stages=rule.num_stages),
    )


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where `total` may be wider than the factors."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cuda" and torch.version.hip is None:
        total.add_(torch.mm(a, b, out_dtype=total.dtype))
    elif a.device.type == "cpu":
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    else:
        # No mixed product on this device: each range's share is rounded once before it is added.
        total.add_(torch.mm(a, b))


def linear_cross_entropy_forward_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    grad_loss: Tensor,
    options: LossOptions,
    chunk_tokens: int,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Multiplies the logits out twice. Once would do by chunks of tokens, but each chunk would then read and write a
    float32 gradient of the whole head: at V = 128,256 and H = 4,096 that costs what the product saves."""
    loss, lse, faults = linear_cross_entropy_forward(hidden, weight, bias, target, options, chunk_tokens)
    grads = linear_cross_entropy_backward(
        hidden, weight, bias, target, lse, grad_loss, options, chunk_tokens, needs
    )  # fmt: skip
    return loss, lse, faults, *grads
