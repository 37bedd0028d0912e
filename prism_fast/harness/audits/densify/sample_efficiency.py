"""How fast a run learned, from its series alone: bpb at token marks, the area under the curve, how steady it went."""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_fast.protocol import manifest as m

MARKS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # of the tokens seen
MIN_POINTS = 8  # below, a spread says nothing


def sample_efficiency_panel(series: m.TrainSeries) -> dict[str, Any]:
    """bpb in bits a UTF-8 byte: `running_bpb` since the start (the prequential one), `window_bpb` since the last mark.

    `area_under_curve_bpb`: the mean over tokens of each point's own bpb, lower is better. `stability` looks at the
    second half: the standard deviation of the loss around its straight line, the largest rise of its running mean.
    """
    columns, aggregates = series.columns, series.aggregates
    bpb = np.array([np.nan if v is None else v for v in columns.running_bpb], float)
    known = np.isfinite(bpb) & (np.array(columns.covered_bytes) > 0)
    tokens = np.array(columns.tokens_seen, float)[known]
    n_bytes = np.array(columns.covered_bytes, float)[known]
    if not len(tokens):
        nothing = "the series has no point that covers anything"
        return {
            "at_tokens": None,
            "area_under_curve_bpb": None,
            "stability": None,
            "points": 0,
            "reasons": dict.fromkeys(("at_tokens", "area_under_curve_bpb", "stability"), nothing),
        }
    bits = bpb[known] * n_bytes
    own_bits, own_bytes, own_tokens = (np.diff(v, prepend=0.0) for v in (bits, n_bytes, tokens))
    with np.errstate(divide="ignore", invalid="ignore"):
        own_bpb = np.where(own_bytes > 0, own_bits / own_bytes, 0.0)
    losses = np.array([np.nan if v is None else v for v in columns.train_ce_nats], float)
    stability, reason = _stability(losses[np.isfinite(losses)], aggregates, series.batches)
    return {
        "at_tokens": _marks(tokens, bits, n_bytes),
        "area_under_curve_bpb": float((own_bpb * own_tokens).sum() / own_tokens.sum()),
        "stability": stability,
        "points": len(tokens),
        "reasons": {} if reason is None else {"stability": reason},
    }


def _marks(tokens: np.ndarray, bits: np.ndarray, n_bytes: np.ndarray) -> list[dict[str, Any]]:
    wanted = np.unique(np.searchsorted(tokens, [share * tokens[-1] for share in MARKS]))
    found, before_bits, before_bytes = [], 0.0, 0.0
    for i in wanted.tolist():
        found.append(
            {
                "tokens": int(tokens[i]),
                "running_bpb": float(bits[i] / n_bytes[i]),
                "window_bpb": float((bits[i] - before_bits) / max(1.0, n_bytes[i] - before_bytes)),
            }
        )
        before_bits, before_bytes = bits[i], n_bytes[i]
    return found


def _stability(
    losses: np.ndarray, aggregates: m.SeriesAggregates, batches: int
) -> tuple[dict[str, Any] | None, str | None]:
    half = losses[len(losses) // 2 :]
    if len(half) < MIN_POINTS:
        return None, f"{len(half)} points in the second half of the series; at least {MIN_POINTS} are needed"
    steps = np.arange(len(half), dtype=float)
    line = np.polyval(np.polyfit(steps, half, 1), steps)
    smooth = np.convolve(half, np.ones(MIN_POINTS) / MIN_POINTS, "valid")
    rise = smooth - np.minimum.accumulate(smooth)
    return {
        "loss_std_around_trend_nats": float(np.std(half - line)),
        "largest_rise_nats": float(rise.max()),
        "grad_spike_rate": aggregates.grad_spike_rate,
        "clip_rate": aggregates.clip_events / max(1, batches),
        "nan_inf_batches": aggregates.nan_inf_batches,
    }, None
