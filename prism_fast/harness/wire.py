"""Frames between a runner rank and the referee, over a Unix stream socket.

A frame is a 5-byte header (kind u8, length u32, little-endian) and a body: a fixed record for what happens once a
batch, JSON for what happens once a run. The referee is the server; a rank that closes without `done` or `fault`
died, and the referee knows it at once.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import orjson

HEADER = struct.Struct("<BI")
MAX_BODY_BYTES = 1 << 20

# runner -> referee
HELLO = 1  # JSON: rank, pid, secret, machine
STARTED = 2  # JSON: train(ctx) is about to be entered
MODEL = 3  # JSON: what is being trained, known at the first batch
PREDICTED = 4  # one LEDGER_DTYPE record
STEPPED = 5  # one OBSERVATIONS_DTYPE record
READY = 6  # u64 index: may I hand out this batch? (world sizes above 1)
DONE = 7  # JSON: train returned; final facts
FAULT = 8  # JSON: rule, message, traceback, kind
# referee -> runner
GO = 32
STOP = 33  # JSON: reason


class FrameError(Exception):
    """The peer sent something that is not a frame."""


def encode(kind: int, body: bytes = b"") -> bytes:
    return HEADER.pack(kind, len(body)) + body


def encode_json(kind: int, document: Any) -> bytes:
    return encode(kind, orjson.dumps(document, default=str))


class FrameDecoder:
    """Bytes in, frames out. Keeps at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        self._buffer += data
        frames: list[tuple[int, bytes]] = []
        offset = 0
        while len(self._buffer) - offset >= HEADER.size:
            kind, length = HEADER.unpack_from(self._buffer, offset)
            if length > MAX_BODY_BYTES:
                raise FrameError(f"frame of kind {kind} claims {length} bytes; at most {MAX_BODY_BYTES} are allowed")
            end = offset + HEADER.size + length
            if len(self._buffer) < end:
                break
            frames.append((kind, bytes(self._buffer[offset + HEADER.size : end])))
            offset = end
        del self._buffer[:offset]
        return frames


class RunnerChannel:
    """A rank's end of the socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._decoder = FrameDecoder()
        self._pending: list[tuple[int, bytes]] = []
        self._stop: str | None = None

    def send(self, kind: int, body: bytes = b"") -> None:
        self._socket.sendall(encode(kind, body))

    def send_json(self, kind: int, document: Any) -> None:
        self._socket.sendall(encode_json(kind, document))

    def stop_requested(self) -> str | None:
        """The referee's reason to stop, if it has sent one. Never blocks."""
        try:
            while self._stop is None:
                data = self._socket.recv(4096, socket.MSG_DONTWAIT)
                if not data:
                    self._stop = "referee gone"
                    break
                self._take(self._decoder.feed(data))
        except (BlockingIOError, InterruptedError):
            pass
        return self._stop

    def ask(self, index: int) -> str | None:
        """Blocks until every rank is ready for batch `index`: None to go on, or the reason to stop."""
        self.send(READY, struct.pack("<Q", index))
        while self._stop is None:
            if self._pending:
                self._pending.pop(0)
                return None
            data = self._socket.recv(4096)
            if not data:
                self._stop = "referee gone"
                break
            self._take(self._decoder.feed(data))
        return self._stop

    def _take(self, frames: list[tuple[int, bytes]]) -> None:
        for kind, body in frames:
            if kind == STOP:
                self._stop = orjson.loads(body)["reason"]
            elif kind == GO:
                self._pending.append((kind, body))
            else:
                raise FrameError(f"the referee sent a frame of kind {kind}, which is not the runner's to receive")

    def close(self) -> None:
        self._socket.close()
