"""The `sealed` batch source, in the trainer: shows its weights, and is handed a batch once that has been scored.

There is no data here and nothing that scores. The model's state is kept in memory that the referee laid out; an
executor copies it from there before each prediction, and the referee answers a request with a batch that was marked.
"""

from __future__ import annotations

from time import perf_counter

import torch

from prism_fast.harness.process import wire
from prism_fast.harness.process.shared_memory import SharedRegion
from prism_fast.harness.process.shared_state import from_json, view
from prism_fast.harness.trainer.full_state import FullState, plain_model
from prism_fast.harness.trainer.instrument import Handed, Request
from prism_fast.harness.trainer.predictor import check_parameter_cap
from prism_fast.protocol.errors import EngineFault
from prism_fast.protocol.run_spec import RunSpec


class SealedSource:
    """Implements `instrument.BatchSource`."""

    def __init__(self, spec: RunSpec, channel: wire.RankChannel) -> None:
        self.spec, self.channel = spec, channel
        self._state: FullState | None = None

    def begin(self) -> None:
        """Budgets are the referee's."""

    def start(self, request: Request) -> None:
        model = plain_model(request.model)
        check_parameter_cap(request.model, self.spec.max_parameters, self.spec.param_ladder_stage)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        state = FullState(request.model)
        dtypes = {name: _name_of(tensor.dtype) for name, tensor in state.tensors()}
        self.channel.send_json(
            wire.SHARE,
            {
                "batch_size": request.batch_size,
                "seq_len": request.seq_len,
                "basis": request.basis,
                "dtypes": dtypes,
                "other_dtypes": {n: _name_of(b.dtype) for n, b in model.named_buffers() if n not in dtypes},
                "matmul_precision": torch.get_float32_matmul_precision(),
            },
        )
        answer = self.channel.wait_for(wire.REGION)
        if isinstance(answer, str):
            raise EngineFault(f"stopped before the first batch: {answer}")
        assert answer.fd is not None
        region = SharedRegion(answer.fd, writable=True)
        state.share({slot.name: view(slot, region) for slot in from_json(answer.json())})
        self._settle(state)
        self._state = state
        self.channel.send(wire.MAPPED)

    def take(self, index: int) -> Handed | str:
        assert self._state is not None
        began = perf_counter()
        self._settle(self._state)
        if self._device.type == "cuda":
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
        if self._state is not None:
            self._settle(self._state)

    def _settle(self, state: FullState) -> None:
        """The region holds what the model holds, and the device has come to the end of writing it."""
        state.refresh()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _autocast(self) -> int:
        """The autocast in force around the bundle's loop: open mode predicts under it, and so must an executor."""
        kind = self._device.type
        if not torch.is_autocast_enabled(kind):
            return 0
        return wire.AUTOCAST.index(_name_of(torch.get_autocast_dtype(kind)))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
