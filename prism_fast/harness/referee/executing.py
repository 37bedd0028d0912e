"""The referee's handle on an executor: starts it, hands it programs and weights, asks it for sums.

An executor runs our code alone, but on a program that came from a bundle: how it ends is the program's doing, and said
so; what it answers is held to its form.
"""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import numpy as np
import orjson

from prism_fast.harness.marking.heldout import Marks
from prism_fast.harness.process import wire
from prism_fast.harness.process.commands import child_command, child_environment, nothing_to_read
from prism_fast.harness.process.isolation import Sandbox
from prism_fast.harness.process.jobs import (
    HEADS,
    PREDICT,
    PROBE_MODES,
    RESULT,
    STATES,
    VERDICTS,
    Fault,
    Loaded,
    LoadedProgram,
    LoadJob,
    PredictRecord,
    ResultRecord,
    garbage,
    handling,
    read,
)
from prism_fast.harness.process.shared_memory import SharedRegion
from prism_fast.harness.referee.tracing import Traced
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BudgetExceeded, BundleFailed, EngineFault, PrismError
from prism_fast.protocol.run_spec import RunSpec

PROBE_SHARE = 0.06  # of the rows, on average


class Executor:
    """One executor process. `deadline()` gives the monotonic time by which an answer must have come."""

    def __init__(
        self,
        spec: RunSpec,
        sandbox: Sandbox,
        environment: dict[str, str],
        log_path: Path,
        *,
        deadline: Callable[[], float],
        rank: int = 0,
        probe_share: float = PROBE_SHARE,
        may_tell: bool = False,
    ) -> None:
        self._spec, self._deadline, self._rank = spec, deadline, rank
        self._share, self._may_tell = probe_share, may_tell
        self.n_vocab = 1
        self.head_width = 0
        self.probed_rows = self.trained_numbers = 0
        self.rules: list[str] = []  # broken ones, as probes found them
        self.probe_mode, self.head = PROBE_MODES[0], HEADS[0]
        self._loaded = False
        self._private = tempfile.TemporaryDirectory(prefix="prism-executor-")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel = wire.Channel(ours, descriptors=False)
        command = child_command("prism_fast.harness.executor.main", str(theirs.fileno()))
        with open(log_path, "ab") as log, theirs, nothing_to_read() as stdin:
            self.process = subprocess.Popen(
                sandbox.executor(command),
                env=child_environment(environment),
                stdin=stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._private.name,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def set_deadline(self, deadline: Callable[[], float]) -> None:
        """From now on, answers must have come by `deadline()`, monotonic seconds."""
        self._deadline = deadline

    def load(self, traced: Traced, token_bytes: np.ndarray, matmul_precision: str = "highest") -> None:
        """Hands over the programs, and the initial state as the state "initial". `token_bytes`: int32 [n_vocab].

        Raises what a program is refused with.
        """
        blobs = [bytes(np.ascontiguousarray(token_bytes, np.int32).data)]
        for each in traced.programs:
            blobs += [each.program.to_bytes(), each.constants]
        places, end = [], 0
        for blob in blobs:
            places.append((end, len(blob)))
            end += -(-len(blob) // 64) * 64
        region = SharedRegion.create("prism-programs", end)
        with SharedRegion.writer(region) as writer:
            for (begin, size), blob in zip(places, blobs, strict=True):
                writer.array()[begin : begin + size] = np.frombuffer(blob, np.uint8)
        region.close_to_writers()
        job = LoadJob(
            device=self._spec.device,
            local_rank=self._rank,
            torch_threads=self._spec.torch_threads,
            deterministic_algorithms=self._spec.deterministic_algorithms,
            matmul_precision=matmul_precision,
            memory_bytes=None,
            programs=[
                LoadedProgram(width=each.program.width, program=places[1 + 2 * i], constants=places[2 + 2 * i])
                for i, each in enumerate(traced.programs)
            ],
            token_bytes=places[0],
            probe_share=self._share,
            watch_buffers=traced.numbers > self._spec.max_parameters,
            may_tell=self._may_tell,
        )
        self.n_vocab = len(token_bytes)
        self._send(wire.LOAD, orjson.dumps(job.model_dump()), fd=region.fd)
        region.close()
        self._loaded = False
        self.adopt("initial", traced.initial_state)

    def adopt(self, name: str, region: SharedRegion) -> None:
        """Makes a region the state called `name`, one of STATES. It is read again whenever it is asked for afresh."""
        self._send(wire.STATE, orjson.dumps({"name": name}), fd=region.fd)

    def predict(
        self,
        tokens: np.ndarray,
        targets: np.ndarray,
        *,
        state: str,
        autocast: int = 0,
        fresh: bool = True,
        probe: bool = True,
    ) -> tuple[ResultRecord, np.ndarray]:
        """-> (sums and verdicts, float64 nats of each row; empty of the live state).

        int64 [rows, width] each. Raises BundleFailed, BundleRejected, BudgetExceeded, EngineFault.
        """
        self._ask(wire.PREDICT, tokens, targets, state, autocast, fresh, probe)
        frame = self._receive(wire.RESULT)
        with handling("the executor"):
            record = ResultRecord(*RESULT.unpack_from(frame.body))
            rows = np.frombuffer(frame.body, np.float64, offset=RESULT.size)
            verdict = VERDICTS[record.verdict]
            self.probe_mode, self.head = (
                PROBE_MODES[record.probe_mode] if probe else self.probe_mode,
                HEADS[record.head],
            )
            if len(rows) != (0 if state == "live" else len(tokens)) or record.head_width < self.n_vocab:
                raise garbage(f"{len(rows)} rows, a head of {record.head_width}")
        if self.head_width not in (0, record.head_width):
            raise BundleFailed(
                f"the model's logits were {self.head_width} wide and are now {record.head_width}",
                rule=c.RULE_OUTPUT_SHAPE,
            )
        self.head_width = record.head_width
        self.probed_rows += record.probed_rows
        self.trained_numbers = max(self.trained_numbers, record.trained_numbers)
        if verdict is not None and verdict not in self.rules:
            self.rules.append(verdict)
        return record, rows

    def detail(self, tokens: np.ndarray, targets: np.ndarray, state: str) -> tuple[np.ndarray, np.ndarray]:
        """-> (float64 nats [rows, width], float64 logits at each row's last target [rows, V]); for audits."""
        self._ask(wire.DETAIL, tokens, targets, state, 0, False, False)
        frame = self._receive(wire.NATS)
        with handling("the executor"):
            found = np.frombuffer(frame.body, np.float64)
            return found[: tokens.size].reshape(tokens.shape), found[tokens.size :].reshape(len(tokens), -1)

    def snapshot(self, path: Path) -> None:
        """Has the weights of the last prediction written to `path`, as safetensors."""
        with open(path, "wb") as file:
            self._send(wire.SNAPSHOT, fd=file.fileno())
            self._receive(wire.SAVED)

    def _ask(
        self,
        kind: int,
        tokens: np.ndarray,
        targets: np.ndarray,
        state: str,
        autocast: int,
        fresh: bool,
        probe: bool,
    ) -> None:
        rows, width = tokens.shape
        record = PredictRecord(rows, width, autocast, STATES.index(state), fresh, probe)
        self._send(kind, PREDICT.pack(*record) + tokens.tobytes() + targets.tobytes())

    def _send(self, kind: int, body: bytes = b"", *, fd: int | None = None) -> None:
        try:
            self._channel.send(kind, body, fd=fd, timeout=max(0.001, self._deadline() - monotonic()))
        except TimeoutError:
            raise self._too_late() from None
        except OSError:
            self._receive()  # it is gone: raises the fault that it reported, or what became of it
            raise

    def _receive(self, *kinds: int) -> wire.Frame:
        while True:
            try:
                frame = self._channel.receive(max(0.001, self._deadline() - monotonic()))
            except TimeoutError:
                raise self._too_late() from None
            except (wire.PeerClosed, wire.FrameError, BrokenPipeError, struct.error):
                raise self._post_mortem() from None
            if frame.kind == wire.FAULT:
                raise read(Fault, frame.body).error(ours_possible=True)
            if frame.kind == wire.LOADED and not self._loaded:
                self.device = read(Loaded, frame.body).device
                self._loaded = True
                continue
            if frame.kind in kinds:
                return frame
            raise garbage(f"the executor: a frame of kind {frame.kind} out of turn")

    def _too_late(self) -> PrismError:
        return BudgetExceeded(
            f"the model was still predicting at the end of the run's time ({c.MARKER_BUDGET_EXCEEDED})",
            rule=c.RULE_BUDGET_EXCEEDED,
        )

    def _post_mortem(self) -> PrismError:
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            code = None
        # bwrap reports a child killed by signal n as 128 + n.
        if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return BundleFailed("the executor was killed, most likely out of memory", rule=c.RULE_RESOURCE_OOM)
        if not self._loaded:
            return EngineFault(
                f"the executor ended with code {code} before it had a program; see {c.EXECUTOR_LOG_FILE}"
            )
        return BundleFailed(
            f"the executor ended in the model's program (code {code}); see {c.EXECUTOR_LOG_FILE}",
            rule=c.RULE_RUNTIME_ERROR,
        )

    def close(self) -> None:
        """Closes the channel, on which the executor ends; the caller ends whatever is left."""
        self._channel.close()
        self._private.cleanup()


class StatePredictor:
    """Implements `marking.heldout.Predictor`: one state of an executor."""

    def __init__(self, executor: Executor, state: str, *, probe: bool) -> None:
        self._executor, self._state, self._probe = executor, state, probe
        self._fresh = True

    def mark(self, tokens: np.ndarray, targets: np.ndarray) -> Marks:
        record, rows = self._executor.predict(tokens, targets, state=self._state, fresh=self._fresh, probe=self._probe)
        self._fresh = False
        return Marks(rows, record.scored_tokens, record.faults, record.head_width)
