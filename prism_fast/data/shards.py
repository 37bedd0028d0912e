"""Token shards: open, read, check, write. The format lives in csrc/shard; its spec is docs/shard-format.md."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_fast import _core
from prism_fast.data.tokenizers import Tokenizer
from prism_fast.protocol.errors import DataError

PathLike = str | os.PathLike[str]
PRISM_SHARD = "prism_shard.v1"
CONVERT_RECORDS = 1024  # records copied at once


def document_id(name: str) -> int:
    """What a shard keeps of a document's id: the first 8 bytes, little-endian, of sha256 over its UTF-8."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "little")


class Shard:
    """An open shard: `len(shard)` records, `shard[i]` the tokens of record i.

    Arrays are read-only views of the file where it is mapped, and outlive this object. With `access="pread"` (the
    default on network filesystems) records are copies, and a file cut short under us is an error, not a crash.
    """

    def __init__(self, core: Any) -> None:
        self.core = core

    def __len__(self) -> int:
        return self.core.records

    def __getitem__(self, record: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Tokens of one record, unsigned, in the width of the file. DataError when its offsets contradict."""
        index = record + len(self) if record < 0 else record
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path}: record {record} of {len(self)}")
        return self.core.record(index)

    def __iter__(self) -> Iterator[npt.NDArray[np.unsignedinteger[Any]]]:
        return (self[i] for i in range(len(self)))

    @property
    def path(self) -> str:
        return self.core.path

    @property
    def format(self) -> str:
        """`prism_shard.v1`, or the name of the foreign format."""
        return self.core.format

    @property
    def token_width(self) -> int:
        """Bytes of a stored token: 2 or 4 (foreign formats also 1 or 8)."""
        return self.core.token_width

    @property
    def n_tokens(self) -> int:
        """Tokens in records."""
        return self.core.tokens

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of all records."""
        self._need_bytes()
        return self.core.utf8_bytes_total

    @property
    def offsets(self) -> npt.NDArray[np.uint64]:
        """uint64 [records + 1]: record i has offsets[i + 1] - offsets[i] tokens."""
        return self.core.offsets

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """int64 [records]: tokens of each record."""
        return np.diff(self.core.offsets.astype(np.int64))

    @property
    def utf8_bytes(self) -> npt.NDArray[np.uint32]:
        """uint32 [records]: UTF-8 bytes of each record."""
        self._need_bytes()
        return self.core.utf8_bytes

    @property
    def doc_ids(self) -> npt.NDArray[np.uint64]:
        """uint64 [records]: `document_id` of each document; empty for foreign formats."""
        return self.core.doc_ids

    @property
    def tokens(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """All stored tokens, end to end."""
        return self.core.all_tokens()

    @property
    def tokenizer_name(self) -> str:
        return self.core.tokenizer_name

    @property
    def tokenizer_fingerprint(self) -> str:
        """sha256 in hex; zeros when the format does not say."""
        return self.core.tokenizer_fingerprint.hex()

    @property
    def fingerprint(self) -> str:
        """sha256 that names the content: of header and footer, which hold every count and section checksum. Of other
        formats, which hold none: of the layout, all record lengths and the first MiB of tokens."""
        return hashlib.sha256(self.core.seal()).hexdigest()

    def verify(self, tokenizer: Tokenizer | None = None) -> None:
        """Reads everything: checksums, padding, offsets, totals, ids, and with a tokenizer each record's bytes.

        Raises DataError naming file, offset, expected and found.
        """
        if tokenizer is not None:
            require_tokenizer(self, tokenizer)
        self.core.verify(None if tokenizer is None else tokenizer.table)

    def _need_bytes(self) -> None:
        if not self.core.knows_utf8_bytes:
            raise ValueError(
                f"{self.path}: a {self.format} file does not hold UTF-8 lengths: "
                "open it with tokenizer=..., which counts them"
            )


def require_tokenizer(shard: Shard, tokenizer: Tokenizer) -> None:
    """DataError when the shard was made by another tokenizer."""
    if shard.format == PRISM_SHARD and shard.tokenizer_fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{shard.path}: offset 96: expected the fingerprint {tokenizer.fingerprint} of tokenizer "
            f"{tokenizer.name!r}, found {shard.tokenizer_fingerprint} ({shard.tokenizer_name!r})"
        )


# Headerless token types by name, with their width in bytes. Signed ids below 0 read as ids far above any vocabulary.
DTYPES = {"u8": 1, "u16": 2, "u32": 4, "i32": 4, "u64": 8, "i64": 8,
          "uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8}  # fmt: skip


def open_shard(
    path: PathLike,
    *,
    tokenizer: Tokenizer | None = None,
    format: str | None = None,
    dtype: str | None = None,
    eot: int | None = None,
    one_record: bool = False,
    access: str = "auto",
) -> Shard:
    """Opens a shard: `prism_shard.v1`, or a token file of another tool, read in place.

    format: "prism", "llmc" (also modded-nanogpt), "megatron", "datatrove", "npy", "raw"; None: told by the content.
    dtype: token type of headerless files ("u16", "u32", "i32", ...). eot: the id that separates documents; where an
    index gives the documents (megatron, datatrove), it is taken off their ends. one_record: without an index and
    without eot, all is one record; with neither, the file is refused. tokenizer: must be the one that made a
    prism shard; for other formats it counts UTF-8 lengths (reading the whole file), and its end-of-text is the
    default of `eot`.
    access: "auto" (map local files, pread on network filesystems), "map" or "pread".

    Opening a prism shard checks header and footer and reads nothing else.
    Raises DataError naming file, offset, expected and found; FileNotFoundError and other OSError.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    if eot is None and tokenizer is not None and not one_record:
        eot = tokenizer.eot
    shard = Shard(
        _core.Shard.open(
            os.fspath(path),
            format=format or "",
            width=DTYPES[dtype] if dtype else 0,
            end_of_text=eot,
            one_record=one_record,
            access=access,
        )
    )
    if tokenizer is not None:
        require_tokenizer(shard, tokenizer)
        if shard.format != PRISM_SHARD:
            shard.core.count_utf8_bytes(tokenizer.table)
    return shard


def convert_shard(source: Shard, path: PathLike, tokenizer: Tokenizer) -> None:
    """Writes `source` (opened with this tokenizer) as a prism shard. Document ids are those of "<file name>:<record>"
    where the source has none. DataError on an id outside the vocabulary."""
    name = os.path.basename(source.path)
    own_ids = source.doc_ids
    with ShardWriter(path, tokenizer) as writer:
        for first in range(0, len(source), CONVERT_RECORDS):
            records = range(first, min(first + CONVERT_RECORDS, len(source)))
            arrays = [source[i] for i in records]
            ids = own_ids[first : records.stop] if len(own_ids) else [document_id(f"{name}:{i}") for i in records]
            lengths = np.fromiter(map(len, arrays), np.uint64, len(arrays))
            writer.add(np.concatenate(arrays), lengths, source.utf8_bytes[first : records.stop], ids)


class ShardWriter:
    """Writes one shard; `with` finishes it, an exception leaves nothing behind."""

    def __init__(self, path: PathLike, tokenizer: Tokenizer) -> None:
        self.path = os.fspath(path)
        self.tokenizer = tokenizer
        self._core: Any = _core.ShardWriter(
            self.path, tokenizer.name, bytes.fromhex(tokenizer.fingerprint), tokenizer.n_vocab, tokenizer.eot
        )

    def add(
        self,
        tokens: npt.ArrayLike,
        lengths: npt.ArrayLike,
        utf8_bytes: npt.ArrayLike,
        doc_ids: npt.ArrayLike,
    ) -> None:
        """Appends records: `tokens` end to end; `lengths`, `utf8_bytes`, `doc_ids` one a record.

        Raises ValueError on negative values or lengths that do not add up, DataError on an id outside the vocabulary.
        """
        self._core.add(
            unsigned(tokens, np.uint32, "token id"),
            unsigned(lengths, np.uint64, "record length"),
            unsigned(utf8_bytes, np.uint64, "UTF-8 length"),
            unsigned(doc_ids, np.uint64, "document id"),
        )

    @property
    def records(self) -> int:
        return self._core.records

    @property
    def n_tokens(self) -> int:
        return self._core.tokens

    @property
    def n_bytes(self) -> int:
        return self._core.utf8_bytes

    def finish(self) -> None:
        """Writes index, header and footer, syncs, and gives the file its name."""
        self._core.finish()
        self._core = None

    def abandon(self) -> None:
        """Removes what was written."""
        self._core = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._core is None:
            return
        if kind is None:
            self.finish()
        else:
            self.abandon()


def write_shard(
    path: PathLike,
    records: Sequence[npt.ArrayLike],
    *,
    tokenizer: Tokenizer,
    doc_ids: npt.ArrayLike | None = None,
) -> None:
    """Writes `records` (token ids each, text only, no end-of-text) as one shard; UTF-8 lengths come from the tokenizer.

    doc_ids: uint64 [records], see `document_id`; zeros by default. Raises as `ShardWriter.add`.
    """
    arrays = [unsigned(record, np.uint32, "token id") for record in records]
    lengths = np.fromiter(map(len, arrays), np.uint64, len(arrays))
    tokens = np.concatenate(arrays) if arrays else np.empty(0, np.uint32)
    ids = np.zeros(len(arrays), np.uint64) if doc_ids is None else doc_ids
    with ShardWriter(path, tokenizer) as writer:
        writer.add(tokens, lengths, tokenizer.table.count(tokens, lengths), ids)


def unsigned(values: npt.ArrayLike, dtype: Any, what: str) -> npt.NDArray[Any]:
    """`values` as a contiguous 1-D array of `dtype`; ValueError instead of a wrap, TypeError for non-integers."""
    array = np.asarray(values)
    if array.dtype.kind == "f" and not isinstance(values, np.ndarray):
        array = np.asarray(values, object)  # numpy makes floats of Python integers on both sides of 2^63
    if array.size == 0:
        return np.empty(0, dtype)
    if array.dtype.kind not in "uiO" or (array.dtype.kind == "O" and any(type(v) is not int for v in array.flat)):
        raise TypeError(f"{what}: expected integers, found {np.asarray(values).dtype}")
    if not np.can_cast(array.dtype, dtype):
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > np.iinfo(dtype).max:
            raise ValueError(f"{what} {low if low < 0 else high}: expected 0 to {np.iinfo(dtype).max}")
    return np.ascontiguousarray(array.ravel(), dtype)
