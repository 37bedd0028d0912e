"""Gradient over rows of logits, elementwise once lse is known: one device-memory read of the logits, one write.

    d loss / d z'_v = a p_v - (1 - eps) w_t [v = t] - eps / V w_v,   a = (1 - eps) w_t + eps / V sum w + 2 z_loss lse
    d z' / d z = 1 - tanh^2(z / softcap)

The gradient may be written over the logits: a place is read before it is written, by the one program that owns it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism_fast.kernels.backends.triton.numerics import exp, expm1, tanh
from prism_fast.kernels.backends.triton.rows import row_start


@triton.jit
def row_terms(
    row,
    t,
    known,
    ignored,
    lse,
    grad_loss,
    grad_loss_stride,
    class_weight,
    class_weight_sum,
    V,
    label_smoothing,
    z_loss,
    ACC: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
):
    """What a row's places share: lse in two parts (float32 alone would cost digits at 1000), the upstream gradient
    (NaN for a target out of range), a, the target's extra share, every class's share."""
    lse_high = lse.to(ACC)
    lse_low = (lse - lse_high.to(tl.float64)).to(ACC)
    upstream = tl.load(grad_loss + row.to(tl.int64) * grad_loss_stride).to(ACC)
    upstream = tl.where(known | ignored, upstream, float("nan"))
    at_target = tl.full([], 1.0, ACC)
    if WEIGHTED:
        at_target = tl.load(class_weight + t, mask=known, other=0.0).to(ACC)
    everywhere = tl.full([], 0.0, ACC)
    slope = at_target
    if SMOOTHED:
        smoothing = tl.cast(label_smoothing, ACC)
        at_target = at_target * (1.0 - smoothing)
        everywhere = smoothing / V
        if WEIGHTED:
            slope = at_target + everywhere * tl.load(class_weight_sum).to(ACC)
        else:
            slope = at_target + smoothing
    if Z_LOSS:
        slope += 2.0 * tl.cast(z_loss, ACC) * lse_high
    return lse_high, lse_low, upstream, slope, at_target, everywhere


@triton.jit
def places_gradient(
    z,
    column,
    inside,
    t,
    lse_high,
    lse_low,
    upstream,
    slope,
    at_target,
    everywhere,
    softcap,
    class_weight,
    TARGET: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
):
    """Gradient at a block of places; TARGET: one that may hold the target."""
    if SOFTCAP:
        cap = tl.cast(softcap, z.dtype)
        bent = tanh(z / cap)
        z = cap * bent
    log_p = (z - lse_high) - lse_low
    p = exp(log_p)
    grad = slope * p
    if TARGET:
        # a p - h = h (p - 1) + (a - h) p, and p - 1 keeps its digits where the model is sure.
        grad = tl.where(column == t, at_target * expm1(log_p) + (slope - at_target) * p, grad)
    if SMOOTHED:
        if WEIGHTED:
            grad -= everywhere * tl.load(class_weight + column, mask=inside, other=0.0).to(z.dtype)
        else:
            grad -= everywhere
    if SOFTCAP:
        grad *= 1.0 - bent * bent
    return grad * upstream


@triton.jit(do_not_specialize=["vocab", "vocab_start", "ignore_index"])
def rows_backward(
    logits,
    target,
    class_weight,
    class_weight_sum,
    lse,
    grad_loss,
    out,
    V,
    vocab,
    vocab_start,
    phase,
    out_phase,
    row_stride,
    column_stride,
    grad_loss_stride,
    out_row_stride,
    out_column_stride,
    ignore_index,
    label_smoothing: tl.float64,
    z_loss: tl.float64,
    softcap: tl.float64,
    ACC: tl.constexpr,
    PLACES: tl.constexpr,
    GRANULE: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    SAME_LAYOUT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Grid (N, ceil((V + GRANULE) / PLACES)). SAME_LAYOUT: `out` lies at the same 16-byte phase as `logits`.

    Column 0 is class `vocab_start` of `vocab`.
    """
    row = tl.program_id(0)
    t = tl.load(target + row).to(tl.int64)
    ignored = t == ignore_index
    known = (t >= 0) & (t < vocab) & (ignored == 0)
    lse_high, lse_low, upstream, slope, at_target, everywhere = row_terms(
        row, t, known, ignored, tl.load(lse + row).to(tl.float64), grad_loss, grad_loss_stride,
        class_weight, class_weight_sum, vocab, label_smoothing, z_loss, ACC, WEIGHTED, SMOOTHED, Z_LOSS,
    )  # fmt: skip
    write_row(
        logits, out, row, tl.program_id(1), ignored, tl.where(known, t - vocab_start, -1).to(tl.int32),
        lse_high, lse_low, upstream, slope, at_target, everywhere, softcap, class_weight + vocab_start,
        V, phase, out_phase, row_stride, column_stride, out_row_stride, out_column_stride,
        ACC, PLACES, GRANULE, UNIT_STRIDE, SAME_LAYOUT, WEIGHTED, SMOOTHED, SOFTCAP,
    )  # fmt: skip


@triton.jit
def write_row(
    logits,
    out,
    row,
    tile,
    ignored,
    t,
    lse_high,
    lse_low,
    upstream,
    slope,
    at_target,
    everywhere,
    softcap,
    class_weight,
    V,
    phase,
    out_phase,
    row_stride,
    column_stride,
    out_row_stride,
    out_column_stride,
    ACC: tl.constexpr,
    PLACES: tl.constexpr,
    GRANULE: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    SAME_LAYOUT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One tile of PLACES 16-byte-aligned places of one row. Ignored rows are not read and become 0."""
    start, shift = row_start(logits, row, phase, row_stride, GRANULE, UNIT_STRIDE)
    out_start, out_shift = row_start(out, row, out_phase, out_row_stride, GRANULE, SAME_LAYOUT)
    places = tile * PLACES + tl.arange(0, PLACES)
    if UNIT_STRIDE:
        limit = ((shift + V + GRANULE - 1) // GRANULE) * GRANULE
        read = start + places
    else:
        limit = V
        read = start + places.to(tl.int64) * column_stride
    column = places - shift
    inside = (column >= 0) & (column < V)
    z = tl.load(read, mask=(places < limit) & (ignored == 0), other=0.0, eviction_policy="evict_first").to(ACC)
    if (t + shift) // PLACES == tile:
        grad = places_gradient(
            z, column, inside, t, lse_high, lse_low, upstream, slope, at_target, everywhere, softcap, class_weight,
            True, SOFTCAP, WEIGHTED, SMOOTHED,
        )  # fmt: skip
    else:
        grad = places_gradient(
            z, column, inside, t, lse_high, lse_low, upstream, slope, at_target, everywhere, softcap, class_weight,
            False, SOFTCAP, WEIGHTED, SMOOTHED,
        )  # fmt: skip
    grad = tl.where(ignored, 0.0, grad)
    if SAME_LAYOUT:
        # Whole granules are written 16 bytes at a time; the row's two ragged ends, shared with its neighbours, apart.
        head = ((shift + GRANULE - 1) // GRANULE) * GRANULE
        tail = ((shift + V) // GRANULE) * GRANULE
        write = out_start + places
        tl.store(write, grad, mask=(places >= head) & (places < tail), eviction_policy="evict_first")
        if tile * PLACES < head or (tile + 1) * PLACES > tail:
            tl.store(write, grad, mask=inside & ((places < head) | (places >= tail)))
    else:
        tl.store(out_start + out_shift + column.to(tl.int64) * out_column_stride, grad, mask=inside)
