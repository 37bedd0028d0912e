"""What scoring costs: the step of a scored run over the step of the bare training loop.

    python -m benchmarks.overhead [--quick] [--json] [--model M] [--vocab V] [--neighbour quiet|busy]

The example decoder and one of about 30 million parameters, vocabularies of 4,096 and 50,304, 128 and 512 tokens a row.
strict: an open run, which predicts every batch before it is trained on, in the bundle's own process; sealed: an
executor predicts from a copy of the weights, with probes. The modes take turns, each run a process of its own,
steady-state steps only. `ratio` is over the bare loop (aimed at: 1.30, and 1.20 at 50,304), `over_strict` over the open
run (1.05). The example decoder at 4,096 and 128 is measured a second time beside a neighbour that keeps a core busy
for as long: whoever waits by spinning loses there (aimed at: 1.15 over strict).
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import RESULTS, Table, machine, parser_for
from prism_fast.harness.process.commands import child_environment, python_command
from prism_fast.profiling.overhead import measure_overhead

EXAMPLE = Path(__file__).parents[1] / "examples" / "transformer_tiny"
MODELS = {"example": (64, 2, 4), "30M": (384, 6, 6)}  # width, layers, heads
VOCABULARIES = {4096: "bytes", 50304: "gpt2"}  # heads may be wider than the tokenizer's ids, never narrower
RUN_SECONDS = 15  # of the bare loop
COLUMNS = {
    "model": "7", "vocab": "", "seq": "", "neighbour": "", "mode": "6", "tokens_per_s": "9.0f", "ratio": ".2f",
    "over_strict": ".2f",
}  # fmt: skip
MODES = {"bare": "bare", "open": "strict", "sealed": "sealed"}
BESIDE_A_NEIGHBOUR = ("example", 4096, 128)
SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"  # ends with us, however we end


@contextmanager
def neighbour(kind: str) -> Iterator[None]:
    """One process that keeps a core busy, where `kind` is "busy"."""
    if kind == "quiet":
        yield
        return
    command = python_command("-c", SPIN, str(os.getpid()))
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=child_environment())
    try:
        yield
    finally:
        process.kill()
        process.wait()


def write_decoder(folder: Path, model: str, vocab: int) -> Path:
    """The example decoder with another size and head."""
    architecture = (EXAMPLE / "architecture.py").read_text()
    training = (EXAMPLE / "training.py").read_text()
    sized = architecture.replace(
        "WIDTH, LAYERS, HEADS = 64, 2, 4", "WIDTH, LAYERS, HEADS = {}, {}, {}".format(*MODELS[model])
    )
    bundle = folder / f"{model}-{vocab}"
    bundle.mkdir()
    (bundle / "architecture.py").write_text(sized.replace("Decoder(ctx.vocab_size,", f"Decoder({vocab},"))
    (bundle / "training.py").write_text(training.replace('"gpt2"', f'"{VOCABULARIES[vocab]}"'))
    return bundle


def measured(row: dict[str, Any]) -> tuple[str, int, int, str]:
    return row["model"], row["vocab"], row["seq"], row.get("neighbour", "quiet")


def kept_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the file of what was not measured now, if this machine and torch made them."""
    file = RESULTS / "overhead.json"
    if not file.is_file():
        return []
    document = json.loads(file.read_text())
    if document["machine"] != machine() or document["versions"] != {"torch": torch.__version__}:
        return []
    now = {measured(row) for row in rows}
    return [row for row in document["rows"] if measured(row) not in now]


def steps_for(bundle: Path, seq: int, tokenizer: str) -> int:
    """Steps that take the bare loop RUN_SECONDS, so that a second of noise weighs little."""
    found = measure_overhead(bundle, seq_len=seq, tokenizer=tokenizer, modes=("bare",), steps=5, repeats=1)
    row = found["rows"][0]
    return max(8, min(1000, round(RUN_SECONDS * row["tokens_per_s"] / (row["batch"] * seq))))


def main() -> None:
    parser = parser_for(__doc__, quick="the example decoder at 128 tokens, once")
    parser.add_argument("--model", choices=tuple(MODELS), default=None, help="this one alone; the file keeps the other")
    parser.add_argument("--vocab", type=int, choices=tuple(VOCABULARIES), default=None, help="likewise")
    parser.add_argument("--neighbour", choices=("quiet", "busy"), default=None, help="likewise")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    models = (arguments.model,) if arguments.model else ("example",) if arguments.quick else tuple(MODELS)
    widths = (128,) if arguments.quick else (128, 512)
    table = Table("overhead", {"torch": torch.__version__}, COLUMNS, arguments)
    with tempfile.TemporaryDirectory() as scratch:
        for model in models:
            for vocab, tokenizer in VOCABULARIES.items():
                if arguments.vocab not in (None, vocab):
                    continue
                bundle = write_decoder(Path(scratch), model, vocab)
                for seq in widths:
                    steps = 12 if arguments.quick else steps_for(bundle, seq, tokenizer)
                    kinds = ("quiet", "busy") if (model, vocab, seq) == BESIDE_A_NEIGHBOUR else ("quiet",)
                    for kind in kinds:
                        if arguments.neighbour not in (None, kind):
                            continue
                        with neighbour(kind):
                            found = measure_overhead(
                                bundle,
                                seq_len=seq,
                                tokenizer=tokenizer,
                                modes=tuple(MODES),
                                steps=steps,
                                repeats=1 if arguments.quick else arguments.repeats,
                            )
                        rates = {row["mode"]: row["tokens_per_s"] for row in found["rows"]}
                        for row in found["rows"]:
                            of = {"mode": MODES[row["mode"]], "model": model, "vocab": vocab, "neighbour": kind}
                            over = rates["open"] / rates["sealed"] if row["mode"] == "sealed" else None
                            table.add({**row, **of, "over_strict": over})
    table.finish(kept_rows(table.rows))


if __name__ == "__main__":
    main()
