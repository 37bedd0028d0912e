"""One row of logits -> (max, sum of exponentials): the fold that every kernel over logits shares.

The same bits must come out however a row is stored (its alignment, its stride), however many programs share it and
however many warps run it. So nothing about the order of a floating-point addition may depend on those:

- A row is cut into *segments* of S = LANES * TILES - 8 columns, by the vocabulary alone. A segment is reduced to its
  own (max, sum), and segments are merged. Who computes a segment does not matter.
- Rows need not start on a 16-byte boundary (V = 50,257 in bfloat16), yet loads are to be 16 bytes wide. So a segment
  is read through a *window* of LANES * TILES places that starts at the 16-byte boundary below it; the 8 spare places
  are for that shift, and what does not belong to the segment counts as -inf.
- A shift moves a column to another lane. All columns of one *lane class* (column modulo LANES) move together, so
  their exponentials are added one after another, in column order, whatever the shift. What is added across lanes is
  a whole number of 2**-49ths (`numerics.count`): exact, so any order gives the same sum.

The target's own logit stays out of the fold. With it apart, NLL = softplus(logsumexp(others) - target logit): never
negative, exactly 0 for a vocabulary of one, and right to a few units in the last place even at 1e-9.
"""

# Triton unrolls tuples that mypy takes for fixed ones.
# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from prism_fast.kernels.backends.triton.numerics import INF, MINUS_INF, count, exp, log1p_unit, softplus, tanh

# Sums of a segment are at most 2**12 (its columns, each at most 1), so a unit of 2**-49 fills 61 bits.
SEGMENT_UNIT = tl.constexpr(2.0**49)
SPARE = tl.constexpr(8)


@dataclass(frozen=True)
class Geometry:
    """How a vocabulary is cut. It is part of the arithmetic: changing it changes last bits, nothing else does."""

    lanes: int
    tiles: int

    @property
    def segment(self) -> int:
        """Columns of a segment."""
        return self.lanes * self.tiles - 8

    def segments(self, vocab: int) -> int:
        return -(-vocab // self.segment)


def geometry(vocab: int) -> Geometry:
    """4,088 columns a segment (4 tiles of 1,024: 16 values a thread at 8 warps); small vocabularies in one segment."""
    if vocab + 8 <= 1024:
        return Geometry(max(32, triton.next_power_of_2(vocab + 8)), 1)
    return Geometry(1024, min(4, -(-(vocab + 8) // 1024)))


@triton.jit
def capped(z, softcap, SOFTCAP: tl.constexpr):
    """z' = softcap * tanh(z / softcap), in the accumulator's type."""
    if SOFTCAP:
        cap = tl.cast(softcap, z.dtype)
        z = cap * tanh(z / cap)
    return z


@triton.jit
def load_window(
    start,
    step,
    shift,
    columns,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    GRANULE: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    EVICT: tl.constexpr,
):
    """U windows of a row, TILES blocks of [U, LANES]. `start` (pointers, at 16-byte boundaries when UNIT_STRIDE) and
    `columns` are [U]; the first column lies `shift` places after `start`."""
    # The last granule that holds a column is read whole: 16 aligned bytes never cross a page.
    limit = ((shift + columns + GRANULE - 1) // GRANULE) * GRANULE
    raw = ()
    for i in tl.static_range(TILES):
        place = tl.arange(0, LANES)[None, :] + i * LANES
        if UNIT_STRIDE:
            at = start[:, None] + place
        else:
            at = start[:, None] + place.to(tl.int64) * step
        raw += (tl.load(at, mask=place < limit[:, None], eviction_policy=EVICT),)
    return raw


@triton.jit
def fold_window(
    raw,
    shift,
    columns,
    hole,
    reference,
    softcap,
    class_weight,
    ACC: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SUMMED: tl.constexpr,
    CORRECT: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """U segments at once -> their (max, sum, spread, total, before), each [U], the column `hole` left out.

    MASKED: a window is not full, or holds the hole. spread is sum (z - max) e^(z - max), total is
    sum w (z - reference), before is the largest logit left of the hole; each is only right under its flag.
    """
    lane = tl.arange(0, LANES)[None, :]
    z = ()
    top = tl.full([columns.shape[0], LANES], MINUS_INF, ACC)
    before = top
    total = tl.zeros_like(top)
    for i in tl.static_range(TILES):
        x = capped(raw[i].to(ACC), softcap, SOFTCAP)
        column = lane + i * LANES - shift
        if MASKED:
            inside = (column >= 0) & (column < columns[:, None]) & (column != hole[:, None])
        else:
            # Only the first and the last tile of a full window have places outside it.
            inside = lane < LANES
            if i == 0:
                inside = column >= 0
            if i == TILES - 1:
                inside = inside & (column < LANES * TILES - SPARE)
        if SUMMED:
            term = x - reference
            if WEIGHTED:
                term *= tl.load(class_weight[:, None] + column, mask=inside, other=0.0).to(ACC)
            total += tl.where(inside, term, 0.0)
        if MASKED or i == 0 or i == TILES - 1:
            x = tl.where(inside, x, MINUS_INF)
        if CORRECT and MASKED:
            before = tl.maximum(before, tl.where(column < hole[:, None], x, MINUS_INF))
        top = tl.maximum(top, x, propagate_nan=tl.PropagateNan.ALL)
        z += (x,)

    # NaN becomes +inf: either makes the row faulty, and the plain maximum is the same on every target.
    top = tl.max(tl.where(top != top, INF, top), 1)
    if CORRECT:
        if MASKED:
            before = tl.max(before, 1)
        else:
            before = tl.where(hole > 0, top, MINUS_INF)
    else:
        before = top

    base = tl.where(top == MINUS_INF, 0.0, top)[:, None]
    sums = exp(z[0] - base)
    if ENTROPY:
        # -1000 stands for -inf, whose exponential is 0 all the same.
        spread = tl.maximum(z[0] - base, -1000.0) * sums
    for i in tl.static_range(1, TILES):
        below = z[i] - base
        e = exp(below)
        sums += e
        if ENTROPY:
            spread += tl.maximum(below, -1000.0) * e
    sums = tl.sum(count(sums, SEGMENT_UNIT), 1).to(ACC) * (1.0 / SEGMENT_UNIT)
    if ENTROPY:
        spread = tl.sum(count(-spread, SEGMENT_UNIT), 1).to(ACC) * (-1.0 / SEGMENT_UNIT)
    else:
        spread = sums
    if SUMMED:
        total = ordered_sum(total)
    else:
        total = sums
    return top, sums, spread, total, before


@triton.jit
def ordered_sum(x):
    """Sum over axis 1 of values of any size: scaled by their own largest, then added as whole numbers."""
    largest = tl.max(tl.where(x == x, tl.abs(x), INF), 1)
    finite = largest < INF
    # A row has at most 2**10 lanes: 2**49 * 2**10 stays within 62 bits.
    unit = SEGMENT_UNIT / tl.where(finite, tl.maximum(largest, 1e-30), 1.0)
    exact = tl.sum((tl.where(finite[:, None], x, 0.0) * unit[:, None]).to(tl.int64), 1).to(x.dtype) / unit
    return tl.where(finite, exact, tl.sum(x, 1))


@triton.jit
def merge_segments(top, sums, spread, total, before, PARTS: tl.constexpr, ENTROPY: tl.constexpr, SUMMED: tl.constexpr):
    """Parts of one row, 1-d (max -inf and sum 0 where there is none) -> the row's, in whatever order they lie.

    PARTS: the number of segments that the row has, up to a power of 2; it bounds the sum, hence the unit. Not the
    length of the vectors: that depends on the launch.
    """
    ROW_UNIT: tl.constexpr = 2.0**49 / PARTS
    largest = tl.max(top, 0)
    base = tl.where(largest == MINUS_INF, 0.0, largest)
    below = tl.maximum(top - base, -1000.0)
    share = exp(top - base)
    merged = tl.sum(count(sums * share, ROW_UNIT), 0).to(top.dtype) * (1.0 / ROW_UNIT)
    if ENTROPY:
        spread = (spread + below * sums) * share
        spread = tl.sum(count(-spread, ROW_UNIT), 0).to(top.dtype) * (-1.0 / ROW_UNIT)
    else:
        spread = merged
    if SUMMED:
        total = tl.sum(ordered_sum(total[None, :]), 0)
    else:
        total = merged
    return largest, merged, spread, total, tl.max(before, 0)


@triton.jit
def row_log_sum_exp(top, sums, z_target):
    """(max, sum) of the other columns and the target's logit -> (nll, lse in float64, faulty).

    Differences of logits are taken before anything is rounded, so a large offset common to the row costs no digit;
    the gradient needs z - lse, hence the float64.
    """
    some = sums > 0.0
    log_sums = tl.log(tl.where(some, sums, 1.0))
    lead = tl.where(some, (top - z_target) + log_sums, MINUS_INF)
    nll = softplus(lead)
    rest = log1p_unit(exp(-tl.abs(lead)))
    over_top = top.to(tl.float64) + (log_sums + rest).to(tl.float64)
    lse = tl.where(lead > 0.0, over_top, z_target.to(tl.float64) + rest.to(tl.float64))
    # +inf or NaN anywhere (the fold turns both into top = +inf), or nothing but -inf.
    bad = (top == INF) | (z_target == INF) | (z_target != z_target) | ((some == 0) & (z_target == MINUS_INF))
    return tl.where(bad, float("nan"), nll), tl.where(bad, float("nan"), lse), bad


@triton.jit
def row_entropy(top, sums, spread, z_target):
    """H = log S - (1/S) sum_v (z_v - m) e^(z_v - m), in nats, the target's column added to the others."""
    largest = tl.maximum(top, z_target)
    down = tl.maximum(top - largest, -1000.0)
    share = exp(down)
    target_down = tl.maximum(z_target - largest, -1000.0)
    target_share = exp(target_down)
    everything = sums * share + target_share
    entropy = tl.log(everything) - ((spread + down * sums) * share + target_down * target_share) / everything
    return tl.maximum(entropy, 0.0)
