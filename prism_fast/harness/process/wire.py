"""Frames between the referee, its trainer ranks and its executors, over Unix stream sockets.

A frame is a 5-byte header (kind u8, length u32, little-endian) and a body: a fixed record for what happens once a
batch, JSON for what happens once a run. Kinds in WITH_DESCRIPTOR carry one file descriptor each. The referee is the
server; a rank that closes without `DONE` or `FAULT` died, and the referee knows it at once.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from typing import Any, NamedTuple

import orjson

HEADER = struct.Struct("<BI")
MAX_BODY_BYTES = 64 << 20
RECEIVE_BYTES = 1 << 18
MAX_DESCRIPTORS = 4  # in one read

# trainer rank -> referee
HELLO = 1  # JSON: rank, pid, secret, machine
STARTED = 2  # JSON: train(ctx) is about to be entered
MODEL = 3  # JSON: what is being trained, known at the first batch
PREDICTED = 4  # open: one LEDGER_DTYPE record
STEPPED = 5  # one OBSERVATIONS_DTYPE record
READY = 6  # READY_RECORD: may I have this batch? (sealed, and world sizes above 1)
DONE = 7  # JSON: train returned; final facts
FAULT = 8  # JSON: rule, message, traceback, kind
SHARE = 9  # sealed, JSON: jobs.ShareRequest; answered by REGION
MAPPED = 10  # sealed: the region is mapped and holds the state
TRAINED = 11  # JSON: train(ctx) returned; what follows is not its time
# referee -> trainer rank
GO = 32
STOP = 33  # JSON: reason
REGION = 34  # JSON: where each tensor of the state belongs; carries the descriptor of the region
BATCH = 35  # sealed: BATCH_RECORD, then int64 tokens
# referee -> executor
LOAD = 48  # JSON: jobs.LoadJob; carries a region with the programs; answered by LOADED
STATE = 49  # JSON: name; carries the region of a state
PREDICT = 50  # jobs.PREDICT, then int64 tokens and targets; answered by RESULT
SNAPSHOT = 51  # carries a file to write the weights to; answered by SAVED
DETAIL = 52  # as PREDICT, of an executor that may tell; answered by NATS
# executor -> referee
LOADED = 64  # JSON: jobs.Loaded
RESULT = 65  # jobs.RESULT, then of held-out rows float64 nats
SAVED = 66
NATS = 67  # float64 nats [rows, width], then float64 logits at each row's last target [rows, V]

WITH_DESCRIPTOR = frozenset({REGION, LOAD, STATE, SNAPSHOT})

READY_RECORD = struct.Struct("<QB")  # index, autocast code
BATCH_RECORD = struct.Struct("<QIIfff")  # index, rows, width, data wait, predict and scoring seconds
AUTOCAST = ("off", "bfloat16", "float16")  # codes of an enclosing autocast


class FrameError(Exception):
    """The peer sent something that is not a frame."""


class PeerClosed(Exception):
    """The peer closed its end."""


class Frame(NamedTuple):
    kind: int
    body: bytes
    fd: int | None = None

    def json(self) -> Any:
        return orjson.loads(self.body)


def encode(kind: int, body: bytes = b"") -> bytes:
    return HEADER.pack(kind, len(body)) + body


def _json(document: Any) -> bytes:
    """As UTF-8, whatever text is in it: what a bundle says may quote file names that are none."""
    try:
        return orjson.dumps(document, default=str)
    except TypeError:
        return json.dumps(document, default=str, ensure_ascii=False).encode(errors="replace")


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


class Channel:
    """One end of a connection. Either end may be polled (`receive_now`) or waited on (`receive`)."""

    def __init__(self, connection: socket.socket, *, descriptors: bool = True) -> None:
        """`descriptors`: whether the peer may send any; those of a peer that may not are discarded by the kernel."""
        self.socket = connection
        self._ancillary_bytes = socket.CMSG_SPACE(4 * MAX_DESCRIPTORS) if descriptors else 0
        self._decoder = FrameDecoder()
        self._frames: deque[Frame] = deque()
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, kind: int, body: bytes = b"", *, fd: int | None = None, timeout: float | None = None) -> None:
        """Raises TimeoutError when the peer has not read enough after `timeout` seconds; the frame is then torn."""
        data = encode(kind, body)
        self.socket.settimeout(timeout)
        try:
            if fd is None:
                self.socket.sendall(data)
            else:
                sent = socket.send_fds(self.socket, [data], [fd])
                if sent < len(data):  # sending nothing would still fail where the peer has answered and gone
                    self.socket.sendall(data[sent:])
        finally:
            self.socket.settimeout(None)

    def send_json(self, kind: int, document: Any, *, fd: int | None = None, timeout: float | None = None) -> None:
        self.send(kind, _json(document), fd=fd, timeout=timeout)

    def receive(self, timeout: float | None = None) -> Frame:
        """The next frame. Raises TimeoutError, PeerClosed, FrameError."""
        while not self._frames:
            self.socket.settimeout(timeout)
            try:
                self._take(0)
            finally:
                self.socket.settimeout(None)
        return self._frames.popleft()

    def receive_now(self) -> list[Frame]:
        """Every frame that is here already. Raises PeerClosed once they have all been returned."""
        try:
            self._take(socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            pass
        except PeerClosed:
            if not self._frames:
                raise
        frames = list(self._frames)
        self._frames.clear()
        return frames

    def _take(self, flags: int) -> None:
        try:
            # Not socket.recv_fds: up to Python 3.11 at least it drops its flags argument, and so blocks.
            data, ancillary, _, _ = self.socket.recvmsg(RECEIVE_BYTES, self._ancillary_bytes, flags)
        except ConnectionError:
            raise PeerClosed from None
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds.extend(struct.unpack(f"{len(payload) // 4}i", payload[: len(payload) // 4 * 4]))
        if not data:
            raise PeerClosed
        for kind, body in self._decoder.feed(data):
            fd = None
            if kind in WITH_DESCRIPTOR:
                if not self._fds:
                    raise FrameError(f"frame of kind {kind} came without its descriptor")
                fd = self._fds.popleft()
            self._frames.append(Frame(kind, body, fd))

    def close(self) -> None:
        self.socket.close()


class RankChannel(Channel):
    """A rank's end of the socket."""

    def __init__(self, path: str) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        super().__init__(connection)
        self._stop: str | None = None

    def stop_requested(self) -> str | None:
        """The referee's reason to stop, if it has sent one. Never blocks."""
        if self._stop is None:
            try:
                for frame in self.receive_now():
                    self._expect(frame, STOP)
            except PeerClosed:
                self._stop = "referee gone"
        return self._stop

    def ask(self, index: int, expected: int = GO, autocast: int = 0) -> Frame | str:
        """Blocks until the referee answers READY for batch `index`: its frame, or the reason to stop."""
        self.send(READY, READY_RECORD.pack(index, autocast))
        return self.wait_for(expected)

    def wait_for(self, expected: int) -> Frame | str:
        """The next frame, which must be of kind `expected`; or the reason to stop."""
        while self._stop is None:
            try:
                frame = self.receive()
            except PeerClosed:
                self._stop = "referee gone"
                break
            if frame.kind == expected:
                return frame
            self._expect(frame, STOP)
        return self._stop

    def _expect(self, frame: Frame, kind: int) -> None:
        if frame.kind != kind:
            raise FrameError(f"the referee sent a frame of kind {frame.kind}; expected {kind}")
        self._stop = frame.json()["reason"]
