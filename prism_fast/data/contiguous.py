"""The original engine's rows, for accounting prism-v2: documents end to end, without separator, cut without overlap.

Row k of length L is stream[k L : (k + 1) L], so a row's first token is a target of nobody; a document's UTF-8 bytes
are spread evenly over its tokens, and every token of a batch carries its share, predicted or not. How the exact
accounting differs is in docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_fast.data.stream import open_shards, tokenizer_of
from prism_fast.protocol import constants as c


@dataclass(frozen=True)
class ContiguousBatch:
    """tokens: int64 [rows, width], a copy. utf8_bytes: the share of all of them. documents: those that begin here."""

    tokens: npt.NDArray[np.int64]
    utf8_bytes: float
    documents: int


class ContiguousStream(Iterator[ContiguousBatch]):
    """Batches of `batch_size` rows of `seq_len` tokens; what is left at the end of the data is one row of any width.

    split, basis: as of `TokenStream`. token_budget: consumed tokens at which the pass ends; a batch that it cuts
    through is not handed out. `stopped` says, after the last batch, which of the two it was. Memory: one document and
    one batch.
    """

    def __init__(
        self, split: Any, seq_len: int, batch_size: int, *, basis: str = "tokens", token_budget: int | None = None
    ) -> None:
        if seq_len < 2 or batch_size < 1:
            raise ValueError(f"rows of {seq_len} tokens, {batch_size} a batch: expected at least 2 and 1")
        self.seq_len, self.batch_size, self.token_budget = seq_len, batch_size, token_budget
        self.stopped: str | None = None
        self._shards = open_shards(split)
        tokenizer = tokenizer_of(self._shards)
        self._decode = tokenizer.decode_bytes if basis == "bytes" and tokenizer.name != "bytes" else None
        self.corpus_bytes = sum(shard.n_bytes for shard in self._shards)
        self.corpus_tokens = self.corpus_bytes if self._decode else sum(shard.n_tokens for shard in self._shards)
        self._documents = self._read()
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # ids, bytes of each, first of a document
        self._buffered = self._consumed = 0

    def _read(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for shard in self._shards:
            for record in range(len(shard)):
                ids = np.asarray(shard[record])
                if self._decode is not None:
                    ids = np.frombuffer(self._decode(ids), np.uint8)
                if not len(ids):
                    continue
                first = np.zeros(len(ids), bool)
                first[0] = True
                yield ids.astype(np.int64), np.full(len(ids), int(shard.utf8_bytes[record]) / len(ids)), first

    def __next__(self) -> ContiguousBatch:
        wanted, total, budget = self.seq_len * self.batch_size, self.corpus_tokens, self.token_budget
        left = total - self._consumed
        if self._consumed + wanted <= (total if budget is None else min(total, budget)):
            rows, width = self.batch_size, self.seq_len
        elif (budget is None or total < budget) and left >= 2:
            rows, width = 1, left
        else:
            self.stopped = c.STOP_DATA_EXHAUSTED if budget is None or total < budget else c.STOP_TOKEN_BUDGET
            raise StopIteration
        ids, shares, first = self._take(rows * width)
        return ContiguousBatch(ids.reshape(rows, width), float(shares.sum()), int(first.sum()))

    def _take(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        while self._buffered < count:
            self._waiting.append(next(self._documents))
            self._buffered += len(self._waiting[-1][0])
        joined = [np.concatenate(parts) for parts in zip(*self._waiting, strict=True)]
        self._waiting = [(joined[0][count:], joined[1][count:], joined[2][count:])]
        self._buffered -= count
        self._consumed += count
        return joined[0][:count], joined[1][:count], joined[2][:count]

    def close(self) -> None:
        """Nothing is open but the shards' maps."""


class WholeBytes:
    """Fractional bytes to whole ones, batch by batch, so that their sum is the rounded sum."""

    def __init__(self) -> None:
        self._exact, self._given = 0.0, 0

    def __call__(self, utf8_bytes: float) -> int:
        self._exact += utf8_bytes
        whole = round(self._exact) - self._given
        self._given += whole
        return whole
