"""The `sealed` batch source, in the trainer: shows its weights, and is handed a batch once that has been scored.

There is no data here and nothing that scores. The model's parameters are moved into memory shared with an evaluator;
the referee answers each request with the tokens of a batch that the evaluator has already predicted from them.
"""

from __future__ import annotations

from time import perf_counter

import torch

from prism_fast.harness.process import wire
from prism_fast.harness.process.shared_memory import SharedRegion
from prism_fast.harness.process.state_layout import WeightShare, layout_of, to_json
from prism_fast.harness.trainer.instrument import Handed, Request
from prism_fast.harness.trainer.predictor import check_parameter_cap, unwrap
from prism_fast.protocol.errors import EngineFault
from prism_fast.protocol.run_spec import RunSpec


class SealedSource:
    """Implements `instrument.BatchSource`."""

    def __init__(self, spec: RunSpec, channel: wire.RunnerChannel) -> None:
        self.spec, self.channel = spec, channel
        self._share: WeightShare | None = None

    def begin(self) -> None:
        """Budgets are the referee's."""

    def start(self, request: Request) -> None:
        model = unwrap(request.model)
        check_parameter_cap(model, self.spec.max_parameters, self.spec.param_ladder_stage)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        entries = layout_of(model)
        self.channel.send_json(
            wire.SHARE,
            {
                "layout": to_json(entries),
                "batch_size": request.batch_size,
                "seq_len": request.seq_len,
                "basis": request.basis,
            },
        )
        answer = self.channel.wait_for(wire.REGION)
        if isinstance(answer, str):
            raise EngineFault(f"stopped before the first batch: {answer}")
        assert answer.fd is not None
        self._share = WeightShare(model, entries, SharedRegion(answer.fd, writable=True))
        self.channel.send(wire.MAPPED)

    def take(self, index: int) -> Handed | str:
        assert self._share is not None
        began = perf_counter()
        self._share.refresh()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the evaluator reads what the last step wrote
            began = perf_counter()  # the wait was the step's own time, which events measure
        answer = self.channel.ask(index, wire.BATCH, self._autocast())
        if isinstance(answer, str):
            return answer
        _, rows, width, data_s, predict_s, scoring_s = wire.BATCH_RECORD.unpack_from(answer.body)
        tokens = torch.frombuffer(bytearray(answer.body[wire.BATCH_RECORD.size :]), dtype=torch.int64)
        tokens = tokens.view(rows, width).to(self._device)
        ledger_s = perf_counter() - began - data_s - predict_s - scoring_s
        return Handed(tokens, data_s, predict_s, scoring_s, max(0.0, ledger_s))

    def finish(self) -> None:
        if self._share is not None:
            self._share.refresh()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

    def _autocast(self) -> int:
        """The autocast in force around the bundle's loop: open mode predicts under it, and so must an evaluator."""
        kind = self._device.type
        if not torch.is_autocast_enabled(kind):
            return 0
        return wire.AUTOCAST.index(str(torch.get_autocast_dtype(kind)).removeprefix("torch."))
