"""What the data benchmarks share: the machine in words, medians of alternating repeats, raw rows in a file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
    }


def median_seconds(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, `repeats` times after a warm-up, in turn: a slow minute of the machine hits all."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def median(values: list[float]) -> float:
    return statistics.median(values)


def save(name: str, versions: Mapping[str, str], rows: list[dict[str, Any]]) -> None:
    RESULTS.mkdir(exist_ok=True)
    document = {"benchmark": name, "machine": machine(), "versions": dict(versions), "rows": rows}
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"rows written to benchmarks/results/{path.name}")
