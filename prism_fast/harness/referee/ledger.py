"""The referee's ledger: one record per batch and rank, in (index, rank) order, kept in constant memory.

Records of several ranks arrive interleaved; they are held back until every rank's record of that index is there and
then summed and written in rank order, so the sums have the same bits whoever was first.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prism_fast.protocol import constants as c
from prism_fast.protocol import ledger as layout
from prism_fast.protocol.errors import EngineFault
from prism_fast.protocol.score import CodeLength

LEDGER_RECORD = struct.Struct("<QddQIIIIIHH")  # protocol.ledger.LEDGER_DTYPE
FLUSH_RECORDS = 1024
MAX_RANK_SKEW = 4096


def pack_record(index: int, sums: Sequence[float], positions: int, documents: int, rank: int, rows: int) -> bytes:
    """One ledger record. `sums`: the six values of `kernels.batch_code_length`."""
    nats, special_nats, n_bytes, scored, special, faults = sums
    return LEDGER_RECORD.pack(
        index,
        nats,
        special_nats,
        int(n_bytes),
        int(scored),
        int(special),
        positions,
        int(faults),
        documents,
        rank,
        rows,
    )


def _write_all(file: Any, data: bytes) -> None:
    """An unbuffered write may stop short on a disk that fills up; the next one raises."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


class Ledger:
    """Sums and files of one run. Not thread-safe: the referee's loop owns it."""

    def __init__(self, run_dir: Path, world_size: int) -> None:
        self.world_size, self._run_dir = world_size, run_dir
        self.batches = 0  # complete indices, over all ranks
        self.nats = 0.0
        self.special_nats = 0.0
        self.bytes = 0
        self.scored_tokens = 0
        self.special_tokens = 0
        self.positions = 0
        self.documents = 0
        self.faults = 0
        self.nan_inf_batches = 0
        self.step0_loss = math.nan
        self._next = [0] * world_size
        self._observed = [0] * world_size
        self._waiting: dict[int, dict[int, np.void]] = {}
        self.chain = b""  # the last link; empty until `bind`
        self._unchained = bytearray()
        self._chain_file = open(run_dir / c.LEDGER_CHAIN_FILE, "wb", buffering=0)  # noqa: SIM115 - closed in close()
        self._files = {}
        self._unwritten: dict[str, list[bytes]] = {}
        for name, magic, dtype in (
            (c.LEDGER_FILE, layout.LEDGER_MAGIC, layout.LEDGER_DTYPE),
            (c.OBSERVATIONS_FILE, layout.OBSERVATIONS_MAGIC, layout.OBSERVATIONS_DTYPE),
        ):
            self._files[name] = open(run_dir / name, "wb", buffering=0)  # noqa: SIM115 - closed in close()
            if name == c.OBSERVATIONS_FILE:
                _write_all(self._files[name], layout.pack_header(magic, dtype, world_size))
            self._unwritten[name] = []

    def bind(self, genesis: bytes) -> None:
        """Begins both files with the sha256 of genesis.json, 32 bytes: what it says was so before the first record."""
        if self.chain:
            raise EngineFault("a ledger was bound twice")
        header = layout.pack_header(layout.LEDGER_MAGIC, layout.LEDGER_DTYPE, self.world_size, genesis)
        _write_all(self._files[c.LEDGER_FILE], header)
        self.chain = layout.first_link(genesis)
        _write_all(self._chain_file, self.chain)

    def seal(self, receipt: bytes) -> None:
        """Ends the chain of a closed ledger with the sha256 of receipt.json, 32 bytes."""
        self.chain = layout.next_link(self.chain, receipt)
        with open(self._run_dir / c.LEDGER_CHAIN_FILE, "ab", buffering=0) as file:
            _write_all(file, self.chain)

    @property
    def code_length(self) -> CodeLength:
        return CodeLength(nats=self.nats, bytes=self.bytes, tokens=self.scored_tokens)

    def add(self, rank: int, body: bytes) -> None:
        """Takes one PREDICTED record from `rank`'s own connection; its rank and order are checked, not trusted."""
        if len(body) != layout.LEDGER_DTYPE.itemsize:
            raise EngineFault(f"rank {rank} sent a ledger record of {len(body)} bytes")
        if not self.chain:
            raise EngineFault("a record came before the ledger was bound to what the run is of")
        record = np.frombuffer(body, layout.LEDGER_DTYPE)[0]
        index = int(record["index"])
        if int(record["rank"]) != rank or index != self._next[rank]:
            raise EngineFault(
                f"rank {rank} sent the record of rank {int(record['rank'])}, batch {index}; "
                f"expected its own batch {self._next[rank]}"
            )
        self._next[rank] += 1
        self._waiting.setdefault(index, {})[rank] = record
        if len(self._waiting) > MAX_RANK_SKEW:
            raise EngineFault(f"a rank is {MAX_RANK_SKEW} batches behind the others")
        while len(self._waiting.get(self.batches, ())) == self.world_size:
            self._fold(self._waiting.pop(self.batches))

    def _fold(self, records: dict[int, np.void]) -> None:
        first_nats, first_tokens, faults = 0.0, 0, 0
        for rank in range(self.world_size):
            r = records[rank]
            self.nats += float(r["nats"])
            self.special_nats += float(r["special_nats"])
            self.bytes += int(r["bytes"])
            self.scored_tokens += int(r["scored_tokens"])
            self.special_tokens += int(r["special_tokens"])
            self.positions += int(r["positions"])
            self.documents += int(r["documents"])
            faults += int(r["faults"])
            first_nats += float(r["nats"])
            first_tokens += int(r["scored_tokens"])
            self._write(c.LEDGER_FILE, r.tobytes())
        self.faults += faults
        self.nan_inf_batches += faults > 0
        if self.batches == 0:
            self.step0_loss = first_nats / first_tokens if first_tokens else math.nan
        self.batches += 1

    def observe(self, rank: int, body: bytes) -> None:
        """Takes one STEPPED record: written as it comes, never summed, one a batch and in order.

        What a rank measures of itself is its word, but it cannot break the documents made of it or fill the disk.
        Raises ValueError for what no honest rank sends.
        """
        if len(body) != layout.OBSERVATIONS_DTYPE.itemsize:
            raise ValueError(f"an observation of {len(body)} bytes")
        record = np.frombuffer(body, layout.OBSERVATIONS_DTYPE)[0]
        index = int(record["index"])
        if index != self._observed[rank] or index > self._next[rank] + MAX_RANK_SKEW or int(record["rank"]) != rank:
            raise ValueError(f"an observation of batch {index}, rank {int(record['rank'])}, out of turn")
        if not all(
            0.0 <= float(record[name]) < 1e18 for name in layout.OBSERVATIONS_DTYPE.names or () if name[-2:] == "_s"
        ):
            raise ValueError(f"an observation of batch {index} with a time that is none")
        self._observed[rank] += 1
        self._write(c.OBSERVATIONS_FILE, body)

    def _write(self, name: str, record: bytes) -> None:
        self._unwritten[name].append(record)
        if len(self._unwritten[name]) >= FLUSH_RECORDS:
            self._flush(name)

    def _flush(self, name: str) -> None:
        if self._unwritten[name]:
            data = b"".join(self._unwritten[name])
            _write_all(self._files[name], data)
            self._unwritten[name].clear()
            if name == c.LEDGER_FILE:
                self._extend_chain(data)

    def _extend_chain(self, records: bytes, *, last: bool = False) -> None:
        self._unchained += records
        block = layout.CHAIN_RECORDS * layout.LEDGER_DTYPE.itemsize
        while len(self._unchained) >= block or (last and self._unchained):
            self.chain = layout.next_link(self.chain, bytes(self._unchained[:block]))
            _write_all(self._chain_file, self.chain)
            del self._unchained[:block]

    def flush(self) -> None:
        for name in self._files:
            self._flush(name)

    @property
    def incomplete_indices(self) -> int:
        """Batches that some ranks have recorded and others have not."""
        return len(self._waiting)

    def close(self) -> None:
        """Writes what is left and closes the files. A second call does nothing."""
        if self._chain_file.closed:
            return
        self.flush()
        self._extend_chain(b"", last=True)
        self._chain_file.close()
        for f in self._files.values():
            f.close()
