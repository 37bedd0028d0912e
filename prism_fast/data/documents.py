"""Documents out of files: JSONL (.gz, .zst), Parquet and plain text, in a fixed order, one at a time.

Text is bytes: no newline translation, no normalisation. JSON lines end at `\\n` alone. What cannot be read is a
DataError naming file and line, or is counted and left out, as the caller says.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from prism_fast.data.tokenizers import utf8
from prism_fast.protocol.errors import DataError, UsageError

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".txt": "text"}
COMPRESSED = (".gz", ".zst")
EXPECTED = "*.jsonl, *.ndjson, *.txt (also .gz, .zst) or *.parquet"
_SPLIT_NAME = re.compile(r"(train|val|test)[-_.].*")
_PARQUET_BYTES = 16 << 20  # text decoded at once, about: a batch, never a column or a row group
_PARQUET_ROWS = 256


class Document(NamedTuple):
    """One document. id: its own, or "<file name>:<line>". data: UTF-8. where: "<path>:<line>", for errors.

    replaced: lone surrogates had to be replaced.
    """

    id: str
    data: bytes
    where: str
    replaced: bool


@dataclass(frozen=True)
class Source:
    """One input file. name: its path below the input that was given. kind: jsonl, parquet or text."""

    path: Path
    name: str
    kind: str
    size: int
    mtime_ns: int

    @property
    def split(self) -> str | None:
        """The split that the file name claims (`train-*`, `val-*`, `test-*`), if any."""
        match = _SPLIT_NAME.fullmatch(self.path.name)
        return match[1] if match else None


def find_sources(inputs: Iterable[str | os.PathLike[str]]) -> list[Source]:
    """The files of `inputs` (files, or folders searched to the bottom): by input, then sorted by name.

    UsageError for a path that does not exist, a file of unknown kind, or a folder without any text. Hidden files and
    files of other kinds in folders are passed over.
    """
    sources: list[Source] = []
    for item in inputs:
        root = Path(item)
        if root.is_dir():
            found = [
                _source(path, path.relative_to(root).as_posix())
                for path in root.rglob("*")
                if _kind(path) and path.is_file() and not any(p.startswith(".") for p in path.relative_to(root).parts)
            ]
            if not found:
                raise UsageError(f"{root}: no text in this folder: expected {EXPECTED}")
            sources += sorted(found, key=lambda source: source.name.encode())
        elif root.is_file():
            if not _kind(root):
                raise UsageError(f"{root}: expected {EXPECTED}")
            sources.append(_source(root, root.name))
        else:
            raise UsageError(f"{root}: no such file or folder")
    return sources


def _kind(path: Path) -> str | None:
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in COMPRESSED:
        kind = KINDS.get(suffixes[-2]) if len(suffixes) > 1 else None
        return None if kind == "parquet" else kind
    return KINDS.get(suffixes[-1]) if suffixes else None


def _source(path: Path, name: str) -> Source:
    info = path.stat()
    return Source(path, name, _kind(path) or "", info.st_size, info.st_mtime_ns)


class DocumentReader:
    """Iterates over the documents of `sources`, in order.

    on_error: "raise" (DataError naming file and line) or "skip" (counted in `skipped`). id_key, text_key: JSON keys
    or Parquet columns. bytes_done, bytes_total: progress, in bytes of the files as they are on disk.
    """

    def __init__(
        self, sources: Sequence[Source], *, on_error: str = "raise", id_key: str = "id", text_key: str = "text"
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error {on_error!r}: expected 'raise' or 'skip'")
        self.sources, self.on_error, self.id_key, self.text_key = sources, on_error, id_key, text_key
        self.skipped = 0
        self.bytes_total = sum(source.size for source in sources)
        self._finished = 0  # bytes of the files that are read to the end
        self._position: Callable[[], int] = lambda: 0  # in the current file

    @property
    def bytes_done(self) -> int:
        return self._finished + self._position()

    def __iter__(self) -> Iterator[Document]:
        for source in self.sources:
            yield from self.read(source)

    def read(self, source: Source) -> Iterator[Document]:
        """The documents of one source."""
        read = {"jsonl": self._jsonl, "parquet": self._parquet, "text": self._text}[source.kind]
        yield from read(source)
        self._position = lambda: 0
        self._finished += source.size

    def refuse(self, error: DataError) -> None:
        """Raises `error`, or counts it."""
        if self.on_error == "raise":
            raise error
        self.skipped += 1

    def refuse_tokens(self, error: DataError) -> None:
        """The same for a document that was read but could not be tokenised: its split has counted it."""
        if self.on_error == "raise":
            raise error

    def _jsonl(self, source: Source) -> Iterator[Document]:
        with ExitStack() as stack:
            stream = self._open(source, stack)
            number = 0
            while line := _guard(source, number + 1, stream.readline):
                number += 1
                if not line.strip():
                    continue
                try:
                    document = self._parse_line(line, source, number)
                except DataError as error:
                    self.refuse(error)
                    continue
                yield document

    def _parse_line(self, line: bytes, source: Source, number: int) -> Document:
        where = f"{source.path}:{number}"
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            # orjson refuses lone surrogates, which real corpora hold; the standard library reads them.
            try:
                record = json.loads(line.decode())
            except (ValueError, RecursionError):
                raise DataError(f"{where}: expected a JSON object, found {_excerpt(line)} ({error.msg})") from None
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected a JSON object, found {_excerpt(line)}")
        return self._document(record.get(self.id_key), record.get(self.text_key), source, number, where)

    def _document(self, name: Any, text: Any, source: Source, number: int, where: str) -> Document:
        if isinstance(text, bytes):
            try:
                text.decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where}: expected UTF-8, found byte 0x{text[error.start]:02x} at byte {error.start}"
                ) from None
            data, replaced = text, False
        elif isinstance(text, str):
            data, replaced = utf8(text)
        else:
            raise DataError(
                f"{where}: expected a string under {self.text_key!r}, found {_excerpt(repr(text).encode())}"
            )
        if name is None:
            name = f"{source.name}:{number}"
        elif isinstance(name, int) and not isinstance(name, bool):
            name = str(name)
        elif isinstance(name, bytes):
            try:
                name = name.decode()
            except UnicodeDecodeError:
                raise DataError(f"{where}: expected UTF-8 under {self.id_key!r}, found {name[:60]!r}") from None
        elif not isinstance(name, str):
            raise DataError(f"{where}: expected a string under {self.id_key!r}, found {_excerpt(repr(name).encode())}")
        return Document(name, data, where, replaced)

    def _parquet(self, source: Source) -> Iterator[Document]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            file = pq.ParquetFile(source.path)
            names = file.schema_arrow.names
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{source.path}: expected a Parquet file: {error}") from None
        with file:
            if self.text_key not in names:
                raise DataError(f"{source.path}: expected a column {self.text_key!r}, found {', '.join(names)}")
            columns = [self.text_key] + [self.id_key] * (self.id_key in names)
            rows, total = 0, max(1, file.metadata.num_rows)
            self._position = lambda: source.size * rows // total
            # Batches may cross row groups, and a column of any size is never put together.
            size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            batch_rows = max(1, min(_PARQUET_ROWS, _PARQUET_BYTES * total // max(1, size)))
            batches = file.iter_batches(batch_size=batch_rows, columns=columns, use_threads=False)
            while (batch := _guard(source, rows + 1, lambda: next(batches, None))) is not None:
                texts = _as_bytes(batch.column(self.text_key))
                ids = _as_bytes(batch.column(self.id_key)) if len(columns) == 2 else [None] * len(texts)
                for name, text in zip(ids, texts, strict=True):
                    rows += 1
                    try:
                        document = self._document(name, text, source, rows, f"{source.path}:{rows}")
                    except DataError as error:
                        self.refuse(error)
                        continue
                    yield document

    def _text(self, source: Source) -> Iterator[Document]:
        with ExitStack() as stack:
            data = _guard(source, 1, self._open(source, stack).read)
        try:
            yield self._document(source.name, data, source, 1, str(source.path))
        except DataError as error:
            self.refuse(error)

    def _open(self, source: Source, stack: ExitStack) -> BinaryIO:
        raw = stack.enter_context(source.path.open("rb"))
        self._position = raw.tell
        stack.callback(lambda: setattr(self, "_position", lambda: source.size))
        if source.path.suffix == ".gz":
            return stack.enter_context(gzip.open(raw))  # type: ignore[return-value]
        if source.path.suffix == ".zst":
            try:
                import zstandard
            except ImportError:
                raise UsageError(
                    f"{source.path}: reading .zst needs the zstandard package: pip install zstandard"
                ) from None
            reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
            return stack.enter_context(io.BufferedReader(reader, 1 << 20))
        return raw


def _guard(source: Source, number: int, read: Callable[[], Any]) -> Any:
    """Damage inside a compressed or columnar file cannot be skipped over: it is an error in any case."""
    try:
        return read()
    except (EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{source.path}:{number}: the compressed file is damaged or cut short: {error}") from None
    except Exception as error:
        # pyarrow raises bare OSErrors, without an errno, for bytes it cannot make sense of.
        foreign = type(error).__module__.split(".")[0] in ("zlib", "zstandard", "zstd", "pyarrow")
        if foreign or (isinstance(error, OSError) and error.errno is None):
            raise DataError(f"{source.path}:{number}: the file is damaged or cut short: {error}") from None
        raise


def _as_bytes(column: Any) -> list[Any]:
    """A column as Python values, strings as bytes, so that text which is not UTF-8 can be told from a fault of ours."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    return column.to_pylist()


def _excerpt(data: bytes, size: int = 60) -> str:
    text = data[: size + 1].rstrip(b"\n")
    return repr(text[:size].decode("utf-8", "backslashreplace")) + ("..." if len(text) > size else "")
