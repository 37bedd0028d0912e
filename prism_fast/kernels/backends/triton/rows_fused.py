"""Loss and gradient in one kernel, for an upstream gradient that is known beforehand (1, or 1 / count for a mean).

A row in float32 registers would spill (50,304 of them), so it is read twice, the second time from L2: few programs a
multiprocessor, so that the rows between their two reads fit there. Device memory sees one read and one write.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism_fast.kernels.backends.triton.fold import SPARE, capped
from prism_fast.kernels.backends.triton.numerics import MINUS_INF
from prism_fast.kernels.backends.triton.rows import finish_row, fold_row, row_start, smoothing_reference
from prism_fast.kernels.backends.triton.rows_backward import row_terms, write_row


@triton.jit(do_not_specialize=["ignore_index"])
def rows_fused(
    logits,
    target,
    class_weight,
    class_weight_sum,
    grad_loss,
    loss_out,
    lse_out,
    faults,
    out,
    V,
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
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    ABREAST: tl.constexpr,
    ROUNDS: tl.constexpr,
    STAGES: tl.constexpr,
    PLACES: tl.constexpr,
    GRANULE: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    SAME_LAYOUT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Grid (N,). The arguments are those of `rows_forward` and `rows_backward`."""
    row = tl.program_id(0)
    t = tl.load(target + row).to(tl.int64)
    ignored = t == ignore_index
    known = (t >= 0) & (t < V) & (ignored == 0)
    t32 = tl.where(known, t, -1).to(tl.int32)
    start, shift = row_start(logits, row, phase, row_stride, GRANULE, UNIT_STRIDE)
    z_target = tl.load(start + shift + t * column_stride, mask=known, other=MINUS_INF).to(ACC)
    z_target = tl.where(known, capped(z_target, softcap, SOFTCAP), MINUS_INF)
    last = tl.where(ignored, 0, tl.cdiv(V, LANES * TILES - SPARE))
    top, sums, spread, total, before = fold_row(
        start, shift, column_stride, t32, smoothing_reference(z_target, True), 0, last,
        softcap, class_weight, loss_out, 0, V, ACC, LANES, TILES, ABREAST, ROUNDS, GRANULE, UNIT_STRIDE, False,
        SOFTCAP, WEIGHTED, SMOOTHED, False, False, STAGES, "evict_last",
    )  # fmt: skip
    lse = finish_row(
        row, top, sums, spread, total, before, z_target, smoothing_reference(z_target, True), t,
        class_weight, class_weight_sum, loss_out, lse_out, loss_out, loss_out, faults,
        V, ignore_index, label_smoothing, z_loss, WEIGHTED, SMOOTHED, Z_LOSS, False, False,
    )  # fmt: skip
    lse_high, lse_low, upstream, slope, at_target, everywhere = row_terms(
        row, t, known, ignored, lse, grad_loss, grad_loss_stride,
        class_weight, class_weight_sum, V, label_smoothing, z_loss, ACC, WEIGHTED, SMOOTHED, Z_LOSS,
    )  # fmt: skip
    for tile in range(tl.cdiv(V + GRANULE - 1, PLACES)):
        write_row(
            logits, out, row, tile, ignored, t32,
            lse_high, lse_low, upstream, slope, at_target, everywhere, softcap, class_weight,
            V, phase, out_phase, row_stride, column_stride, out_row_stride, out_column_stride,
            ACC, PLACES, GRANULE, UNIT_STRIDE, SAME_LAYOUT, WEIGHTED, SMOOTHED, SOFTCAP,
        )  # fmt: skip
