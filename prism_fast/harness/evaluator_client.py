"""The referee's handle on an evaluator process: starts it, hands it weights, asks it for logits, trusts none of them.

Everything an evaluator says is checked here: a shape that is not the one asked for, a head narrower than the
vocabulary, a claim of more memory than the logits can need. How it ended is told apart, so that a model which writes
to its weights (they are mapped read-only, so that kills it) is the bundle's fault and not ours.
"""

from __future__ import annotations

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
MAX_LOGITS_BYTES = 64 << 30
FAULT_KINDS: dict[str, type[PrismError]] = {
    "quota": ArtifactsQuotaExceeded,
    "rejected": BundleRejected,
    "failed": BundleFailed,
    "engine": EngineFault,
}


class Prediction(NamedTuple):
    """`logits`: a CPU tensor [rows, width, V] over shared memory, valid until the next prediction."""

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
        self._private = tempfile.TemporaryDirectory(prefix="prism-evaluator-")
        bundle_dir = Path(self._private.name) / "bundle"
        bundle.write_to(bundle_dir, ("architecture.py",))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel = wire.Channel(ours)
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
        self._born = False

    def set_deadline(self, deadline: Callable[[], float]) -> None:
        """From now on, answers must have come by `deadline()`, monotonic seconds."""
        self._deadline = deadline

    def wait_until_born(self) -> None:
        """Blocks until `build_model` has returned there."""
        if not self._born:
            self._receive(wire.BORN)
            self._born = True

    def adopt(self, layout: Any, region: SharedRegion, *, check_init: bool) -> None:
        """Makes the evaluator's model read its state from `region`. Raises what the evaluator refuses it with."""
        self.wait_until_born()
        self._channel.send_json(wire.ADOPT, {"layout": layout, "check_init": check_init}, fd=region.fd)
        self._receive(wire.ADOPTED)

    def predict(self, tokens: Any, autocast: int = 0) -> Prediction:
        """`tokens`: int64 numpy [rows, width]. Raises BundleFailed, BundleRejected, BudgetExceeded."""
        self.wait_until_born()
        rows, width = tokens.shape
        self._channel.send(wire.PREDICT, wire.PREDICT_RECORD.pack(rows, width, autocast) + tokens.tobytes())
        frame = self._receive(wire.LOGITS, wire.NEED)
        if frame.kind == wire.NEED:
            dtype, shape = self._checked(frame, rows, width)
            size = LOGIT_DTYPES[dtype] * shape[0] * shape[1] * shape[2]
            if size > MAX_LOGITS_BYTES:
                raise BundleFailed(
                    f"the model's logits take {size:,} bytes a batch; at most {MAX_LOGITS_BYTES:,} can be scored",
                    rule=c.RULE_RESOURCE_OOM,
                )
            self._region = SharedRegion.create("prism-logits", size)
            self._channel.send(wire.REGION, fd=self._region.fd)
            frame = self._receive(wire.LOGITS)
        dtype, shape = self._checked(frame, rows, width)
        if self._region is None or self._region.size < LOGIT_DTYPES[dtype] * shape[0] * shape[1] * shape[2]:
            raise BundleFailed("the evaluator announced logits it has no memory for", rule=c.RULE_OUTPUT_SHAPE)
        import torch

        logits = self._region.tensor(getattr(torch, dtype), shape, (shape[1] * shape[2], shape[2], 1), 0)
        return Prediction(logits, float(frame.json()["forward_s"]))

    def _checked(self, frame: wire.Frame, rows: int, width: int) -> tuple[str, tuple[int, int, int]]:
        document = frame.json()
        dtype, shape = document["dtype"], tuple(document["shape"])
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
        return dtype, shape  # type: ignore[return-value]

    def _receive(self, *kinds: int) -> wire.Frame:
        try:
            frame = self._channel.receive(max(0.001, self._deadline() - monotonic()))
        except TimeoutError:
            raise BudgetExceeded(
                f"the model was still predicting at the end of the run's time ({c.MARKER_BUDGET_EXCEEDED})",
                rule=c.RULE_BUDGET_EXCEEDED,
            ) from None
        except (wire.PeerClosed, wire.FrameError, BrokenPipeError):
            raise self._post_mortem() from None
        try:
            if frame.kind == wire.FAULT:
                fault = frame.json()
                raise FAULT_KINDS[fault["kind"]](fault["message"], rule=fault["rule"])
            if frame.kind in kinds:
                return frame
        except (orjson.JSONDecodeError, KeyError, TypeError):
            pass
        raise BundleFailed(f"the evaluator sent a frame of kind {frame.kind} out of turn", rule=c.RULE_RUNTIME_ERROR)

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
