"""Sums over rows in float64, in an order that the shape alone decides: no atomics on floating-point numbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N"])
def sum_rows(values, out, N, stride, LINE: tl.constexpr):
    """One program: lane i adds values i, i + LINE, ... in order; then the lanes are added."""
    lanes = tl.zeros([LINE], tl.float64)
    for begin in range(0, N, LINE):
        at = begin + tl.arange(0, LINE)
        lanes += tl.load(values + at.to(tl.int64) * stride, mask=at < N, other=0.0).to(tl.float64)
    tl.store(out, tl.sum(lanes, 0))


@triton.jit(do_not_specialize=["L", "ignore_index"])
def code_length_rows(
    nll, target, token_bytes, parts, L, T, ignore_index, fault_nats: tl.float64, LINE: tl.constexpr
):  # fmt: skip
    """Grid (B,): a line of text into its six sums (prism_fast.kernels.bits_per_byte), float64 [B, 8].

    Lane i adds columns i, i + LINE, ...: padding a line on the right adds zeros and changes no bit.
    """
    row = tl.program_id(0).to(tl.int64)
    nats = tl.zeros([LINE], tl.float64)
    special_nats = nats
    size = tl.zeros([LINE], tl.int64)
    tokens = size
    special_tokens = size
    faults = size
    for begin in range(0, L, LINE):
        at = begin + tl.arange(0, LINE)
        inside = at < L
        t = tl.load(target + row * L + at, mask=inside, other=0).to(tl.int64)
        scored = inside & (t != ignore_index)
        known = scored & (t >= 0) & (t < T)
        spelled = tl.load(token_bytes + t, mask=known, other=0).to(tl.int64)
        loss = tl.load(nll + row * L + at, mask=known, other=0.0).to(tl.float64)
        broken = known & ((loss != loss) | (tl.abs(loss) == float("inf")))
        loss = tl.where(broken, fault_nats, loss)
        text = known & (spelled > 0)
        special = known & (spelled == 0)
        nats += tl.where(text, loss, 0.0)
        special_nats += tl.where(special, loss, 0.0)
        size += spelled
        tokens += text.to(tl.int64)
        special_tokens += special.to(tl.int64)
        faults += (broken | (scored & (known == 0))).to(tl.int64)
    part = parts + row * 8
    tl.store(part, tl.sum(nats, 0))
    tl.store(part + 1, tl.sum(special_nats, 0))
    tl.store(part + 2, tl.sum(size, 0).to(tl.float64))
    tl.store(part + 3, tl.sum(tokens, 0).to(tl.float64))
    tl.store(part + 4, tl.sum(special_tokens, 0).to(tl.float64))
    tl.store(part + 5, tl.sum(faults, 0).to(tl.float64))


@triton.jit(do_not_specialize=["B"])
def code_length_finish(parts, out, B):
    """One program: the lines' sums, added in the order of the lines."""
    field = tl.arange(0, 8)
    total = tl.zeros([8], tl.float64)
    for row in range(B):
        total += tl.load(parts + row * 8 + field, mask=field < 6, other=0.0)
    tl.store(out + field, total, mask=field < 6)
