"""Text to shards: tokenised in parallel, checked byte for byte, resumable, the same bytes at any worker count."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from prism_fast.data.documents import Document, DocumentReader, Source, find_sources
from prism_fast.data.manifest import NAME as MANIFEST
from prism_fast.data.manifest import (
    SPLITS,
    Dataset,
    InputCounts,
    Manifest,
    Partition,
    ShardEntry,
    SplitEntry,
    TokenizerEntry,
    canonical_json,
)
from prism_fast.data.shards import ShardWriter, document_id
from prism_fast.data.tokenizers import Tokenizer
from prism_fast.protocol.canonical import write_atomically
from prism_fast.protocol.errors import DataError, UsageError

DOCUMENTS_PER_SHARD = 65_536
JOURNAL = "PACKING.json"  # present while a folder is being packed; what a killed packer goes on from
LOCK = "PACKING.lock"
_CHUNK_BYTES = 1 << 20  # tiny documents cost a call each, so workers are handed about this much text at once
_CHUNK_DOCUMENTS = 4096


@dataclass(frozen=True)
class Progress:
    """How far a packer is. bytes_done of bytes_total: input files as on disk. text_bytes: UTF-8 packed so far."""

    stage: str
    bytes_done: int
    bytes_total: int
    documents: int
    tokens: int
    text_bytes: int


ProgressCallback = Callable[[Progress], None]


class Encoded(NamedTuple):
    """A run of documents of one split, tokenised. Arrays have one entry a document, `tokens` one a token."""

    split: str
    tokens: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.uint64]
    utf8_bytes: npt.NDArray[np.uint64]
    doc_ids: npt.NDArray[np.uint64]
    replaced: npt.NDArray[np.bool_]
    taken: npt.NDArray[np.int64]  # documents of the input up to and with this one, counted within the run
    consumed: int  # documents of the input, refused ones included
    refused: list[DataError]


def encode_run(split: str, documents: Sequence[Document], tokenizer: Tokenizer) -> Encoded:
    """Tokenises `documents`. One whose tokens do not stand for exactly its bytes is refused, by name."""
    kept = list(range(len(documents)))
    refused: list[DataError] = []
    try:
        tokens, lengths = tokenizer.encode_utf8_run([document.data for document in documents])
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException:  # a panic of the tokenizer's core is no Exception; now one by one, to find whose it is
        kept, arrays = [], []
        for number, document in enumerate(documents):
            try:
                arrays.append(tokenizer.encode_utf8(document.data))
                kept.append(number)
            except (KeyboardInterrupt, SystemExit, MemoryError):
                raise
            except BaseException as error:
                refused.append(DataError(f"{document.where}: document {document.id!r}: the tokenizer failed: {error}"))
        lengths = np.fromiter(map(len, arrays), np.uint64, len(arrays))
        tokens = np.concatenate(arrays) if arrays else np.empty(0, np.uint32)
    counted = tokenizer.table.count(tokens, lengths)
    sizes = np.fromiter((len(documents[i].data) for i in kept), np.uint64, len(kept))
    if (counted != sizes).any():
        exact = counted == sizes
        for i in np.flatnonzero(~exact):
            document = documents[kept[i]]
            refused.append(
                DataError(
                    f"{document.where}: document {document.id!r}: expected tokens of its {sizes[i]} UTF-8 bytes, "
                    f"found tokens of {counted[i]}"
                )
            )
        tokens = tokens[np.repeat(exact, lengths.astype(np.int64))]
        lengths, sizes = lengths[exact], sizes[exact]
        kept = [number for number, good in zip(kept, exact, strict=True) if good]
    return Encoded(
        split,
        tokens,
        lengths,
        sizes,
        np.fromiter((document_id(documents[i].id) for i in kept), np.uint64, len(kept)),
        np.fromiter((documents[i].replaced for i in kept), np.bool_, len(kept)),
        np.array(kept, np.int64) + 1,
        len(documents),
        refused,
    )


def _runs(documents: Iterable[tuple[str, Document]]) -> Iterator[tuple[str, list[Document]]]:
    """Groups documents of one split, in order, into runs of about `_CHUNK_BYTES`."""
    pending: dict[str, list[Document]] = {}
    sizes: dict[str, int] = {}
    for split, document in documents:
        run = pending.setdefault(split, [])
        run.append(document)
        sizes[split] = sizes.get(split, 0) + len(document.data)
        if sizes[split] >= _CHUNK_BYTES or len(run) >= _CHUNK_DOCUMENTS:
            yield split, pending.pop(split)
            sizes.pop(split)
    yield from pending.items()


class Pending(Protocol):
    """A run being tokenised."""

    def result(self) -> Encoded: ...

    def cancel(self) -> object: ...


class Encoders(Protocol):
    """Where runs are tokenised, `width` of them at a time."""

    width: int

    def submit(self, split: str, documents: Sequence[Document]) -> Pending: ...


class ThreadEncoders:
    """`Encoders` on `workers` threads of this process: tiktoken releases the GIL."""

    def __init__(self, tokenizer: Tokenizer, workers: int) -> None:
        self.width = workers
        self._tokenizer = tokenizer
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(workers)

    def __enter__(self) -> ThreadEncoders:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def submit(self, split: str, documents: Sequence[Document]) -> Pending:
        return self._pool.submit(self._encode, split, documents)

    def _encode(self, split: str, run: Sequence[Document]) -> Encoded:
        # A thread's first run with the shared tokenizer: where there is one only, a twin would take as long to make.
        self._own.runs = getattr(self._own, "runs", 0) + 1
        if self._own.runs == 2:
            self._own.twin = self._tokenizer.twin()
        return encode_run(split, run, self._tokenizer if self._own.runs == 1 else self._own.twin)


def encode_in_order(documents: Iterable[tuple[str, Document]], encoders: Encoders) -> Iterator[Encoded]:
    """Tokenises documents; results come in input order. Holds about 2 * encoders.width runs in memory."""
    waiting: deque[Pending] = deque()
    try:
        for split, run in _runs(documents):
            waiting.append(encoders.submit(split, run))
            if len(waiting) > 2 * encoders.width:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for pending in waiting:
            pending.cancel()


def _encoded(
    documents: Iterable[tuple[str, Document]], tokenizer: Tokenizer, workers: int, encoders: Encoders | None
) -> Iterator[Encoded]:
    """By `encoders`, or by `workers` threads of this process; one worker is this thread."""
    if encoders is not None:
        yield from encode_in_order(documents, encoders)
    elif workers == 1:
        for split, run in _runs(documents):
            yield encode_run(split, run, tokenizer)
    else:
        with ThreadEncoders(tokenizer, workers) as threads:
            yield from encode_in_order(documents, threads)


class _SplitWriter:
    """Cuts one split into shards of `documents_per_shard` records; `entry` grows as shards are finished."""

    def __init__(
        self, root: Path, split: str, tokenizer: Tokenizer, documents_per_shard: int, entry: SplitEntry, consumed: int
    ) -> None:
        self.root, self.split, self.tokenizer = root, split, tokenizer
        self.documents_per_shard = documents_per_shard
        self.entry = entry
        self.consumed = consumed  # input documents in finished shards
        self.open_counts = SplitEntry()  # of the shard being written
        self.open_consumed = 0
        self.writer: ShardWriter | None = None

    def add(self, run: Encoded) -> bool:
        """Appends a run; True when a shard was finished."""
        finished = False
        bounds = np.concatenate([[0], np.cumsum(run.lengths, dtype=np.int64)])
        done, taken, count = 0, 0, len(run.lengths)
        while done < count:
            if self.writer is None:
                self.writer = ShardWriter(self.root / self._name(), self.tokenizer)
            take = min(count - done, self.documents_per_shard - self.writer.records)
            stop = done + take
            self.writer.add(
                run.tokens[bounds[done] : bounds[stop]],
                run.lengths[done:stop],
                run.utf8_bytes[done:stop],
                run.doc_ids[done:stop],
            )
            upto = int(run.taken[stop - 1])
            self.open_counts.empty_documents += int((run.utf8_bytes[done:stop] == 0).sum())
            self.open_counts.replaced_surrogates += int(run.replaced[done:stop].sum())
            self.open_counts.refused_documents += (upto - taken) - take
            self.open_consumed += upto - taken
            done, taken = stop, upto
            if self.writer.records == self.documents_per_shard:
                self.close()
                finished = True
        self.open_counts.refused_documents += run.consumed - taken
        self.open_consumed += run.consumed - taken
        return finished

    def _name(self) -> str:
        return f"{self.split}/shard-{len(self.entry.shards):05d}.prsh"

    def close(self) -> None:
        """Finishes the open shard, if there is one."""
        if self.writer is not None:
            writer, self.writer = self.writer, None
            name = self._name()
            counts = {"documents": writer.records, "tokens": writer.n_tokens, "bytes": writer.n_bytes}
            writer.finish()
            path = self.root / name
            shard = ShardEntry(name=name, sha256=sha256_of(path), size_bytes=path.stat().st_size, **counts)
            self.entry.shards.append(shard)
            self.entry.documents += shard.documents
            self.entry.tokens += shard.tokens
            self.entry.bytes += shard.bytes
        self.entry.empty_documents += self.open_counts.empty_documents
        self.entry.replaced_surrogates += self.open_counts.replaced_surrogates
        self.entry.refused_documents += self.open_counts.refused_documents
        self.consumed += self.open_consumed
        self.open_counts, self.open_consumed = SplitEntry(), 0


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Holds a lock that the system drops when the process dies. Without `wait`: UsageError when it is taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UsageError(f"{path.parent}: another process is packing into this folder: wait for it") from None
        yield


def pack_splits(
    documents: Iterable[tuple[str, Document]],
    out: Path,
    tokenizer: Tokenizer,
    *,
    splits: Sequence[str],
    identity: Mapping[str, Any],
    documents_per_shard: int,
    workers: int,
    encoders: Encoders | None = None,
    refuse: Callable[[DataError], None],
    progress: Callable[[SplitEntry], None] | None = None,
) -> dict[str, SplitEntry]:
    """Writes (split, document) pairs as shards below `out`, in the order given, and returns what it wrote.

    After a kill, a call with the same `identity` goes on after the last finished shard of each split: documents up to
    there are passed over, not tokenised. `refuse` gets each document that could not be tokenised.
    """
    out.mkdir(parents=True, exist_ok=True)
    journal = out / JOURNAL
    key = hashlib.sha256(
        canonical_json([dict(identity), tokenizer.fingerprint, documents_per_shard, list(splits)])
    ).hexdigest()
    state = _read_journal(journal, key, out)
    writers = {}
    for split in splits:
        (out / split).mkdir(exist_ok=True)
        saved = state.get(split, {"consumed": 0, "entry": {}})
        entry = SplitEntry.model_validate(saved["entry"])
        writers[split] = _SplitWriter(out, split, tokenizer, documents_per_shard, entry, saved["consumed"])
        known = {shard.name for shard in entry.shards}
        for path in (out / split).iterdir():  # an unfinished or unrecorded shard of the killed packer
            if f"{split}/{path.name}" not in known:
                path.unlink()

    def save() -> None:
        record = {name: {"consumed": w.consumed, "entry": w.entry.model_dump()} for name, w in writers.items()}
        write_atomically(journal, canonical_json({"key": key, "splits": record}))

    save()
    passed = {split: writer.consumed for split, writer in writers.items()}

    def rest() -> Iterator[tuple[str, Document]]:
        for split, document in documents:
            if passed[split]:
                passed[split] -= 1
            else:
                yield split, document

    runs = _encoded(rest(), tokenizer, workers, encoders)
    try:
        for run in runs:
            for error in run.refused:
                refuse(error)
            if writers[run.split].add(run):
                save()
            if progress is not None:
                progress(_totals(writers.values()))
        for writer in writers.values():
            writer.close()
    finally:
        runs.close()  # type: ignore[attr-defined]
        for writer in writers.values():
            if writer.writer is not None:
                writer.writer.abandon()
    save()
    return {split: writer.entry for split, writer in writers.items()}


def _read_journal(journal: Path, key: str, out: Path) -> dict[str, Any]:
    if not journal.exists():
        return {}
    state = json.loads(journal.read_bytes())
    if state["key"] != key:
        raise UsageError(
            f"{out}: holds an unfinished packing of other inputs or settings: remove it, or choose another folder"
        )
    return state["splits"]


def _totals(writers: Iterable[_SplitWriter]) -> SplitEntry:
    total = SplitEntry()
    for writer in writers:
        total.documents += writer.entry.documents + (writer.writer.records if writer.writer else 0)
        total.tokens += writer.entry.tokens + (writer.writer.n_tokens if writer.writer else 0)
        total.bytes += writer.entry.bytes + (writer.writer.n_bytes if writer.writer else 0)
    return total


def sha256_of(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokenizer_entry(tokenizer: Tokenizer) -> TokenizerEntry:
    return TokenizerEntry(
        name=tokenizer.name, fingerprint=tokenizer.fingerprint, n_vocab=tokenizer.n_vocab, end_of_text=tokenizer.eot
    )


def source_identity(sources: Sequence[Source]) -> list[list[Any]]:
    """What tells one state of input files from another without reading them."""
    return [[source.name, source.size, source.mtime_ns] for source in sources]


def pack(
    inputs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    split: str = "train",
    dataset: Dataset | None = None,
    documents_per_shard: int = DOCUMENTS_PER_SHARD,
    workers: int | None = None,
    encoders: Encoders | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    id_key: str = "id",
    text_key: str = "text",
    progress: ProgressCallback | None = None,
) -> Manifest:
    """Packs files or folders (JSONL, Parquet, text) into `out`, in input order, as one split, and writes MANIFEST.json.

    A killed packer goes on when called again with the same arguments; `workers` (default: the cores at hand) may
    differ, and so may `encoders`, which tokenise elsewhere (`campaign.encoders`). Memory is bounded by the workers and
    the longest document. Raises UsageError (nothing to read, a folder that holds something else), DataError naming
    file and line (unless `on_error="skip"`, which counts), OSError.
    """
    if split not in SPLITS:
        raise UsageError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    sources = find_sources(inputs)
    reader = DocumentReader(sources, on_error=on_error, id_key=id_key, text_key=text_key)
    return pack_given(
        ((split, document) for document in reader),
        reader,
        Path(out),
        tokenizer,
        splits=[split],
        dataset=dataset or Dataset(name="unnamed"),
        documents_per_shard=documents_per_shard,
        workers=workers,
        encoders=encoders,
        progress=progress,
    )


def pack_given(
    documents: Iterable[tuple[str, Document]],
    reader: DocumentReader,
    out: Path,
    tokenizer: Tokenizer,
    *,
    splits: Sequence[str],
    dataset: Dataset,
    documents_per_shard: int,
    workers: int | None,
    encoders: Encoders | None = None,
    progress: ProgressCallback | None,
) -> Manifest:
    """Packs (split, document) pairs that `reader` yields, in its order, and writes the manifest."""

    def report(total: SplitEntry) -> None:
        if progress is not None:
            progress(
                Progress("pack", reader.bytes_done, reader.bytes_total, total.documents, total.tokens, total.bytes)
            )

    with claimed(out):
        entries = pack_splits(
            documents,
            out,
            tokenizer,
            splits=splits,
            identity={"sources": source_identity(reader.sources), "keys": [reader.id_key, reader.text_key],
                      "on_error": reader.on_error},
            documents_per_shard=documents_per_shard,
            workers=workers or default_workers(),
            encoders=encoders,
            refuse=reader.refuse_tokens,
            progress=report,
        )  # fmt: skip
        manifest = Manifest(
            dataset=dataset,
            partition=Partition(kind="as-given"),
            order="input",
            tokenizer=tokenizer_entry(tokenizer),
            documents_per_shard=documents_per_shard,
            input=InputCounts(skipped_lines=reader.skipped),
            splits=entries,
        )
        finish(out, manifest)
    return manifest


def require_free(out: Path) -> None:
    """UsageError when `out` holds a whole corpus, or anything but an unfinished one."""
    if (out / MANIFEST).exists():
        raise UsageError(f"{out}: already holds a packed corpus: choose another folder")
    if out.exists() and not (out / JOURNAL).exists():
        others = sorted(path.name for path in out.iterdir() if path.name != LOCK)
        if others:
            raise UsageError(f"{out}: expected an empty or new folder, found {others[0]!r}: choose another")


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Holds `out` for this process; UsageError when another packs into it or it is not free."""
    require_free(out)  # before anything is made there
    with locked(out / LOCK, wait=False):
        require_free(out)
        yield


def finish(out: Path, manifest: Manifest) -> None:
    """The manifest makes a folder a corpus, so it comes last but for the clearing away."""
    manifest.write(out)
    (out / JOURNAL).unlink()
    (out / LOCK).unlink()


def default_workers() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
