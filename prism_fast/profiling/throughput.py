"""`prism_throughput_profile.v1` from a run's ledger and observations. Reads files; measures nothing itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from prism_fast.protocol import constants as c
from prism_fast.protocol import ledger as layout
from prism_fast.protocol import manifest as m

WARMUP_BATCHES = 10  # first steps left out of the steady state: compiles, allocator growth, cold caches
PARTS = ("data_wait_s", "predict_s", "scoring_s", "step_s", "ledger_s")


def build_profile(
    run_dir: Path,
    *,
    submission_id: str,
    run_id: str,
    machine: m.MachineBlock,
    world_size: int,
    flops: float,
    train_s: float,
    startup_s: dict[str, float],
    heldout_s: float | None,
    memory: m.MemoryBlock,
) -> m.ThroughputProfile:
    """All times in seconds on the host's monotonic clock; rates count positions fed to the model and covered bytes."""
    records = layout.read_records(run_dir / c.LEDGER_FILE, layout.LEDGER_MAGIC, layout.LEDGER_DTYPE)
    seen = layout.read_records(run_dir / c.OBSERVATIONS_FILE, layout.OBSERVATIONS_MAGIC, layout.OBSERVATIONS_DTYPE)
    batches = len(records) // world_size
    warmup = min(WARMUP_BATCHES, batches // 10)
    rank0 = seen[seen["rank"] == 0]
    steady = rank0[rank0["index"] >= warmup]
    parts = quantiles = overhead = None
    steady_s = 0.0
    if len(steady):
        step = _step_seconds(steady)
        means = {p: float(steady[p].mean(dtype=np.float64)) for p in PARTS}
        # From one hand-out to the next, on the clock: what the parts must add up to.
        steady_s = float(step.sum())
        if len(steady) > 1:
            gaps = np.diff(steady["wall_s"])
            inner = {p: float(steady[p][1:].mean(dtype=np.float64)) for p in PARTS if p != "step_s"}
            explained = sum(inner.values()) + float(steady["step_s"][:-1].mean(dtype=np.float64))
            other = float(gaps.mean()) - explained
        else:
            other = 0.0
        quantiles = m.Quantiles(
            p50=float(np.percentile(step, 50)),
            p90=float(np.percentile(step, 90)),
            p99=float(np.percentile(step, 99)),
            max=float(step.max()),
        )
        parts = m.StepParts(
            data_wait=means["data_wait_s"],
            predict_forward=means["predict_s"],
            scoring_kernel=means["scoring_s"],
            miner_step=means["step_s"],
            ledger=means["ledger_s"],
            other=other,
            step=float(step.mean()) + other,
        )
        overhead = float(step.mean()) / means["step_s"] if means["step_s"] > 0 else None
    positions = int(records["positions"].sum(dtype=np.int64))
    return m.ThroughputProfile(
        submission_id=submission_id,
        run_id=run_id,
        machine=machine,
        end_to_end=_rate(records, train_s, batches),
        steady_state=_rate(records[records["index"] >= warmup], steady_s, batches - warmup),
        warmup_batches=warmup,
        per_rank=[_rate(records[records["rank"] == r], train_s, batches) for r in range(world_size)],
        step_s=quantiles,
        parts_s=parts,
        scoring_overhead=overhead,
        flops=m.FlopsBlock(total=flops, per_second=flops / train_s if train_s > 0 else None, mfu=None, peak_flops=None),
        padding=m.PaddingBlock(real_tokens=positions, padded_tokens=positions),
        memory=memory,
        startup_s=startup_s,
        heldout_s=heldout_s,
    )


def _step_seconds(seen: np.ndarray) -> np.ndarray:
    total = np.zeros(len(seen))
    for part in PARTS:
        total += seen[part]
    return total


def _rate(records: np.ndarray, seconds: float, batches: int) -> m.RateBlock:
    tokens, n_bytes = records["positions"].sum(dtype=np.int64), records["bytes"].sum(dtype=np.int64)
    return m.RateBlock(
        tokens_per_s=float(tokens / seconds) if seconds > 0 else None,
        bytes_per_s=float(n_bytes / seconds) if seconds > 0 else None,
        seconds=seconds,
        batches=batches,
    )
