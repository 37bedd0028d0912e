"""The instrumented, single-pass training stream: predict, record, then hand out.

A batch's record leaves for the referee before the bundle sees the batch; that order is what makes the summed loss a
code length. Who predicts is the source's business: this process (`open`), or an executor it cannot reach (`sealed`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from prism_fast.harness.process import wire
from prism_fast.harness.trainer.deferred import DeferredReads
from prism_fast.harness.trainer.full_state import FullState, full_tensor, plain_model
from prism_fast.profiling.step_timer import Clock, Seconds, seconds_of
from prism_fast.protocol import PrismBatch, PrismContext
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleRejected, PrismError
from prism_fast.protocol.run_spec import RunSpec

OBSERVATION_RECORD = struct.Struct("<QdffffffII")  # ledger.OBSERVATIONS_DTYPE


class Request(NamedTuple):
    """What the bundle asked for, checked. `model` is as given (it may be wrapped); `basis` is "tokens" or "bytes"."""

    model: nn.Module
    batch_size: int
    seq_len: int
    basis: str


class Handed(NamedTuple):
    """A predicted and recorded batch, int64 [B, L] on the model's device, and where its time went.

    Seconds of the host, or where the work was a GPU's the device's own, known once the device has come so far.
    """

    tokens: Tensor
    data_wait_s: Seconds
    predict_s: Seconds
    scoring_s: Seconds
    ledger_s: Seconds


class BatchSource(Protocol):
    """Hands out batches that have been predicted and recorded."""

    def begin(self) -> None:
        """train(ctx) is about to be entered."""
        ...

    def start(self, request: Request) -> None: ...

    def take(self, index: int) -> Handed | str:
        """Batch `index` of this rank, or why there is none (one of the STOP_ constants)."""
        ...

    def finish(self) -> None:
        """No further batch will be taken: whatever is on its way to the referee arrives."""
        ...


class GradNorm:
    """The gradient norm of each step, for the series only.

    Taken from the bundle's own `clip_grad_norm_` when it calls that (its norm before clipping, already computed);
    otherwise one fused norm over the gradients left at the next request. Never synchronises, but for gradients that are
    sharded; of those that FSDP keeps flat it is this rank's part.
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

    def take(self, parameters: list[nn.Parameter]) -> Tensor:
        """The last step's norm, float64 [1]; NaN when the bundle left no gradient to see."""
        norm, self._clipped = self._clipped, None
        if norm is None:
            grads = [p.grad for p in parameters if p.grad is not None]
            if grads:
                with torch.no_grad():
                    norm = torch.nn.utils.get_total_norm(grads)
        if not isinstance(norm, Tensor) or norm.numel() != 1:
            return torch.full((1,), math.nan, dtype=torch.float64)
        try:
            return full_tensor(norm.detach()).reshape(1).double()
        except Exception:  # its group is gone: a bundle may leave its loop early and end them first
            return torch.full((1,), math.nan, dtype=torch.float64)


class Instrument:
    """Serves one `iter_train_batches` per process and keeps the referee informed of what it sees."""

    def __init__(
        self, spec: RunSpec, source: BatchSource, channel: wire.RankChannel, tokenizer: Any, rank: int
    ) -> None:
        """`tokenizer`: the only object, besides None, that a bundle may pass as tokenizer."""
        self.spec, self.source, self.channel, self.rank = spec, source, channel, rank
        self.grad_norm = GradNorm()
        self.model: nn.Module | None = None  # the bundle's own, out of its wrappers
        self.state: FullState | None = None  # what is saved
        self.stopped_reason: str | None = None
        self.error: PrismError | None = None
        self._tokenizer = tokenizer
        self._started = False
        self._request: Request | None = None
        self._began = perf_counter()
        self._reads = DeferredReads()
        self._clock = Clock("cpu")
        self._open: tuple[int, float, Any, Handed] | None = None
        self._parameters: list[nn.Parameter] = []

    def begin(self) -> None:
        """Sets the clocks to zero: train(ctx) is about to be entered."""
        self._began = perf_counter()
        self.source.begin()

    def forward_flops(self) -> int | None:
        """Products of the trained model's forward over one batch, or None where they cannot be counted."""
        from prism_fast.profiling.flops import forward_flops

        if self.model is None or self._request is None or (self.state is not None and self.state.sharded):
            return None  # a forward of one rank alone would wait for the others
        return forward_flops(self.model, self._request.batch_size, self._request.seq_len)

    @property
    def basis(self) -> str:
        """The basis that the bundle asked for, "tokens" or "bytes"; nothing before its first batch."""
        return self._request.basis if self._request is not None else ""

    def final_state(self) -> dict[str, Tensor]:
        """The state as training left it, by name; gathered by all ranks where it is sharded."""
        assert self.state is not None
        if not self.state.sharded:
            return dict(FullState(self.state.model).tensors())  # modules may have been exchanged since
        return dict(self.state.tensors())

    def finish(self) -> None:
        """After train(ctx) returned: closes the last step and lets everything arrive."""
        self._close_step()
        self._reads.poll(wait=True)
        if self._started:
            self.source.finish()
        if self.stopped_reason is None:
            self.stopped_reason = c.STOP_BUNDLE_RETURNED

    # ------------------------------------------------------------------------------------------- the bundle's side

    def iter_train_batches(
        self, context: PrismContext, model: Any, *, batch_size: int, seq_len: int | None, tokenizer: Any
    ) -> Iterator[PrismBatch]:
        if self._started:
            return iter(())
        try:
            if not isinstance(model, nn.Module):
                raise BundleRejected(
                    f"iter_train_batches was given a {type(model).__name__}; "
                    "expected the torch.nn.Module being trained",
                    rule=c.RULE_BATCH_REQUEST,
                )
            request = Request(
                model, self._check_batch_size(batch_size), self._check_seq_len(seq_len), self._basis(tokenizer)
            )
            self.model, self.state = plain_model(model), FullState(model)
            self._parameters = list(self.model.parameters())
            self._clock = Clock(self._parameters[0].device.type if self._parameters else "cpu")
            self._started = True
            self._request = request
            return self._loop(request)
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

    def _check_seq_len(self, seq_len: int | None) -> int:
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

    def _check_batch_size(self, batch_size: int) -> int:
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
        return batch_size

    def _remember(self, error: PrismError) -> PrismError:
        """Keeps the first error, so that a bundle which swallows the exception still ends with it."""
        if self.error is None:
            self.error = error
        return error

    # -------------------------------------------------------------------------------------------------- the loop

    def _loop(self, request: Request) -> Iterator[PrismBatch]:
        try:
            self.source.start(request)
            index = 0
            while not isinstance(handed := self.source.take(index), str):
                self._open = (index, perf_counter(), self._clock.mark(), handed)
                yield PrismBatch(tokens=handed.tokens, index=index)
                self._close_step()
                index += 1
            self.stopped_reason = handed
        except PrismError as e:
            raise self._remember(e) from None

    def _close_step(self) -> None:
        """Observes the step that just ended: the bundle asked for the next batch, or is done."""
        if self._open is None:
            return
        (index, handed_out_at, mark, handed), self._open = self._open, None
        step_s = self._clock.between(mark, self._clock.mark())

        def send(norm: list[float]) -> None:
            self.channel.send(
                wire.STEPPED,
                OBSERVATION_RECORD.pack(
                    index,
                    handed_out_at - self._began,
                    seconds_of(handed.data_wait_s),
                    seconds_of(handed.predict_s),
                    seconds_of(handed.scoring_s),
                    seconds_of(handed.ledger_s),
                    seconds_of(step_s),
                    norm[0],
                    self.rank,
                    0,
                ),
            )

        self._reads.read(self.grad_norm.take(self._parameters), send)
