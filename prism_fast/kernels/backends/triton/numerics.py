"""Scalar arithmetic shared by the kernels: what the hardware's own functions get wrong by more than an ulp or two."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MINUS_INF = tl.constexpr(float("-inf"))
INF = tl.constexpr(float("inf"))


@triton.jit
def exp(x):
    """e**x by the hardware's base-2 exponential (2 ulp on NVIDIA, float32; the library's in float64)."""
    return tl.exp2(x * LOG2E)


@triton.jit
def log1p_unit(x):
    """log(1 + x) for x in [0, 1], relative error of a few ulp however small x is.

    Triton has no log1p, and log(1 + x) loses every digit of a small x. log(1 + x) = 2 artanh(y) with
    y = x / (2 + x) <= 1/3, and the series in y^2 <= 1/9 gains a digit a term: 8 for float32, 17 for float64.
    """
    y = x / (2.0 + x)
    square = y * y
    terms: tl.constexpr = 17 if x.dtype == tl.float64 else 8
    series = tl.zeros_like(x)
    for i in tl.static_range(terms):
        series = series * square + 1.0 / (2 * (terms - 1 - i) + 1)
    return 2.0 * y * series


@triton.jit
def softplus(x):
    """log(1 + e**x), never negative; relative error of a few ulp in both tails; inf and NaN pass through."""
    return tl.maximum(x, 0.0) + log1p_unit(exp(-tl.abs(x)))


@triton.jit
def tanh(x):
    """tanh, accurate to a few ulp everywhere: the hardware's own is good to 2**-11 only.

    1 - 2 / (1 + e**2x) is exact enough away from 0; below 5/8 it cancels, so sinh x / cosh x by their series there.
    """
    square = x * x
    sinh = tl.full(x.shape, 1.0, x.dtype)
    cosh = sinh
    terms: tl.constexpr = 9 if x.dtype == tl.float64 else 5
    for k in tl.static_range(terms, 0, -1):
        sinh = 1.0 + square * sinh * (1.0 / (2 * k * (2 * k + 1)))
        cosh = 1.0 + square * cosh * (1.0 / (2 * k * (2 * k - 1)))
    near = x * sinh / cosh
    far = 1.0 - 2.0 / (1.0 + exp(2.0 * tl.abs(x)))
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def expm1(x):
    """e**x - 1, relative error of a few ulp also near 0: 2 t / (1 - t) with t = tanh(x / 2)."""
    half = tanh(0.5 * x)
    return 2.0 * half / (1.0 - half)


@triton.jit
def count(x, UNIT: tl.constexpr):
    """x >= 0 as a whole number of UNIT-ths. Integers add exactly, so their sum is the same in any order."""
    scaled = x * UNIT
    if x.dtype == tl.float64:
        # float32 terms that matter are whole already; float64 ones are rounded, for truncation would add up.
        scaled += 0.5
    return scaled.to(tl.int64)
