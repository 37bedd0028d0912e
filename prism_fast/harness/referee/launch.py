"""Starts the trainer ranks (several: under torchrun), listens to them, enforces budgets, ends every process of theirs.

One loop, one thread: sockets, deadlines, quota and process exits are looked at in turn, so nothing here races. The
process tree is found through /proc: torchrun starts its workers in sessions of their own, and a bundle may fork.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import orjson

from prism_fast.harness.process import jobs, wire
from prism_fast.harness.process.artifacts import EVERYTHING, MAX_DEPTH, directory_bytes, make_removable
from prism_fast.harness.process.commands import child_command, child_environment, nothing_to_read
from prism_fast.harness.process.die_with_parent import adopt_orphans
from prism_fast.harness.process.interrupt import StopFlag
from prism_fast.harness.process.isolation import Sandbox
from prism_fast.harness.process.processes import descendants, end_processes
from prism_fast.harness.referee.ledger import Ledger
from prism_fast.harness.referee.session import SealedSession
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import (
    ArtifactsQuotaExceeded,
    BudgetExceeded,
    BundleFailed,
    EngineFault,
    PrismError,
)
from prism_fast.protocol.run_spec import RunSpec

POLL_S = 0.1
QUOTA_EVERY_S = 1.0
EXIT_GRACE_S = 10.0  # from the last rank's `done` to torchrun's own exit
HELDOUT_SECONDS = 600.0  # all of held-out scoring, plus twice what training was given
SEND_TIMEOUT_S = 20.0  # a rank reads what it asked for at once


@dataclass
class TrainerResult:
    """What the trainer ranks told the referee besides the ledger."""

    hello: dict[int, jobs.Hello] = field(default_factory=dict)
    started: dict[int, jobs.Started] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    done: dict[int, jobs.Done] = field(default_factory=dict)
    stopped_reason: str = c.STOP_BUNDLE_RETURNED
    launch_s: float = 0.0  # from the spawn of the ranks to the last rank's hello
    tracing_s: float = 0.0  # sealed: waiting for the programs, and for the executors to have loaded them
    first_batch_s: float | None = None  # from train(ctx)'s start to the first predicted batch, tracing included
    train_s: float = 0.0  # from the first rank's start of train(ctx) to the last rank's end
    wall_s: float = 0.0


def single_rank_environment() -> dict[str, str]:
    """What `torchrun --standalone --nnodes=1 --nproc-per-node=1` sets for its worker.

    Its agent has nothing to agree on with a single rank, and would import torch before the rank starts to: two seconds.
    Rank 0 then hosts the rendezvous store itself, which `init_process_group` does by these variables.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    zero = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), "0")
    one = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1")
    return {
        **zero,
        **one,
        "ROLE_NAME": "default",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


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
        sandbox: Sandbox,
        start_session: Callable[[Callable[[], float]], SealedSession] | None = None,
    ) -> None:
        """`start_session(deadline)` starts the sealed session beside the ranks; None: the ranks score themselves."""
        self.sandbox, self._start_session = sandbox, start_session
        self.session: SealedSession | None = None
        self.spec, self.job, self.run_dir, self.environment = spec, job, run_dir, environment
        self.ledger, self.stop, self.on_progress = ledger, stop, on_progress
        self.result = TrainerResult()
        self.fault: PrismError | None = None
        self._secret = secrets.token_hex(16)
        self._ranks: dict[wire.Channel, int | None] = {}
        self._closed_ranks: set[int] = set()
        self._trained_ranks: set[int] = set()
        self._ready: dict[int, dict[int, int]] = {}  # batch -> rank -> autocast code
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
                    if self._start_session is not None:
                        self.session = self._start_session(self.deadline)
                    self._loop(server, selector, process, began)
                except PrismError as error:
                    self.fault = self.fault or error
                finally:
                    end_processes(process, keep | (self.session.processes if self.session is not None else set()))
                    for connection in self._ranks:
                        connection.close()
                    server.close()
                    self.result.wall_s = monotonic() - began
        self.ledger.flush()
        try:
            self._check_end(process.returncode)
        finally:
            make_removable(Path(self.job["artifacts_dir"]))
        return self.result

    def _spawn(self, job_path: Path, log: Any) -> subprocess.Popen[bytes]:
        ranks = self.spec.world_size
        runner = "prism_fast.harness.trainer.rank"
        command, variables = child_command(runner), {}
        if ranks > 1:
            torchrun = ("--standalone", "--nnodes=1", f"--nproc-per-node={ranks}", "-m", runner)
            command = child_command("prism_fast.harness.process.torchrun", *torchrun)
        else:
            variables = single_rank_environment()
        artifacts_dir = Path(self.job["artifacts_dir"])
        with nothing_to_read() as stdin:
            return subprocess.Popen(
                self.sandbox.trainer(command, Path(self.job["bundle_dir"]), job_path.parent, artifacts_dir),
                env=child_environment(self.environment, {**variables, "PRISM_RUN_JOB": str(job_path)}),
                stdin=stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=artifacts_dir,
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
                if key.data is None:
                    connection = wire.Channel(server.accept()[0], descriptors=False)
                    if len(self._ranks) == spec.world_size:
                        connection.close()
                        raise BundleFailed(
                            "a process that is not a rank of this run connected to the referee",
                            rule=c.RULE_RUNTIME_ERROR,
                        )
                    self._ranks[connection] = None
                    selector.register(connection, selectors.EVENT_READ, connection)
                else:
                    self._receive(key.data, selector)
            now = monotonic()
            if self.fault is not None:
                return
            if process.poll() is not None and not selector.select(0):
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
            self._check_deadlines(monotonic())

    def _check_quota(self) -> None:
        if self.session is not None:
            self.session.check_scratch()
        used = directory_bytes(Path(self.job["artifacts_dir"]))
        for log in (c.TRAINER_LOG_FILE, c.TRACER_LOG_FILE):
            with contextlib.suppress(OSError):
                used += (self.run_dir / log).stat().st_size
        if used > self.spec.artifacts_quota_bytes:
            wrote = f"the bundle wrote {used:,} bytes of artifacts and output"
            if used >= EVERYTHING:
                wrote = f"the bundle made artifacts directories that are closed or more than {MAX_DEPTH} deep"
            raise ArtifactsQuotaExceeded(
                f"{wrote}; the quota is {self.spec.artifacts_quota_bytes:,} bytes ({c.MARKER_ARTIFACTS_QUOTA})",
                rule=c.RULE_ARTIFACTS_QUOTA,
            )

    def deadline(self) -> float:
        """The monotonic time at which the watchdog ends the run; before train(ctx) is entered, the outer cap's."""
        if self._started_at is None:
            return self._began + c.STARTUP_ALLOWANCE_SECONDS + self.spec.budget_seconds
        if self.session is None and len(self._trained_ranks) == self.spec.world_size:  # held-out text is next, there
            return self._started_at + self.result.train_s + HELDOUT_SECONDS + 2 * self.spec.budget_seconds
        return self._started_at + self.spec.budget_seconds + self.spec.watchdog_grace_seconds

    def _check_deadlines(self, now: float) -> None:
        if self.stop.reason is not None:
            self._send_stop(self.stop.reason)
        # A single open rank watches its own budget; whoever asks for batches is told by the referee.
        if self._asked and self._started_at is not None and now - self._started_at >= self.spec.budget_seconds:
            self._send_stop(c.STOP_WALL_CLOCK)
        if now > self.deadline():
            if self._started_at is None:
                self.fault = self._over_budget("before train(ctx) was entered", now - self._began)
            else:
                where = "outside the instrumented loop or in one step"
                self.fault = self._over_budget(where, now - self._started_at)

    @property
    def _asked(self) -> bool:
        """Whether ranks ask the referee for every batch: sealed, or several of them."""
        return self._start_session is not None or self.spec.world_size > 1

    def _over_budget(self, where: str, elapsed: float) -> BudgetExceeded:
        return BudgetExceeded(
            f"the bundle was still running {elapsed:.0f} s after the start, {where}; the budget is "
            f"{self.spec.budget_seconds:.0f} s plus {self.spec.watchdog_grace_seconds:.0f} s of grace "
            f"({c.MARKER_BUDGET_EXCEEDED})",
            rule=c.RULE_BUDGET_EXCEEDED,
        )

    # ------------------------------------------------------------------------------------------------- frames

    def _receive(self, connection: wire.Channel, selector: selectors.BaseSelector) -> None:
        try:
            frames = connection.receive_now()
            with jobs.handling("a rank"):
                for frame in frames:
                    self._take(connection, frame)
        except wire.FrameError as error:
            self.fault = self.fault or jobs.garbage(str(error))
        except wire.PeerClosed:
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
        except PrismError as error:
            self.fault = self.fault or error

    def _take(self, connection: wire.Channel, frame: wire.Frame) -> None:
        rank, kind = self._ranks[connection], frame.kind
        if kind == wire.HELLO:
            hello = jobs.read(jobs.Hello, frame.body)
            if hello.secret != self._secret or hello.rank >= self.spec.world_size:
                raise jobs.garbage("a process that is not a rank of this run connected")
            if hello.rank in self.result.hello or rank is not None:
                raise jobs.garbage(f"rank {hello.rank} connected twice")
            self._ranks[connection] = hello.rank
            self.result.hello[hello.rank] = hello
            self.result.launch_s = monotonic() - self._began
            if self._stop_reason is not None:
                self._send_stop(self._stop_reason)
        elif kind == wire.FAULT:
            self._take_fault(rank, jobs.read(jobs.Fault, frame.body))
        elif rank is None:
            raise jobs.garbage(f"a frame of kind {kind} came before hello")
        elif kind == wire.STEPPED:
            self.ledger.observe(rank, frame.body)
        elif kind == wire.READY:
            index, autocast = wire.READY_RECORD.unpack(frame.body)
            self._take_ready(rank, index, autocast)
            self._watch_first_batch()
        elif kind == wire.STARTED:
            if rank in self.result.started:
                raise jobs.garbage(f"rank {rank} started twice")
            self.result.started[rank] = jobs.read(jobs.Started, frame.body)
            self._start_clock()
        elif kind == wire.TRAINED:
            trained = jobs.read(jobs.Trained, frame.body)
            if rank not in self.result.started or rank in self._trained_ranks:
                raise jobs.garbage(f"rank {rank} was trained before it started, or twice")
            self._trained_ranks.add(rank)
            self._stop_clock(trained.stopped_reason if rank == 0 else None)
        elif kind == wire.DONE:
            if rank not in self.result.started or rank in self.result.done:
                raise jobs.garbage(f"rank {rank} was done before it started, or twice")
            self.result.done[rank] = done = jobs.read(jobs.Done, frame.body)
            if rank not in self._trained_ranks:
                self._stop_clock(done.stopped_reason if rank == 0 else None)
        elif kind == wire.PREDICTED and self.session is None:
            self.ledger.add(rank, frame.body)
            self._watch_first_batch()
        elif kind == wire.MODEL and self.session is None:
            if self.result.model is None or rank == 0:
                self.result.model = jobs.read(jobs.OpenModel, frame.body).model_dump(exclude={"rank"})
        elif kind == wire.SHARE and self.session is not None:
            self._start_clock()
            layout, region = self.session.share(rank, jobs.read(jobs.ShareRequest, frame.body))
            self.result.tracing_s = self.session.trace_s
            self._answer(connection, wire.REGION, orjson.dumps(layout), fd=region.fd)
        elif kind == wire.MAPPED and self.session is not None:
            self.session.mapped(rank)
        else:
            raise jobs.garbage(f"a frame of kind {kind} is not the referee's to receive in {self.spec.seal} mode")

    def _stop_clock(self, reason: str | None) -> None:
        """Training is over, or one more rank's is; what a rank does after it is not the bundle's time."""
        self.result.train_s = monotonic() - (self._started_at or monotonic())
        if reason is not None and self.session is None:
            self.result.stopped_reason = reason[:100]

    def _watch_first_batch(self) -> None:
        """Notes when the first batch was there for the bundle to train on."""
        if self.result.first_batch_s is None and self.ledger.batches:
            self.result.first_batch_s = monotonic() - (self._started_at or monotonic())

    def _start_clock(self) -> None:
        """The budget runs from the first sign of train(ctx), whatever a rank says of it."""
        if self._started_at is None:
            self._started_at = monotonic()

    def _take_fault(self, rank: int | None, fault: jobs.Fault) -> None:
        if self.fault is not None:
            return
        # Open mode has the data and the scorer in the rank itself, so an error there may well be ours.
        ours_possible = self.session is None or rank is None or self.stop.reason is not None
        prefix = "" if self.spec.world_size == 1 or rank is None else f"rank {rank}: "
        self.fault = fault.error(ours_possible=ours_possible, prefix=prefix)

    def _answer(self, connection: wire.Channel, kind: int, body: bytes = b"", *, fd: int | None = None) -> None:
        """Answers a rank that waits for it. One that does not read must not hold the referee up."""
        try:
            connection.send(kind, body, fd=fd, timeout=SEND_TIMEOUT_S)
        except TimeoutError:
            raise BundleFailed(
                f"rank {self._ranks[connection]} did not read the answer it asked for", rule=c.RULE_RUNTIME_ERROR
            ) from None
        except OSError:
            pass  # it is gone, which its socket says next

    def _take_ready(self, rank: int, index: int, autocast: int) -> None:
        due = self.session is None or index == self.ledger.batches
        if not self._asked or autocast >= len(wire.AUTOCAST) or not due:
            raise jobs.garbage(f"rank {rank} asked for batch {index} out of turn")
        waiting = self._ready.setdefault(index, {})
        waiting[rank] = autocast
        if len(waiting) < self.spec.world_size:
            return
        del self._ready[index]
        if self.session is None:
            answer: dict[int, bytes] | str = self._stop_reason or dict.fromkeys(waiting, b"")
        else:
            answer = self.session.hand_out(index, waiting, self._stop_reason)
            self.result.model = self.session.model
        for connection, to in self._ranks.items():
            if to is None or to in self._closed_ranks:
                continue
            if isinstance(answer, str):
                self._answer(connection, wire.STOP, orjson.dumps({"reason": answer}))
            else:
                self._answer(connection, wire.GO if self.session is None else wire.BATCH, answer[to])

    def _send_stop(self, reason: str) -> None:
        """Ranks that ask for batches hear it in the next answer, all of them the same; a single open rank at once."""
        self._stop_reason = self._stop_reason or reason
        if self._asked or self._stop_sent or not self.result.hello:
            return
        self._stop_sent = True
        for connection, rank in self._ranks.items():
            if rank is not None and rank not in self._closed_ranks:
                with contextlib.suppress(OSError):
                    connection.send_json(wire.STOP, {"reason": self._stop_reason})

    # ---------------------------------------------------------------------------------------------------- end

    def _check_end(self, returncode: int | None) -> None:
        if self.fault is None or isinstance(self.fault, BundleFailed):
            self._check_quota()  # a bundle that fills its artifacts and dies of it, or does so in its last moment
        if self.fault is not None:
            raise self.fault
        missing = [r for r in range(self.spec.world_size) if r not in self.result.done]
        if missing:
            if not self.result.hello:
                raise EngineFault(
                    f"the ranks ended with code {returncode} before any rank reported; see {c.TRAINER_LOG_FILE}"
                )
            raise BundleFailed(
                f"rank {missing[0]} ended without saying why (code {returncode}); see {c.TRAINER_LOG_FILE}",
                rule=c.RULE_RUNTIME_ERROR,
            )
        if self.session is not None:
            self.result.stopped_reason = self.session.stopped_reason or c.STOP_BUNDLE_RETURNED
        if self.ledger.incomplete_indices:
            raise BundleFailed(
                f"the ranks did not take equal steps: {self.ledger.incomplete_indices} batches lack a rank's record",
                rule=c.RULE_RUNTIME_ERROR,
            )
        if self.ledger.batches == 0 and self.stop.reason is not None:
            raise EngineFault("interrupted before the first batch: nothing to score")
        if self.ledger.batches == 0:
            raise BundleFailed("train(ctx) returned without taking a batch: nothing to score", rule=c.RULE_DEGENERATE)
