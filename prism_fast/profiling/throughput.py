"""`prism_throughput_profile.v1` from a run's ledger and observations. Reads files; measures nothing itself.

Both files are read in chunks and folded as they come, so a run of a million steps costs the memory of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from prism_fast.profiling.flops import mfu, six_nd
from prism_fast.protocol import constants as c
from prism_fast.protocol import ledger as layout
from prism_fast.protocol import manifest as m

WARMUP_BATCHES = 10  # first steps left out of the steady state: compiles, allocator growth, cold caches
PARTS = ("data_wait_s", "predict_s", "scoring_s", "step_s", "ledger_s")
MINER = PARTS.index("step_s")
CHUNK_RECORDS = 1 << 15
SERIES_POINTS = 1024
EXACT_QUANTILES = 1 << 16  # steps up to which quantiles are exact
BIN_RATIO = 1.002  # above: bins of 0.2 %, whose middle is at most 0.1 % off
SHORTEST_S, LONGEST_S = 1e-7, 1e6


def build_profile(
    run_dir: Path,
    *,
    submission_id: str,
    run_id: str,
    machine: m.MachineBlock,
    world_size: int,
    parameters: int,
    forward_flops: int | None,
    rows_times_width: int,
    on_device: bool,
    train_s: float,
    startup_s: dict[str, float],
    heldout_s: float | None,
    memory: m.MemoryBlock,
) -> m.ThroughputProfile:
    """All times in seconds; rates count positions fed to the model and covered bytes.

    forward_flops: of one forward over `rows_times_width` positions (`profiling.flops.forward_flops`), or None.
    on_device: the ranks computed on the machine's GPUs, one each; their peak is what MFU is a share of.
    """
    records = layout.read_records(run_dir / c.LEDGER_FILE, layout.LEDGER_MAGIC, layout.LEDGER_DTYPE)
    seen = layout.read_records(run_dir / c.OBSERVATIONS_FILE, layout.OBSERVATIONS_MAGIC, layout.OBSERVATIONS_DTYPE)
    batches = len(records) // world_size
    warmup = min(WARMUP_BATCHES, batches // 10)
    covered = Covered(world_size, warmup, batches)
    for chunk in chunks_of(records):
        covered.add(chunk)
    steps = StepAccumulator(warmup, batches)
    for chunk in chunks_of(seen):
        steps.add(chunk[chunk["rank"] == 0])
    parts = steps.parts()
    steady_s = parts.step * steps.count if parts is not None else 0.0
    positions = int(covered.positions.sum())
    return m.ThroughputProfile(
        submission_id=submission_id,
        run_id=run_id,
        machine=machine,
        end_to_end=_rate(positions, int(covered.bytes.sum()), train_s, batches),
        steady_state=_rate(covered.steady_positions, covered.steady_bytes, steady_s, batches - warmup),
        warmup_batches=warmup,
        per_rank=[_rate(int(covered.positions[r]), int(covered.bytes[r]), train_s, batches) for r in range(world_size)],
        step_s=steps.quantiles(),
        parts_s=parts,
        scoring_overhead=parts.step / parts.miner_step if parts is not None and parts.miner_step > 0 else None,
        flops=_flops(parameters, positions, forward_flops, rows_times_width, train_s, machine, world_size, on_device),
        padding=m.PaddingBlock(real_tokens=positions, padded_tokens=positions),
        memory=memory,
        startup_s=startup_s,
        heldout_s=heldout_s,
        series=steps.series(covered.point_positions),
    )


class StepAccumulator:
    """Folds rank 0's observations, given in index order in chunks of any size. Memory does not grow with the run."""

    def __init__(self, warmup: int, batches: int) -> None:
        self.warmup, self.count = warmup, 0
        self.stride = _stride(batches)
        self._sums = np.zeros(len(PARTS))
        self._quantiles = QuantileSketch()
        self._first: np.ndarray | None = None  # PARTS and wall_s of the first steady step, and of the last one
        self._last: np.ndarray | None = None
        points = -(-batches // self.stride)
        self._points = np.zeros((points, len(PARTS)))
        self._longest = np.zeros(points)
        self._in_point = np.zeros(points, np.int64)

    def add(self, seen: np.ndarray) -> None:
        if not len(seen):
            return
        values = np.stack([seen[p].astype(np.float64) for p in PARTS], axis=1)
        point = (seen["index"] // self.stride).astype(np.int64)
        known = point < len(self._in_point)
        np.add.at(self._points, point[known], values[known])
        np.maximum.at(self._longest, point[known], values[known].sum(axis=1))
        np.add.at(self._in_point, point[known], 1)
        steady = seen["index"] >= self.warmup
        if not steady.any():
            return
        values, walls = values[steady], seen["wall_s"][steady]
        self._sums += values.sum(axis=0)
        self._quantiles.add(values.sum(axis=1))
        self.count += len(values)
        if self._first is None:
            self._first = np.append(values[0], walls[0])
        self._last = np.append(values[-1], walls[-1])

    def parts(self) -> m.StepParts | None:
        """Mean seconds of each part; `other` is what the clock saw between hand-outs and no part explains."""
        if self._first is None or self._last is None:
            return None
        means = dict(zip(PARTS, (self._sums / self.count).tolist(), strict=True))
        other = 0.0
        if self.count > 1:
            # From one hand-out to the next lie the step of the first and everything but the step of the second.
            steps = self._sums[MINER] - self._last[MINER]
            between = self._sums.sum() - self._sums[MINER] - (self._first[:-1].sum() - self._first[MINER])
            other = float((self._last[-1] - self._first[-1] - steps - between) / (self.count - 1))
        return m.StepParts(
            data_wait=means["data_wait_s"],
            predict_forward=means["predict_s"],
            scoring_kernel=means["scoring_s"],
            miner_step=means["step_s"],
            ledger=means["ledger_s"],
            other=other,
            step=sum(means.values()) + other,
        )

    def quantiles(self) -> m.Quantiles | None:
        if not self.count:
            return None
        p50, p90, p99 = (self._quantiles.quantile(q) for q in (0.5, 0.9, 0.99))
        return m.Quantiles(p50=p50, p90=p90, p99=p99, max=self._quantiles.largest)

    def series(self, positions: np.ndarray) -> m.ProfileSeries:
        """`positions`: fed to the model by all ranks, a point."""
        filled = self._in_point > 0
        count = self._in_point[filled]
        means = self._points[filled] / count[:, None]
        total = means.sum(axis=1) * count
        rates = np.divide(positions[filled], total, out=np.zeros(len(total)), where=total > 0)
        return m.ProfileSeries(
            stride=self.stride,
            i=(np.flatnonzero(filled) * self.stride).tolist(),
            data_wait_s=_compact(means[:, 0]),
            predict_forward_s=_compact(means[:, 1]),
            scoring_kernel_s=_compact(means[:, 2]),
            miner_step_s=_compact(means[:, 3]),
            ledger_s=_compact(means[:, 4]),
            step_max_s=_compact(self._longest[filled]),
            tokens_per_s=_compact(rates),
        )


class Covered:
    """Positions and bytes of the ledger: a rank, of the steady state, and a point of the series."""

    def __init__(self, world_size: int, warmup: int, batches: int) -> None:
        self._warmup, self._stride = warmup, _stride(batches)
        self.positions, self.bytes = np.zeros(world_size, np.int64), np.zeros(world_size, np.int64)
        self.steady_positions = self.steady_bytes = 0
        self.point_positions = np.zeros(-(-batches // self._stride), np.int64)

    def add(self, records: np.ndarray) -> None:
        positions, n_bytes = records["positions"].astype(np.int64), records["bytes"].astype(np.int64)
        np.add.at(self.positions, records["rank"], positions)
        np.add.at(self.bytes, records["rank"], n_bytes)
        steady = records["index"] >= self._warmup
        self.steady_positions += int(positions[steady].sum())
        self.steady_bytes += int(n_bytes[steady].sum())
        np.add.at(self.point_positions, (records["index"] // self._stride).astype(np.int64), positions)


class QuantileSketch:
    """Quantiles of a stream of numbers from 1e-7 to 1e6 (seconds): exact up to 65,536 of them, within 0.1 % beyond."""

    def __init__(self) -> None:
        self._exact: list[np.ndarray] | None = []
        self.count = 0
        self._bins = np.zeros(0, np.int64)
        self.largest = 0.0

    def add(self, seconds: np.ndarray) -> None:
        self.count += len(seconds)
        self.largest = max(self.largest, float(seconds.max(initial=0.0)))
        if self._exact is not None:
            self._exact.append(seconds)
            if self.count > EXACT_QUANTILES:
                kept, self._exact = self._exact, None
                self._bins = np.zeros(_bin_of(np.array([LONGEST_S]))[0] + 1, np.int64)
                for piece in kept:
                    self._fold(piece)
        else:
            self._fold(seconds)

    def quantile(self, q: float) -> float:
        if self._exact is not None:
            return float(np.quantile(np.concatenate(self._exact), q))
        place = int(np.searchsorted(np.cumsum(self._bins), q * self.count, side="left"))
        return min(self.largest, SHORTEST_S * BIN_RATIO ** (place + 0.5))

    def _fold(self, seconds: np.ndarray) -> None:
        self._bins += np.bincount(_bin_of(seconds), minlength=len(self._bins))


def _bin_of(seconds: np.ndarray) -> np.ndarray:
    clipped = np.clip(seconds, SHORTEST_S, LONGEST_S)
    return (np.log(clipped / SHORTEST_S) / np.log(BIN_RATIO)).astype(np.int64)


def _stride(batches: int) -> int:
    return max(1, -(-batches // SERIES_POINTS))


def chunks_of(records: np.ndarray) -> Iterator[np.ndarray]:
    """A mapped record file, piece by piece."""
    for start in range(0, len(records), CHUNK_RECORDS):
        yield records[start : start + CHUNK_RECORDS]


def _compact(values: np.ndarray) -> list[float]:
    """Six digits: a clock has no more, and a profile stays small."""
    return [float(f"{v:.6g}") for v in values.tolist()]


def _flops(
    parameters: int,
    positions: int,
    forward: int | None,
    forward_positions: int,
    train_s: float,
    machine: m.MachineBlock,
    world_size: int,
    on_device: bool,
) -> m.FlopsBlock:
    total = six_nd(parameters, positions)
    aware = 3.0 * forward / forward_positions * positions if forward is not None and forward_positions else None
    names = machine.gpus[:world_size] if on_device else []
    share, peak, source = mfu(total, train_s, names)
    return m.FlopsBlock(
        total=total,
        per_second=total / train_s if train_s > 0 else None,
        mfu=share,
        attention_aware_total=aware,
        attention_aware_per_second=aware / train_s if aware is not None and train_s > 0 else None,
        attention_aware_mfu=mfu(aware, train_s, names)[0] if aware is not None else None,
        peak_flops=peak,
        peak_source=source,
    )


def _rate(tokens: int, n_bytes: int, seconds: float, batches: int) -> m.RateBlock:
    return m.RateBlock(
        tokens_per_s=tokens / seconds if seconds > 0 else None,
        bytes_per_s=n_bytes / seconds if seconds > 0 else None,
        seconds=seconds,
        batches=batches,
    )
