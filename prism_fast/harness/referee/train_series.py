"""`prism_train_series.v1` from a run's ledger and observations, folded in chunks: no memory that grows with the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from prism_fast.profiling.throughput import QuantileSketch, chunks_of
from prism_fast.protocol import constants as c
from prism_fast.protocol import ledger as layout
from prism_fast.protocol import manifest as m

STEP_PARTS = ("data_wait_s", "predict_s", "scoring_s", "ledger_s", "step_s")


def build_series(
    run_dir: Path, *, submission_id: str, run_id: str, token_budget: int | None, world_size: int
) -> m.TrainSeries:
    """At most SERIES_MAX_POINTS points, of `stride` batches each. Quantiles are exact up to 65,536 steps."""
    records = layout.read_records(run_dir / c.LEDGER_FILE, layout.LEDGER_MAGIC, layout.LEDGER_DTYPE)
    seen = layout.read_records(run_dir / c.OBSERVATIONS_FILE, layout.OBSERVATIONS_MAGIC, layout.OBSERVATIONS_DTYPE)
    batches = len(records) // world_size
    stride = max(1, -(-batches // c.SERIES_MAX_POINTS))
    recorded = _Recorded(batches, stride, world_size)
    for chunk in chunks_of(records[: batches * world_size]):
        recorded.add(chunk)
    observed = _Observed(batches, stride)
    for chunk in _of_rank_0(seen, batches):
        observed.add(chunk)
    n_bytes = np.cumsum(recorded.bytes)
    with np.errstate(divide="ignore", invalid="ignore"):
        loss = np.where(recorded.scored > 0, recorded.nats / recorded.scored, np.nan)
        running = np.where(n_bytes > 0, np.cumsum(recorded.nats) / c.LN2 / n_bytes, np.nan)
    return m.TrainSeries(
        submission_id=submission_id,
        run_id=run_id,
        token_budget=token_budget,
        batches=batches,
        stride=stride,
        columns=m.SeriesColumns(
            i=np.arange(0, batches, stride).tolist(),
            tokens_seen=np.cumsum(recorded.positions).tolist(),
            covered_bytes=n_bytes.tolist(),
            train_ce_nats=_nullable(loss),
            running_bpb=_nullable(running),
            wall_s=observed.wall.tolist(),
            grad_norm=_nullable(observed.norm),
            clip_event=(observed.norm > c.CLIP_EVENT_NORM).tolist(),
            nan_inf=(recorded.faults > 0).tolist(),
        ),
        aggregates=m.SeriesAggregates(
            n_points=len(recorded.nats),
            mean_step_ms=1e3 * observed.step_sum / observed.count if observed.count else None,
            p99_step_ms=1e3 * observed.steps.quantile(0.99) if observed.count else None,
            grad_spike_rate=_spike_rate(_of_rank_0(seen, batches), observed.norms),
            nan_inf_batches=recorded.faulty_batches,
            clip_events=observed.clip_events,
        ),
    )


class _Recorded:
    """Sums of the ledger's columns over the ranks and the batches of each point. Records come in the ledger's order."""

    def __init__(self, batches: int, stride: int, world_size: int) -> None:
        points = -(-batches // stride)
        self._stride, self._world = stride, world_size
        self.nats = np.zeros(points)
        self.bytes, self.scored, self.positions, self.faults = (np.zeros(points, np.int64) for _ in range(4))
        self.faulty_batches = 0
        self._last_faulty = -1

    def add(self, records: np.ndarray) -> None:
        point = (records["index"] // self._stride).astype(np.int64)
        for name, column in (
            ("nats", self.nats),
            ("bytes", self.bytes),
            ("scored_tokens", self.scored),
            ("positions", self.positions),
            ("faults", self.faults),
        ):
            np.add.at(column, point, records[name].astype(column.dtype))
        faulty = np.unique(records["index"][records["faults"] > 0]).astype(np.int64)
        if len(faulty):
            self.faulty_batches += len(faulty) - int(faulty[0] == self._last_faulty)  # ranks of one, cut by a chunk
            self._last_faulty = int(faulty[-1])


class _Observed:
    """What rank 0 saw: of each point the clock at its end and the largest gradient norm, of all steps their times."""

    def __init__(self, batches: int, stride: int) -> None:
        points = -(-batches // stride)
        self._batches, self._stride = batches, stride
        self.wall, self.norm = np.zeros(points), np.full(points, np.nan)
        self.steps, self.norms = QuantileSketch(), QuantileSketch()
        self.step_sum = 0.0
        self.count = self.clip_events = 0

    def add(self, seen: np.ndarray) -> None:
        """In index order."""
        index = seen["index"].astype(np.int64)
        point, norm = index // self._stride, seen["grad_norm"].astype(np.float64)
        at_end = np.minimum((point + 1) * self._stride, self._batches) - 1 == index
        self.wall[point[at_end]] = seen["wall_s"][at_end]
        np.fmax.at(self.norm, point, norm)
        self.clip_events += int((norm > c.CLIP_EVENT_NORM).sum())
        self.norms.add(norm[np.isfinite(norm)])
        seconds = np.sum([seen[part].astype(np.float64) for part in STEP_PARTS], axis=0)
        self.step_sum += float(seconds.sum())
        self.count += len(seen)
        self.steps.add(seconds)


def _of_rank_0(seen: np.ndarray, batches: int) -> Iterator[np.ndarray]:
    """Observations of batches that the ledger has: a rank may claim to have seen more."""
    for chunk in chunks_of(seen):
        yield chunk[(chunk["rank"] == 0) & (chunk["index"] < batches)]


def _spike_rate(chunks: Iterable[np.ndarray], norms: QuantileSketch) -> float | None:
    """The share of finite gradient norms above GRAD_SPIKE_FACTOR times their median."""
    if not norms.count:
        return None
    limit, spikes = c.GRAD_SPIKE_FACTOR * norms.quantile(0.5), 0
    for chunk in chunks:
        norm = chunk["grad_norm"].astype(np.float64)
        spikes += int((norm[np.isfinite(norm)] > limit).sum())
    return spikes / norms.count


def _nullable(values: Any) -> list[float | None]:
    return [v if np.isfinite(v) else None for v in values.tolist()]
