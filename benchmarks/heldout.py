"""What does batching rows of like width save in held-out scoring, against batches in the file's order?

    python -m benchmarks.heldout [--quick] [--json]

The whole val split of the sample corpus, chapter by chapter (its documents) and verse by verse, by the example decoder
at its random init in an evaluator process, scored by the referee's own code: rows sorted by width, which is what a run
does, and rows as they come, both in batches of at most the same number of padded tokens. The passes take turns. Every
document must cost the same nats either way.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Table, median, parser_for
from prism_fast.harness.bundle.bundle import load_bundle
from prism_fast.harness.process.isolation import Sandbox
from prism_fast.harness.referee import heldout
from prism_fast.harness.referee.evaluator_client import Evaluator
from prism_fast.profiling.machine import THREADS_WAIT
from prism_fast.protocol.run_spec import RunSpec

EXAMPLE = Path(__file__).parents[1] / "examples" / "transformer_tiny"
COLUMNS = {
    "text": "8", "seq": "", "order": "10", "batches": "", "padding": ".1%", "tokens_per_s": "9.0f",
    "over_file_order": ".2f",
}  # fmt: skip
Batching = Callable[[np.ndarray], Iterator[np.ndarray]]


def in_file_order(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Row numbers as they come, in batches of at most MICRO_BATCH_TOKENS padded tokens, the widest first in each."""
    begin, widest = 0, 0
    for end in range(len(rows) + 1):
        width = int(rows[end, 2]) + 1 if end < len(rows) else 0
        full = (end - begin + 1) * max(widest, width) > heldout.MICRO_BATCH_TOKENS
        if end > begin and (full or end == len(rows)):
            batch = np.arange(begin, end)
            yield batch[np.argsort(-rows[batch, 2], kind="stable")]
            begin, widest = end, 0
        widest = max(widest, width)


ORDERS: dict[str, Batching] = {"by width": heldout.micro_batches, "file order": in_file_order}


def line_by_line(documents: Any, tokenizer: Any) -> Any:
    """The same text with every line a document of its own."""
    newlines = [i for i in range(tokenizer.n_vocab) if tokenizer.decode_bytes(np.array([i])).endswith(b"\n")]
    ends = np.union1d(np.flatnonzero(np.isin(documents.ids, newlines)) + 1, documents.offsets[1:])
    offsets = np.concatenate([[0], ends])
    utf8_bytes = np.add.reduceat(tokenizer.token_bytes[documents.ids].astype(np.int64), offsets[:-1])
    return heldout.Documents(documents.ids, offsets, utf8_bytes)


def padded_tokens(rows: np.ndarray, batching: Batching) -> tuple[int, int]:
    """-> (padded tokens fed, batches)."""
    batches = list(batching(rows))
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(rows)))
    return sum(len(b) * (int(rows[b[0], 2]) + 1) for b in batches), len(batches)


def measure(documents: Any, tokenizer: Any, seq_len: int, repeats: int) -> list[dict[str, Any]]:
    spec = RunSpec(
        engine_version="", bundle_digest="", seal="sealed", isolation="none", tokenizer="gpt2",
        tokenizer_fingerprint="", corpus_fingerprint="", val_corpus_fingerprint=None,
        vocab_size=-(-tokenizer.n_vocab // 64) * 64, sequence_length=seq_len, torch_threads=torch.get_num_threads(),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        evaluator = Evaluator(
            spec, load_bundle(EXAMPLE), Sandbox("none"), {**os.environ, **THREADS_WAIT},
            Path(folder) / "log", tokenizer_dir="", deadline=lambda: monotonic() + 600,
        )  # fmt: skip
        evaluator.n_vocab = tokenizer.n_vocab
        seconds: dict[str, list[float]] = {order: [] for order in ORDERS}
        passes: dict[str, Any] = {}
        try:
            evaluator.wait_until_born()
            for _ in range(repeats):
                for order, batching in ORDERS.items():
                    heldout.micro_batches = batching
                    began = perf_counter()
                    passes[order] = heldout.Pass(
                        evaluator, None, documents, seq_len, tokenizer.eot, tokenizer.n_vocab, lambda: None
                    )
                    seconds[order].append(perf_counter() - began)
        finally:
            heldout.micro_batches = ORDERS["by width"]
            evaluator.close()
            evaluator.process.wait()
    np.testing.assert_allclose(passes["by width"].nats, passes["file order"].nats, rtol=1e-5)
    rows, typical = documents.rows(seq_len), {order: median(values) for order, values in seconds.items()}
    real = int(rows[:, 2].sum() + len(rows))  # each row begins with a token that is not scored
    found = []
    for order, batching in ORDERS.items():
        padded, batches = padded_tokens(rows, batching)
        found.append(
            {
                "order": order,
                "seq": seq_len,
                "documents": len(documents),
                "tokens": passes[order].tokens,
                "batches": batches,
                "padding": 1 - real / padded,
                "seconds": typical[order],
                "tokens_per_s": passes[order].tokens / typical[order],
                "over_file_order": typical["file order"] / typical[order],
            }
        )
    return found


def main() -> None:
    arguments = parser_for(__doc__, quick="a prefix of 30,000 bytes, once").parse_args()
    from prism_fast.data.corpus import resolve_data
    from prism_fast.data.tokenizers import reference_tokenizer

    tokenizer = reference_tokenizer("gpt2")
    table = Table("heldout", {"torch": torch.__version__}, COLUMNS, arguments)
    with tempfile.TemporaryDirectory() as cache:
        corpus = resolve_data("sample", tokenizer, Path(cache))
        documents = heldout.Documents.read(corpus, "val", "tokens", 30_000 if arguments.quick else None)
        texts = {"chapters": documents, "verses": line_by_line(documents, tokenizer)}
        for (text, of_text), seq_len in itertools.product(texts.items(), (128, 512)):
            for row in measure(of_text, tokenizer, seq_len, 1 if arguments.quick else 3):
                table.add({"text": text, **row})
    table.finish()


if __name__ == "__main__":
    main()
