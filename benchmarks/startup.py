"""From the command to the first batch that a bundle may train on: which part of the start takes how long?

    python -m benchmarks.startup [--repeats N] [--json]

`prism-fast score` of the example decoder on the packed sample, sealed and open, each a command of its own, in turn: the
parts of `startup_s` in its throughput profile, medians. They add up to `to first batch`; `first_step_over_import` is
that over the wall time of `python -c "import torch"` in the same turns, which no run can be faster than.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.measure import machine, save
from prism_fast.protocol import constants as c

EXAMPLE = Path(__file__).parents[1] / "examples" / "transformer_tiny"
SEALS = ("sealed", "open")


def start_of(seal: str, folder: Path) -> dict[str, float]:
    out = folder / seal
    command = [
        sys.executable, "-m", "prism_fast.cli.main", "score", str(EXAMPLE), "--data=sample", f"--out={out}",
        f"--cache-dir={folder / 'cache'}", f"--seal={seal}", "--step-budget=2", "--val-byte-budget=1000",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    profile = json.loads((out / f"seed-{c.DEFAULT_SEED}" / c.THROUGHPUT_PROFILE_FILE).read_bytes())
    return dict(profile["startup_s"])


def import_torch_s() -> float:
    began = perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON; write no results file")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {seal: [] for seal in SEALS}
    imports = []
    with tempfile.TemporaryDirectory(prefix="prism-startup-") as folder:
        start_of("open", Path(folder))  # packs the sample
        for _ in range(arguments.repeats):
            imports.append(import_torch_s())
            for seal, starts in found.items():
                starts.append(start_of(seal, Path(folder)))
    torch_s = statistics.median(imports)
    rows: list[dict[str, Any]] = []
    for seal, starts in found.items():
        rows += [
            {"seal": seal, "part": part, "seconds": statistics.median(s[part] for s in starts)} for part in starts[0]
        ]
        total = statistics.median(sum(s.values()) for s in starts)
        rows.append(
            {"seal": seal, "part": "to first batch", "seconds": total, "first_step_over_import": total / torch_s}
        )
    rows.append({"seal": "-", "part": 'python -c "import torch"', "seconds": torch_s})
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return
    print(machine(), f"torch {torch.__version__}")
    for row in rows:
        print(f"{row['seal']:<7}{row['part']:<26}{row['seconds']:>8.2f} s")
    save("startup", {"torch": torch.__version__}, rows)


if __name__ == "__main__":
    main()
