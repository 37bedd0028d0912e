"""The instrumented, single-pass training stream: predict, record, then hand out (harness.md).

A batch's record leaves for the referee before the bundle sees the batch; that order is what makes the summed loss a
code length. On a GPU nothing here waits for the device: sums travel by asynchronous copies and are sent when their
event has passed, in order.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from prism_fast.harness import wire
from prism_fast.harness.predictor import InProcessPredictor, unwrap
from prism_fast.kernels.dispatch import backend_for
from prism_fast.protocol import PrismBatch, PrismContext
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleRejected, PrismError
from prism_fast.protocol.run_spec import RunSpec

LEDGER_RECORD = struct.Struct("<QddQIIIIIHH")  # ledger.LEDGER_DTYPE
OBSERVATION_RECORD = struct.Struct("<QdffffffII")  # ledger.OBSERVATIONS_DTYPE
IN_FLIGHT = 64  # device batches whose sums have not been read yet


class GradNorm:
    """The gradient norm of each step, for the series only.

    Taken from the bundle's own `clip_grad_norm_` when it calls that (its norm before clipping, already computed);
    otherwise one fused norm over the gradients left at the next request. Never synchronises.
    """

    def __init__(self) -> None:
        self._clipped: Tensor | None = None

    def install(self) -> None:
        """Wraps `torch.nn.utils.clip_grad_norm_`; call before the bundle is imported."""
        original = torch.nn.utils.clip_grad_norm_

        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Tensor:
            norm = original(*args, **kwargs)
            self._clipped = norm
            return norm

        clip_grad_norm_.__doc__ = original.__doc__
        torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
        torch.nn.utils.clip_grad.clip_grad_norm_ = clip_grad_norm_

    def take(self, parameters: list[nn.Parameter]) -> Tensor | None:
        """The last step's norm as a scalar tensor, or None when the bundle left no gradient to see."""
        norm, self._clipped = self._clipped, None
        if norm is not None:
            return norm.detach()
        grads = [p.grad for p in parameters if p.grad is not None]
        if not grads:
            return None
        with torch.no_grad():
            return torch.nn.utils.get_total_norm(grads)


class _Observation:
    """What is seen of one step, filled in as it happens and sent when the next batch is asked for."""

    __slots__ = ("data_wait_s", "index", "ledger_s", "predict_s", "scoring_s", "step_s", "wall_s")

    def __init__(self, index: int) -> None:
        self.index = index
        self.wall_s = self.data_wait_s = self.predict_s = self.scoring_s = self.ledger_s = self.step_s = 0.0


class Instrument:
    """Serves one `iter_train_batches` per process and keeps the referee informed."""

    def __init__(
        self,
        spec: RunSpec,
        channel: wire.RunnerChannel,
        make_stream: Callable[[int, int, str], Any],
        reference_tokenizer: Any,
        token_bytes: dict[str, Any],
        rank: int,
        device: torch.device,
    ) -> None:
        """`make_stream(seq_len, batch_size, basis)` opens the stream; `token_bytes[basis]` is its int32 byte table."""
        self.spec, self.channel, self.rank, self.device = spec, channel, rank, device
        self._make_stream, self._tokenizer, self._token_bytes = make_stream, reference_tokenizer, token_bytes
        self.grad_norm = GradNorm()
        self.model: nn.Module | None = None  # unwrapped; what is scored and saved
        self.stopped_reason: str | None = None
        self.error: PrismError | None = None
        self._started = False
        self._began = perf_counter()
        self._in_flight: deque[tuple[Callable[[list[float]], None], Tensor, Any]] = deque()
        self._open: _Observation | None = None
        self._handed_out_at = 0.0
        self._parameters: list[nn.Parameter] = []

    def begin(self) -> None:
        """Starts the graceful budget's clock: train(ctx) is about to be entered."""
        self._began = perf_counter()

    # ------------------------------------------------------------------------------------------- the bundle's side

    def iter_train_batches(
        self, context: PrismContext, model: Any, *, batch_size: int, seq_len: int | None, tokenizer: Any
    ) -> Iterator[PrismBatch]:
        if self._started:
            return iter(())
        try:
            basis = self._basis(tokenizer)
            seq_len = self._seq_len(seq_len)
            self._check_batch_size(batch_size)
            if not isinstance(model, nn.Module):
                raise BundleRejected(
                    f"iter_train_batches was given a {type(model).__name__}; "
                    "expected the torch.nn.Module being trained",
                    rule=c.RULE_BATCH_REQUEST,
                )
            self._started = True
            self.model = unwrap(model)
            self._parameters = list(self.model.parameters())
            return self._guarded(self._loop(model, batch_size, seq_len, basis))
        except PrismError as e:
            raise self._remember(e) from None

    def _basis(self, tokenizer: Any) -> str:
        if tokenizer is None:
            return "bytes"
        if tokenizer is not self._tokenizer:
            raise BundleRejected(
                f"iter_train_batches was given a {type(tokenizer).__name__} as tokenizer; expected the object that "
                "ctx.reference_tokenizer returned, or None for the byte basis",
                rule=c.RULE_TOKENIZER,
            )
        return "tokens"

    def _seq_len(self, seq_len: int | None) -> int:
        limit = self.spec.sequence_length
        if seq_len is None:
            return limit
        if isinstance(seq_len, bool) or not isinstance(seq_len, int) or not 2 <= seq_len <= limit:
            raise BundleRejected(
                f"iter_train_batches was asked for seq_len={seq_len!r}; "
                f"expected 2 to {limit}, the run's sequence length",
                rule=c.RULE_BATCH_REQUEST,
            )
        return seq_len

    def _check_batch_size(self, batch_size: int) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or not 1 <= batch_size <= 65535:
            raise BundleRejected(
                f"iter_train_batches was asked for batch_size={batch_size!r}; expected 1 to 65535",
                rule=c.RULE_BATCH_REQUEST,
            )
        if self.spec.batch_size is not None and batch_size != self.spec.batch_size:
            raise BundleRejected(
                f"iter_train_batches was asked for batch_size={batch_size}; this run pins it to {self.spec.batch_size}",
                rule=c.RULE_BATCH_REQUEST,
            )

    def _remember(self, error: PrismError) -> PrismError:
        """Keeps the first error, so that a bundle which swallows the exception still ends with it."""
        if self.error is None:
            self.error = error
        return error

    def _guarded(self, loop: Iterator[PrismBatch]) -> Iterator[PrismBatch]:
        try:
            yield from loop
        except PrismError as e:
            raise self._remember(e) from None

    # -------------------------------------------------------------------------------------------------- the loop

    def _loop(self, model: nn.Module, batch_size: int, seq_len: int, basis: str) -> Iterator[PrismBatch]:
        spec, world = self.spec, self.spec.world_size
        device = next((p.device for p in model.parameters()), self.device)
        token_bytes = torch.as_tensor(self._token_bytes[basis], dtype=torch.int32).to(device)
        predictor = InProcessPredictor(model, token_bytes, cap=spec.max_parameters, stage=spec.param_ladder_stage)
        stream = self._make_stream(seq_len, batch_size, basis)
        blocks = iter(stream)
        plan = asdict(stream.plan_summary())
        index = positions = 0
        reason: str | None = None
        while reason is None:
            reason = self._budget_reached(positions * world, index)
            if reason is None and world > 1:
                reason = self.channel.ask(index)
            if reason is not None:
                break
            seen = self._open = _Observation(index)
            t0 = perf_counter()
            block = next(blocks, None)
            if block is None:
                self._open = None
                reason = c.STOP_DATA_EXHAUSTED
                break
            tokens, targets = self._to_device(block.tokens, device), self._to_device(block.targets, device)
            t1 = perf_counter()
            prediction = predictor.predict(tokens, targets)
            t2 = perf_counter()
            if index == 0:
                self.channel.send_json(
                    wire.MODEL,
                    {
                        "rank": self.rank,
                        "model_params": predictor.model_params,
                        "head_width": predictor.head_width,
                        "n_vocab": token_bytes.numel(),
                        "batch_size": batch_size,
                        "seq_len": seq_len,
                        "basis": basis,
                        "plan": plan,
                        "backends": {"token_nll": backend_for(device).name},
                    },
                )
            rows, width = tokens.shape
            self._record(index, rows, width, block.documents, prediction.sums)
            index += 1
            positions += rows * width
            now = perf_counter()
            seen.data_wait_s, seen.predict_s, seen.scoring_s = t1 - t0, prediction.forward_s, prediction.scoring_s
            seen.ledger_s, seen.wall_s = now - t2, now - self._began
            self._handed_out_at = now
            yield PrismBatch(tokens=tokens, index=seen.index)
            self._finish_step()
        self.stopped_reason = reason
        self._drain(wait=True)

    def _budget_reached(self, tokens_seen: int, steps: int) -> str | None:
        """Why no further batch may be handed out, in the contract's order of precedence."""
        spec = self.spec
        if spec.token_budget is not None and tokens_seen >= spec.token_budget:
            return c.STOP_TOKEN_BUDGET
        if spec.step_budget is not None and steps >= spec.step_budget:
            return c.STOP_STEP_BUDGET
        if spec.world_size > 1:
            return None  # ranks must stop together: the referee decides
        if perf_counter() - self._began >= spec.budget_seconds:
            return c.STOP_WALL_CLOCK
        return self.channel.stop_requested()

    def _to_device(self, array: Any, device: torch.device) -> Tensor:
        """A private copy of a recycled buffer, on the model's device."""
        host = torch.from_numpy(array)
        if device.type == "cpu":
            return host.clone()
        return host.pin_memory().to(device, non_blocking=True)

    def _record(self, index: int, rows: int, width: int, documents: int, sums: Tensor) -> None:
        def send(v: list[float]) -> None:
            nats, special_nats, n_bytes, scored, special, faults = v
            body = LEDGER_RECORD.pack(
                index,
                nats,
                special_nats,
                int(n_bytes),
                int(scored),
                int(special),
                rows * width,
                int(faults),
                documents,
                self.rank,
                rows,
            )
            self.channel.send(wire.PREDICTED, body)

        self._defer(sums, send)

    def _finish_step(self) -> None:
        """Observes the step that just ended; called when the bundle asks for the next batch, or is done."""
        seen, self._open = self._open, None
        if seen is None:
            return
        seen.step_s = perf_counter() - self._handed_out_at
        norm = self.grad_norm.take(self._parameters)

        def send(v: list[float]) -> None:
            body = OBSERVATION_RECORD.pack(
                seen.index,
                seen.wall_s,
                seen.data_wait_s,
                seen.predict_s,
                seen.scoring_s,
                seen.ledger_s,
                seen.step_s,
                v[0],
                self.rank,
                0,
            )
            self.channel.send(wire.STEPPED, body)

        if norm is None:
            norm = torch.tensor(math.nan)
        self._defer(norm.reshape(1).double(), send)

    # ------------------------------------------------------------------------------- device values, without waiting

    def _defer(self, values: Tensor, send: Callable[[list[float]], None]) -> None:
        """Calls `send` with the values once they are on the host; calls stay in order."""
        if values.device.type == "cpu" and not self._in_flight:
            send(values.numpy().tolist())
            return
        event = None
        if values.device.type != "cpu":
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            values = host
        self._in_flight.append((send, values, event))
        self._drain(wait=False)

    def _drain(self, *, wait: bool) -> None:
        while self._in_flight:
            send, values, event = self._in_flight[0]
            if event is not None and not event.query():
                if not wait and len(self._in_flight) <= IN_FLIGHT:
                    return
                event.synchronize()
            self._in_flight.popleft()
            send(values.numpy().tolist())

    def finish(self) -> None:
        """After train(ctx) returned: closes the last step and sends what is still in flight."""
        self._finish_step()
        self._drain(wait=True)
        if self.stopped_reason is None:
            self.stopped_reason = c.STOP_BUNDLE_RETURNED
