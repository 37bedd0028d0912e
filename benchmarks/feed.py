"""Does the engine keep up with ten times the token rate? What data wait and ledger are of a step then.

    python -m benchmarks.feed [--quick] [--json]

The example decoder as it is, and a model of one lookup and one small product that is trained on rows of 256 in batches
of 64: its tokens come more than ten times as fast. Scored open and sealed, each run a process of its own; the shares
are of the steady state's mean step, from the throughput profile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.growth import ARCHITECTURE, TRAINING, write_text
from benchmarks.measure import machine, save
from prism_fast.protocol import constants as c

EXAMPLE = Path(__file__).parents[1] / "examples" / "transformer_tiny"
LENGTH, ROWS = 256, 64


def profile_of(bundle: Path, folder: Path, seal: str, *options: str) -> dict[str, Any]:
    out = folder / "run"
    command = [
        sys.executable, "-m", "prism_fast.cli.main", "score", str(bundle), f"--out={out}",
        f"--cache-dir={folder / 'cache'}", f"--seal={seal}", "--token-budget=0", "--val-byte-budget=1000", *options,
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return dict(json.loads((out / f"seed-{c.DEFAULT_SEED}" / c.THROUGHPUT_PROFILE_FILE).read_bytes()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="open alone, once, fewer steps")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON; write no results file")
    arguments = parser.parse_args()
    repeats, steps = (1, 60) if arguments.quick else (3, 200)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="prism-feed-") as scratch:
        place = Path(scratch)
        (place / "fast").mkdir()
        (place / "fast" / "architecture.py").write_text(ARCHITECTURE)
        (place / "fast" / "training.py").write_text(TRAINING.replace("batch_size=8", f"batch_size={ROWS}"))
        (place / "text").mkdir()
        write_text(place / "text" / "text.jsonl", (steps + 20) * ROWS * LENGTH * 5 // 4)
        models = {
            "example": (EXAMPLE, ("--data=sample", "--seq-len=128", "--step-budget=40")),
            "fast": (
                place / "fast",
                (f"--data={place / 'text'}", "--tokenizer=bytes", f"--seq-len={LENGTH}", f"--step-budget={steps}"),
            ),
        }
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for _ in range(repeats):
            for seal in ("open",) if arguments.quick else ("open", "sealed"):
                for model, (bundle, options) in models.items():
                    found.setdefault((model, seal), []).append(profile_of(bundle, place, seal, *options))
    for (model, seal), profiles in found.items():

        def typical(of: Any, profiles: Any = profiles) -> float:
            return statistics.median(of(p) for p in profiles)

        rate = typical(lambda p: p["steady_state"]["tokens_per_s"])
        example = statistics.median(p["steady_state"]["tokens_per_s"] for p in found["example", seal])
        rows.append(
            {
                "model": model,
                "seal": seal,
                "tokens_per_s": rate,
                "times_example": rate / example,
                "step_ms": 1e3 * typical(lambda p: p["parts_s"]["step"]),
                **{
                    f"{part}_share": typical(lambda p, part=part: p["parts_s"][part] / p["parts_s"]["step"])
                    for part in ("data_wait", "ledger", "other")
                },
            }
        )
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return
    print(machine(), f"torch {torch.__version__}")
    print(f"{'model':<9}{'seal':<8}{'tokens/s':>10}{'x example':>11}{'data wait':>11}{'ledger':>9}{'other':>8}")
    for row in rows:
        print(
            f"{row['model']:<9}{row['seal']:<8}{row['tokens_per_s']:>10.0f}{row['times_example']:>11.1f}"
            f"{row['data_wait_share']:>11.2%}{row['ledger_share']:>9.2%}{row['other_share']:>8.2%}"
        )
    if not arguments.quick:
        save("feed", {"torch": torch.__version__}, rows)


if __name__ == "__main__":
    main()
