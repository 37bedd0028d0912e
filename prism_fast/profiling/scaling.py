"""The scaling probe: times a bundle's step at several widths in one process and fits the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prism_fast.profiling.bundle_process import BundleJob, run_bundle
from prism_fast.profiling.cost_model import fit_cost
from prism_fast.protocol.errors import UsageError

SCHEMA = "prism_profile_scaling.v1"
WARMUP_ROUNDS = 2  # of every width: compiles, allocator growth, optimizer state


def measure_scaling(job: BundleJob, repeats: int, *, processor: bool = False) -> dict[str, Any]:
    """-> the probe's document: the fit (see `fit_cost`) and every step's seconds.

    The widths take turns, so that a slow minute of the machine hits all of them. On a GPU times are the device's own,
    by events, and their median is fitted; on the CPU the fastest step is, because neighbours only ever add.
    processor: fit the processor time of the bundle's threads, not the time gone by; for machines that others load, and
    with one thread, so that no waiting of one thread for another counts.
    """
    if len(job.widths) < 2:
        raise UsageError(f"widths {','.join(map(str, job.widths))}: a fit needs two at least; name another")
    if repeats < 1:
        raise UsageError(f"--repeats {repeats}: expected 1 or more")
    count = len(job.widths)
    rounds = WARMUP_ROUNDS + repeats
    found = run_bundle(replace(job, steps=rounds * count, observe={"what": "steps", "processor": processor}))[0]
    by_width = steps_by_width(found["step_s"], found["widths"], WARMUP_ROUNDS)
    on_device = found["clock"] == "events"
    fit = fit_cost(by_width, statistic="median" if on_device else "min")
    return {
        "schema": SCHEMA,
        "submission_id": found["submission_id"],
        "machine": found["machine"],
        "device": found["device"],
        "clock": found["clock"],
        "model_params": found["model_params"],
        "batch_size": found["batch_size"],
        **fit,
        "step_s": {str(w): times for w, times in by_width.items()},
    }


def steps_by_width(step_s: Sequence[float], widths: Sequence[int], warmup_rounds: int) -> dict[int, list[float]]:
    """Seconds of the steps of each width, the first `warmup_rounds` rounds left out."""
    count = len(widths)
    kept = list(step_s)[warmup_rounds * count :]
    return {width: kept[i::count] for i, width in enumerate(widths)}
