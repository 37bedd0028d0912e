"""What the benchmarks share: the machine in words, medians of alternating repeats, tables, raw rows in a file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
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


def parser_for(doc: str | None, quick: str | None = None) -> argparse.ArgumentParser:
    """A parser with `--json` and, where `quick` says what that leaves out, `--quick`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help=f"{quick}; write no results file")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON; write no results file")
    return parser


class Table:
    """A benchmark's rows, printed as they are found and kept in its results file, or printed as JSON at the end."""

    def __init__(self, name: str, versions: Mapping[str, str], columns: Mapping[str, str], arguments: Any) -> None:
        """`columns`: keys of a row in the order they are printed, and their formats. `arguments`: of `parser_for`."""
        self.name, self.versions, self.columns = name, versions, columns
        self.rows: list[dict[str, Any]] = []
        self._json, self._save = arguments.json, not getattr(arguments, "quick", False)
        if not self._json:
            print(machine(), ", ".join(f"{package} {version}" for package, version in versions.items()))
            headings = {key: key.replace("_", " ") for key in columns}
            self._widths = {key: max(len(headings[key]), self._width(key)) for key in columns}
            print("  ".join(f"{headings[key]:>{self._widths[key]}}" for key in columns), flush=True)

    def _width(self, key: str) -> int:
        """What the column's format asks for: the number before its point or letter."""
        return int("".join(c for c in self.columns[key].partition(".")[0] if c.isdigit()) or 0)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if not self._json:
            cells = {
                key: format(row[key], form) if row.get(key) is not None else "" for key, form in self.columns.items()
            }
            print("  ".join(f"{cells[key]:>{self._widths[key]}}" for key in self.columns), flush=True)

    def finish(self, kept: Sequence[dict[str, Any]] = ()) -> None:
        """`kept`: rows of the file that were not measured now and still hold."""
        if self._json:
            print(json.dumps({"rows": self.rows}))
        elif self._save:
            save(self.name, self.versions, [*kept, *self.rows])
