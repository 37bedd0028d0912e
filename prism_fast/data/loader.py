"""Blocks of tokens for training and evaluation: bucketed, token-budgeted or packed, assembled ahead by C++ threads."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from prism_fast import _core
from prism_fast.data.plan import Bucket, BucketPlan, Dropped, Over, RecordRows, bucket_plan, fit_rows, read_manifest
from prism_fast.data.shards import require_tokenizer
from prism_fast.data.stream import TokenStream, open_shards, shards_fingerprint, tokenizer_of
from prism_fast.data.tokenizers import Tokenizer
from prism_fast.protocol.errors import UsageError

STATE_SCHEMA = "prism_token_loader.v1"
IGNORE = -100
# Blocks whose buffers stay untouched: the last one handed out and the one before it (both readers keep to it).
_LENT = 2
_NO_INT64 = np.empty(0, np.int64)


class Event(Protocol):
    """What says that a copy is done, such as a `torch.cuda.Event` recorded after it."""

    def synchronize(self) -> object: ...


class Block(_core.BlockBase):  # type: ignore[misc]
    """One micro-batch. Arrays are torch tensors, or numpy arrays with `output="numpy"`.

    They alias recycled buffers, valid until the second `next()` after the one that returned the block; copy to keep
    longer. See `TokenLoader.recycle_after` for copies that are still under way then.

    tokens, targets: [rows, width], int64 or int32. targets[:, j] is tokens[:, j + 1], or -100 where there is none.
    index: number of the micro-batch over all ranks. bytes: UTF-8 bytes of the scored targets.
    scored_tokens, special_tokens: targets that are text, that are end-of-text.
    """

    __slots__ = ()
    tokens: Any
    targets: Any
    index: int
    bytes: int
    scored_tokens: int
    special_tokens: int
    _rows: _PaddedRows | _PackedRows
    _slot: int

    @property
    def lengths(self) -> Any:
        """int64 [rows]: positions in use, the context in front included."""
        return self._rows.lengths(self._slot, len(self.tokens))

    @property
    def row_bytes(self) -> Any:
        """int64 [rows]: UTF-8 bytes of each row's targets; None for packed rows."""
        return self._rows.row_bytes(self._slot, len(self.tokens))

    @property
    def records(self) -> NDArray[np.int64] | None:
        """int64 [rows], numpy: which record of the corpus each row holds; None for packed rows."""
        return self._rows.records(self.index)

    @property
    def cu_seqlens(self) -> Any:
        """int32 [sequences + 1]: where each sequence begins and ends, for variable-length attention.

        Padded rows: in the rows' tokens put end to end without padding. Packed rows: in `tokens.reshape(-1)`; a
        sequence begins with each row and with each end-of-text.
        """
        return self._rows.cu_seqlens(self._slot, self.tokens)

    def __repr__(self) -> str:
        rows, width = self.tokens.shape
        return f"Block(index={self.index}, rows={rows}, width={width}, bytes={self.bytes})"


class TokenLoader(Iterator[Block]):
    """Iterates over the blocks of one rank, once; `len(loader)` is how many there are, the same on every rank.

    Args:
        shards: a `Split` of a corpus, shards or their paths, read as one corpus.
        plan: "packed" (rows of the end-to-end stream, see `TokenStream`); a `BucketPlan` over these records, or the
            path of its manifest; or the bucket to plan with here (a number of records, "width", None: file order).
        batch: rows a block. With a ready plan it may be left out. With `token_budget`: at most (None: no limit).
        seq_len: positions a row has at most (packed: exactly). None: as long as the longest record.
        rank, world: rank r takes micro-batches r, r + world, ...; a remainder is dropped, see `dropped`.
        seed: of the order, when it is planned here (default 0); otherwise what the plan's seed must be.
        prefetch: blocks assembled ahead; 0: none, no threads (packed rows always have one reader). A consumer that
            takes under 50 us a block has them assembled in its own thread, which is faster than waking another.
        over: what becomes of records longer than `seq_len`: "truncate", "split" or "drop" (see `fit_rows`).
        token_budget: rows x width of a block at most, end-of-text included, when the order is planned here.
        dtype: of tokens and targets.
        output: "torch" (pinned memory where CUDA is there) or "numpy" (imports no torch).
        threads: that assemble blocks; more than one pays on storage with a long way. The blocks are the same.
        tokenizer: needed for shards whose tokenizer is neither "gpt2" nor "bytes".
        access: as in `open_shard`.

    Rows of a bucketed or budgeted block: end-of-text, then the tokens of one record, padded on the right with
    end-of-text to the longest row of the block. Padding is a target of nobody.

    Errors of the threads (DataError, OSError) are raised by `next()` in the place of the block they belong to. Not
    usable after a fork (RuntimeError): make one in the child.
    """

    def __init__(
        self,
        shards: Any,
        plan: BucketPlan | Bucket | str | os.PathLike[str],
        batch: int | None = None,
        seq_len: int | None = None,
        rank: int = 0,
        world: int = 1,
        seed: int | None = None,
        prefetch: int = 4,
        *,
        over: Over = "truncate",
        token_budget: int | None = None,
        dtype: Literal["int64", "int32"] = "int64",
        output: Literal["torch", "numpy"] = "torch",
        threads: int = 1,
        tokenizer: Tokenizer | None = None,
        access: str = "auto",
    ) -> None:
        for name, value, least, most in (
            ("world", world, 1, 2**20), ("rank", rank, 0, world - 1), ("prefetch", prefetch, 0, 1024),
            ("threads", threads, 1, 256),
        ):  # fmt: skip
            if not least <= value <= most:
                raise ValueError(f"{name} {value}: expected {least} to {most}")
        if dtype not in ("int64", "int32"):
            raise ValueError(f"dtype {dtype!r}: expected 'int64' or 'int32'")
        if output not in ("torch", "numpy"):
            raise ValueError(f"output {output!r}: expected 'torch' or 'numpy'")
        opened = open_shards(shards, access, tokenizer)
        self.tokenizer = tokenizer or tokenizer_of(opened)
        for shard in opened:
            require_tokenizer(shard, self.tokenizer)
        self.rank, self.world, self.prefetch = rank, world, prefetch
        torch = importlib.import_module("torch") if output == "torch" else None
        self._reader: _PackedReader | _PlannedReader
        if isinstance(plan, str) and plan == "packed":
            if batch is None or seq_len is None:
                raise ValueError("packed blocks need batch (rows) and seq_len (positions)")
            if seed is not None or token_budget is not None:
                raise ValueError("packed rows come in the order of the corpus: neither seed nor token_budget applies")
            self._reader = _PackedReader(
                opened, self.tokenizer, torch, dtype, seq_len=seq_len, batch_size=batch, rank=rank, world=world,
                prefetch=max(1, prefetch),
            )  # fmt: skip
        else:
            lengths = np.concatenate([_NO_INT64, *(shard.lengths for shard in opened)])
            fingerprint = shards_fingerprint(opened)
            ready, rows = _plan_for(plan, lengths, fingerprint, batch, seq_len, seed, token_budget, over)
            self._reader = _PlannedReader(
                opened, self.tokenizer, fingerprint, ready, rows, torch, dtype, rank, world, prefetch, threads
            )
        self._take = self._reader.take
        # By block number: what has to happen before the buffers of a lent block are written again.
        self._events: dict[int, Event] = {}

    def __len__(self) -> int:
        return self._reader.steps

    def __iter__(self) -> TokenLoader:
        return self

    def __next__(self) -> Block:
        if self._events:
            self._wait_until(self._reader.next_step - _LENT)
        return self._take()

    def recycle_after(self, block: Block, event: Event) -> None:
        """Has the loader call `event.synchronize()` before it writes the block's buffers again.

        For `tokens.to(device, non_blocking=True)` from pinned memory: record a CUDA event after the copy and hand it
        in. ValueError if the block is not one of the last two.
        """
        if not self._reader.next_step - _LENT <= block.index // self.world < self._reader.next_step:
            raise ValueError(f"block {block.index} was handed out too long ago: its buffers may be in use already")
        self._events[block.index] = event

    def _wait_until(self, step: int) -> None:
        """Waits for what is to happen to the blocks up to this step."""
        for index in [index for index in self._events if index // self.world <= step]:
            self._events.pop(index).synchronize()

    @property
    def plan(self) -> BucketPlan | None:
        """The order; None for packed rows."""
        return self._reader.plan

    @property
    def rows(self) -> RecordRows | None:
        """What `seq_len` made of the records (`rows.report(...)`); None for packed rows."""
        return self._reader.rows

    @property
    def dropped(self) -> Dropped:
        """What no rank reads, because every rank takes as many steps (packed: and a last row that is not full)."""
        return self._reader.dropped

    def state_dict(self) -> dict[str, Any]:
        """Where the next `next()` goes on, with what that belongs to; JSON-ready, the same on every rank.

        Prefetch depth, threads, dtype and rank are no part of it.
        """
        return {"schema": STATE_SCHEMA, **self._reader.identity(), "next_step": self._reader.next_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the position of `state`. UsageError when it is from another corpus, plan, seed, shape or world."""
        for key, expected in {"schema": STATE_SCHEMA, **self._reader.identity()}.items():
            if state.get(key) != expected:
                raise UsageError(f"loader state: {key}: expected {expected!r}, found {state.get(key)!r}")
        step = state.get("next_step")
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= len(self):
            raise UsageError(f"loader state: next_step: expected 0 to {len(self)}, found {step!r}")
        self._wait_until(self._reader.next_step)
        self._reader.seek(step)
        self._take = self._reader.take

    def close(self) -> None:
        """Stops the threads. Blocks in hand stay valid."""
        self._reader.close()

    def __enter__(self) -> TokenLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Buffer:
    """A flat array that C++ writes, and the views of it that users see."""

    def __init__(self, size: int, dtype: str, torch: Any) -> None:
        self._tensor: Any = None
        self.pinned = torch is not None and torch.cuda.is_available()
        if self.pinned:
            self._tensor = torch.empty(size, dtype=getattr(torch, dtype), pin_memory=True)
            self.array = self._tensor.numpy()
        else:  # numpy asks for huge pages: a fifth of the page faults of torch.empty, which cost a wide block its time
            self.array = np.empty(size, dtype)
            self._tensor = None if torch is None else torch.from_numpy(self.array)

    def view(self, start: int, size: int) -> Any:
        source = self.array if self._tensor is None else self._tensor
        return source[start : start + size]

    def matrix(self, start: int, rows: int, width: int) -> Any:
        if self._tensor is None:
            return np.ndarray((rows, width), self.array.dtype, self.array, start * self.array.itemsize)
        return self._tensor.as_strided((rows, width), (width, 1), start)


def _views(tokens: _Buffer, targets: _Buffer, capacity: int, slot: int, rows: int, width: int) -> tuple[Any, Any]:
    """The block of a slot, of which only the first rows x width elements are in use."""
    return tokens.matrix(slot * capacity, rows, width), targets.matrix(slot * capacity, rows, width)


def _block_maker(
    tokens: _Buffer, targets: _Buffer, capacity: int, slots: int, rows: _PaddedRows | _PackedRows, torch: Any
) -> Any:
    if torch is None or tokens.pinned:
        # A view of the pinned tensor itself: torch's allocator then knows of copies under way when it is freed.
        return _core.BlockMaker(Block, partial(_views, tokens, targets, capacity), rows, slots)
    imported = torch.utils.dlpack.from_dlpack
    return _core.BlockMaker(Block, imported, rows, slots, tokens.array, targets.array, capacity)


class _PaddedRows:
    """What is known about the rows of padded blocks, by slot."""

    def __init__(self, plan: BucketPlan, rows: RecordRows, slots: int, max_rows: int, torch: Any) -> None:
        self._plan, self._rows, self._max_rows = plan, rows, max_rows
        self.lengths_of, self.bytes_of = (_Buffer(slots * max_rows, "int64", torch) for _ in range(2))
        self.cu_lengths_of = _Buffer(slots * (max_rows + 1), "int32", torch)

    def lengths(self, slot: int, rows: int) -> Any:
        return self.lengths_of.view(slot * self._max_rows, rows)

    def row_bytes(self, slot: int, rows: int) -> Any:
        return self.bytes_of.view(slot * self._max_rows, rows)

    def records(self, index: int) -> NDArray[np.int64]:
        return self._rows.record[self._plan[index]]

    def cu_seqlens(self, slot: int, tokens: Any) -> Any:
        return self.cu_lengths_of.view(slot * (self._max_rows + 1), len(tokens) + 1)


class _PlannedReader:
    """Padded blocks in the order of a plan, from the C++ assembler."""

    def __init__(
        self,
        shards: list[Any],
        tokenizer: Tokenizer,
        fingerprint: str,
        plan: BucketPlan,
        rows: RecordRows,
        torch: Any,
        dtype: str,
        rank: int,
        world: int,
        prefetch: int,
        threads: int,
    ) -> None:
        self.plan, self.rows = plan, rows
        self.steps = len(plan) // world
        self._fingerprint, self._world = fingerprint, world
        max_rows, capacity = _block_size(plan)
        slots = _core.BatchAssembler.slots(prefetch)
        tokens, targets = (_Buffer(slots * capacity, dtype, torch) for _ in range(2))
        rest = _PaddedRows(plan, rows, slots, max_rows, torch)
        whole = rows.record_is_row
        self._arguments = {
            "shards": [shard.core for shard in shards],
            "table": tokenizer.table,
            "row_record": _NO_INT64 if whole else rows.record,
            "row_start": _NO_INT64 if whole else rows.start,
            "row_length": _NO_INT64 if whole else rows.length,
            "rows": plan.records,
            "starts": _NO_INT64 if plan.is_fixed else plan.starts,
            "micro_batch": plan.micro_batch or 0,
            "tokens": tokens.array,
            "targets": targets.array,
            "lengths": rest.lengths_of.array,
            "cu_lengths": rest.cu_lengths_of.array,
            "bytes": rest.bytes_of.array,
            "capacity": capacity,
            "max_rows": max_rows,
            "rank": rank,
            "world": world,
            "prefetch": prefetch,
            "threads": threads,
            "end_of_text": tokenizer.eot,
            "maker": _block_maker(tokens, targets, capacity, slots, rest, torch),
        }
        self._core = _core.BatchAssembler(**self._arguments, start_step=0)

    @property
    def take(self) -> Callable[[], Block]:
        """Hands out the next block; StopIteration at the end. Another one after `seek()`."""
        return self._core.next

    @property
    def next_step(self) -> int:
        return self._core.next_step

    def seek(self, step: int) -> None:
        self._core.close()
        self._core = _core.BatchAssembler(**self._arguments, start_step=step)

    def identity(self) -> dict[str, Any]:
        return {
            "corpus": self._fingerprint,
            "plan": self.plan.digest,
            "seed": self.plan.seed,
            "seq_len": self.rows.seq_len,
            "over": self.rows.over,
            "world": self._world,
        }

    @property
    def dropped(self) -> Dropped:
        return self.plan.dropped(self._world)

    def close(self) -> None:
        self._core.close()


class _PackedRows:
    """What is known about packed rows: all of them are full."""

    def __init__(self, rows: int, width: int, end_of_text: int, torch: Any) -> None:
        self._lengths = _Buffer(rows, "int64", torch)
        self._lengths.array[:] = width
        self._end_of_text, self._torch = end_of_text, torch

    def lengths(self, slot: int, rows: int) -> Any:
        return self._lengths.view(0, rows)

    def row_bytes(self, slot: int, rows: int) -> None:
        return None

    def records(self, index: int) -> None:
        return None

    def cu_seqlens(self, slot: int, tokens: Any) -> Any:
        flat = np.asarray(tokens).reshape(-1)
        begins = flat == self._end_of_text
        begins[:: tokens.shape[1]] = True
        bounds = np.append(np.flatnonzero(begins), len(flat)).astype(np.int32)
        return bounds if self._torch is None else self._torch.from_numpy(bounds)


class _PackedReader:
    """Blocks of a `TokenStream`."""

    plan = None
    rows = None

    def __init__(
        self,
        shards: list[Any],
        tokenizer: Tokenizer,
        torch: Any,
        dtype: str,
        *,
        seq_len: int,
        batch_size: int,
        prefetch: int,
        **arguments: Any,
    ) -> None:
        capacity = batch_size * seq_len
        slots = _core.TokenStream.slots(prefetch)
        tokens, targets = (_Buffer(slots * capacity, dtype, torch) for _ in range(2))
        rows = _PackedRows(batch_size, seq_len, tokenizer.eot, torch)
        buffers = iter((tokens.array, targets.array))
        self._stream = TokenStream(
            shards,
            seq_len,
            batch_size,
            tokenizer=tokenizer,
            prefetch=prefetch,
            allocate=lambda shape: next(buffers).reshape(shape),
            maker=_block_maker(tokens, targets, capacity, slots, rows, torch),
            **arguments,
        )
        self.steps = len(self._stream)

    @property
    def take(self) -> Callable[[], Block]:
        return self._stream.take

    @property
    def next_step(self) -> int:
        return self._stream.state_dict()["next_batch"]

    def seek(self, step: int) -> None:
        self._stream.load_state_dict({**self._stream.state_dict(), "next_batch": step})

    def identity(self) -> dict[str, Any]:
        state = self._stream.state_dict()
        return {
            "corpus": state["shards"],
            "plan": "packed",
            "batch": state["batch_size"],
            "seq_len": state["seq_len"],
            "world": state["world"],
        }

    @property
    def dropped(self) -> Dropped:
        summary = self._stream.plan_summary()
        return Dropped(0, summary.documents - summary.covered_documents, summary.tail_tokens)

    def close(self) -> None:
        self._stream.close()


def _plan_for(
    plan: BucketPlan | Bucket | str | os.PathLike[str],
    lengths: NDArray[np.int64],
    fingerprint: str,
    batch: int | None,
    seq_len: int | None,
    seed: int | None,
    token_budget: int | None,
    over: Over,
) -> tuple[BucketPlan, RecordRows]:
    """The plan asked for, made, read or checked against the records at hand."""
    if plan is None or isinstance(plan, int) or plan == "width":
        rows = fit_rows(lengths, seq_len, over)
        bucket: Bucket = plan  # type: ignore[assignment]
        made = bucket_plan(rows.length, batch, bucket, seed or 0, token_budget=token_budget, row_overhead=1)
        return made, rows
    if isinstance(plan, BucketPlan):
        ready, rows = plan, fit_rows(lengths, seq_len, over)
        if not np.array_equal(ready.lengths, rows.length):
            raise UsageError(
                f"the plan is for {len(ready.lengths)} rows of {int(ready.lengths.sum(dtype=np.int64))} tokens, but "
                f"these shards have {len(rows)} of {int(rows.length.sum())} (seq_len {seq_len}, over {over!r}): "
                "plan over fit_rows(lengths, seq_len, over).length"
            )
    else:
        ready, rows = read_manifest(Path(plan), lengths, fingerprint)
        if seq_len not in (None, rows.seq_len):
            raise UsageError(f"{plan}: planned for seq_len {rows.seq_len}, asked for {seq_len}")
    for name, asked, planned in (
        ("batch", batch, ready.micro_batch),
        ("seed", seed, ready.seed),
        ("token_budget", token_budget, ready.token_budget),
    ):
        if asked not in (None, planned):
            raise UsageError(f"{name} is {asked}, but the plan was made with {planned}: leave it out, or plan anew")
    return ready, rows


def _block_size(plan: BucketPlan) -> tuple[int, int]:
    """(rows, tokens) that the largest block of a plan takes, each row with its context."""
    if len(plan) == 0:
        return 0, 0
    if plan.is_fixed:
        assert plan.micro_batch is not None
        rows = min(plan.micro_batch, len(plan.records))
        return rows, rows * (int(plan.lengths.max()) + 1)
    sizes = np.diff(plan.starts)
    widths = np.maximum.reduceat(plan.lengths[plan.records], plan.starts[:-1]).astype(np.int64) + 1
    return int(sizes.max()), int((sizes * widths).max())
