"""The `open` batch source: this process reads the stream, predicts with the miner's own model, and reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from prism_fast.harness.process import wire
from prism_fast.harness.referee.ledger import pack_record
from prism_fast.harness.trainer.deferred import DeferredReads
from prism_fast.harness.trainer.instrument import Handed, Request
from prism_fast.harness.trainer.predictor import InProcessPredictor
from prism_fast.kernels import backend_for
from prism_fast.profiling.step_timer import Clock
from prism_fast.protocol import constants as c
from prism_fast.protocol.budgets import budget_reached
from prism_fast.protocol.run_spec import RunSpec


class OpenSource:
    """Implements `instrument.BatchSource`. Budgets are counted here; several ranks stop together, by the referee."""

    def __init__(
        self,
        spec: RunSpec,
        channel: wire.RankChannel,
        make_stream: Callable[[int, int, str], Any],
        token_bytes: dict[str, Any],
        rank: int,
    ) -> None:
        """`make_stream(seq_len, batch_size, basis)` opens the stream; `token_bytes[basis]` is its int32 byte table."""
        self.spec, self.channel, self.rank = spec, channel, rank
        self._make_stream, self._token_bytes = make_stream, token_bytes
        self._reads = DeferredReads()
        self._began = perf_counter()
        self._tokens_seen = 0  # over all ranks

    def begin(self) -> None:
        """Starts the graceful budget's clock: train(ctx) is about to be entered."""
        self._began = perf_counter()

    def start(self, request: Request) -> None:
        self._request = request
        self._device = next((p.device for p in request.model.parameters()), torch.device("cpu"))
        self._clock = Clock(self._device.type)
        token_bytes = torch.as_tensor(self._token_bytes[request.basis].copy(), dtype=torch.int32).to(self._device)
        self._predictor = InProcessPredictor(
            request.model, token_bytes, cap=self.spec.max_parameters, stage=self.spec.param_ladder_stage
        )
        self._stream = self._make_stream(request.seq_len, request.batch_size, request.basis)

    def take(self, index: int) -> Handed | str:
        reason = self._budget_reached(index)
        if reason is not None:
            return reason
        if self.spec.world_size > 1 and isinstance(answer := self.channel.ask(index), str):
            return answer
        began = self._clock.mark()
        block = next(self._stream, None)
        if block is None:
            return c.STOP_DATA_EXHAUSTED
        tokens, targets = self._to_device(block.tokens), self._to_device(block.targets)
        read = self._clock.mark()
        prediction = self._predictor.predict(tokens, targets)
        predicted = self._clock.mark()
        self._record(index, tokens, block.documents, prediction.sums)
        self._tokens_seen += tokens.numel() * self.spec.world_size
        between = self._clock.between
        return Handed(
            tokens,
            between(began, read),
            prediction.forward_s,
            prediction.scoring_s,
            between(predicted, self._clock.mark()),
        )

    def finish(self) -> None:
        self._reads.poll(wait=True)
        if hasattr(self, "_stream"):
            self._stream.close()

    def _budget_reached(self, steps: int) -> str | None:
        """Why no further batch may be handed out, in the contract's order of precedence."""
        spec = self.spec
        if (reason := budget_reached(spec, self._tokens_seen, steps, self._predictor.model_params)) is not None:
            return reason
        if spec.world_size > 1:
            return None  # ranks must stop together: the referee decides
        if perf_counter() - self._began >= spec.budget_seconds:
            return c.STOP_WALL_CLOCK
        return self.channel.stop_requested()

    def _to_device(self, array: Any) -> Tensor:
        """A private copy of a recycled buffer, on the model's device."""
        host = torch.from_numpy(array)
        if self._device.type == "cpu":
            return host.clone()
        return host.pin_memory().to(self._device, non_blocking=True)

    def _describe(self) -> None:
        request = self._request
        self.channel.send_json(
            wire.MODEL,
            {
                "rank": self.rank,
                "model_params": self._predictor.model_params,
                "head_width": self._predictor.head_width,
                "batch_size": request.batch_size,
                "seq_len": request.seq_len,
                "basis": request.basis,
                "plan": asdict(self._stream.plan_summary()),
                "backends": {"token_nll": backend_for(self._device).name},
            },
        )

    def _record(self, index: int, tokens: Tensor, documents: int, sums: Tensor) -> None:
        if index == 0:
            self._describe()
        rows, width = tokens.shape

        def send(v: list[float]) -> None:
            record = pack_record(index, v, rows * width, documents, self.rank, rows)
            self.channel.send(wire.PREDICTED, record)

        self._reads.read(sums, send)
