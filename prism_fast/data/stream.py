"""The packed token stream of a split, read ahead by a C++ thread. What is measured is in docs/numerics.md."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from prism_fast import _core
from prism_fast.data.shards import Shard, open_shard, require_tokenizer
from prism_fast.data.tokenizers import Tokenizer, reference_tokenizer
from prism_fast.protocol.errors import UsageError

STATE_SCHEMA = "prism_token_stream.v1"


class StreamBatch(_core.BlockBase):  # type: ignore[misc]
    """One batch of rows.

    tokens, targets: int64 [rows, seq_len], views of recycled buffers: valid until the second `next()` after the one
    that returned them (so a batch may be copied to a device while its successor is in hand); copy to keep longer.
    targets[:, j] = tokens[:, j + 1]; the last column is -100.
    bytes: UTF-8 bytes of the scored targets. scored_tokens, special_tokens: targets that are text, that are
    end-of-text. documents: documents whose end-of-text is read here for the first time.
    index: batch number over all ranks.
    """

    __slots__ = ()
    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    index: int
    bytes: int
    scored_tokens: int
    special_tokens: int
    documents: int

    def __repr__(self) -> str:
        return f"StreamBatch(index={self.index}, rows={len(self.tokens)}, bytes={self.bytes})"


@dataclass(frozen=True)
class StreamPlan:
    """What the batches of all ranks cover. covered + tail = corpus, exactly, in tokens and in bytes.

    tokens are elements of the basis, end-of-text not counted. The tail is never a target: a last row that cannot be
    filled and, with several ranks, a last group of batches that is not complete.
    """

    rows: int
    batches: int
    documents: int
    covered_documents: int
    covered_tokens: int
    covered_bytes: int
    special_tokens: int
    tail_tokens: int
    tail_bytes: int
    corpus_tokens: int
    corpus_bytes: int


def _slot_views(tokens: npt.NDArray[Any], targets: npt.NDArray[Any], slot: int, rows: int, _: int) -> tuple[Any, Any]:
    return tokens[slot, :rows], targets[slot, :rows]


class TokenStream(Iterator[StreamBatch]):
    """Rows of the packed stream: for every document end-of-text and then its text, cut in rows that overlap by one.

    Row k is stream[k(L-1) : k(L-1)+L]: each element is a target exactly once. Batch j holds `batch_size` rows in a
    row; rank r takes batches r, r + world, ... With one rank the last batch may hold fewer rows; with several, every
    rank takes as many full batches, and the rest is tail.

    split: a `Split` of a corpus, or shard paths, or open shards (of other formats: opened with `tokenizer`).
    basis: "tokens" (ids as stored) or "bytes" (each token becomes its bytes, ids 0..255, end-of-text 256).
    tokenizer: needed only for shards of another tokenizer than "gpt2" and "bytes". access: as in `open_shard`.
    start_batch counts this rank's batches.

    allocate: makes the int64 (or int32) buffers, [prefetch + 2, batch_size, seq_len] each (pinned memory, say); default
    numpy. maker: makes the batches (`_core.BlockMaker`), for loaders that are built on this one.

    A consumer that takes under 50 us a batch has them read in its own thread, which is faster than waking another.

    Memory: (prefetch + 2) batches, whatever the size of the corpus. Errors of the reader (DataError, OSError) are
    raised by `next()`, after the batches that were read before them. Not usable after a fork (RuntimeError).
    """

    def __init__(
        self,
        split: Any,
        seq_len: int,
        batch_size: int,
        *,
        basis: Literal["tokens", "bytes"] = "tokens",
        rank: int = 0,
        world: int = 1,
        prefetch: int = 4,
        start_batch: int = 0,
        tokenizer: Tokenizer | None = None,
        access: str = "auto",
        allocate: Callable[[tuple[int, ...]], npt.NDArray[Any]] | None = None,
        maker: Any = None,
    ) -> None:
        if basis not in ("tokens", "bytes"):
            raise ValueError(f"basis {basis!r}: expected 'tokens' or 'bytes'")
        for name, value, least, most in (
            ("seq_len", seq_len, 2, 2**30), ("batch_size", batch_size, 1, 2**20), ("prefetch", prefetch, 1, 1024),
            ("world", world, 1, 2**20), ("rank", rank, 0, world - 1), ("start_batch", start_batch, 0, 2**62),
        ):  # fmt: skip
            if not least <= value <= most:
                raise ValueError(f"{name} {value}: expected {least} to {most}")
        shards = open_shards(split, access, tokenizer)
        self.tokenizer = tokenizer or tokenizer_of(shards)
        for shard in shards:
            require_tokenizer(shard, self.tokenizer)
        self.seq_len, self.batch_size, self.basis = seq_len, batch_size, basis
        self.rank, self.world, self.prefetch = rank, world, prefetch
        self.eot = 256 if basis == "bytes" else self.tokenizer.eot
        self._shards = shards
        self._fingerprint = shards_fingerprint(shards)
        slots = _core.TokenStream.slots(prefetch)
        shape = (slots, batch_size, seq_len)
        self._tokens, self._targets = (allocate(shape) if allocate else np.zeros(shape, np.int64) for _ in range(2))
        views = partial(_slot_views, self._tokens, self._targets)
        self._maker = maker or _core.BlockMaker(StreamBatch, views, None, slots)
        self._start(start_batch)

    def _start(self, batch: int) -> None:
        self._core = _core.TokenStream(
            [shard.core for shard in self._shards],
            self.tokenizer.table,
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            rank=self.rank,
            world=self.world,
            prefetch=self.prefetch,
            start_batch=batch,
            byte_basis=self.basis == "bytes",
            end_of_text=self.eot,
            tokens=self._tokens,
            targets=self._targets,
            maker=self._maker,
        )
        self._batches: int = self._core.batches
        self.take: Callable[[], Any] = self._core.next

    def __len__(self) -> int:
        """Batches of this rank, from the first."""
        return self._batches

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> StreamBatch:
        return self.take()

    def plan_summary(self) -> StreamPlan:
        """What all ranks together read and leave."""
        plan = self._core.plan
        return StreamPlan(
            rows=plan.rows,
            batches=plan.batches,
            documents=plan.documents,
            covered_documents=plan.covered_documents,
            covered_tokens=plan.covered_tokens,
            covered_bytes=plan.covered_bytes,
            special_tokens=plan.special_tokens,
            tail_tokens=plan.tail_tokens,
            tail_bytes=plan.tail_bytes,
            corpus_tokens=plan.covered_tokens + plan.tail_tokens,
            corpus_bytes=plan.covered_bytes + plan.tail_bytes,
        )

    def _identity(self) -> dict[str, Any]:
        return {
            "schema": STATE_SCHEMA,
            "shards": self._fingerprint,
            "seq_len": self.seq_len,
            "batch_size": self.batch_size,
            "basis": self.basis,
            "rank": self.rank,
            "world": self.world,
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the next `next()` goes on, with what the position belongs to. Prefetch depth is not part of it."""
        return {**self._identity(), "next_batch": self._core.next_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the position of `state`; UsageError when it belongs to another corpus, shape, rank or world."""
        for key, expected in self._identity().items():
            if state.get(key) != expected:
                raise UsageError(f"stream state: {key}: expected {expected!r}, found {state.get(key)!r}")
        batch = state.get("next_batch")
        if not isinstance(batch, int) or not 0 <= batch <= len(self):
            raise UsageError(f"stream state: next_batch: expected 0 to {len(self)}, found {batch!r}")
        self._core.close()
        self._start(batch)

    def close(self) -> None:
        """Stops the reader thread. Batches in hand stay valid."""
        self._core.close()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_shards(split: Any, access: str = "auto", tokenizer: Tokenizer | None = None) -> list[Shard]:
    """The open shards of a `Split`, of a shard or its path, or of several of these."""
    items: Sequence[Any]
    if isinstance(split, (str, os.PathLike, Shard)):
        items = [split]
    else:
        items = list(getattr(split, "shards", split))
    return [item if isinstance(item, Shard) else open_shard(item, tokenizer=tokenizer, access=access) for item in items]


def tokenizer_of(shards: Sequence[Shard]) -> Tokenizer:
    """The tokenizer that the first shard names; UsageError when only its name is known."""
    name = shards[0].tokenizer_name if shards else "bytes"
    if name not in ("gpt2", "bytes"):
        raise UsageError(f"{shards[0].path}: made by tokenizer {name!r}: pass tokenizer=..., only its bytes are known")
    return reference_tokenizer(name)


def shards_fingerprint(shards: Sequence[Shard]) -> str:
    """sha256 (hex) over the fingerprints of shards, in order: the identity of what a stream or a plan reads."""
    digest = hashlib.sha256(b"prism_shards.v1")
    for shard in shards:
        digest.update(bytes.fromhex(shard.fingerprint))
    return digest.hexdigest()
