"""Held-out text, row by row: which rows there are, in which micro-batches they are predicted, and what they add up to.

Every document stands by itself: rows begin with end-of-text, are cut at the sequence length with one token of overlap,
and are batched with rows of the same padded width, so neither batch size nor the documents beside it reach a
document's figure. Who predicts is the caller's business: an executor (sealed), or the bundle's own process (open).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import EngineFault
from prism_fast.protocol.score import CodeLength, HeldOut

# Padded tokens of one forward. Part of the measurement (a matrix product's last bits depend on its row count), so
# a change here moves scores in their last digits and must say so.
MICRO_BATCH_TOKENS = 2048
# A program is made for one width, and making one takes longer than a short row's padding: a narrower width than the
# run's own must save this share of the padded tokens.
WORTH_A_WIDTH = 0.1
NARROWEST = 8


def row_lengths(corpus: Any, split: str, basis: str, seq_len: int, byte_budget: int | None) -> np.ndarray:
    """int64 [rows]: tokens of every row that `Documents.read(...).rows(seq_len)` would have, without reading text."""
    tokens, sizes = [], []
    for shard in corpus.split(split).open():
        sizes.append(np.asarray(shard.utf8_bytes, np.int64))
        tokens.append(sizes[-1] if basis == "bytes" else shard.lengths)
    lengths, size = np.concatenate(tokens), np.concatenate(sizes)
    if byte_budget is not None:
        lengths = lengths[: int(np.searchsorted(np.cumsum(size), byte_budget)) + 1]
    whole, rest = np.divmod(lengths, seq_len - 1)
    return np.concatenate([np.full(int(whole.sum()), seq_len), rest[rest > 0] + 1])


def choose_widths(rows: np.ndarray, seq_len: int) -> tuple[int, ...]:
    """Widths that rows are padded to, ascending: the sequence length, and halves of it that save enough padding."""
    chosen = [seq_len]
    width = seq_len // 2
    while width >= NARROWEST and rows.size:
        before, after = (int(_padded(rows, w).sum()) for w in (chosen, [width, *chosen]))
        if after <= (1 - WORTH_A_WIDTH) * before:
            chosen.insert(0, width)
        width //= 2
    return tuple(chosen)


def _padded(rows: np.ndarray, widths: Sequence[int]) -> np.ndarray:
    ascending = np.asarray(sorted(widths))
    return ascending[np.searchsorted(ascending, rows)]


class Documents:
    """A prefix of a split as flat token ids: document d is ids[offsets[d]:offsets[d + 1]], without end-of-text."""

    def __init__(self, ids: np.ndarray, offsets: np.ndarray, utf8_bytes: np.ndarray) -> None:
        self.ids, self.offsets, self.utf8_bytes = ids, offsets, utf8_bytes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def read(cls, corpus: Any, split: str, basis: str, byte_budget: int | None) -> Documents:
        """Documents in corpus order until `byte_budget` UTF-8 bytes are reached (None: all). Empty ones count 0."""
        from prism_fast.data.tokenizers import reference_tokenizer

        source = corpus.split(split)
        decode = None
        if basis == "bytes" and source.tokenizer_name != "bytes":
            decode = reference_tokenizer(source.tokenizer_name).decode_bytes
        parts: list[np.ndarray] = []
        sizes: list[int] = []
        total = 0
        for shard in source.open():
            for record in range(len(shard)):
                if byte_budget is not None and total >= byte_budget:
                    break
                tokens = shard[record]
                if decode is not None:
                    tokens = np.frombuffer(decode(tokens), np.uint8)
                parts.append(np.array(tokens))  # a copy in the stored width; the map may go
                sizes.append(int(shard.utf8_bytes[record]))
                total += sizes[-1]
        if not total:
            raise EngineFault(f"{corpus.folder}: split {split!r} has no text to score")
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(p) for p in parts], out=offsets[1:])
        return cls(np.concatenate(parts), offsets, np.asarray(sizes, np.int64))

    def rows(self, seq_len: int) -> np.ndarray:
        """int64 [rows, 3]: (document, first scored token, scored tokens) of every row, in document order."""
        lengths = np.diff(self.offsets)
        per_document = -(-lengths // (seq_len - 1))
        document = np.repeat(np.arange(len(self)), per_document)
        first_row = np.cumsum(per_document) - per_document
        start = (np.arange(len(document)) - first_row[document]) * (seq_len - 1)
        return np.stack([document, start, np.minimum(lengths[document] - start, seq_len - 1)], axis=1)

    def batch(self, rows: np.ndarray, width: int, eot: int) -> tuple[np.ndarray, np.ndarray]:
        """-> (tokens, targets) int64 [len(rows), width]. Padding: eot, -100."""
        tokens = np.full((len(rows), width), eot, np.int64)
        targets = np.full((len(rows), width), -100, np.int64)
        for i, (document, start, count) in enumerate(rows.tolist()):
            at = int(self.offsets[document]) + start
            if start:
                tokens[i, 0] = self.ids[at - 1]
            tokens[i, 1 : count + 1] = self.ids[at : at + count]
            targets[i, :count] = self.ids[at : at + count]
        return tokens, targets


def micro_batches(rows: np.ndarray, widths: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """(width, row numbers), widest first: rows of one padded width, at most MICRO_BATCH_TOKENS padded tokens (one row
    at least)."""
    padded = _padded(rows[:, 2] + 1, widths)
    for width in sorted(set(padded.tolist()), reverse=True):
        numbers = np.flatnonzero(padded == width)
        count = max(1, MICRO_BATCH_TOKENS // width)
        for begin in range(0, len(numbers), count):
            yield width, numbers[begin : begin + count]


class Marks(NamedTuple):
    """What a predicted batch costs: `nats` float64 [rows], faulty targets charged already; counts; the head's width."""

    nats: np.ndarray
    tokens: int
    faults: int
    head_width: int


class Predictor(Protocol):
    """Predicts rows of held-out text and marks them."""

    def mark(self, tokens: np.ndarray, targets: np.ndarray) -> Marks:
        """int64 [rows, width] each; -100 where there is no target."""
        ...


class Pass:
    """One measurement of one state on one set of documents."""

    def __init__(
        self,
        predictor: Predictor,
        documents: Documents,
        widths: Sequence[int],
        eot: int,
        before_batch: Callable[[], None],
    ) -> None:
        """`widths`: of the rows, ascending; the last is the sequence length. `before_batch` may raise to give up."""
        self.nats = np.zeros(len(documents))  # per document
        self.faults = self.tokens = self.head_width = 0
        rows = documents.rows(widths[-1])
        row_nats = np.zeros(len(rows))
        for width, numbers in micro_batches(rows, widths):
            before_batch()
            marks = predictor.mark(*documents.batch(rows[numbers], width, eot))
            row_nats[numbers] = marks.nats
            self.tokens += marks.tokens
            self.faults += marks.faults
            self.head_width = marks.head_width
        np.add.at(self.nats, rows[:, 0], row_nats)
        self.rows = len(rows)
        self.bytes = int(documents.utf8_bytes.sum())

    @property
    def code_length(self) -> CodeLength:
        total = 0.0
        for value in self.nats.tolist():
            total += value
        return CodeLength(nats=total, bytes=self.bytes, tokens=self.tokens)

    def summary(self) -> dict[str, Any]:
        """This pass in heldout.json."""
        code = self.code_length
        return {
            "nats": code.nats,
            "bytes": code.bytes,
            "tokens": code.tokens,
            "documents": len(self.nats),
            "rows": self.rows,
            "faults": self.faults,
            "head_width": self.head_width,
        }


class Measured(NamedTuple):
    """Held-out sums, and the report that heldout.json keeps."""

    heldout: HeldOut
    report: dict[str, Any]


def measure(
    initial: Predictor,
    trained: Callable[[], Predictor],
    *,
    corpus: Any,
    val_corpus: Any,
    basis: str,
    basis_tokenizer: Any,
    widths: Sequence[int],
    val_byte_budget: int | None,
    documents_path: Path,
    before_batch: Callable[[], None] = lambda: None,
) -> Measured:
    """The random-init twin and the trained state on the val split, and the trained state on as much of the train split.

    `trained()` is called once the twin has been measured. Raises the PrismError of a bundle that cannot be scored.
    Writes `documents_path`: an npz of utf8_bytes, nats_trained, nats_twin, one number a document.
    """
    val = Documents.read(val_corpus, "val", basis, val_byte_budget)
    prefix = Documents.read(corpus, "train", basis, int(val.utf8_bytes.sum()))
    text = (widths, basis_tokenizer.eot, before_batch)
    twin = Pass(initial, val, *text)
    predictor = trained()
    after, converged = Pass(predictor, val, *text), Pass(predictor, prefix, *text)
    np.savez_compressed(documents_path, utf8_bytes=val.utf8_bytes, nats_trained=after.nats, nats_twin=twin.nats)
    heldout = HeldOut(
        trained=after.code_length,
        twin=twin.code_length,
        train_prefix=converged.code_length,
        n_vocab=basis_tokenizer.n_vocab,
    )
    report = {
        "schema_version": c.HELDOUT_SCHEMA,
        "documents": documents_path.name,
        "widths": list(widths),
        "twin": twin.summary(),
        "trained": after.summary(),
        "train_prefix": converged.summary(),
        "n_vocab": basis_tokenizer.n_vocab,
    }
    return Measured(heldout, report)
