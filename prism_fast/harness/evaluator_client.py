"""The referee's handle on an evaluator process: starts it, hands it weights, asks it for logits, trusts none of them.

Everything an evaluator says is checked here: a shape that is not the one asked for, a head narrower than the
vocabulary, a claim of more memory than the logits can need. How it ended is told apart, so that a model which writes
to its weights (they are mapped read-only, so that kills it) is the bundle's fault and not ours.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import orjson

from prism_fast.harness import wire
from prism_fast.harness.bundle import Bundle
from prism_fast.harness.isolation import Sandbox
from prism_fast.harness.shared_memory import SharedRegion
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

LOGIT_DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MAX_LOGITS_BYTES = min(64 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
MAX_MESSAGE = 2000


def reported_fault(fault: dict[str, Any], *, ours_possible: bool) -> PrismError:
    """The error a process of the bundle's says it ended with. `ours_possible`: no bundle code has run there yet.

    Whatever it says is the bundle's word: it can name a rule of ours for itself, and cannot put the blame on us.
    Raises KeyError, TypeError or ValueError when it is not even a fault.
    """
    kind, rule = fault["kind"], fault["rule"]
    words = "".join(ch if ch.isprintable() else " " for ch in str(fault["message"])[: 2 * MAX_MESSAGE])
    message = " ".join(words.split())[:MAX_MESSAGE] or "no reason given"
    if kind == "engine" and ours_possible:
        return EngineFault(message)
    known = rule if isinstance(rule, str) and rule in c.RULES else c.RULE_RUNTIME_ERROR
    kinds = {"rejected": BundleRejected, "quota": ArtifactsQuotaExceeded}
    return kinds.get(kind, BundleFailed)(message, rule=known)


class Prediction(NamedTuple):
    """`logits`: a CPU tensor [rows, width, V] of this process's own, valid until the next prediction."""

    logits: Any
    forward_s: float


class Evaluator:
    """One evaluator process. `deadline()` gives the monotonic time by which an answer must have come."""

    def __init__(
        self,
        spec: RunSpec,
        bundle: Bundle,
        sandbox: Sandbox,
        environment: dict[str, str],
        log_path: Path,
        *,
        tokenizer_dir: str,
        deadline: Callable[[], float],
        rank: int = 0,
    ) -> None:
        self.n_vocab = 1  # ids that need a logit of their own; known once the basis is
        self._deadline = deadline
        self._region: SharedRegion | None = None
        self._copy: Any = None  # uint8 tensor: the last logits' bytes
        self._private = tempfile.TemporaryDirectory(prefix="prism-evaluator-")
        bundle_dir = Path(self._private.name) / "bundle"
        bundle.write_to(bundle_dir, ("architecture.py",))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel = wire.Channel(ours, descriptors=False)
        command = [sys.executable, "-m", "prism_fast.harness.evaluator", str(theirs.fileno())]
        with open(log_path, "ab") as log, theirs:
            self.process = subprocess.Popen(
                sandbox.evaluator(command, bundle_dir),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._private.name,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._channel.send_json(
            wire.HELLO,
            {
                "spec": spec.model_dump(),
                "bundle_dir": str(bundle_dir),
                "tokenizer_dir": tokenizer_dir,
                "rank": rank,
                "local_rank": rank,
            },
        )
        self._importing = self._born = False

    def set_deadline(self, deadline: Callable[[], float]) -> None:
        """From now on, answers must have come by `deadline()`, monotonic seconds."""
        self._deadline = deadline

    def wait_until_born(self) -> None:
        """Blocks until `build_model` has returned there."""
        if not self._born:
            self._receive(wire.IMPORTING)
            self._importing = True
            self._receive(wire.BORN)
            self._born = True

    def adopt(self, layout: Any, region: SharedRegion, *, check_init: bool) -> None:
        """Makes the evaluator's model read its state from `region`. Raises what the evaluator refuses it with."""
        self.wait_until_born()
        self._send(wire.ADOPT, orjson.dumps({"layout": layout, "check_init": check_init}), fd=region.fd)
        self._receive(wire.ADOPTED)

    def predict(self, tokens: Any, autocast: int = 0) -> Prediction:
        """`tokens`: int64 numpy [rows, width]. Raises BundleFailed, BundleRejected, BudgetExceeded.

        The logits are copied out of the shared memory before anything reads them: the evaluator may go on writing
        there, and would otherwise be scored on one answer and probed on another.
        """
        self.wait_until_born()
        rows, width = tokens.shape
        self._send(wire.PREDICT, wire.PREDICT_RECORD.pack(rows, width, autocast) + tokens.tobytes())
        frame = self._receive(wire.LOGITS, wire.NEED)
        if frame.kind == wire.NEED:
            dtype, shape, _ = self._checked(frame, rows, width)
            size = LOGIT_DTYPES[dtype] * shape[0] * shape[1] * shape[2]
            if size > MAX_LOGITS_BYTES:
                raise BundleFailed(
                    f"the model's logits take {size:,} bytes a batch; at most {MAX_LOGITS_BYTES:,} can be scored",
                    rule=c.RULE_RESOURCE_OOM,
                )
            if self._region is not None:
                self._region.close()
            self._region = SharedRegion.create("prism-logits", size)
            self._send(wire.REGION, fd=self._region.fd)
            frame = self._receive(wire.LOGITS)
        dtype, shape, forward_s = self._checked(frame, rows, width)
        if self._region is None or self._region.size < LOGIT_DTYPES[dtype] * shape[0] * shape[1] * shape[2]:
            raise BundleFailed("the evaluator announced logits it has no memory for", rule=c.RULE_OUTPUT_SHAPE)
        import torch

        shared = self._region.tensor(getattr(torch, dtype), shape, (shape[1] * shape[2], shape[2], 1), 0)
        size = shared.numel() * shared.element_size()
        if self._copy is None or self._copy.numel() < size:
            self._copy = torch.empty(size, dtype=torch.uint8)
        return Prediction(self._copy[:size].view(shared.dtype).view(shape).copy_(shared), forward_s)

    def _send(self, kind: int, body: bytes = b"", *, fd: int | None = None) -> None:
        try:
            self._channel.send(kind, body, fd=fd, timeout=max(0.001, self._deadline() - monotonic()))
        except TimeoutError:
            raise self._too_late() from None
        except OSError:
            self._receive()  # it is gone: raises the fault that it reported, or what became of it
            raise

    def _checked(self, frame: wire.Frame, rows: int, width: int) -> tuple[str, tuple[int, int, int], float]:
        try:
            document = frame.json()
            dtype, shape = str(document["dtype"]), tuple(document["shape"])
            forward_s = float(document.get("forward_s", 0.0))
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
            raise self._out_of_turn(frame) from None
        good = dtype in LOGIT_DTYPES and len(shape) == 3 and shape[:2] == (rows, width) and isinstance(shape[2], int)
        if not good:
            raise BundleFailed(
                f"the evaluator announced {dtype} logits of shape {list(shape)}; expected float [{rows}, {width}, V]",
                rule=c.RULE_OUTPUT_SHAPE,
            )
        if shape[2] < self.n_vocab:
            raise BundleRejected(
                f"the model's logits are {shape[2]} wide; the tokenizer has {self.n_vocab} ids and each needs its own",
                rule=c.RULE_VOCAB_MISMATCH,
            )
        return dtype, shape, forward_s  # type: ignore[return-value]

    def _receive(self, *kinds: int) -> wire.Frame:
        try:
            frame = self._channel.receive(max(0.001, self._deadline() - monotonic()))
        except TimeoutError:
            raise self._too_late() from None
        except (wire.PeerClosed, wire.FrameError, BrokenPipeError):
            raise self._post_mortem() from None
        try:
            if frame.kind == wire.FAULT:
                raise reported_fault(frame.json(), ours_possible=not self._importing)
            if frame.kind in kinds:
                return frame
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            pass
        raise self._out_of_turn(frame)

    def _out_of_turn(self, frame: wire.Frame) -> BundleFailed:
        return BundleFailed(f"the evaluator sent a frame of kind {frame.kind} out of turn", rule=c.RULE_RUNTIME_ERROR)

    def _too_late(self) -> BudgetExceeded:
        return BudgetExceeded(
            f"the model was still predicting at the end of the run's time ({c.MARKER_BUDGET_EXCEEDED})",
            rule=c.RULE_BUDGET_EXCEEDED,
        )

    def _post_mortem(self) -> BundleFailed:
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            code = None
        # bwrap reports a child killed by signal n as 128 + n.
        if code in (-signal.SIGSEGV, -signal.SIGBUS, 128 + signal.SIGSEGV, 128 + signal.SIGBUS):
            return BundleFailed(
                "the evaluator was killed by a memory fault in the model's forward: weights are read-only there, "
                "and a forward that writes to its parameters ends like this",
                rule=c.RULE_RUNTIME_ERROR,
            )
        if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return BundleFailed("the evaluator was killed, most likely out of memory", rule=c.RULE_RESOURCE_OOM)
        return BundleFailed(
            f"the evaluator ended without an answer (code {code}); see {c.EVALUATOR_LOG_FILE}",
            rule=c.RULE_RUNTIME_ERROR,
        )

    def close(self) -> None:
        """Closes the channel, on which the evaluator ends; the caller ends whatever is left."""
        self._channel.close()
        self._private.cleanup()
        if self._region is not None:
            self._region.close()
