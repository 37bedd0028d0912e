"""What leaving the logits out saves a prediction (`--head fused` against `--head plain`), in time and in memory.

    python -m benchmarks.head_fusion [--quick] [--json]

A decoder whose body is one layer of 384 units, 2,048 tokens a batch, vocabularies of 50,304 and 128,256. open: the
prediction in the model's own process; sealed: by an evaluator process, scored by the referee. Each measurement is a
process of its own (two when sealed), in turn; seconds are the median of the batches after the first, which is also
predicted plainly and so is in the peak. MiB are the growth of resident memory from the moment the model is built.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch

from benchmarks.measure import Table, parser_for

VOCABULARIES = (50304, 128256)
WIDTH, ROWS, LENGTH, BATCHES = 384, 4, 512, 4
COLUMNS = {
    "where": "6", "vocab": "", "head": "5", "milliseconds": ".0f", "times_faster": ".2f", "peak_mib": ".0f",
    "evaluator_peak_mib": ".0f",
}  # fmt: skip
ARCHITECTURE = f"""
import torch
from torch import nn
class Decoder(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embedding = nn.Embedding(vocab, {WIDTH})
        self.mix = nn.Linear({WIDTH}, {WIDTH})
        self.head = nn.Linear({WIDTH}, vocab, bias=False)
    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + torch.tanh(self.mix(x)))
def build_model(ctx):
    return Decoder(VOCAB)
"""


def resident_mib(process: int | str, field: str) -> float:
    """VmRSS (now) or VmHWM (at most) of a process, from /proc."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/{process}/status has no {field}")


def growth_from_here(process: int | str) -> Any:
    Path(f"/proc/{process}/clear_refs").write_text("5")  # the high-water mark starts again
    before = resident_mib(process, "VmRSS")
    return lambda: resident_mib(process, "VmHWM") - before


def measure_open(vocab: int, head: str) -> dict[str, Any]:
    from prism_fast.harness.referee.head_choice import HeadChoice
    from prism_fast.harness.trainer.predictor import InProcessPredictor

    names: dict[str, Any] = {}
    exec(ARCHITECTURE.replace("VOCAB", str(vocab)), names)
    torch.manual_seed(0)
    predictor = InProcessPredictor(
        names["build_model"](None),
        torch.ones(vocab, dtype=torch.int32),
        cap=10**9,
        stage="explore",
        head=HeadChoice(head),
    )
    peak, seconds, nats = growth_from_here("self"), [], []
    for tokens in torch.randint(0, vocab, (BATCHES, ROWS, LENGTH)):
        began = perf_counter()
        nats.append(predictor.predict(tokens, tokens.roll(-1, 1)).sums[0].item())
        seconds.append(perf_counter() - began)
    assert predictor.head.document()["used"] == head, predictor.head.reason
    return {"seconds": statistics.median(seconds[1:]), "peak_mib": peak(), "nats": nats[0]}


def measure_sealed(vocab: int, head: str) -> dict[str, Any]:
    """The referee's part and its evaluator's: the evaluator is not sandboxed, which costs nothing per batch."""
    import os

    from prism_fast.harness.bundle.bundle import load_bundle
    from prism_fast.harness.process.isolation import Sandbox
    from prism_fast.harness.process.state_layout import load_state
    from prism_fast.harness.process.weights_file import save_weights
    from prism_fast.harness.referee.evaluator_client import Evaluator
    from prism_fast.protocol.run_spec import RunSpec

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        source = ARCHITECTURE.replace("VOCAB", str(vocab))
        (place / "architecture.py").write_text(source)
        (place / "training.py").write_text("def train(ctx):\n    pass\n")
        names: dict[str, Any] = {}
        exec(source, names)
        torch.manual_seed(0)
        save_weights(names["build_model"](None).state_dict(), place / "weights.safetensors")
        layout, region = load_state(place / "weights.safetensors")
        spec = RunSpec(
            engine_version="", bundle_digest="", seal="sealed", isolation="none", tokenizer="gpt2",
            tokenizer_fingerprint="", corpus_fingerprint="", val_corpus_fingerprint=None, vocab_size=vocab,
            max_parameters=10**9, sequence_length=LENGTH, torch_threads=torch.get_num_threads(), head=head,
        )  # fmt: skip
        evaluator = Evaluator(
            spec, load_bundle(place), Sandbox("none"), dict(os.environ), place / "log", tokenizer_dir="",
            deadline=lambda: monotonic() + 300,
        )  # fmt: skip
        try:
            evaluator.adopt(layout, region, check_init=False)
            referees, evaluators = growth_from_here("self"), growth_from_here(evaluator.process.pid)
            seconds, nats = [], []
            for i, tokens in enumerate(torch.randint(0, vocab, (BATCHES, ROWS, LENGTH))):
                targets = tokens.roll(-1, 1)
                if i == 0:  # tells the evaluator how wide the head is
                    evaluator.predict(tokens[:1].numpy()).nll(targets[:1])
                began = perf_counter()
                answer = evaluator.predict(tokens.numpy(), fused=head == "fused")
                nats.append(float(answer.nll(targets).sum()))
                seconds.append(perf_counter() - began)
                assert (answer.head is not None) == (head == "fused"), answer.why_plain
            found = {"peak_mib": referees(), "evaluator_peak_mib": evaluators()}
        finally:
            evaluator.close()
            evaluator.process.wait()
    return {**found, "seconds": statistics.median(seconds[1:]), "nats": nats[0]}


MEASURES = {"open": measure_open, "sealed": measure_sealed}


def main() -> None:
    parser = parser_for(__doc__, quick="the smaller vocabulary, once")
    parser.add_argument("--one", nargs=3, metavar=("WHERE", "VOCAB", "HEAD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        where, vocab, head = arguments.one
        print(json.dumps(MEASURES[where](int(vocab), head)))
        return
    table = Table("head_fusion", {"torch": torch.__version__}, COLUMNS, arguments)
    for where in MEASURES:
        for vocab in VOCABULARIES[: 1 if arguments.quick else None]:
            found: dict[str, list[dict[str, Any]]] = {"plain": [], "fused": []}
            for _ in range(1 if arguments.quick else 2):
                for head, runs in found.items():
                    command = [sys.executable, "-m", "benchmarks.head_fusion", "--one", where, str(vocab), head]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                    runs.append(json.loads(done.stdout.splitlines()[-1]))
            plain_s = statistics.median(r["seconds"] for r in found["plain"])
            for head, runs in found.items():
                row = {"where": where, "vocab": vocab, "head": head, "tokens": ROWS * LENGTH, "width": WIDTH}
                row |= {key: statistics.median(r[key] for r in runs) for key in runs[0]}
                row |= {"milliseconds": 1e3 * row["seconds"], "times_faster": plain_s / row["seconds"]}
                row |= {"logits_mib": ROWS * LENGTH * vocab * 4 / 2**20}
                table.add(row)
    table.finish()


if __name__ == "__main__":
    main()
