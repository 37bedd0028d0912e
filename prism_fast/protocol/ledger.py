"""The ledger's and the observations' record layouts: what a batch leaves behind, on the wire and on disk.

Two files, kept apart on purpose. `ledger.bin` holds only what a score may be made of; `observations.bin` holds what
was merely seen (times, gradient norms). Both are a 64-byte header (magic, record size, world size) and then fixed
little-endian records in (index, rank) order, so a reader needs `numpy.fromfile` and nothing else. `ledger.chain` holds
32 bytes of genesis.json (receipts.py), 32 for every 1,024 ledger records, each link a sha256 over the one before and
the records since, and at the end 32 of receipt.json: written as the run goes, it fixes the past before the end is
known.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np

from prism_fast.protocol.errors import DataError

HEADER = struct.Struct("<8sIII32s12x")  # magic, record bytes, world size, format version, digest of genesis.json
HEADER_BYTES = HEADER.size
LEDGER_MAGIC = b"PRISMLDG"
OBSERVATIONS_MAGIC = b"PRISMOBS"
FORMAT_VERSION = 2

LEDGER_DTYPE = np.dtype(
    [
        ("index", "<u8"),  # batch number of this rank, from 0
        ("nats", "<f8"),  # sum of -ln p over scored targets; a faulty target is charged 2 ln V
        ("special_nats", "<f8"),  # the same over special targets; enters nothing
        ("bytes", "<u8"),  # UTF-8 bytes of the scored targets
        ("scored_tokens", "<u4"),
        ("special_tokens", "<u4"),
        ("positions", "<u4"),  # tokens fed to the model: rows x width
        ("faults", "<u4"),  # scored targets whose loss was not finite
        ("documents", "<u4"),  # documents whose first token lies in this batch
        ("rank", "<u2"),
        ("rows", "<u2"),
    ]
)

OBSERVATIONS_DTYPE = np.dtype(
    [
        ("index", "<u8"),
        ("wall_s", "<f8"),  # since train(ctx) began, when the batch was handed out
        ("data_wait_s", "<f4"),
        ("predict_s", "<f4"),
        ("scoring_s", "<f4"),
        ("ledger_s", "<f4"),
        ("step_s", "<f4"),  # the miner's own step: from hand-out to the next request
        ("grad_norm", "<f4"),  # NaN when the bundle shows none
        ("rank", "<u4"),
        ("pad", "<u4"),
    ]
)


CHAIN_RECORDS = 1024  # ledger records a link of the chain stands for; the last link may stand for fewer
CHAIN_SEED = b"prism_ledger_chain.v1"


def next_link(previous: bytes, records: bytes) -> bytes:
    """The chain's next 32 bytes: sha256 over the link before and the records since. The first follows CHAIN_SEED."""
    return hashlib.sha256(previous + records).digest()


def first_link(genesis: bytes) -> bytes:
    """The chain's first 32 bytes, from the sha256 of genesis.json: the past of a run before its first batch."""
    return next_link(CHAIN_SEED, genesis)


def genesis_of(path: str | Path) -> bytes:
    """The digest of genesis.json that a ledger file names. Raises DataError for what is no ledger."""
    with open(path, "rb") as f:
        head = f.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES:
        raise DataError(f"{path}: {len(head)} bytes; expected a header of {HEADER_BYTES} bytes")
    return bytes(HEADER.unpack(head)[4])


def chain_of(path: str | Path, genesis: bytes) -> list[bytes]:
    """Every link but the last, which is of receipt.json: from the digest of genesis.json and a ledger's records."""
    links = [first_link(genesis)]
    with open(path, "rb") as f:
        f.seek(HEADER_BYTES)
        while block := f.read(CHAIN_RECORDS * LEDGER_DTYPE.itemsize):
            links.append(next_link(links[-1], block))
    return links


def pack_header(magic: bytes, dtype: np.dtype, world_size: int, genesis: bytes = b"") -> bytes:
    return HEADER.pack(magic, dtype.itemsize, world_size, FORMAT_VERSION, genesis)


def read_records(path: str | Path, magic: bytes, dtype: np.dtype) -> np.ndarray:
    """Maps a record file read-only. Raises DataError naming the file when its header or size is wrong."""
    path = Path(path)
    size = path.stat().st_size
    if size < HEADER_BYTES:
        raise DataError(f"{path}: {size} bytes; expected a header of {HEADER_BYTES} bytes")
    with path.open("rb") as f:
        found, record_bytes, _, version, _ = HEADER.unpack(f.read(HEADER_BYTES))
    if found != magic or version != FORMAT_VERSION or record_bytes != dtype.itemsize:
        raise DataError(
            f"{path}: header is {found!r} version {version} with records of {record_bytes} bytes; "
            f"expected {magic!r} version {FORMAT_VERSION} with {dtype.itemsize}"
        )
    body = size - HEADER_BYTES
    if body % dtype.itemsize:
        raise DataError(f"{path}: {body} bytes of records; expected a multiple of {dtype.itemsize}")
    if body == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES)
