"""The scripts in a .zip. What a stranger packed is read here alone: all that can go wrong is one sentence about it.

`zipfile` reads what it is given in good faith. Of a damaged or hostile file it raises whatever it stumbles over
(struct.error, zlib.error, UnicodeDecodeError, IndexError, NotImplementedError ...), and what it unpacks by bzip2 or
LZMA has no bound. So sizes and methods are looked at before anything is unpacked, and whatever is raised here is a
BundleRejected that names the file.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path

from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleRejected

MAX_ARCHIVE_BYTES = 16 << 20  # zipfile keeps the whole directory of an archive in memory, 600 bytes and more an entry
MAX_ENTRIES = 10_000
SHOWN = 3  # names in a sentence
ENCRYPTED = 0x1
METHODS = {zipfile.ZIP_STORED: "stored", zipfile.ZIP_DEFLATED: "deflated"}


def read_scripts(path: Path, names: Collection[str], limit: int) -> dict[str, bytes]:
    """The files `names` of the archive at `path`, each of at most `limit` bytes.

    They may lie at the archive's root or together in one folder, as zipping a folder leaves them; `\\` separates as
    `/` does, since some packers on Windows write it. Raises BundleRejected (`prism:bundle-shape`) for all else.
    """
    try:
        size = path.stat().st_size
        if size > MAX_ARCHIVE_BYTES:
            raise _reject(f"{path}: {size} bytes; expected at most {MAX_ARCHIVE_BYTES}, two scripts take far less")
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if len(entries) > MAX_ENTRIES:
                raise _reject(f"{path}: {len(entries)} entries; expected at most {MAX_ENTRIES}")
            return {name: _unpacked(path, archive, _entry(path, entries, name), name, limit) for name in names}
    except BundleRejected:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:200] or "no more is known"
        raise _reject(f"{path}: not a readable zip archive: {type(error).__name__}: {said}") from error


def is_archive(path: Path) -> bool:
    """Whether a file is named or marked as a zip archive, which need not make it a good one."""
    if path.suffix.lower() == ".zip":
        return True
    try:
        return zipfile.is_zipfile(path)
    except Exception:
        return True  # it has the mark, and what follows is broken: `read_scripts` says how


def _reject(message: str) -> BundleRejected:
    return BundleRejected(message, rule=c.RULE_BUNDLE_SHAPE)


def _entry(path: Path, entries: list[zipfile.ZipInfo], name: str) -> zipfile.ZipInfo:
    """The one entry of that name that lies at the root or in one folder."""
    places = {id(entry): entry.filename.replace("\\", "/") for entry in entries}
    found = [entry for entry in entries if places[id(entry)].rpartition("/")[2] == name]
    if not found:
        raise _reject(f"{path}: no {name} inside; expected {name} at the archive's root or in one folder")
    depths = [places[id(entry)].count("/") for entry in found]
    if depths.count(min(depths)) > 1 or min(depths) > 1:
        named = ", ".join(entry.filename[:100] for entry in found[:SHOWN]) + " ..." * (len(found) > SHOWN)
        raise _reject(f"{path}: {name} stands at {named}; expected one, at the archive's root or in one folder")
    return found[depths.index(min(depths))]


def _unpacked(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str, limit: int) -> bytes:
    if entry.flag_bits & ENCRYPTED:
        raise _reject(f"{path}: {name} is encrypted; expected no password")
    if entry.compress_type not in METHODS:
        method = zipfile.compressor_names.get(entry.compress_type, str(entry.compress_type))  # type: ignore[attr-defined]
        raise _reject(f"{path}: {name} is compressed by {method}; expected {' or '.join(METHODS.values())}")
    if entry.file_size > limit:
        raise _reject(f"{path}: {name} is {entry.file_size} bytes; expected at most {limit}")
    with archive.open(entry) as stream:
        data = stream.read(limit + 1)  # deflate unpacks no more than is asked for
    if len(data) != entry.file_size or zlib.crc32(data) != entry.CRC:
        raise _reject(f"{path}: {name} unpacks to other bytes than the archive says; pack it again")
    return data
