"""Loss and scores from hidden states: log-sum-exp over tiles of logits as they are multiplied out.

Operations: 2 N V H. Bytes: hidden, head, and 8 to 20 bytes a row and span; [N, V] is never stored. A program takes one
tile of rows over one span of the vocabulary, tile after tile in order, and leaves the parts of its rows for
`rows_finish`: no locks, no atomics, and the order of every sum is fixed by V and the tile shape.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism_fast.kernels.backends.triton.linear_tiles import logits_tile, program_tile
from prism_fast.kernels.backends.triton.numerics import INF, MINUS_INF, exp


@triton.jit(do_not_specialize=["N", "spans", "part_stride", "ignore_index"])
def linear_forward(
    hidden,
    weight,
    bias,
    target,
    class_weight,
    parts,
    target_logit,
    N,
    V,
    H,
    spans,
    hidden_stride,
    weight_stride,
    part_stride,
    ignore_index,
    softcap: tl.float64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPAN_TILES: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE_DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    CORRECT: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Grid (ceil(N / ROWS) * spans,), a span being SPAN_TILES * COLUMNS classes."""
    row_tile, span = program_tile(N, spans, ROWS, GROUP)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    t = tl.load(target + row, mask=row < N, other=ignore_index).to(tl.int64)
    known = (t >= 0) & (t < V) & (t != ignore_index)
    t = tl.where(known, t, -1).to(tl.int32)

    top = tl.full([ROWS], MINUS_INF, tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    spread = sums
    total = sums
    before = top
    z_target = sums
    tiles = tl.minimum(SPAN_TILES, tl.cdiv(V, COLUMNS) - span * SPAN_TILES)
    for tile in range(tiles):
        column = (span * SPAN_TILES + tile) * COLUMNS + tl.arange(0, COLUMNS)
        z = logits_tile(
            hidden, weight, bias, row, column, N, V, H, hidden_stride, weight_stride, softcap,
            ROWS, COLUMNS, DEPTH, WHOLE_DEPTH, BIASED, SOFTCAP, WIDEN,
        )  # fmt: skip
        at_target = column[None, :] == t[:, None]
        z_target += tl.sum(tl.where(at_target, z, 0.0), 1)
        others = (column < V)[None, :] & (at_target == 0)
        if SMOOTHED:
            term = tl.where(others, z, 0.0)
            if WEIGHTED:
                term *= tl.load(class_weight + column, mask=column < V, other=0.0).to(tl.float32)[None, :]
            total += tl.sum(term, 1)
        z = tl.where(others, z, MINUS_INF)
        if CORRECT:
            before = tl.maximum(before, tl.max(tl.where(column[None, :] < t[:, None], z, MINUS_INF), 1))
        raised = tl.maximum(top, tl.max(z, 1))
        base = tl.where(raised == MINUS_INF, 0.0, raised)
        below = z - base[:, None]
        e = exp(below)
        kept = exp(top - base)
        if ENTROPY:
            lost = tl.maximum(top - base, -1000.0)
            spread = (spread + lost * sums) * kept + tl.sum(tl.maximum(below, -1000.0) * e, 1)
        sums = sums * kept + tl.sum(e, 1)
        top = raised

    # The maximum passes over NaN; the sum does not. +inf marks such a row for `rows_finish`.
    top = tl.where(sums == sums, top, INF)
    segment = row.to(tl.int64) * spans + span
    inside = row < N
    tl.store(parts + segment, top, mask=inside)
    tl.store(parts + part_stride + segment, sums, mask=inside)
    if ENTROPY:
        tl.store(parts + 2 * part_stride + segment, spread, mask=inside)
    if SMOOTHED:
        tl.store(parts + 3 * part_stride + segment, total, mask=inside)
    if CORRECT:
        tl.store(parts + 4 * part_stride + segment, before, mask=inside)
    here = tl.where(known, t // (SPAN_TILES * COLUMNS), 0) == span
    tl.store(target_logit + row, tl.where(known, z_target, MINUS_INF), mask=here & inside)
