"""Forward over rows of logits: token NLL and cross-entropy, one device-memory read of the logits.

Bytes: N * V * itemsize read; a few words a row written. One program folds one row (or, when N is too small to fill
the chip, a few segments of one row, whose parts `rows_finish` then merges to the same bits).
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism_fast.kernels.backends.triton.fold import (
    SPARE,
    capped,
    fold_window,
    load_window,
    merge_segments,
    row_entropy,
    row_log_sum_exp,
)
from prism_fast.kernels.backends.triton.numerics import INF, MINUS_INF


@triton.jit
def finish_row(
    row,
    top,
    sums,
    spread,
    total,
    before,
    z_target,
    reference,
    target,
    class_weight,
    class_weight_sum,
    loss_out,
    lse_out,
    correct_out,
    entropy_out,
    faults,
    V,
    ignore_index,
    label_smoothing,
    z_loss,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    CORRECT: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Row results from the fold; writes everything a row has, ignored and faulty rows included. -> lse"""
    ignored = target == ignore_index
    known = (target >= 0) & (target < V)
    nll, lse, bad = row_log_sum_exp(top, sums, z_target)
    loss = nll
    if WEIGHTED:
        weight = tl.load(class_weight + target, mask=known & (ignored == 0), other=0.0).to(nll.dtype)
        loss = nll * weight
    if SMOOTHED:
        smoothing = tl.cast(label_smoothing, nll.dtype)
        # sum_v w_v (lse - z_v), all relative to `reference`; the target's own term is not in `total`.
        beyond = z_target - reference
        if WEIGHTED:
            mass = tl.load(class_weight_sum).to(nll.dtype)
            total += weight * beyond
        else:
            mass = tl.cast(V, nll.dtype)
            total += beyond
        loss = (1.0 - smoothing) * loss + smoothing / V * (mass * (nll + beyond) - total)
    if Z_LOSS:
        loss += tl.cast(z_loss, nll.dtype) * (lse * lse).to(nll.dtype)
    faulty = (bad | (known == 0)) & (ignored == 0)
    lse = tl.where(faulty, float("nan"), lse)
    tl.store(loss_out + row, tl.where(ignored, 0.0, tl.where(faulty, float("nan"), loss)))
    tl.store(lse_out + row, tl.where(ignored, 0.0, lse))
    if CORRECT:
        # First largest column wins, as in argmax.
        hit = (z_target >= top) & (z_target > before) & (faulty == 0) & (ignored == 0)
        tl.store(correct_out + row, hit)
    if ENTROPY:
        entropy = row_entropy(top, sums, spread, z_target)
        tl.store(entropy_out + row, tl.where(ignored, 0.0, tl.where(faulty, float("nan"), entropy)))
    # An integer count: the same in whatever order rows add to it.
    tl.atomic_add(faults, 1, mask=faulty, sem="relaxed")
    return lse


@triton.jit
def smoothing_reference(z_target, RELATIVE: tl.constexpr):
    """What the logits of a row are summed relative to: a large common offset must cost the sum no digit."""
    if RELATIVE:
        reference = tl.where(tl.abs(z_target) < INF, z_target, 0.0)
    else:
        reference = tl.zeros_like(z_target)
    return reference


@triton.jit
def row_start(logits, row, phase, row_stride, GRANULE: tl.constexpr, UNIT_STRIDE: tl.constexpr):
    """-> (pointer to the 16-byte boundary at or below the row's first logit, places from there to it)."""
    begin = row.to(tl.int64) * row_stride + phase
    if UNIT_STRIDE:
        aligned = tl.multiple_of((begin // GRANULE) * GRANULE, GRANULE)
        start = logits + aligned
        shift = (begin - aligned).to(tl.int32)
    else:
        start = logits + begin
        shift = 0
    return start, shift


@triton.jit
def fold_row(
    start,
    shift,
    column_stride,
    hole,
    reference,
    first,
    last,
    softcap,
    class_weight,
    parts,
    part_stride,
    V,
    ACC: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    ABREAST: tl.constexpr,
    ROUNDS: tl.constexpr,
    GRANULE: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    CORRECT: tl.constexpr,
    ENTROPY: tl.constexpr,
    STAGES: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Segments [first, last) of a row, ABREAST at a time in at most ROUNDS: merged, or (SPLIT) each to `parts`."""
    SEGMENT: tl.constexpr = LANES * TILES - SPARE
    abreast = tl.arange(0, ABREAST)
    rounds = tl.arange(0, ROUNDS)[:, None]
    tops = tl.full([ROUNDS, ABREAST], MINUS_INF, ACC)
    sums = tl.zeros([ROUNDS, ABREAST], ACC)
    spreads = sums
    totals = sums
    befores = tops
    for at in tl.range(first, last, ABREAST, num_stages=STAGES):
        segment = at + abreast
        column = segment * SEGMENT
        columns = tl.where(segment < last, tl.minimum(tl.maximum(V - column, 0), SEGMENT), 0)
        if UNIT_STRIDE:
            window = start + column
        else:
            window = start + column.to(tl.int64) * column_stride
        raw = load_window(window, column_stride, shift, columns, LANES, TILES, GRANULE, UNIT_STRIDE, EVICT)
        weights = class_weight + column
        if (
            (at + ABREAST > last)
            | ((at + ABREAST) * SEGMENT > V)
            | ((hole >= at * SEGMENT) & (hole < (at + ABREAST) * SEGMENT))
        ):
            top, sum_e, spread, total, before = fold_window(
                raw, shift, columns, hole - column, reference, softcap, weights,
                ACC, LANES, TILES, True, SOFTCAP, WEIGHTED, SMOOTHED, CORRECT, ENTROPY,
            )  # fmt: skip
        else:
            top, sum_e, spread, total, before = fold_window(
                raw, shift, columns, hole - column, reference, softcap, weights,
                ACC, LANES, TILES, False, SOFTCAP, WEIGHTED, SMOOTHED, CORRECT, ENTROPY,
            )  # fmt: skip
        if SPLIT:
            inside = segment < last
            tl.store(parts + segment, top, mask=inside)
            tl.store(parts + part_stride + segment, sum_e, mask=inside)
            if ENTROPY:
                tl.store(parts + 2 * part_stride + segment, spread, mask=inside)
            if SMOOTHED:
                tl.store(parts + 3 * part_stride + segment, total, mask=inside)
            if CORRECT:
                tl.store(parts + 4 * part_stride + segment, before, mask=inside)
        else:
            now = rounds == at // ABREAST
            tops = tl.where(now, top[None, :], tops)
            sums = tl.where(now, sum_e[None, :], sums)
            spreads = tl.where(now, spread[None, :], spreads)
            totals = tl.where(now, total[None, :], totals)
            befores = tl.where(now, before[None, :], befores)
    return merge_segments(
        tl.reshape(tops, [ROUNDS * ABREAST]),
        tl.reshape(sums, [ROUNDS * ABREAST]),
        tl.reshape(spreads, [ROUNDS * ABREAST]),
        tl.reshape(totals, [ROUNDS * ABREAST]),
        tl.reshape(befores, [ROUNDS * ABREAST]),
        ENTROPY,
        SMOOTHED,
    )


@triton.jit(
    do_not_specialize=["vocab_start", "part_stride", "part_row_stride", "segments_per_program", "fresh", "ignore_index"]
)
def rows_forward(
    logits,
    target,
    class_weight,
    class_weight_sum,
    loss_out,
    lse_out,
    correct_out,
    entropy_out,
    faults,
    parts,
    target_logit,
    V,
    phase,
    row_stride,
    column_stride,
    vocab_start,
    part_stride,
    part_row_stride,
    segments_per_program,
    fresh,
    ignore_index,
    label_smoothing: tl.float64,
    z_loss: tl.float64,
    softcap: tl.float64,
    ACC: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    ROUNDS: tl.constexpr,
    GRANULE: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    RELATIVE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CORRECT: tl.constexpr,
    ENTROPY: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (N, programs a row), `segments_per_program` segments each. SPLIT: leaves `parts` for `rows_finish`.

    Column 0 is class `vocab_start`: for a shard, or for logits made a range of classes at a time, the first range
    first. Those ranges have no common reference for the smoothing sum, hence not RELATIVE.
    """
    row = tl.program_id(0)
    t = tl.load(target + row).to(tl.int64)
    local = t - vocab_start
    known = (local >= 0) & (local < V) & (t != ignore_index)
    start, shift = row_start(logits, row, phase, row_stride, GRANULE, UNIT_STRIDE)
    z_target = tl.load(start + shift + local * column_stride, mask=known, other=MINUS_INF).to(ACC)
    z_target = tl.where(known, capped(z_target, softcap, SOFTCAP), MINUS_INF)
    reference = smoothing_reference(z_target, RELATIVE)
    segments = tl.cdiv(V, LANES * TILES - SPARE)
    first = tl.program_id(1) * segments_per_program
    last = tl.where(t == ignore_index, 0, tl.minimum(first + segments_per_program, segments))
    top, sums, spread, total, before = fold_row(
        start, shift, column_stride, tl.where(known, local, -1).to(tl.int32), reference,
        first, last, softcap, class_weight, parts + row.to(tl.int64) * part_row_stride, part_stride, V,
        ACC, LANES, TILES, 1, ROUNDS, GRANULE, UNIT_STRIDE, SPLIT,
        SOFTCAP, WEIGHTED, SMOOTHED, CORRECT, ENTROPY, STAGES, "evict_first",
    )  # fmt: skip
    if SPLIT:
        # A later range of classes must not undo what an earlier one found.
        if first == 0:
            tl.store(target_logit + row, z_target, mask=known | (fresh != 0))
    else:
        finish_row(
            row, top, sums, spread, total, before, z_target, reference, t,
            class_weight, class_weight_sum, loss_out, lse_out, correct_out, entropy_out, faults,
            V, ignore_index, label_smoothing, z_loss, WEIGHTED, SMOOTHED, Z_LOSS, CORRECT, ENTROPY,
        )  # fmt: skip


@triton.jit
def load_parts(parts, part_stride, row, segments, read, PARTS: tl.constexpr, ENTROPY, SMOOTHED, CORRECT):
    """The [PARTS] parts of one row, padded with those of an empty segment."""
    segment = tl.arange(0, PARTS)
    part = row.to(tl.int64) * segments + segment
    inside = (segment < segments) & read
    top = tl.load(parts + part, mask=inside, other=MINUS_INF)
    sums = tl.load(parts + part_stride + part, mask=inside, other=0.0)
    spread = sums
    total = sums
    before = top
    if ENTROPY:
        spread = tl.load(parts + 2 * part_stride + part, mask=inside, other=0.0)
    if SMOOTHED:
        total = tl.load(parts + 3 * part_stride + part, mask=inside, other=0.0)
    if CORRECT:
        before = tl.load(parts + 4 * part_stride + part, mask=inside, other=MINUS_INF)
    return merge_segments(top, sums, spread, total, before, ENTROPY, SMOOTHED)


@triton.jit(do_not_specialize=["segments", "part_stride", "ignore_index"])
def rows_finish(
    parts,
    target_logit,
    target,
    class_weight,
    class_weight_sum,
    loss_out,
    lse_out,
    correct_out,
    entropy_out,
    faults,
    V,
    segments,
    part_stride,
    ignore_index,
    label_smoothing: tl.float64,
    z_loss: tl.float64,
    PARTS: tl.constexpr,
    RELATIVE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    CORRECT: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Grid (N,): the parts of a row, made by several programs, into its results."""
    row = tl.program_id(0)
    t = tl.load(target + row).to(tl.int64)
    top, sums, spread, total, before = load_parts(
        parts, part_stride, row, segments, t != ignore_index, PARTS, ENTROPY, SMOOTHED, CORRECT
    )
    z_target = tl.load(target_logit + row)
    reference = smoothing_reference(z_target, RELATIVE)
    finish_row(
        row, top, sums, spread, total, before, z_target, reference, t,
        class_weight, class_weight_sum, loss_out, lse_out, correct_out, entropy_out, faults,
        V, ignore_index, label_smoothing, z_loss, WEIGHTED, SMOOTHED, Z_LOSS, CORRECT, ENTROPY,
    )  # fmt: skip


@triton.jit(do_not_specialize=["segments", "part_stride", "ignore_index"])
def rows_finish_shard(
    parts,
    target_logit,
    target,
    max_out,
    sum_out,
    target_out,
    segments,
    part_stride,
    ignore_index,
    PARTS: tl.constexpr,
):
    """Grid (N,): the parts of a row of one vocabulary shard into what merges with the other shards."""
    row = tl.program_id(0)
    kept = tl.load(target + row) != ignore_index
    top, sums, _spread, _total, _before = load_parts(
        parts, part_stride, row, segments, kept, PARTS, False, False, False
    )
    # The fold turns NaN into +inf, and neither has a sum.
    tl.store(max_out + row, tl.where(top == INF, float("nan"), top))
    tl.store(sum_out + row, tl.where(top == INF, float("nan"), sums))
    tl.store(target_out + row, tl.load(target_logit + row))
