"""Starts the trainer ranks under torchrun, listens to them, enforces budgets, and ends every process it started.

One loop, one thread: sockets, deadlines, quota and process exits are looked at in turn, so nothing here races. The
process tree is found through /proc: torchrun starts its workers in sessions of their own, and a bundle may fork.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import orjson

from prism_fast.harness import wire
from prism_fast.harness.die_with_parent import adopt_orphans
from prism_fast.harness.ledger import Ledger
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import (
    ArtifactsQuotaExceeded,
    BudgetExceeded,
    BundleFailed,
    BundleRejected,
    EngineFault,
    PrismError,
)
from prism_fast.protocol.run_spec import RunSpec

POLL_S = 0.1
QUOTA_EVERY_S = 1.0
EXIT_GRACE_S = 10.0  # from the last rank's `done` to torchrun's own exit
TERMINATE_GRACE_S = 5.0


@dataclass
class TrainerResult:
    """What the trainer ranks told the referee besides the ledger."""

    hello: dict[int, dict[str, Any]] = field(default_factory=dict)
    started: dict[int, dict[str, Any]] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    done: dict[int, dict[str, Any]] = field(default_factory=dict)
    launch_s: float = 0.0  # from the spawn of torchrun to the last rank's hello
    train_s: float = 0.0  # from the first rank's start of train(ctx) to the last rank's end
    wall_s: float = 0.0


class StopFlag:
    """Set from a signal handler: the run is to stop gracefully and score what it has."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def set(self, reason: str = c.STOP_INTERRUPTED) -> None:
        self.reason = reason


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = Path(f"/proc/{entry}/stat").read_text()
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, queue = [], [pid]
    while queue:
        for child in children.get(queue.pop(0), []):
            found.append(child)
            queue.append(child)
    return found


def end_processes(process: subprocess.Popen[bytes], keep: set[int]) -> None:
    """Ends `process` and every descendant of ours that is not in `keep`: first politely, then surely."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATE_GRACE_S)
    if process.poll() is None:
        process.kill()
        process.wait()
    for _ in range(50):
        rest = [p for p in descendants(os.getpid()) if p not in keep]
        if not rest:
            return
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in rest:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def directory_bytes(path: Path) -> int:
    """Bytes allocated or claimed (whichever is more) by the regular files below `path`; links are not followed."""
    total = 0
    for root, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(OSError):
                st = os.lstat(os.path.join(root, name))
                total += max(st.st_size, st.st_blocks * 512)
    return total


class Trainer:
    """One seed's training run, seen from the referee."""

    def __init__(
        self,
        spec: RunSpec,
        job: dict[str, Any],
        run_dir: Path,
        environment: dict[str, str],
        ledger: Ledger,
        stop: StopFlag,
        on_progress: Callable[[Ledger, float], None],
    ) -> None:
        self.spec, self.job, self.run_dir, self.environment = spec, job, run_dir, environment
        self.ledger, self.stop, self.on_progress = ledger, stop, on_progress
        self.result = TrainerResult()
        self.fault: PrismError | None = None
        self._secret = secrets.token_hex(16)
        self._ranks: dict[socket.socket, int | None] = {}
        self._decoders: dict[socket.socket, wire.FrameDecoder] = {}
        self._closed_ranks: set[int] = set()
        self._ready: dict[int, set[int]] = {}
        self._stop_sent = False
        self._stop_reason: str | None = None
        self._began = monotonic()
        self._started_at: float | None = None

    # ------------------------------------------------------------------------------------------------- life

    def run(self) -> TrainerResult:
        """Runs to the end. Raises the PrismError that says why the run cannot be scored."""
        adopt_orphans()
        keep = set(descendants(os.getpid()))
        self._began = began = monotonic()
        with tempfile.TemporaryDirectory(prefix="prism-") as private:
            path = os.path.join(private, "ledger.sock")
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            server.bind(path)
            server.listen(self.spec.world_size)
            server.setblocking(False)
            job_path = Path(private) / "job.json"
            job_path.write_bytes(
                orjson.dumps({**self.job, "spec": self.spec.model_dump(), "socket": path, "secret": self._secret})
            )
            with selectors.DefaultSelector() as selector, open(self.run_dir / c.TRAINER_LOG_FILE, "ab") as log:
                selector.register(server, selectors.EVENT_READ)
                process = self._spawn(job_path, log)
                try:
                    self._loop(server, selector, process, began)
                finally:
                    end_processes(process, keep)
                    for connection in self._ranks:
                        connection.close()
                    server.close()
                    self.result.wall_s = monotonic() - began
        self.ledger.flush()
        self._check_end(process.returncode)
        return self.result

    def _spawn(self, job_path: Path, log: Any) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "prism_fast.harness.torchrun",
            "--standalone",
            "--nnodes=1",
            f"--nproc-per-node={self.spec.world_size}",
            "-m",
            "prism_fast.harness.runner",
        ]
        return subprocess.Popen(
            command,
            env={**self.environment, "PRISM_RUN_JOB": str(job_path)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self.job["artifacts_dir"],
            start_new_session=True,
        )

    def _loop(
        self,
        server: socket.socket,
        selector: selectors.BaseSelector,
        process: subprocess.Popen[bytes],
        began: float,
    ) -> None:
        spec = self.spec
        next_quota = next_progress = began
        finished_at: float | None = None
        while True:
            for key, _ in selector.select(POLL_S):
                if key.fileobj is server:
                    connection, _ = server.accept()
                    self._ranks[connection] = None
                    self._decoders[connection] = wire.FrameDecoder()
                    selector.register(connection, selectors.EVENT_READ)
                else:
                    self._receive(key.fileobj, selector)  # type: ignore[arg-type]
            now = monotonic()
            if self.fault is not None:
                return
            if process.poll() is not None and not self._anything_to_read(selector, server):
                return
            if len(self.result.done) == spec.world_size:
                finished_at = finished_at or now
                if now - finished_at > EXIT_GRACE_S:
                    return
            if now >= next_quota:
                self._check_quota()
                next_quota = monotonic() + QUOTA_EVERY_S
            if now >= next_progress:
                self.on_progress(self.ledger, now - (self._started_at or now))
                self.ledger.flush()
                next_progress = now + 0.2
            self._check_deadlines(now, began)

    def _anything_to_read(self, selector: selectors.BaseSelector, server: socket.socket) -> bool:
        return bool(selector.select(0)) or any(s is not server for s in self._ranks if s.fileno() >= 0)

    def _check_quota(self) -> None:
        used = directory_bytes(Path(self.job["artifacts_dir"]))
        if used > self.spec.artifacts_quota_bytes:
            self.fault = ArtifactsQuotaExceeded(
                f"the bundle wrote {used:,} bytes of artifacts; the quota is {self.spec.artifacts_quota_bytes:,} "
                f"({c.MARKER_ARTIFACTS_QUOTA})",
                rule=c.RULE_ARTIFACTS_QUOTA,
            )

    def _check_deadlines(self, now: float, began: float) -> None:
        spec = self.spec
        if self.stop.reason is not None:
            self._send_stop(self.stop.reason)
        if self._started_at is None:
            if now - began > c.STARTUP_ALLOWANCE_SECONDS + spec.budget_seconds:
                self.fault = self._over_budget("before train(ctx) was entered", now - began)
            return
        elapsed = now - self._started_at
        if spec.world_size > 1 and elapsed >= spec.budget_seconds:
            self._send_stop(c.STOP_WALL_CLOCK)
        if elapsed > spec.budget_seconds + spec.watchdog_grace_seconds:
            self.fault = self._over_budget("outside the instrumented loop or in one step", elapsed)

    def _over_budget(self, where: str, elapsed: float) -> BudgetExceeded:
        return BudgetExceeded(
            f"the bundle was still running {elapsed:.0f} s after the start, {where}; the budget is "
            f"{self.spec.budget_seconds:.0f} s plus {self.spec.watchdog_grace_seconds:.0f} s of grace "
            f"({c.MARKER_BUDGET_EXCEEDED})",
            rule=c.RULE_BUDGET_EXCEEDED,
        )

    # ------------------------------------------------------------------------------------------------- frames

    def _receive(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            data = connection.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            selector.unregister(connection)
            connection.close()
            rank = self._ranks[connection]
            if rank is not None:
                self._closed_ranks.add(rank)
                if rank not in self.result.done and self.fault is None:
                    self.fault = BundleFailed(
                        f"rank {rank} ended without saying why (killed, out of memory, or os._exit in the bundle); "
                        f"see {c.TRAINER_LOG_FILE}",
                        rule=c.RULE_RUNTIME_ERROR,
                    )
            return
        try:
            for kind, body in self._decoders[connection].feed(data):
                self._take(connection, kind, body)
        except (wire.FrameError, EngineFault, orjson.JSONDecodeError, KeyError, TypeError) as e:
            if self.fault is None:
                self.fault = BundleFailed(f"the ledger channel carried garbage: {e}", rule=c.RULE_RUNTIME_ERROR)

    def _take(self, connection: socket.socket, kind: int, body: bytes) -> None:
        rank = self._ranks[connection]
        if kind == wire.HELLO:
            hello = orjson.loads(body)
            if hello["secret"] != self._secret or not 0 <= hello["rank"] < self.spec.world_size:
                raise EngineFault("a process that is not a rank of this run connected")
            self._ranks[connection] = hello["rank"]
            self.result.hello[hello["rank"]] = hello
            self.result.launch_s = monotonic() - self._began
            if self._stop_reason is not None:
                self._send_stop(self._stop_reason)
            return
        if kind == wire.FAULT:
            self._take_fault(orjson.loads(body))
            return
        if rank is None:
            raise EngineFault(f"a frame of kind {kind} came before hello")
        if kind == wire.PREDICTED:
            self.ledger.add(rank, body)
        elif kind == wire.STEPPED:
            self.ledger.observe(body)
        elif kind == wire.READY:
            self._take_ready(rank, struct.unpack("<Q", body)[0])
        elif kind == wire.STARTED:
            self.result.started[rank] = orjson.loads(body)
            if self._started_at is None:
                self._started_at = monotonic()
        elif kind == wire.MODEL:
            model = orjson.loads(body)
            if self.result.model is None or rank == 0:
                self.result.model = model
        elif kind == wire.DONE:
            self.result.done[rank] = orjson.loads(body)
            self.result.train_s = monotonic() - (self._started_at or monotonic())
        else:
            raise EngineFault(f"a frame of kind {kind} is not the referee's to receive")

    def _take_fault(self, fault: dict[str, Any]) -> None:
        if self.fault is not None:
            return
        kinds = {"rejected": BundleRejected, "failed": BundleFailed, "engine": EngineFault}
        message = fault["message"] if self.spec.world_size == 1 else f"rank {fault['rank']}: {fault['message']}"
        self.fault = kinds[fault["kind"]](message, rule=fault["rule"])

    def _take_ready(self, rank: int, index: int) -> None:
        waiting = self._ready.setdefault(index, set())
        waiting.add(rank)
        if len(waiting) == self.spec.world_size:
            del self._ready[index]
            frame = wire.encode(wire.GO)
            if self._stop_reason is not None:
                frame = wire.encode_json(wire.STOP, {"reason": self._stop_reason})
            self._broadcast(frame)

    def _send_stop(self, reason: str) -> None:
        """One rank is told at once; several are told together, at the next batch that all of them ask for."""
        self._stop_reason = self._stop_reason or reason
        if self.spec.world_size == 1 and not self._stop_sent and self.result.hello:
            self._stop_sent = True
            self._broadcast(wire.encode_json(wire.STOP, {"reason": self._stop_reason}))

    def _broadcast(self, frame: bytes) -> None:
        for connection, rank in self._ranks.items():
            if rank is not None and rank not in self._closed_ranks:
                with contextlib.suppress(OSError):
                    connection.sendall(frame)

    # ---------------------------------------------------------------------------------------------------- end

    def _check_end(self, returncode: int | None) -> None:
        if self.fault is not None:
            raise self.fault
        missing = [r for r in range(self.spec.world_size) if r not in self.result.done]
        if missing:
            if not self.result.hello:
                raise EngineFault(
                    f"torchrun ended with code {returncode} before any rank reported; see {c.TRAINER_LOG_FILE}"
                )
            raise BundleFailed(
                f"rank {missing[0]} ended without saying why (torchrun's code {returncode}); see {c.TRAINER_LOG_FILE}",
                rule=c.RULE_RUNTIME_ERROR,
            )
        if self.ledger.incomplete_indices:
            raise BundleFailed(
                f"the ranks did not take equal steps: {self.ledger.incomplete_indices} batches lack a rank's record",
                rule=c.RULE_RUNTIME_ERROR,
            )
        if self.ledger.batches == 0 and self.stop.reason is not None:
            raise EngineFault("interrupted before the first batch: nothing to score")
        if self.ledger.batches == 0:
            raise BundleFailed("train(ctx) returned without taking a batch: nothing to score", rule=c.RULE_DEGENERATE)
