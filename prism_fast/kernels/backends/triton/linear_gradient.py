"""Gradient with respect to a range of classes' logits, from hidden states: multiplied out again and bent in registers.

Operations: 2 N C H for C classes. Writes [N, C] in the dtype of the hidden states; float32 logits are never stored,
so the probabilities are those of the forward pass to its last rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism_fast.kernels.backends.triton.linear_tiles import logits_tile, program_tile
from prism_fast.kernels.backends.triton.numerics import exp, expm1


@triton.jit(do_not_specialize=["N", "first", "classes", "column_tiles", "ignore_index"])
def linear_gradient(
    hidden,
    weight,
    bias,
    target,
    lse,
    grad_loss,
    class_weight,
    class_weight_sum,
    out,
    N,
    V,
    H,
    first,
    classes,
    column_tiles,
    hidden_stride,
    weight_stride,
    grad_loss_stride,
    out_stride,
    ignore_index,
    label_smoothing: tl.float64,
    z_loss: tl.float64,
    softcap: tl.float64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE_DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
):
    """Grid (ceil(N / ROWS) * column_tiles,); column j of `out` is class first + j."""
    row_tile, column_tile = program_tile(N, column_tiles, ROWS, GROUP)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    place = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    column = first + place
    z = logits_tile(
        hidden, weight, bias, row, column, N, V, H, hidden_stride, weight_stride, softcap,
        ROWS, COLUMNS, DEPTH, WHOLE_DEPTH, BIASED, SOFTCAP, WIDEN,
    )  # fmt: skip

    inside = row < N
    t = tl.load(target + row, mask=inside, other=ignore_index).to(tl.int64)
    ignored = t == ignore_index
    known = (t >= 0) & (t < V) & (ignored == 0)
    row_lse = tl.load(lse + row, mask=inside, other=0.0).to(tl.float64)
    lse_high = row_lse.to(tl.float32)
    lse_low = (row_lse - lse_high.to(tl.float64)).to(tl.float32)
    upstream = tl.load(grad_loss + row.to(tl.int64) * grad_loss_stride, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.where(known | ignored, upstream, float("nan"))
    at_target = tl.full([ROWS], 1.0, tl.float32)
    if WEIGHTED:
        at_target = tl.load(class_weight + t, mask=known, other=0.0).to(tl.float32)
    slope = at_target
    if SMOOTHED:
        smoothing = tl.cast(label_smoothing, tl.float32)
        at_target = at_target * (1.0 - smoothing)
        everywhere = smoothing / V
        if WEIGHTED:
            slope = at_target + everywhere * tl.load(class_weight_sum).to(tl.float32)
        else:
            slope = at_target + smoothing
    if Z_LOSS:
        slope += 2.0 * tl.cast(z_loss, tl.float32) * lse_high

    log_p = (z - lse_high[:, None]) - lse_low[:, None]
    p = exp(log_p)
    grad = slope[:, None] * p
    local = tl.where(known, t - column_tile * COLUMNS - first, -1)
    at = tl.arange(0, COLUMNS)[None, :] == local[:, None]
    # At the target p - 1 is wanted with all its digits, once a row.
    exact = tl.sum(tl.where(at, log_p, 0.0), 1)
    exact = at_target * expm1(exact) + (slope - at_target) * exp(exact)
    grad = tl.where(at, exact[:, None], grad)
    if SMOOTHED:
        share = tl.full([COLUMNS], 1.0, tl.float32)
        if WEIGHTED:
            share = tl.load(class_weight + column, mask=column < V, other=0.0).to(tl.float32)
        grad -= (everywhere * share)[None, :]
    if SOFTCAP:
        bent = z * (1.0 / tl.cast(softcap, tl.float32))
        grad *= 1.0 - bent * bent
    grad = tl.where(ignored[:, None], 0.0, grad * upstream[:, None])
    write = out + row.to(tl.int64)[:, None] * out_stride + place[None, :]
    # Whole tiles are written, zeros past the last class, so that every store is wide.
    tl.store(write, tl.where((place < classes)[None, :], grad, 0.0), mask=inside[:, None])
