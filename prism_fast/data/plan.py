"""The order of micro-batches: bucket-to-pair, shuffle-to-mix, from record lengths and a seed alone.

Padding is decided by which records share a micro-batch; mixing is decided by the order of the micro-batches. So records
of similar length are put together first and the finished micro-batches are shuffled over the whole corpus afterwards,
which costs no padding. docs/bucket-plan.md specifies the order to the bit; csrc/bucket_plan computes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import orjson
from numpy.typing import ArrayLike, NDArray

from prism_fast import _core
from prism_fast.protocol.errors import DataError, UsageError

if TYPE_CHECKING:
    from prism_fast.data.shards import Shard
    from prism_fast.data.tokenizers import Tokenizer

Int64Array: TypeAlias = NDArray[np.int64]
Bucket: TypeAlias = int | Literal["width"] | None
Over: TypeAlias = Literal["truncate", "split", "drop"]

MANIFEST_SCHEMA = "prism_bucket_plan.v1"
GENERATOR = "splitmix64+lemire64+fisher-yates"
OVER_POLICIES: tuple[Over, ...] = ("truncate", "split", "drop")
# Token files of other tools, which `open_shard` tells apart by their content.
_TOKEN_FILES = (".bin", ".idx", ".ds", ".npy")
_NO_INT64 = np.empty(0, np.int64)
_NO_INT32 = np.empty(0, np.int32)
_NATIVE_LENGTHS = tuple(np.dtype(kind) for kind in ("uint16", "int32", "uint32", "int64"))


def bucket_plan(
    lengths: ArrayLike,
    micro_batch: int | None = None,
    bucket: Bucket = None,
    seed: int = 0,
    *,
    token_budget: int | None = None,
    row_overhead: int = 0,
) -> BucketPlan:
    """Plans one pass over a corpus: every record exactly once.

    Args:
        lengths: integers [records], in tokens; uint16, int32, uint32 and int64 arrays are used in place.
        micro_batch: records a micro-batch. With `token_budget`: the most it may have (None: no limit).
        bucket: records of neighbouring length among which the partners in a micro-batch are drawn, at least
            `micro_batch`. None: file order, the baseline, nothing shuffled. "width": only records of the very same
            length meet, so there is no padding; each length may leave one incomplete micro-batch.
        seed: 0 .. 2^64 - 1. The same lengths, arguments and seed give the same plan on every machine.
        token_budget: rows x longest row of a micro-batch at most, in tokens; the number of records varies.
        row_overhead: tokens that a row has beyond its record, counted in the budget only (`TokenLoader` puts one
            end-of-text before each record: 1).

    Working memory beyond lengths and plan: at most 8 bytes a record (16 from 2^31 records on).

    Raises:
        TypeError: lengths that are not integers.
        ValueError: a negative length, an argument out of range, a record that alone exceeds the budget.
    """
    array = _as_lengths(lengths)
    seed = _in_range("seed", seed, 0, 2**64 - 1)
    if micro_batch is None and token_budget is None:
        raise ValueError("a plan needs micro_batch (records), token_budget (tokens), or both")
    if micro_batch is not None:
        micro_batch = _in_range("micro_batch", micro_batch, 1, 2**31)
    if token_budget is not None:
        token_budget = _in_range("token_budget", token_budget, 1, 2**62)
    row_overhead = _in_range("row_overhead", row_overhead, 0, 2**31)
    if isinstance(bucket, str):
        if bucket != "width":
            raise ValueError(f"bucket {bucket!r}: expected a number of records, 'width' or None")
    elif bucket is not None:
        bucket = _in_range("bucket", bucket, 1, 2**62)

    rows: Int64Array | None = None
    starts: Int64Array | None = None
    in_records = 0 if bucket in (None, "width") else bucket
    if token_budget is None and bucket != "width":
        rows = _core.bucket_plan_fixed(array, micro_batch, in_records, seed)
        records = rows.reshape(-1)[: len(array)]
    else:
        records, starts = _core.bucket_plan_variable(
            array, micro_batch or 0, token_budget or 0, row_overhead, in_records, bucket == "width", seed
        )
    return BucketPlan(
        lengths=array,
        micro_batch=micro_batch,
        bucket=bucket,
        seed=seed,
        token_budget=token_budget,
        row_overhead=row_overhead,
        records=records,
        _rows=rows,
        _starts=starts,
    )


@dataclass(frozen=True)
class Dropped:
    """What equal steps on every rank leave unread."""

    micro_batches: int
    records: int
    tokens: int


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """An order of micro-batches. `plan[k]` is the record numbers (int64) of micro-batch k, `len(plan)` how many."""

    lengths: NDArray[Any]  # [records], tokens
    micro_batch: int | None
    bucket: Bucket
    seed: int
    token_budget: int | None
    row_overhead: int
    records: Int64Array  # [records], record numbers in the order they are read
    _rows: Int64Array | None = field(repr=False)  # [M, micro_batch] where all micro-batches are of one size
    _starts: Int64Array | None = field(repr=False)  # [M + 1] where they are not

    def __len__(self) -> int:
        if self._rows is not None:
            return len(self._rows)
        assert self._starts is not None
        return len(self._starts) - 1

    def __getitem__(self, k: int) -> Int64Array:
        if not -len(self) <= k < len(self):
            raise IndexError(f"micro-batch {k} of a plan of {len(self)}")
        k %= len(self)
        if self._rows is not None:
            assert self.micro_batch is not None
            return self.records[k * self.micro_batch : (k + 1) * self.micro_batch]
        assert self._starts is not None
        return self.records[self._starts[k] : self._starts[k + 1]]

    @property
    def is_fixed(self) -> bool:
        """Every micro-batch has `micro_batch` records, the last one perhaps fewer."""
        return self._rows is not None

    @cached_property
    def starts(self) -> Int64Array:
        """int64 [M + 1]: micro-batch k is `records[starts[k]:starts[k + 1]]`."""
        if self._starts is not None:
            return self._starts
        assert self.micro_batch is not None
        return np.minimum(np.arange(len(self) + 1, dtype=np.int64) * self.micro_batch, len(self.records))

    @cached_property
    def micro_batches(self) -> Int64Array:
        """int64 [M, rows]: the record numbers of each micro-batch; -1 fills rows that an incomplete one lacks.

        `rows` is `micro_batch`; for a plan of varying sizes (token budget, bucket="width") the largest number of
        records in one micro-batch, so `records` and `starts` are the compact form there.
        """
        return self._rows if self._rows is not None else self._padded(np.arange(len(self)))

    def for_rank(self, rank: int, world: int, remainder: Literal["drop", "refuse"] = "drop") -> Int64Array:
        """int64 [M // world, rows]: micro-batches rank, rank + world, ...; the same number of steps on every rank.

        The last M % world micro-batches are dropped (`dropped(world)` counts them); `remainder="refuse"` raises
        ValueError instead.
        """
        steps = self._steps(rank, world)
        if remainder not in ("drop", "refuse"):
            raise ValueError(f"remainder {remainder!r}: expected 'drop' or 'refuse'")
        if remainder == "refuse" and steps * world != len(self):
            raise ValueError(
                f"{len(self)} micro-batches do not divide over {world} ranks: {len(self) - steps * world} would be "
                "unread; plan for another world, or allow remainder='drop'"
            )
        if self._rows is not None:
            return self._rows[rank : steps * world : world]
        return self._padded(np.arange(rank, steps * world, world))

    def dropped(self, world: int) -> Dropped:
        """Micro-batches, records and tokens that `for_rank(..., world)` reads on no rank."""
        kept = self._steps(0, world) * world
        unread = self.records[int(self.starts[kept]) :]
        return Dropped(len(self) - kept, len(unread), int(self.lengths[unread].sum(dtype=np.int64)))

    def report(
        self,
        accumulate: int = 8,
        sources: ArrayLike | None = None,
        cost: Sequence[float] | None = None,
        cost_rows: int | None = None,
    ) -> dict[str, Any]:
        """Measures this order against file order, as one flat JSON-ready row.

        Args:
            accumulate: micro-batches a step; sources are counted in whole windows of so many.
            sources: integers or strings [records], where each record comes from; None leaves the source keys None.
            cost: (A, B) of the cost model t(w) = A w + B w^2, seconds for a micro-batch of width w tokens
                (`prism-fast profile` fits it); None leaves the predictions None.
            cost_rows: rows of the micro-batches that the model was fitted on, for a plan of varying sizes: there a
                micro-batch costs in proportion to its rows. Default `micro_batch`.

        Keys: bucket (None = file order), records, micro_batches, real_tokens, padded_tokens (rows x width, summed),
        waste (padding's share of padded_tokens), mean_width, mean_square_width, width_p50, width_p90, width_p99 (item
        floor(p x M) of the sorted widths), zero_pad_micro_batches, sources_mean, sources_min (distinct sources a
        window), adjacent_correlation (Pearson, width of a micro-batch and the next; 0 when undefined),
        predicted_micro_batch_s, predicted_step_s, quadratic_share (of the predicted time), saved_padded_tokens,
        saved_time (shares of the file order's padded tokens and predicted time of one pass, 0..1).
        """
        accumulate = _in_range("accumulate", accumulate, 1, 2**62)
        labels, source_count = _source_numbers(sources, len(self.lengths))
        starts = _NO_INT64 if self._starts is None else self._starts
        # An empty `records` means file order to the core; without records both mean the same.
        mine = self._measure(self.records, starts, accumulate, labels, source_count)
        theirs = self._measure_file_order()
        model = None
        if cost is not None:
            if len(cost) != 2:
                raise ValueError(f"cost has {len(cost)} numbers: expected (A, B) of t(w) = A w + B w^2")
            model = _CostModel(float(cost[0]), float(cost[1]), self._cost_rows(cost_rows))
        predicted = model.micro_batch_s(mine) if model else None
        baseline_s = model.micro_batch_s(theirs) * theirs["micro_batches"] if model else None
        micro_batches, windows = mine["micro_batches"], mine["windows"]
        return {
            "bucket": self.bucket,
            "records": len(self.lengths),
            "micro_batches": micro_batches,
            "real_tokens": mine["real_tokens"],
            "padded_tokens": mine["padded_tokens"],
            "waste": 1 - mine["real_tokens"] / mine["padded_tokens"] if mine["padded_tokens"] else 0.0,
            "mean_width": mine["mean_width"],
            "mean_square_width": mine["mean_square_width"],
            "width_p50": mine["width_p50"],
            "width_p90": mine["width_p90"],
            "width_p99": mine["width_p99"],
            "zero_pad_micro_batches": mine["zero_pad_micro_batches"],
            "sources_mean": mine["sources_total"] / windows if windows else None,
            "sources_min": mine["sources_min"] if windows else None,
            "adjacent_correlation": mine["adjacent_correlation"],
            "predicted_micro_batch_s": predicted,
            "predicted_step_s": predicted * accumulate if predicted is not None else None,
            "quadratic_share": model.quadratic_share(mine) if model else None,
            "saved_padded_tokens": _saved(mine["padded_tokens"], theirs["padded_tokens"]),
            "saved_time": (
                _saved(predicted * micro_batches, baseline_s)
                if predicted is not None and baseline_s is not None
                else None
            ),
        }

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of `records` and `starts` as little-endian int64: the identity of the order."""
        return _sha256(self.records, self.starts)

    def parameters(self) -> dict[str, Any]:
        """The arguments of `bucket_plan` that made this plan, lengths aside."""
        return {
            "micro_batch": self.micro_batch,
            "bucket": self.bucket,
            "seed": self.seed,
            "token_budget": self.token_budget,
            "row_overhead": self.row_overhead,
        }

    def _steps(self, rank: int, world: int) -> int:
        _in_range("world", world, 1, 2**31)
        _in_range("rank", rank, 0, world - 1)
        return len(self) // world

    def _padded(self, which: Int64Array) -> Int64Array:
        first, end = self.starts[which], self.starts[which + 1]
        sizes = end - first
        out = np.full((len(which), int(sizes.max(initial=0))), -1, np.int64)
        row, column = np.nonzero(np.arange(out.shape[1]) < sizes[:, None])
        out[row, column] = self.records[first[row] + column]
        return out

    def _measure(
        self, records: Int64Array, starts: Int64Array, accumulate: int, labels: NDArray[np.int32], source_count: int
    ) -> dict[str, Any]:
        # `micro_batch` matters only without `starts`.
        size = self.micro_batch or 1
        return _core.plan_statistics(self.lengths, records, starts, size, accumulate, labels, source_count)

    def _measure_file_order(self) -> dict[str, Any]:
        if self.token_budget is None:
            return self._measure(_NO_INT64, _NO_INT64, 1, _NO_INT32, 0)
        baseline = bucket_plan(
            self.lengths, self.micro_batch, None, token_budget=self.token_budget, row_overhead=self.row_overhead
        )
        return self._measure(baseline.records, baseline.starts, 1, _NO_INT32, 0)

    def _cost_rows(self, cost_rows: int | None) -> int | None:
        if self._starts is None:
            return None  # one size: a micro-batch costs what the model says, and there is nothing to scale
        cost_rows = cost_rows if cost_rows is not None else self.micro_batch
        if cost_rows is None:
            raise ValueError("a plan by token budget alone needs cost_rows: the rows the cost model was fitted on")
        return _in_range("cost_rows", cost_rows, 1, 2**31)


@dataclass(frozen=True)
class _CostModel:
    """t(w) = linear w + quadratic w^2 seconds; scaled by rows / `rows` where `rows` is given."""

    linear: float
    quadratic: float
    rows: int | None

    def _terms(self, statistics: dict[str, Any]) -> tuple[float, float]:
        if self.rows is None:
            return self.linear * statistics["mean_width"], self.quadratic * statistics["mean_square_width"]
        return (
            self.linear * statistics["mean_rows_width"] / self.rows,
            self.quadratic * statistics["mean_rows_square_width"] / self.rows,
        )

    def micro_batch_s(self, statistics: dict[str, Any]) -> float:
        return sum(self._terms(statistics))

    def quadratic_share(self, statistics: dict[str, Any]) -> float:
        linear, quadratic = self._terms(statistics)
        return quadratic / (linear + quadratic) if linear + quadratic else 0.0


@dataclass(frozen=True, eq=False)
class RecordRows:
    """Which stretch of which record each row of a loader holds, after a sequence length was imposed.

    Row r is tokens `start[r]` to `start[r] + length[r]` of record `record[r]`. A row has room for `seq_len - 1` of
    them: its first position is the context, end-of-text, or for a later piece of a split record the token before it.
    """

    record: Int64Array  # [rows]
    start: Int64Array  # [rows], tokens
    length: Int64Array  # [rows], tokens
    seq_len: int | None
    over: Over
    records_over: int  # records longer than a row has room for
    records_lost: int  # records of which no token is left
    tokens_lost: int
    cut: Int64Array = field(repr=False)  # record numbers that lost tokens

    def __len__(self) -> int:
        return len(self.record)

    @property
    def record_is_row(self) -> bool:
        """Row r is the whole record r."""
        return self.records_over == 0

    def report(self, bytes_lost: int | None) -> dict[str, Any]:
        """The truncation report, JSON-ready. `bytes_lost`: UTF-8 bytes of the lost tokens; None if unknown."""
        return {
            "seq_len": self.seq_len,
            "over": self.over,
            "rows": len(self),
            "records_over": self.records_over,
            "records_lost": self.records_lost,
            "tokens_lost": self.tokens_lost,
            "bytes_lost": bytes_lost if self.tokens_lost else 0,
        }


def fit_rows(lengths: ArrayLike, seq_len: int | None, over: Over = "truncate") -> RecordRows:
    """Rows for records under a sequence length: `truncate` keeps the head, `drop` leaves the record out, `split` makes
    pieces, each beginning with the token before it as context, so every token is still a target exactly once.

    lengths: integers [records], in tokens. seq_len: positions a row has at most, 2 or more; None: no limit.
    """
    array = _as_lengths(lengths).astype(np.int64, copy=False)
    if over not in OVER_POLICIES:
        raise ValueError(f"over {over!r}: expected one of {', '.join(OVER_POLICIES)}")
    if len(array) and array.min() < 0:
        raise ValueError(f"record {int(array.argmin())} has length {int(array.min())}: lengths are tokens, 0 or more")
    record = np.arange(len(array), dtype=np.int64)
    start = np.zeros(len(array), np.int64)
    if seq_len is None:
        return RecordRows(record, start, array, None, over, 0, 0, 0, _NO_INT64)
    room = _in_range("seq_len", seq_len, 2, 2**62) - 1
    too_long = np.flatnonzero(array > room)
    lost = int((array[too_long] - room).sum())
    if over == "truncate":
        return RecordRows(record, start, np.minimum(array, room), seq_len, over, len(too_long), 0, lost, too_long)
    if over == "drop":
        kept = np.flatnonzero(array <= room)
        lost = int(array[too_long].sum())
        return RecordRows(
            kept, start[: len(kept)], array[kept], seq_len, over, len(too_long), len(too_long), lost, too_long
        )
    pieces = np.maximum(1, -(-array // room))
    record = np.repeat(record, pieces)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = (np.arange(len(record), dtype=np.int64) - first) * room
    length = np.minimum(array[record] - start, room)
    return RecordRows(record, start, length, seq_len, over, len(too_long), 0, 0, _NO_INT64)


@dataclass(frozen=True, eq=False)
class PlanResult:
    """What `prism-fast plan` computes: the plan that saves most, and a report on every order it was compared with."""

    plan: BucketPlan
    reports: list[dict[str, Any]]  # file order first
    rows: RecordRows
    truncation: dict[str, Any]
    corpus: dict[str, Any]

    def write(self, path: str | Path) -> None:
        """Writes the plan's manifest; see `write_manifest`."""
        report = next(row for row in reversed(self.reports) if row["bucket"] == self.plan.bucket)
        write_manifest(path, self.plan, corpus=self.corpus, rows=self.rows, truncation=self.truncation, report=report)


def plan_corpus(
    corpus: str | Path,
    *,
    micro_batch: int | None,
    buckets: Sequence[Bucket],
    seed: int = 0,
    token_budget: int | None = None,
    accumulate: int = 8,
    cost: Sequence[float] | None = None,
    cost_rows: int | None = None,
    seq_len: int | None = None,
    over: Over = "truncate",
    split: str = "train",
    tokenizer: Tokenizer | None = None,
    corpus_is_lengths: bool = False,
    sources: str | Path | None = None,
) -> PlanResult:
    """Plans a corpus with each bucket size and compares.

    corpus: a packed corpus, "sample", text (packed into the cache first), one shard or token file of another tool, or
    with `corpus_is_lengths` a `.npy` of record lengths. split: of a corpus, "all" for all of them. tokenizer: of text
    and of other tools' files, by default GPT-2's. sources: a `.npy` with the source of each record; default: its
    shard, where there are several. Other arguments as in `compare_buckets` and `fit_rows`.
    Raises DataError, UsageError, and ValueError as `bucket_plan`.
    """
    records = _lengths_file(corpus) if corpus_is_lengths else _corpus_records(corpus, split, tokenizer)
    labels = records.shard_numbers if sources is None else _load_npy(sources)
    if labels is not None and labels.shape != records.lengths.shape:
        raise DataError(
            f"{sources}: expected the sources of {len(records.lengths)} records of {corpus}, found shape {labels.shape}"
        )
    rows = fit_rows(records.lengths, seq_len, over)
    plan, reports = compare_buckets(
        rows.length,
        micro_batch,
        buckets,
        seed,
        token_budget=token_budget,
        row_overhead=1,
        accumulate=accumulate,
        sources=None if labels is None else labels[rows.record],
        cost=cost,
        cost_rows=cost_rows,
    )
    return PlanResult(plan, reports, rows, rows.report(records.bytes_lost(rows)), records.identity)


@dataclass(frozen=True, eq=False)
class _Records:
    """The records that a command line names."""

    lengths: NDArray[Any]
    identity: dict[str, Any]
    shards: list[Shard] = field(default_factory=list)
    tokenizer: Tokenizer | None = None

    @property
    def shard_numbers(self) -> NDArray[Any] | None:
        if len(self.shards) < 2:
            return None
        return np.repeat(np.arange(len(self.shards)), [len(shard) for shard in self.shards])

    def bytes_lost(self, rows: RecordRows) -> int | None:
        """UTF-8 bytes of the tokens that `rows` left out; None if nothing says how long a token is."""
        if not self.shards:
            return None
        if rows.over == "drop":
            utf8_bytes = np.concatenate([shard.utf8_bytes for shard in self.shards])
            return int(utf8_bytes[rows.cut].sum(dtype=np.int64))
        if self.tokenizer is None:
            return None
        token_bytes = self.tokenizer.token_bytes
        first = np.cumsum([0, *(len(shard) for shard in self.shards)])
        lost = 0
        for record in rows.cut.tolist():
            shard = int(np.searchsorted(first, record, side="right")) - 1
            tail = self.shards[shard][record - int(first[shard])][int(rows.length[record]) :]
            lost += int(token_bytes[tail].sum(dtype=np.int64))
        return lost


def _lengths_file(path: str | Path) -> _Records:
    lengths = _as_lengths(_load_npy(path))
    return _Records(lengths, _identity(Path(path).name, None, lengths))


def _corpus_records(spec: str | Path, split: str, tokenizer: Tokenizer | None) -> _Records:
    from prism_fast.data.corpus import open_corpus, resolve_data
    from prism_fast.data.manifest import NAME
    from prism_fast.data.shards import PRISM_SHARD, open_shard
    from prism_fast.data.stream import shards_fingerprint, tokenizer_of
    from prism_fast.data.tokenizers import reference_tokenizer

    path = Path(spec)
    given = tokenizer or reference_tokenizer("gpt2")
    if path.suffix == ".prsh":
        shards = [open_shard(path)]
    elif path.suffix in _TOKEN_FILES:
        shards = [open_shard(path, tokenizer=given)]
    else:
        corpus = open_corpus(path) if (path / NAME).is_file() else resolve_data(spec, given)
        splits = corpus.splits if split == "all" else (split,)
        shards = [shard for name in splits for shard in corpus.split(name).open()]
    lengths = np.concatenate([_NO_INT64, *(shard.lengths for shard in shards)])
    known: Tokenizer | None = given
    if shards and shards[0].format == PRISM_SHARD and shards[0].tokenizer_fingerprint != given.fingerprint:
        try:
            known = tokenizer_of(shards)
        except UsageError:
            known = None  # a tokenizer of which the shard holds only the name
    return _Records(lengths, _identity(path.name, shards_fingerprint(shards), lengths), shards, known)


def _identity(name: str, fingerprint: str | None, lengths: NDArray[Any]) -> dict[str, Any]:
    tokens = int(lengths.sum(dtype=np.int64))
    return {"name": name, "fingerprint": fingerprint, "records": len(lengths), "tokens": tokens}


def lengths_digest(lengths: ArrayLike) -> str:
    """sha256 (hex) of lengths as little-endian int64: what a plan depends on besides its parameters."""
    return _sha256(_as_lengths(lengths))


def compare_buckets(
    lengths: ArrayLike,
    micro_batch: int | None,
    buckets: Sequence[Bucket],
    seed: int = 0,
    *,
    token_budget: int | None = None,
    row_overhead: int = 0,
    accumulate: int = 8,
    sources: ArrayLike | None = None,
    cost: Sequence[float] | None = None,
    cost_rows: int | None = None,
) -> tuple[BucketPlan, list[dict[str, Any]]]:
    """Reports on file order, then on each bucket size; returns the plan that saves most, and all the reports.

    Most predicted time saved if `cost` is given, otherwise most padded tokens; between equals the first listed.
    Only that plan is kept in memory. Arguments as in `bucket_plan` and `BucketPlan.report`.
    """
    best: tuple[float, BucketPlan] | None = None
    reports: list[dict[str, Any]] = []
    for bucket in [None, *buckets]:
        plan = bucket_plan(lengths, micro_batch, bucket, seed, token_budget=token_budget, row_overhead=row_overhead)
        report = plan.report(accumulate, sources, cost, cost_rows)
        reports.append(report)
        saved = report["saved_padded_tokens"] if cost is None else report["saved_time"]
        # File order is the baseline, chosen only where nothing else was asked for.
        if (bucket is not None and (best is None or best[1].bucket is None or saved > best[0])) or best is None:
            best = saved, plan
    assert best is not None
    return best[1], reports


def write_manifest(
    path: str | Path,
    plan: BucketPlan,
    *,
    corpus: dict[str, Any],
    rows: RecordRows,
    truncation: dict[str, Any],
    report: dict[str, Any],
) -> None:
    """Writes a plan so that another run can replay it: parameters, what they apply to, and the digest to expect.

    The order itself follows from these and is not stored. `corpus`: JSON-ready identity (name, fingerprint, counts).
    """
    document = {
        "schema": MANIFEST_SCHEMA,
        "generator": GENERATOR,
        "corpus": corpus,
        "lengths_sha256": lengths_digest(plan.lengths),
        "seq_len": rows.seq_len,
        "over": rows.over,
        "parameters": plan.parameters(),
        "micro_batches": len(plan),
        "order_sha256": plan.digest,
        "truncation": truncation,
        "report": report,
    }
    text = orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(text)
    temporary.replace(path)


def read_manifest(
    path: str | Path, lengths: ArrayLike, fingerprint: str | None = None
) -> tuple[BucketPlan, RecordRows]:
    """Replays a plan that `write_manifest` wrote over the corpus of these record lengths.

    `fingerprint`: of the corpus at hand; compared with the manifest's where both are known. Raises DataError when
    the file, the corpus or the order that comes out is not the one written down.
    """
    path = Path(path)
    lengths = _as_lengths(lengths)  # what is wrong with these is not the manifest's fault
    try:
        document = orjson.loads(path.read_bytes())
        if document["schema"] != MANIFEST_SCHEMA or document["generator"] != GENERATOR:
            raise DataError(
                f"{path}: schema {document['schema']!r}, generator {document['generator']!r}; this engine replays "
                f"{MANIFEST_SCHEMA!r} made with {GENERATOR!r}"
            )
        written = document["corpus"].get("fingerprint")
        if fingerprint is not None and written is not None and written != fingerprint:
            raise DataError(f"{path}: made for corpus {written}, but this corpus is {fingerprint}")
        rows = fit_rows(lengths, document["seq_len"], document["over"])
        found = lengths_digest(rows.length)
        if found != document["lengths_sha256"]:
            raise DataError(
                f"{path}: made for record lengths with sha256 {document['lengths_sha256']}, but those of this corpus "
                f"have {found}; plan this corpus anew"
            )
        plan = bucket_plan(rows.length, **document["parameters"])
        expected = document["order_sha256"]
    except DataError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:  # of the JSON, or of its values
        raise DataError(f"{path}: not a {MANIFEST_SCHEMA} manifest ({error!r}); plan this corpus anew") from error
    if plan.digest != expected:
        raise DataError(f"{path}: the order replayed from its parameters has sha256 {plan.digest}, expected {expected}")
    return plan, rows


def _load_npy(path: str | Path) -> NDArray[Any]:
    try:
        return np.load(path, allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{path}: not a .npy array of numbers ({error})") from error


def _sha256(*arrays: NDArray[Any]) -> str:
    state = hashlib.sha256()
    for array in arrays:
        state.update(np.ascontiguousarray(array, "<i8").data)
    return state.hexdigest()


def _as_lengths(lengths: ArrayLike) -> NDArray[Any]:
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"lengths have shape {array.shape}: expected one integer a record")
    if array.dtype.kind not in "iu":
        if array.size:
            raise TypeError(f"lengths are {array.dtype}: expected integers, in tokens")
        array = array.astype(np.int64)
    if array.dtype not in _NATIVE_LENGTHS:
        if array.dtype.kind == "u" and array.itemsize == 8 and array.size and array.max() > np.iinfo(np.int64).max:
            raise ValueError(f"record {int(array.argmax())} has length {int(array.max())}: more than 2^63 - 1 tokens")
        array = array.astype(np.int64 if array.itemsize >= 4 else np.int32)
    return np.ascontiguousarray(array)


def _source_numbers(sources: ArrayLike | None, records: int) -> tuple[NDArray[np.int32], int]:
    if sources is None:
        return _NO_INT32, 0
    labels = np.asarray(sources)
    if labels.shape != (records,):
        raise ValueError(f"sources have shape {labels.shape}: expected one for each of {records} records")
    names, numbers = np.unique(labels, return_inverse=True)
    return numbers.astype(np.int32), len(names)


def _saved(mine: float, baseline: float) -> float:
    return 1 - mine / baseline if baseline else 0.0


def _in_range(name: str, value: int, low: int, high: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}: expected an integer")
    value = value.__index__()
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}: expected {low} to {high}")
    return value
