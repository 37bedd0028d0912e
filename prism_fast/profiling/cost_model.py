"""What a step of width w costs: t(w) = A w + B w^2, whether a constant is needed, and what that says.

A is the work that grows with the tokens (products, loss, norms), B the attention over all pairs, the constant whatever
a step costs however narrow it is (launches, optimizer, Python). Errors are judged relative to the time, so that every
width counts alike, and no term may be negative: a cost is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

RESAMPLES = 400
CONSTANT_SHARE = 0.02  # of the narrowest step: below it a constant explains nothing worth a term
LAUNCH_BOUND_SHARE = 0.5
TERMS = ("A", "B", "constant")


def fit_cost(seconds: Mapping[int, Sequence[float]], *, statistic: str = "median") -> dict[str, Any]:
    """Fits t(w) to measured steps.

    seconds: width in tokens -> seconds of single steps, at least one each, at least two widths. statistic: "median",
    or "min", for clocks on which a busy neighbour only ever adds.

    -> A [s/token], B [s/token^2], constant [s], residual_max (largest |fit / measured - 1|), quadratic_share
    {width: share of the fitted time}, linear_share, constant_share, constant_needed, constant_interval (95 %, from
    resampled steps, of the three-term fit), residual_max_without_constant, launch_bound ("confirmed", "refuted" or
    "undecided"), points (a dict a width: measured, fitted, residual), verdict (a sentence).

    The constant is kept if its interval excludes 0 and it is over 2 % of the narrowest step; deciding needs three
    widths at least. Raises ValueError for fewer than two widths or a time that is not positive.
    """
    widths = np.array(sorted(seconds), np.float64)
    if len(widths) < 2:
        raise ValueError(f"{len(widths)} widths: expected at least 2")
    samples = [np.asarray(seconds[int(w)], np.float64) for w in widths]
    if any(not len(s) or not np.all(np.isfinite(s)) or s.min() <= 0 for s in samples):
        raise ValueError("every width needs times, all of them finite and over 0")
    times = np.array([_typical(s, statistic) for s in samples])
    decidable = len(widths) > 2
    two = _fit(widths, times, constant=False)
    three = _fit(widths, times, constant=True) if decidable else two
    interval = _constant_interval(widths, samples, statistic) if decidable else None
    needed = bool(
        interval is not None and interval[0] > 0 and three[2] > CONSTANT_SHARE * float(times[0])
    )  # fmt: skip
    chosen = three if needed else two
    parts = np.stack([chosen[0] * widths, chosen[1] * widths**2, np.full(len(widths), chosen[2])])
    fitted = parts.sum(axis=0)
    residuals = fitted / times - 1
    shares = {name: _by_width(widths, row / fitted) for name, row in zip(TERMS, parts, strict=True)}
    document: dict[str, Any] = {
        "A": float(chosen[0]),
        "B": float(chosen[1]),
        "constant": float(chosen[2]),
        "residual_max": float(np.abs(residuals).max()),
        "quadratic_share": shares["B"],
        "linear_share": shares["A"],
        "constant_share": shares["constant"],
        "constant_needed": needed if decidable else None,
        "constant_interval": interval,
        "residual_max_without_constant": float(np.abs(_at(two, widths) / times - 1).max()),
        "launch_bound": _launch_bound(shares["constant"], interval, times) if decidable else "undecided",
        "statistic": statistic,
        "points": [
            {"width": int(w), "measured_s": float(t), "fitted_s": float(f), "residual": float(r), "steps": len(s)}
            for w, t, f, r, s in zip(widths, times, fitted, residuals, samples, strict=True)
        ],
    }
    document["verdict"] = _verdict(document)
    return document


def _typical(samples: np.ndarray, statistic: str) -> float:
    return float(np.median(samples) if statistic == "median" else samples.min())


def _at(coefficients: np.ndarray, widths: np.ndarray) -> np.ndarray:
    return coefficients[0] * widths + coefficients[1] * widths**2 + coefficients[2]


def _fit(widths: np.ndarray, times: np.ndarray, *, constant: bool) -> np.ndarray:
    """float64 [3] (A, B, constant), none negative, least squares of the relative errors.

    With three terms at most, trying every set of terms kept is the whole of non-negative least squares.
    """
    columns = np.stack([widths, widths**2, np.ones_like(widths)], axis=1) / times[:, None]
    best, least = np.zeros(3), np.inf
    terms = range(3 if constant else 2)
    for count in range(1, len(terms) + 1):
        for kept in combinations(terms, count):
            if len(kept) > len(widths):
                continue
            chosen = columns[:, kept]
            scale = np.linalg.norm(chosen, axis=0)
            solution = np.linalg.lstsq(chosen / scale, np.ones(len(times)), rcond=None)[0] / scale
            if np.any(solution < 0):
                continue
            error = float(np.sum((chosen @ solution - 1) ** 2))
            if error < least:
                least, best = error, np.zeros(3)
                best[list(kept)] = solution
    return best


def _constant_interval(widths: np.ndarray, samples: list[np.ndarray], statistic: str) -> list[float] | None:
    """95 % of the three-term fit's constant over resampled steps; None where single steps leave nothing to resample."""
    if all(len(s) < 2 for s in samples):
        return None
    random = np.random.default_rng(0)
    found = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        drawn = np.array([_typical(s[random.integers(0, len(s), len(s))], statistic) for s in samples])
        found[i] = _fit(widths, drawn, constant=True)[2]
    return [float(v) for v in np.percentile(found, [2.5, 97.5])]


def _by_width(widths: np.ndarray, values: np.ndarray) -> dict[str, float]:
    return {str(int(w)): float(v) for w, v in zip(widths, values, strict=True)}


def _launch_bound(constant_share: dict[str, float], interval: list[float] | None, times: np.ndarray) -> str:
    """A launch-bound step costs the same whatever its width: most of even the widest step is constant."""
    if constant_share[max(constant_share, key=int)] > LAUNCH_BOUND_SHARE:
        return "confirmed"
    if interval is not None and interval[1] < LAUNCH_BOUND_SHARE * float(times[-1]):
        return "refuted"
    return "undecided"


def _verdict(fit: dict[str, Any]) -> str:
    widths = list(fit["quadratic_share"])
    low, high = widths[0], widths[-1]
    share = fit["quadratic_share"]
    sentence = (
        f"t(w) = {fit['A']:.3e} w + {fit['B']:.3e} w^2"
        + (f" + {fit['constant']:.3e}" if fit["constant"] else "")
        + f" s fits within {fit['residual_max']:.2%}; the quadratic part is {share[low]:.1%} of a step at width {low} "
        f"and {share[high]:.1%} at {high}"
    )
    needed = fit["constant_needed"]
    if needed is None:
        return sentence + "; whether a constant is needed takes a third width."
    if needed:
        constant = fit["constant_share"]
        return (
            sentence + f"; a constant is needed ({constant[low]:.1%} of the narrowest step), launch-bound is "
            f"{fit['launch_bound']}."
        )
    if fit["launch_bound"] == "refuted":
        return sentence + "; no constant is needed, which refutes launch-bound."
    return sentence + f"; no constant is needed, launch-bound is {fit['launch_bound']}."
