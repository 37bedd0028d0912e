"""The referee's handle on an evaluator process: starts it, hands it weights, asks it for logits, trusts none of them.

Everything an evaluator says is checked here: a shape that is not the one asked for, a head narrower than the
vocabulary, a claim of more memory than the logits can need. How it ended is told apart, so that a model which writes
to its weights (they are mapped read-only, so that kills it) is the bundle's fault and not ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import orjson

from prism_fast.harness.bundle.bundle import Bundle
from prism_fast.harness.process import wire
from prism_fast.harness.process.isolation import Sandbox
from prism_fast.harness.process.shared_memory import SharedRegion
from prism_fast.harness.referee.head_choice import REASONS
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import (
    ArtifactsQuotaExceeded,
    BudgetExceeded,
    BundleFailed,
    BundleRejected,
    EngineFault,
    PrismError,
    one_line,
)
from prism_fast.protocol.run_spec import RunSpec

LOGIT_DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MAX_LOGITS_BYTES = min(64 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
MAX_MESSAGE = 2000
PIECE_BYTES = 1 << 20  # of logits copied at a time: stays in a core's cache until it is scored


def reported_fault(fault: dict[str, Any], *, ours_possible: bool) -> PrismError:
    """The error a process of the bundle's says it ended with. `ours_possible`: no bundle code has run there yet.

    Whatever it says is the bundle's word: it can name a rule of ours for itself, and cannot put the blame on us.
    Raises KeyError, TypeError or ValueError when it is not even a fault.
    """
    kind, rule = fault["kind"], fault["rule"]
    message = one_line(str(fault["message"])[: 2 * MAX_MESSAGE])[:MAX_MESSAGE] or "no reason given"
    if kind == "engine" and ours_possible:
        return EngineFault(message)
    known = rule if isinstance(rule, str) and rule in c.RULES else c.RULE_RUNTIME_ERROR
    kinds = {"rejected": BundleRejected, "quota": ArtifactsQuotaExceeded}
    return kinds.get(kind, BundleFailed)(message, rule=known)


class Head(NamedTuple):
    """The linear head that makes logits of `hidden` [rows, width, H]: the trainer's own weights, read here.

    `threads`: torch's, for the product; its bits may depend on them, so they are the run spec's.
    """

    hidden: Any
    weight: Any
    bias: Any
    threads: int


class Prediction:
    """An evaluator's answer [rows, width, V]: logits, or a head's input. Valid until the next prediction.

    The evaluator may go on writing to the shared memory, and must not be scored on one answer and probed on another:
    so whatever is read there is read once, and at the same pace whether a probe follows or not (a difference would be
    a time to write at). A head's input is copied at once; logits are copied piece by piece while they are scored, into
    one piece's memory or, where they are needed again (`keep`), into that of all.
    """

    def __init__(
        self, shared: Any, head: Head | None, buffer: Any, forward_s: float, why_plain: str | None = None
    ) -> None:
        """`shared`: logits in shared memory; `buffer(bytes)`: private memory, uint8; `why_plain`: the evaluator's word
        for why these are logits although a head's input was asked for, a key of head_choice.REASONS."""
        self.head, self.forward_s, self.why_plain = head, forward_s, why_plain
        self._shared, self._buffer = shared, buffer
        self._logits: Any = None
        self._kept = False
        self.head_width = int(shared.shape[2] if head is None else head.weight.shape[0])

    def keep(self) -> None:
        """The logits that `nll` is about to read will be needed again."""
        self._kept = True

    @property
    def logits(self) -> Any:
        """A CPU tensor [rows, width, V] of this process's own; made here where the answer is a head's input.

        After `nll` only what was kept is there: RuntimeError otherwise.
        """
        if self.head is not None:
            hidden = self.head.hidden
            return self.logits_between(0, hidden.shape[0] * hidden.shape[1]).view(*hidden.shape[:2], self.head_width)
        if self._logits is None:
            if self._shared is None:
                raise RuntimeError("the logits were scored piece by piece and are gone: keep() comes first")
            self._logits, self._shared = self._private(self._shared), None
        return self._logits

    def logits_between(self, first: int, last: int) -> Any:
        """The logits of the flattened positions [first, last), as [last - first, V]."""
        import torch

        if self.head is None:
            return self.logits.view(-1, self.head_width)[first:last]
        head = self.head
        with _torch_threads(head.threads):
            rows = head.hidden.view(-1, head.hidden.shape[2])[first:last]
            return torch.nn.functional.linear(rows, head.weight, head.bias)

    def nll(self, targets: Any) -> Any:
        """`kernels.token_nll` of int64 [rows, width] targets: float32 (float64 of float64 logits), same shape."""
        import torch

        from prism_fast.kernels import token_nll

        if self.head is not None:
            with _torch_threads(self.head.threads):
                return token_nll(self.head.hidden, targets, weight=self.head.weight, bias=self.head.bias)
        if self._logits is not None:
            return token_nll(self._logits, targets)
        answer, self._shared = self._shared, None
        shared, flat = answer.view(-1, self.head_width), targets.view(-1)
        step = max(1, PIECE_BYTES // (shared.shape[1] * shared.element_size()))
        whole = self._own(shared if self._kept else shared[:step])
        losses: list[Any] = []
        for first in range(0, len(flat), step):  # a row's bits do not depend on the rows beside it
            piece = shared[first : first + step]
            own = whole[first : first + step] if self._kept else whole[: len(piece)]
            losses.append(token_nll(own.copy_(piece), flat[first : first + step]))
        if self._kept:
            self._logits = whole.view(answer.shape)
        return torch.cat(losses).view(targets.shape)

    def _own(self, like: Any) -> Any:
        """Private memory for a tensor of this shape and dtype."""
        size = like.numel() * like.element_size()
        return self._buffer(size)[:size].view(like.dtype).view(like.shape)

    def _private(self, shared: Any) -> Any:
        return self._own(shared).copy_(shared)


@contextlib.contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
        self._copy: Any = None  # uint8 tensor: the last answer's bytes
        self._spec = spec
        self._state: dict[str, Any] = {}  # adopted tensors by name, read-only
        self._fused = False
        self._autocast = wire.AUTOCAST[0]
        self._private = tempfile.TemporaryDirectory(prefix="prism-evaluator-")
        bundle_dir = Path(self._private.name) / "bundle"
        bundle.write_to(bundle_dir, ("architecture.py",))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel = wire.Channel(ours, descriptors=False)
        command = [sys.executable, "-m", "prism_fast.harness.executor.evaluator", str(theirs.fileno())]
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
        from prism_fast.harness.process.state_layout import from_json

        self._state = {e.name: e.view(region) for e in from_json(layout)}

    def predict(self, tokens: Any, autocast: int = 0, *, fused: bool = False) -> Prediction:
        """`tokens`: int64 numpy [rows, width]. Raises BundleFailed, BundleRejected, BudgetExceeded.

        `fused`: the head's input will do, of a state that was adopted; what is answered may still be logits.
        """
        self.wait_until_born()
        rows, width = tokens.shape
        self._fused = fused = fused and bool(self._state)
        self._autocast = wire.AUTOCAST[autocast]
        self._send(wire.PREDICT, wire.PREDICT_RECORD.pack(rows, width, autocast, fused) + tokens.tobytes())
        frame = self._receive(wire.LOGITS, wire.NEED)
        if frame.kind == wire.NEED:
            dtype, shape = self._checked(frame, rows, width)[:2]
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
        dtype, shape, weight, bias, document = self._checked(frame, rows, width)
        if self._region is None or self._region.size < LOGIT_DTYPES[dtype] * shape[0] * shape[1] * shape[2]:
            raise BundleFailed("the evaluator announced logits it has no memory for", rule=c.RULE_OUTPUT_SHAPE)
        import torch

        shared = self._region.tensor(getattr(torch, dtype), shape, (shape[1] * shape[2], shape[2], 1), 0)
        forward_s = document["forward_s"]
        if weight is None:
            return Prediction(shared, None, self._buffer, forward_s, document["plain"])
        hidden = self._buffer(shared.numel() * shared.element_size())
        hidden = hidden[: shared.numel() * shared.element_size()].view(shared.dtype).view(shape).copy_(shared)
        weight, bias = (None if t is None else t.to(hidden.dtype) for t in (weight, bias))
        return Prediction(None, Head(hidden, weight, bias, self._spec.torch_threads), self._buffer, forward_s)

    def _buffer(self, size: int) -> Any:
        import torch

        if self._copy is None or self._copy.numel() < size:
            self._copy = torch.empty(size, dtype=torch.uint8)
        return self._copy

    def _send(self, kind: int, body: bytes = b"", *, fd: int | None = None) -> None:
        try:
            self._channel.send(kind, body, fd=fd, timeout=max(0.001, self._deadline() - monotonic()))
        except TimeoutError:
            raise self._too_late() from None
        except OSError:
            self._receive()  # it is gone: raises the fault that it reported, or what became of it
            raise

    def _checked(
        self, frame: wire.Frame, rows: int, width: int
    ) -> tuple[str, tuple[int, int, int], Any, Any, dict[str, Any]]:
        """-> (dtype, shape, the head's weight, its bias, {forward_s, plain}); no weight: these are logits."""
        try:
            document = frame.json()
            dtype, shape = str(document["dtype"]), tuple(document["shape"])
            head = document.get("head")
            names = None if head is None else (head[0], head[1])
            plain = document.get("plain")
            told = {
                "forward_s": float(document.get("forward_s", 0.0)),
                "plain": plain if plain in REASONS else "processed",
            }
        except (orjson.JSONDecodeError, AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise self._out_of_turn(frame) from None
        good = dtype in LOGIT_DTYPES and len(shape) == 3 and shape[:2] == (rows, width) and isinstance(shape[2], int)
        if not good:
            raise BundleFailed(
                f"the evaluator announced {dtype} logits of shape {list(shape)}; expected float [{rows}, {width}, V]",
                rule=c.RULE_OUTPUT_SHAPE,
            )
        weight, bias = (None, None) if names is None else self._head(names, dtype, shape[2])
        classes = shape[2] if weight is None else weight.shape[0]
        if classes < self.n_vocab:
            raise BundleRejected(
                f"the model's logits are {classes} wide; the tokenizer has {self.n_vocab} ids and each needs its own",
                rule=c.RULE_VOCAB_MISMATCH,
            )
        return dtype, shape, weight, bias, told  # type: ignore[return-value]

    def _head(self, names: tuple[Any, Any], dtype: str, hidden: int) -> tuple[Any, Any]:
        """The adopted tensors that an evaluator names as its head's; nothing of them is its own."""
        weight, bias = (self._state.get(n) if isinstance(n, str) else None for n in names)
        good = (
            self._fused
            and weight is not None
            and weight.dim() == 2
            and weight.shape[1] == hidden
            and weight.numel() > 0
            and (names[1] is None or (bias is not None and bias.shape == weight.shape[:1]))
            and all(
                str(t.dtype).removeprefix("torch.") == dtype
                or (dtype == self._autocast and t.is_floating_point() and t.element_size() <= 4)
                for t in (weight, bias)
                if t is not None
            )
        )
        if not good:
            raise BundleFailed(
                f"the evaluator announced {dtype} input [.., {hidden}] of a head {names[0]!r} that the model's state "
                "does not have so",
                rule=c.RULE_OUTPUT_SHAPE,
            )
        return weight, bias

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
