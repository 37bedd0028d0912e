"""From losses per row to what the caller asked for, in an order that only the number of rows decides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prism_fast.kernels.backends import LossOptions
from prism_fast.kernels.dispatch import backend_for
from prism_fast.kernels.operators import operator

REDUCTIONS = ("none", "mean", "sum")


def check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}")


def mean_divisor(target: Tensor, options: LossOptions, dtype: torch.dtype) -> Tensor:
    """What a mean divides by, [] in `dtype`: the (weighted) number of targets that are not ignored, as torch has it."""
    counted = target != options.ignore_index
    if options.class_weight is None:
        return counted.sum().to(dtype)
    vocab = len(options.class_weight)
    inside = counted & (target >= 0) & (target < vocab)
    weights = options.class_weight[target.masked_fill(~inside, 0).long()].masked_fill(~inside, 0.0)
    return torch.ops.prism_fast.sum_rows(weights)


@operator("sum_rows")
def sum_rows(values: Tensor) -> Tensor:
    """Sum of `values` [N], -> []."""
    return backend_for(values.device).sum_rows(values)


@sum_rows.register_fake
def _(values: Tensor) -> Tensor:
    return values.new_empty(())


def _setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.rows = inputs[0].shape[0]


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad.expand(ctx.rows)


sum_rows.register_autograd(_backward, setup_context=_setup)
