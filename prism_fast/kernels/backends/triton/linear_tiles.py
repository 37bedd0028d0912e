"""A tile of logits made where it is used: hidden [N, H] times the head [V, H] transposed, float32, never stored.

bfloat16 and float16 only: float32 and float64 products are the matrix library's business (host.py says why).
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism_fast.kernels.backends.triton.fold import capped


@triton.jit
def program_tile(N, spans, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """-> (row tile, span of the vocabulary) of this program.

    Programs that run together take GROUP row tiles and few spans: their hidden states and their part of the head
    stay in L2 while they are multiplied.
    """
    program = tl.program_id(0)
    tiles = tl.cdiv(N, ROWS)
    group = program // (GROUP * spans)
    in_group = tl.minimum(tiles - group * GROUP, GROUP)
    within = program - group * GROUP * spans
    return group * GROUP + within % in_group, within // in_group


@triton.jit
def logits_tile(
    hidden,
    weight,
    bias,
    row,
    column,
    N,
    V,
    H,
    hidden_stride,
    weight_stride,
    softcap,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WHOLE_DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """softcap(hidden[row] . weight[column] + bias[column]), [ROWS, COLUMNS]; past N and V: the last again."""
    depth = tl.arange(0, DEPTH)
    # Past the end the last row again: no mask in the loop, and the caller masks the result.
    a = hidden + tl.minimum(row, N - 1).to(tl.int64)[:, None] * hidden_stride + depth[None, :]
    b = weight + tl.minimum(column, V - 1).to(tl.int64)[None, :] * weight_stride + depth[:, None]
    z = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, H, DEPTH):
        if WHOLE_DEPTH:
            x = tl.load(a)
            y = tl.load(b)
        else:
            x = tl.load(a, mask=begin + depth[None, :] < H, other=0.0)
            y = tl.load(b, mask=begin + depth[:, None] < H, other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        z = tl.dot(x, y, z)
        a += DEPTH
        b += DEPTH
    if BIASED:
        z += tl.load(bias + column, mask=column < V, other=0.0).to(tl.float32)[None, :]
    return capped(z, softcap, SOFTCAP)
