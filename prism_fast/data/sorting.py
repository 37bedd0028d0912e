"""Documents sorted by id and freed of duplicates, in bounded memory: sorted runs on disk, merged."""

from __future__ import annotations

import heapq
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from prism_fast.data.documents import Document

RUN_BYTES = 256 << 20  # text held in memory before a run is written
_FAN_IN = 128  # runs merged at once: each costs a descriptor and a buffer
_HEAD = struct.Struct("<IIIB")


class DocumentSorter:
    """Sorts by id (UTF-8 byte order); of documents with one id it keeps the one with the smallest text.

    That choice depends on the set of documents alone, never on their order. `duplicates` counts the documents left
    out, `conflicts` those of them whose text differed. Memory: `run_bytes` of text and its index; disk, below
    `folder`: the text once over. Nothing is written when all text fits in one run.
    """

    def __init__(self, folder: Path, run_bytes: int = RUN_BYTES) -> None:
        self.folder, self.run_bytes = folder, run_bytes
        self.duplicates = 0
        self.conflicts = 0

    def sort(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Reads all of `documents`, then yields them in order."""
        shutil.rmtree(self.folder, ignore_errors=True)  # of a killed sorter
        runs: list[Path] = []
        held: list[Document] = []
        size = written = 0

        def spill(items: Iterable[Document]) -> None:
            nonlocal written
            self.folder.mkdir(parents=True, exist_ok=True)
            runs.append(self.folder / f"run-{written:06d}")
            written += 1
            with runs[-1].open("wb") as file:
                for document in items:
                    fields = (_id(document), document.data, document.where.encode("utf-8", "surrogateescape"))
                    file.write(_HEAD.pack(*map(len, fields), document.replaced))
                    file.writelines(fields)

        for document in documents:
            held.append(document)
            size += len(document.data) + len(document.id)
            if size >= self.run_bytes:
                spill(sorted(held, key=_key))
                held, size = [], 0
        try:
            if not runs:
                yield from self._unique(sorted(held, key=_key))
                return
            if held:
                spill(sorted(held, key=_key))
            held = []
            while len(runs) > _FAN_IN:
                merged, runs[:] = runs[:_FAN_IN], runs[_FAN_IN:]
                spill(heapq.merge(*map(_read_run, merged), key=_key))
                for path in merged:
                    path.unlink()
            yield from self._unique(heapq.merge(*map(_read_run, runs), key=_key))
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _unique(self, documents: Iterable[Document]) -> Iterator[Document]:
        last: Document | None = None
        for document in documents:
            if last is not None and document.id == last.id:
                self.duplicates += 1
                self.conflicts += document.data != last.data
            else:
                yield document
                last = document


def _id(document: Document) -> bytes:
    return document.id.encode("utf-8", "surrogatepass")


def _key(document: Document) -> tuple[bytes, bytes, bool]:
    return _id(document), document.data, document.replaced


def _read_run(path: Path) -> Iterator[Document]:
    with path.open("rb", buffering=1 << 18) as file:
        while head := file.read(_HEAD.size):
            id_size, data_size, where_size, replaced = _HEAD.unpack(head)
            name = file.read(id_size).decode("utf-8", "surrogatepass")
            data = file.read(data_size)
            yield Document(name, data, file.read(where_size).decode("utf-8", "surrogateescape"), bool(replaced))
