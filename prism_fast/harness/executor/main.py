"""An executor: runs programs on text and marks them. `python -m prism_fast.harness.executor.main FD`; not for people.

There is no code of a bundle here and no way to come by any: what it runs is a list of operators, checked again when it
is loaded. Weights are copied before they are used, so nothing a trainer does to its own reaches a prediction. Only sums
and verdicts leave. It holds neither ledger nor official files: an operator of torch that can be led astray by a program
is worth one process without authority.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import traceback
from time import perf_counter
from typing import Any

import numpy as np
import torch

from prism_fast.harness.executor.probing import Prober
from prism_fast.harness.marking.sums import batch_sums, check_width, fault_nats, nll_of, row_marks
from prism_fast.harness.process import wire
from prism_fast.harness.process.devices import resolve_device
from prism_fast.harness.process.die_with_parent import die_with_parent
from prism_fast.harness.process.jobs import (
    PREDICT,
    PROBE_MODES,
    RESULT,
    STATES,
    VERDICTS,
    Fault,
    Loaded,
    LoadJob,
    PredictRecord,
    ResultRecord,
)
from prism_fast.harness.process.limits import limit_process, usable_memory
from prism_fast.harness.process.seeding import set_deterministic
from prism_fast.harness.process.shared_memory import SharedRegion
from prism_fast.harness.process.shared_state import slots_of, view
from prism_fast.program.format import Program, ProgramError
from prism_fast.program.runnable import Runnable
from prism_fast.program.sizes import logits_spec
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleFailed, BundleRejected, PrismError

MAX_FILE_BYTES = 1 << 28  # of any one file: compiled kernels are the most that is written here
HEAD_MEMORY_SHARE = 0.25  # of the memory: logits that take more are never made where the program allows it
HEAD_ROWS = 512  # positions whose logits exist at a time, then


def main() -> int:
    die_with_parent()
    channel = wire.Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        serve(channel)
        return 0
    except wire.PeerClosed:
        return 0
    except BaseException as error:
        with contextlib.suppress(OSError):  # the log may be what is full
            traceback.print_exc()
        with contextlib.suppress(OSError):
            channel.send_json(wire.FAULT, fault_of(error).model_dump())
        return 1


def fault_of(error: BaseException) -> Fault:
    """What the referee is told. No text of torch's: an operator can be made to put foreign memory into its message."""
    if isinstance(error, BundleRejected):
        return Fault(kind="rejected", rule=error.rule, message=str(error))
    if isinstance(error, BundleFailed):
        return Fault(kind="failed", rule=error.rule, message=str(error))
    if isinstance(error, ProgramError):
        return Fault(kind="rejected", rule=c.RULE_NOT_EXPORTABLE, message=str(error))
    if isinstance(error, PrismError):
        return Fault(kind="engine", rule=error.rule, message=str(error))
    return Fault(kind="engine", message=f"the executor failed: {type(error).__name__}, see {c.EXECUTOR_LOG_FILE}")


class Executor:
    """Programs of one model, one a width, and the weights they run on."""

    def __init__(self, job: LoadJob, blobs: SharedRegion) -> None:
        set_deterministic(job.torch_threads, job.deterministic_algorithms)
        torch.set_float32_matmul_precision(job.matmul_precision)
        self.device = resolve_device(job.device, job.local_rank)

        def blob(place: tuple[int, int]) -> bytes:
            return bytes(blobs.array()[place[0] : place[0] + place[1]])

        self._programs: dict[int, Runnable] = {}
        for each in job.programs:
            program = Program.from_bytes(blob(each.program))
            self._programs[each.width] = Runnable(program, blob(each.constants), self.device.type)
        first = next(iter(self._programs.values())).program
        self._slots = slots_of(first.state)
        table = np.frombuffer(blob(job.token_bytes), np.int32).copy()
        self.token_bytes = torch.from_numpy(table).to(self.device)
        self.n_vocab = len(table)
        self._states: dict[str, list[torch.Tensor]] = {}  # by name: distinct tensors over their region
        distinct = [slot for slot in self._slots if not slot.tied]
        self._private = [
            torch.empty(slot.shape, dtype=getattr(torch, slot.dtype), device=self.device) for slot in distinct
        ]
        own = {slot.name: tensor for slot, tensor in zip(distinct, self._private, strict=True)}
        self._weights = [own[tensor.tied_to or tensor.name] for tensor in first.state]
        self._buffers = [i for i, slot in enumerate(distinct) if not slot.is_parameter and slot.nbytes]
        self._distinct = distinct
        self._holds: str | None = None  # whose weights the private copy is
        self._autocast = 0
        self.head_width = 0
        self._logits_made = True
        self._init_seen = False
        self._watched = job.watch_buffers
        self._memory = usable_memory() if job.memory_bytes is None else job.memory_bytes
        self._share = job.probe_share
        rows_alone = all(r.program.takes(1) for r in self._programs.values())
        prober = functools.partial(Prober, self._nats_for_probe, self.n_vocab, job.probe_share, rows_alone=rows_alone)
        self._probers = {"live": prober(), "trained": prober(first_within=1)}

    def adopt(self, name: str, region: SharedRegion) -> None:
        self._states[name] = [view(slot, region) for slot in self._distinct]
        if self._holds == name:
            self._holds = None

    def predict(self, request: PredictRecord, tokens: np.ndarray, targets: np.ndarray) -> tuple[ResultRecord, bytes]:
        """-> (sums and verdicts, float64 nats of each row where the state is not the live one)."""
        began = perf_counter()
        name = STATES[request.state]
        taken = request.fresh or self._holds != name
        if taken:
            self._take(name)
        self._autocast = request.autocast
        wanted = torch.from_numpy(targets).to(self.device)
        nll = self._nll(tokens, wanted)
        predicted = perf_counter()
        rows = b""
        if name == "live":
            sums = batch_sums(nll, wanted, self.token_bytes, self.head_width).tolist()
        else:
            marks = row_marks(nll, targets, self.head_width)
            sums = [float(marks.nats.sum()), 0.0, 0, marks.tokens, 0, marks.faults]
            rows = marks.nats.tobytes()
        marked = perf_counter()
        verdict, mode, probed = 0, 0, 0
        if request.probe and self._share > 0:
            prober = self._probers[name]
            before = prober.rows
            prober.after(tokens, targets, _charged(nll, targets, self.head_width))
            verdict, mode = VERDICTS.index(prober.rule), PROBE_MODES.index(prober.mode)
            probed = prober.rows - before
        changed = self._changed_numbers() if self._watched and taken and name != "initial" else 0
        record = ResultRecord(
            nats=sums[0],
            special_nats=sums[1],
            bytes=int(sums[2]),
            scored_tokens=int(sums[3]),
            special_tokens=int(sums[4]),
            faults=int(sums[5]),
            head_width=self.head_width,
            trained_numbers=changed,
            probed_rows=probed,
            verdict=verdict,
            probe_mode=mode,
            head=int(not self._logits_made),
            predict_s=predicted - began,
            scoring_s=marked - predicted,
            probe_s=perf_counter() - marked,
        )
        return record, rows

    def _take(self, name: str) -> None:
        """Copies the weights: from here on nobody else can reach them."""
        if self._private:
            torch._foreach_copy_(self._private, self._states[name])
        self._holds = name
        if name == "live" and not self._init_seen:
            self._check_init()
            self._init_seen = True

    def _check_init(self) -> None:
        """The first weights that are predicted from, in the very copy, must be the forced init's bit for bit."""
        for slot, own, first in zip(self._distinct, self._private, self._states["initial"], strict=True):
            if not _same_bytes(own.cpu(), first):
                raise BundleRejected(
                    f"the trainer's {slot.name} was not build_model(ctx)'s under the forced seed when the first batch "
                    "was asked for; a run starts from the forced init",
                    rule=c.RULE_FORCED_INIT,
                )

    def _changed_numbers(self) -> int:
        """Numbers of buffers that are not as the model was built: they were trained, and count as parameters do."""
        initial = self._states.get("initial")
        if initial is None:
            return 0
        return sum(
            self._distinct[i].numbers for i in self._buffers if not _same_bytes(self._private[i].cpu(), initial[i])
        )

    def _nats_for_probe(self, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        nll = self._nll(tokens, torch.from_numpy(np.ascontiguousarray(targets)).to(self.device))
        return _charged(nll, targets, self.head_width)

    def _nll(self, tokens: np.ndarray, targets: torch.Tensor) -> torch.Tensor:
        """float32 [rows, width] on the device. Raises BundleFailed where the program does."""
        rows, width = tokens.shape
        runnable = self._program(width)
        given = torch.from_numpy(np.ascontiguousarray(tokens)).to(self.device)
        program = runnable.program
        try:
            if program.takes(rows):
                return self._run(runnable, given, targets)
            count = program.batch or program.most
            assert count is not None
            pieces = []  # as many rows as the program takes, the last piece filled up with the last row
            for begin in range(0, rows, count):
                index = torch.arange(begin, begin + count, device=self.device).clamp_(max=rows - 1)
                pieces.append(self._run(runnable, given[index], targets[index])[: rows - begin])
            return torch.cat(pieces)
        except (MemoryError, torch.OutOfMemoryError, ProgramError) as error:
            if not isinstance(error, ProgramError) or "allocate memory" in str(error.__cause__):
                raise BundleFailed(
                    f"the model's forward over {rows} rows of {width} tokens needs more memory than there is",
                    rule=c.RULE_RESOURCE_OOM,
                ) from None
            raise BundleFailed(
                f"the model's forward failed on {rows} rows of {width} tokens: {error}", rule=c.RULE_RUNTIME_ERROR
            ) from None

    def _program(self, width: int) -> Runnable:
        runnable = self._programs.get(width)
        if runnable is None:
            raise BundleFailed(f"there is no program for rows of {width} tokens", rule=c.RULE_RUNTIME_ERROR)
        return runnable

    def _run(self, runnable: Runnable, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        kind = self.device.type
        dtype = torch.float16 if wire.AUTOCAST[self._autocast] == "float16" else torch.bfloat16
        rows, width = tokens.shape
        with torch.no_grad():
            with torch.autocast(kind, dtype=dtype, enabled=self._autocast > 0, cache_enabled=False):
                if self._short_of_memory(rows * width, _declared_width(runnable)):
                    hidden = runnable.run_hidden(self._weights, tokens)
                    if hidden is not None:
                        self._logits_made = False
                        return self._by_rows(hidden, targets)
                logits = runnable.run(self._weights, tokens)
            self._check(logits, rows, width)
            return nll_of(logits, targets)

    def _by_rows(self, hidden: Any, targets: torch.Tensor) -> torch.Tensor:
        """Nats without all logits at once: the head's rows in pieces, whatever comes after the head within each."""
        flat, ids = hidden.hidden.reshape(-1, hidden.hidden.shape[-1]), targets.reshape(-1)
        pieces = []
        for begin in range(0, len(ids), HEAD_ROWS):
            logits = hidden.tail(
                torch.nn.functional.linear(flat[begin : begin + HEAD_ROWS], hidden.weight, hidden.bias)
            )
            self._check(logits[None], 1, len(logits))
            pieces.append(nll_of(logits, ids[begin : begin + HEAD_ROWS]))
        return torch.cat(pieces).view(targets.shape)

    def _short_of_memory(self, positions: int, head_width: int) -> bool:
        return positions * head_width * 4 > HEAD_MEMORY_SHARE * self._memory

    def _check(self, logits: torch.Tensor, rows: int, width: int) -> None:
        shape = tuple(logits.shape)
        if len(shape) != 3 or shape[:2] != (rows, width) or not logits.is_floating_point():
            raise BundleFailed(
                f"the model returned {str(logits.dtype).removeprefix('torch.')} of shape {list(shape)}; "
                f"expected float logits of shape [{rows}, {width}, V]",
                rule=c.RULE_OUTPUT_SHAPE,
            )
        check_width(shape[2], self.n_vocab)
        if self.head_width not in (0, shape[2]):
            raise BundleFailed(
                f"the model's logits were {self.head_width} wide and are now {shape[2]}", rule=c.RULE_OUTPUT_SHAPE
            )
        self.head_width = shape[2]

    def detail(self, request: PredictRecord, tokens: np.ndarray, targets: np.ndarray) -> bytes:
        """float64 nats [rows, width], then the logits at each row's last target [rows, V]; for audits."""
        name = STATES[request.state]
        if request.fresh or self._holds != name:
            self._take(name)
        runnable, (rows, width) = self._program(tokens.shape[1]), tokens.shape
        given = torch.from_numpy(tokens).to(self.device)
        with torch.no_grad():
            logits = runnable.run(self._weights, given)
            self._check(logits, rows, width)
            nll = nll_of(logits, torch.from_numpy(targets).to(self.device))
            last = width - 1 - np.argmax((targets >= 0)[:, ::-1], axis=1)
            asked = logits[torch.arange(rows), torch.from_numpy(last)]
        return nll.double().cpu().numpy().tobytes() + asked.double().cpu().numpy().tobytes()

    def snapshot(self, file: int) -> None:
        """Writes the weights as they were last copied, under every name, as safetensors."""
        from safetensors.torch import save

        named = {slot.name: weight.cpu().clone() for slot, weight in zip(self._slots, self._weights, strict=True)}
        with os.fdopen(file, "wb") as out:
            out.write(save(named))


def _declared_width(runnable: Runnable) -> int:
    """Of the logits, as the tracer has it: good enough for a guess at memory."""
    spec = logits_spec(runnable.program)
    size = spec.shape[-1] if spec is not None and spec.shape else 0
    return size if isinstance(size, int) else 0


def _charged(nll: torch.Tensor, targets: np.ndarray, head_width: int) -> np.ndarray:
    """float32 nats as they are charged: a faulty target costs 2 ln V, none where there is no target."""
    nats = nll.cpu().numpy().copy()
    nats[~np.isfinite(nats)] = fault_nats(head_width)
    nats[targets < 0] = 0.0
    return nats


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def serve(channel: wire.Channel) -> None:
    """Answers frames until the referee closes the channel."""
    frame = channel.receive()
    assert frame.kind == wire.LOAD and frame.fd is not None
    job = LoadJob.model_validate_json(frame.body)
    limit_process(MAX_FILE_BYTES, job.memory_bytes)
    executor = Executor(job, SharedRegion(frame.fd, writable=False))
    channel.send_json(wire.LOADED, Loaded(device=str(executor.device)).model_dump())
    while True:
        frame = channel.receive()
        if frame.kind == wire.STATE:
            assert frame.fd is not None
            executor.adopt(frame.json()["name"], SharedRegion(frame.fd, writable=False))
        elif frame.kind == wire.SNAPSHOT:
            assert frame.fd is not None
            executor.snapshot(frame.fd)
            channel.send(wire.SAVED)
        elif frame.kind == wire.PREDICT:
            record, rows = executor.predict(*_request(frame.body))
            channel.send(wire.RESULT, RESULT.pack(*record) + rows)
        elif frame.kind == wire.DETAIL and job.may_tell:
            channel.send(wire.NATS, executor.detail(*_request(frame.body)))
        else:
            raise wire.FrameError(f"frame of kind {frame.kind}")


def _request(body: bytes) -> tuple[PredictRecord, np.ndarray, np.ndarray]:
    request = PredictRecord(*PREDICT.unpack_from(body))
    ids = np.frombuffer(body, np.int64, offset=PREDICT.size).reshape(2, request.rows, request.width)
    return request, ids[0].copy(), ids[1].copy()


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
