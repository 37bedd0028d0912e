"""From the command to the first batch that a bundle may train on: which part of the start takes how long?

    python -m benchmarks.startup [--repeats N] [--json]

`prism-fast score` of the example decoder on the packed sample, sealed and open, each a command of its own, in turn: the
parts of `startup_s` in its throughput profile, medians. They add up to `to first batch`; `over_import` is
that over the wall time of `python -c "import torch"` in the same turns, which no run can be faster than.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.measure import Table, parser_for
from prism_fast.harness.process.commands import child_command, child_environment, python_command
from prism_fast.protocol import constants as c

EXAMPLE = Path(__file__).parents[1] / "examples" / "transformer_tiny"
SEALS = ("sealed", "open")
COLUMNS = {"seal": "7", "part": "26", "seconds": ".2f", "over_import": ".2f"}


def start_of(seal: str, folder: Path) -> dict[str, float]:
    out = folder / seal
    arguments = [
        "score", str(EXAMPLE), "--data=sample", f"--out={out}",
        f"--cache-dir={folder / 'cache'}", f"--seal={seal}", "--step-budget=2", "--val-byte-budget=1000",
    ]  # fmt: skip
    command = child_command("prism_fast.cli.main", *arguments)
    subprocess.run(command, check=True, capture_output=True, env=child_environment())
    profile = json.loads((out / f"seed-{c.DEFAULT_SEED}" / c.THROUGHPUT_PROFILE_FILE).read_bytes())
    return dict(profile["startup_s"])


def import_torch_s() -> float:
    began = perf_counter()
    subprocess.run(python_command("-c", "import torch"), check=True, env=child_environment())
    return perf_counter() - began


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
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
    table = Table("startup", {"torch": torch.__version__}, COLUMNS, arguments)
    for seal, starts in found.items():
        for part in starts[0]:
            table.add({"seal": seal, "part": part, "seconds": statistics.median(s[part] for s in starts)})
        total = statistics.median(sum(s.values()) for s in starts)
        table.add({"seal": seal, "part": "to first batch", "seconds": total, "over_import": total / torch_s})
    table.add({"seal": "-", "part": 'python -c "import torch"', "seconds": torch_s})
    table.finish()


if __name__ == "__main__":
    main()
