"""What do held-out rows cost padded to a few widths, against one width, and against a program for every width there is?

    python -m benchmarks.heldout [--quick] [--json]

The whole val split of the sample corpus, chapter by chapter (its documents) and verse by verse, by the example decoder
at its random init, in an executor, through the referee's own client. Every width takes a program of its own, so each
choice of widths costs `capture_s` once and `pass_s` for each of a run's three passes over text of this size. one: the
sequence length; chosen: what a run takes (halves that save a tenth of the padded tokens); halves: all of them; exact:
no padding. The passes take turns, and every document must cost the same nats whichever it is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Table, median, parser_for
from prism_fast.harness.bundle.bundle import load_bundle
from prism_fast.harness.marking import heldout
from prism_fast.harness.process.environment import engine_environment
from prism_fast.harness.process.isolation import Sandbox
from prism_fast.harness.referee.executing import Executor, StatePredictor
from prism_fast.harness.referee.seed_run import ASSETS
from prism_fast.harness.referee.tracing import Traced, Tracer
from prism_fast.protocol.run_spec import RunSpec

EXAMPLE = Path(__file__).parents[1] / "examples" / "transformer_tiny"
PASSES = 3  # of a run: the twin and the trained weights on val text, the trained weights on as much train text
WIDTHS_A_TRACER = 60  # of at most 64
COLUMNS = {
    "text": "8", "seq": "", "choice": "6", "widths": "", "padding": ".1%", "tokens_per_s": "9.0f", "pass_s": "6.2f",
    "capture_s": ".1f", "run_s": "6.1f", "over_chosen": ".2f",
}  # fmt: skip


def line_by_line(documents: Any, tokenizer: Any) -> Any:
    """The same text with every line a document of its own."""
    newlines = [i for i in range(tokenizer.n_vocab) if tokenizer.decode_bytes(np.array([i])).endswith(b"\n")]
    ends = np.union1d(np.flatnonzero(np.isin(documents.ids, newlines)) + 1, documents.offsets[1:])
    offsets = np.concatenate([[0], ends])
    utf8_bytes = np.add.reduceat(tokenizer.token_bytes[documents.ids].astype(np.int64), offsets[:-1])
    return heldout.Documents(documents.ids, offsets, utf8_bytes)


def choices(lengths: np.ndarray, seq_len: int) -> dict[str, tuple[int, ...]]:
    """Widths by choice, ascending; the last is the sequence length. `lengths`: tokens of every row."""
    halves = [seq_len]
    while halves[0] // 2 >= heldout.NARROWEST:
        halves.insert(0, halves[0] // 2)
    return {
        "one": (seq_len,),
        "chosen": heldout.choose_widths(lengths, seq_len),
        "halves": tuple(halves),
        "exact": tuple(sorted({*lengths.tolist(), seq_len})),
    }


def traced(spec: RunSpec, widths: Sequence[int], log: Path) -> tuple[Traced, float]:
    """-> (programs, seconds of the tracers that made them)."""
    bundle, environment = load_bundle(EXAMPLE), engine_environment(spec)
    found: Traced | None = None
    seconds = 0.0
    for begin in range(0, len(widths), WIDTHS_A_TRACER):
        tracer = Tracer(
            spec, bundle, Sandbox("none"), environment, log, tokenizer_dir=str(ASSETS),
            widths=widths[begin : begin + WIDTHS_A_TRACER], compare=False,
        )  # fmt: skip
        end = monotonic() + 600
        try:
            more = tracer.finish(lambda end=end: end)
        finally:
            tracer.close()
        found = more if found is None else found.with_programs(more)
        seconds += more.seconds
    assert found is not None
    return found, seconds


def measure(documents: Any, tokenizer: Any, seq_len: int, repeats: int) -> list[dict[str, Any]]:
    spec = RunSpec(
        engine_version="", bundle_digest="", seal="sealed", isolation="none", tokenizer="gpt2",
        tokenizer_fingerprint="", corpus_fingerprint="", val_corpus_fingerprint=None,
        vocab_size=-(-tokenizer.n_vocab // 64) * 64, sequence_length=seq_len, torch_threads=torch.get_num_threads(),
    )  # fmt: skip
    rows = documents.rows(seq_len)
    lengths = rows[:, 2] + 1  # each row begins with a token that is not scored
    widths_of = choices(lengths, seq_len)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        programs, capture_s = {}, {}
        for choice, widths in widths_of.items():
            programs[choice], capture_s[choice] = traced(spec, widths, log)
        every = programs["exact"]
        for choice in widths_of:
            every = every.with_programs(programs[choice])
        executor = Executor(
            spec, Sandbox("none"), engine_environment(spec), log, deadline=lambda: monotonic() + 600, probe_share=0.0
        )
        seconds: dict[str, list[float]] = {choice: [] for choice in widths_of}
        passes: dict[str, Any] = {}
        try:
            executor.load(every, np.array(tokenizer.token_bytes, np.int32))
            predictor = StatePredictor(executor, "initial", probe=False)
            heldout.Pass(predictor, documents, widths_of["one"], tokenizer.eot, lambda: None)  # to warm up
            for _ in range(repeats):
                for choice, widths in widths_of.items():
                    began = perf_counter()
                    passes[choice] = heldout.Pass(predictor, documents, widths, tokenizer.eot, lambda: None)
                    seconds[choice].append(perf_counter() - began)
        finally:
            executor.close()
            executor.process.wait()
    for each in passes.values():
        np.testing.assert_allclose(each.nats, passes["chosen"].nats, rtol=1e-5)
    typical = {choice: median(values) for choice, values in seconds.items()}
    found = []
    for choice, widths in widths_of.items():
        padded = sum(width * len(numbers) for width, numbers in heldout.micro_batches(rows, widths))
        found.append(
            {
                "choice": choice,
                "seq": seq_len,
                "documents": len(documents),
                "tokens": passes[choice].tokens,
                "widths": len(widths),
                "padded_tokens": padded,
                "padding": 1 - int(lengths.sum()) / padded,
                "pass_s": typical[choice],
                "tokens_per_s": passes[choice].tokens / typical[choice],
                "capture_s": capture_s[choice],
                "run_s": capture_s[choice] + PASSES * typical[choice],
                "over_chosen": typical[choice] / typical["chosen"],
            }
        )
    return found


def main() -> None:
    arguments = parser_for(__doc__, quick="a prefix of 30,000 bytes at 128 tokens, once").parse_args()
    from prism_fast.data.corpus import resolve_data
    from prism_fast.data.tokenizers import reference_tokenizer

    tokenizer = reference_tokenizer("gpt2")
    table = Table("heldout", {"torch": torch.__version__}, COLUMNS, arguments)
    with tempfile.TemporaryDirectory() as cache:
        corpus = resolve_data("sample", tokenizer, Path(cache))
        documents = heldout.Documents.read(corpus, "val", "tokens", 30_000 if arguments.quick else None)
        texts = {"chapters": documents, "verses": line_by_line(documents, tokenizer)}
        for text, of_text in texts.items():
            for seq_len in (128,) if arguments.quick else (128, 512):
                for row in measure(of_text, tokenizer, seq_len, 1 if arguments.quick else 3):
                    table.add({"text": text, **row})
    table.finish()


if __name__ == "__main__":
    main()
