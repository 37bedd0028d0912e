"""Rows times a factor each, in place: mends a gradient that was made for another upstream gradient.

A row whose factor is 1 is neither read nor written, so the usual case costs one launch and N factors.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_scale(rows, factor, V, row_stride, column_stride, factor_stride, PLACES: tl.constexpr):
    """Grid (N,)."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(factor + row * factor_stride)
    if scale != 1.0:
        for begin in range(0, V, PLACES):
            column = begin + tl.arange(0, PLACES)
            at = rows + row * row_stride + column.to(tl.int64) * column_stride
            value = tl.load(at, mask=column < V)
            tl.store(at, value.to(factor.dtype.element_ty) * scale, mask=column < V)
