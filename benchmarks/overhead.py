"""What scoring costs: the step of a scored run over the step of the bare training loop.

    python -m benchmarks.overhead [--quick] [--json]

The example decoder and one of about 30 million parameters, vocabularies of 4,096 and 50,304, 128 and 512 tokens a row.
strict: an open run, which predicts every batch before it is trained on; sealed: the same by evaluators in sandboxes,
with probes; fused: an open run that takes the loss of the bundle's own forward. The modes take turns, each run a
process of its own, steady-state steps only. The peer is the bare loop.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import RESULTS, Table, machine, parser_for
from prism_fast.profiling.overhead import measure_overhead

EXAMPLE = Path(__file__).parents[1] / "examples" / "transformer_tiny"
MODELS = {"example": (64, 2, 4), "30M": (384, 6, 6)}  # width, layers, heads
VOCABULARIES = {4096: "bytes", 50304: "gpt2"}  # heads may be wider than the tokenizer's ids, never narrower
RUN_SECONDS = 15  # of the bare loop
COLUMNS = {"model": "7", "vocab": "", "seq": "", "mode": "6", "tokens_per_s": "9.0f", "ratio": ".2f"}
MODES = {"bare": "bare", "open": "strict", "sealed": "sealed", "fused": "fused"}


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


def kept_rows(measured: set[tuple[str, int]]) -> list[dict[str, Any]]:
    """Rows of the (model, vocabulary) pairs that were not measured now, if this machine and torch made them."""
    file = RESULTS / "overhead.json"
    if not file.is_file():
        return []
    document = json.loads(file.read_text())
    if document["machine"] != machine() or document["versions"] != {"torch": torch.__version__}:
        return []
    return [row for row in document["rows"] if (row["model"], row["vocab"]) not in measured]


def steps_for(bundle: Path, seq: int, tokenizer: str) -> int:
    """Steps for a run so long that its start weighs little: the shadow evaluator loads torch in the first seconds."""
    found = measure_overhead(bundle, seq_len=seq, tokenizer=tokenizer, modes=("bare",), steps=5, repeats=1)
    row = found["rows"][0]
    return max(8, min(1000, round(RUN_SECONDS * row["tokens_per_s"] / (row["batch"] * seq))))


def main() -> None:
    parser = parser_for(__doc__, quick="the example decoder at 128 tokens, once")
    parser.add_argument("--model", choices=tuple(MODELS), default=None, help="this one alone; the file keeps the other")
    parser.add_argument("--vocab", type=int, choices=tuple(VOCABULARIES), default=None, help="likewise")
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
                    found = measure_overhead(
                        bundle,
                        seq_len=seq,
                        tokenizer=tokenizer,
                        modes=tuple(MODES),
                        steps=12 if arguments.quick else steps_for(bundle, seq, tokenizer),
                        repeats=1 if arguments.quick else arguments.repeats,
                    )
                    for row in found["rows"]:
                        table.add({**row, "mode": MODES[row["mode"]], "model": model, "vocab": vocab})
    table.finish(kept_rows({(row["model"], row["vocab"]) for row in table.rows}))


if __name__ == "__main__":
    main()
