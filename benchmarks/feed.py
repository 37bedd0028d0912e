"""Does the engine keep up with ten times the token rate? What data wait and ledger are of a step then.

    python -m benchmarks.feed [--quick] [--json]

The example decoder as it is, and a model of one lookup and one small product that is trained on rows of 256 in batches
of 64: its tokens come more than ten times as fast. Scored open and sealed, each run a process of its own; the shares
are of the steady state's mean step, from the throughput profile.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.growth import ARCHITECTURE, TRAINING, write_text
from benchmarks.measure import Table, parser_for
from prism_fast.harness.process.commands import child_command, child_environment
from prism_fast.protocol import constants as c

EXAMPLE = Path(__file__).parents[1] / "examples" / "transformer_tiny"
LENGTH, ROWS = 256, 64
COLUMNS = {
    "model": "8", "seal": "7", "tokens_per_s": "9.0f", "times_example": ".1f", "step_ms": ".1f",
    "data_wait_share": ".2%", "ledger_share": ".2%", "other_share": ".2%",
}  # fmt: skip


def profile_of(bundle: Path, folder: Path, seal: str, *options: str) -> dict[str, Any]:
    out = folder / "run"
    arguments = [
        "score", str(bundle), f"--out={out}",
        f"--cache-dir={folder / 'cache'}", f"--seal={seal}", "--token-budget=0", "--val-byte-budget=1000", *options,
    ]  # fmt: skip
    command = child_command("prism_fast.cli.main", *arguments)
    subprocess.run(command, check=True, capture_output=True, env=child_environment())
    return dict(json.loads((out / f"seed-{c.DEFAULT_SEED}" / c.THROUGHPUT_PROFILE_FILE).read_bytes()))


def main() -> None:
    arguments = parser_for(__doc__, quick="open alone, once, fewer steps").parse_args()
    repeats, steps = (1, 60) if arguments.quick else (3, 200)
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
    table = Table("feed", {"torch": torch.__version__}, COLUMNS, arguments)
    for (model, seal), profiles in found.items():

        def typical(of: Any, profiles: Any = profiles) -> float:
            return statistics.median(of(p) for p in profiles)

        rate = typical(lambda p: p["steady_state"]["tokens_per_s"])
        example = statistics.median(p["steady_state"]["tokens_per_s"] for p in found["example", seal])
        table.add(
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
    table.finish()


if __name__ == "__main__":
    main()
