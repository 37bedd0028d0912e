"""Canonical JSON and digests: the one byte string a document has, so that its sha256 means something."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import orjson


def canonical_json(document: Any) -> bytes:
    """UTF-8 JSON with sorted keys, no spaces, shortest round-trip floats; NaN and infinities become null."""
    return orjson.dumps(document, option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY)


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: str | Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_atomically(path: str | Path, data: bytes) -> None:
    """Writes beside `path`, fsyncs, renames: a reader sees the old file or the whole new one, never a part."""
    path = Path(path)
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: str | Path, document: Any, *, indent: bool = True) -> None:
    """Writes a document for people (indented) or machines, atomically, keys in the order given."""
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE | (orjson.OPT_INDENT_2 if indent else 0)
    write_atomically(path, orjson.dumps(document, option=option))
