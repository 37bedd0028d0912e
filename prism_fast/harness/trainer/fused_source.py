"""`--capture fused`: the code length of a batch is taken from the bundle's own training forward, one forward less.

A hook on the model takes the logits of the first call on the batch's tokens. That is a prediction only if the weights
are still those the batch was handed out under, so a fingerprint of them is compared when the forward starts; and it is
the strict prediction only if the model trains in the mode it is evaluated in, so the first batch and a secret random
share of the others are predicted strictly too, before they are handed out, and must agree. Whatever is not as it must
be fails the run: fused never quietly becomes another score. It is open mode's: a bundle that means to cheat shares the
process with all of this.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from prism_fast.harness.trainer.instrument import Handed, Request
from prism_fast.harness.trainer.open_source import Batch, OpenSource
from prism_fast.harness.trainer.predictor import Prediction, unwrap
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleFailed


class FusedSource(OpenSource):
    """Implements `instrument.BatchSource`."""

    def start(self, request: Request) -> None:
        super().start(request)
        self._model = unwrap(request.model)
        self._secret = random.SystemRandom()
        self._waiting: Batch | None = None
        self._seen: Tensor | None = None  # what the bundle holds are tokens it may write to
        self._fingerprint: Tensor | None = None
        self._strict: Tensor | None = None  # this batch's strict sums, where it is audited
        self._running = False
        self._fault: BundleFailed | None = None
        self._model.register_forward_pre_hook(self._enter, with_kwargs=True)
        self._model.register_forward_hook(self._leave)

    def take(self, index: int) -> Handed | str:
        self._settle()
        return super().take(index)

    def finish(self) -> None:
        if hasattr(self, "_model"):
            self._settle()
        super().finish()

    def _predict(self, batch: Batch) -> Prediction | None:
        audited = batch.index == 0 or self._secret.random() < c.FUSED_AUDIT_SHARE
        prediction = self._predictor.predict(batch.tokens, batch.targets) if audited else None
        self._strict = prediction.sums if prediction else None
        # Only now: the hooks see the strict forward too, and must not take it for the bundle's.
        self._waiting, self._seen = batch, batch.tokens.clone()
        self._fingerprint = fingerprint(self._model)
        return prediction

    # ------------------------------------------------------------------------------------------------ the hooks

    def _enter(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self._waiting is None or self._running or not self._is_the_batch([*arguments, *keywords.values()]):
            return
        assert self._fingerprint is not None
        if not torch.equal(fingerprint(self._model), self._fingerprint):
            raise self._fail(
                f"the weights changed between batch {self._waiting.index} and the model's forward over it; "
                "--capture fused needs that forward first, or use --capture strict"
            )
        self._running = True

    def _leave(self, _: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if not self._running:
            return
        self._running = False
        batch, self._waiting = self._waiting, None
        assert batch is not None
        sums = self._predictor.code_length(output, batch.targets)
        if self._strict is None:
            self._record(batch, sums)
            return
        strict, fused = float(self._strict[0]), float(sums[0])
        if not abs(fused - strict) <= c.FUSED_TOLERANCE * max(abs(strict), 1.0):
            raise self._fail(
                f"batch {batch.index} costs {fused:.6f} nats by the training forward and {strict:.6f} by a strict "
                "prediction; a model that trains in another mode than it predicts in (dropout, autocast around its "
                "forward) needs --capture strict"
            )

    def _is_the_batch(self, given: list[Any]) -> bool:
        assert self._seen is not None
        return any(
            isinstance(x, Tensor) and x.shape == self._seen.shape and bool((x == self._seen).all()) for x in given
        )

    def _settle(self) -> None:
        """The bundle is done with the batch: its code length must be there."""
        if self._fault is not None:
            raise self._fault  # the bundle may have caught it in its forward
        if self._waiting is not None:
            raise self._fail(
                f"the model was not called on the whole of batch {self._waiting.index}, batch.tokens as it was handed "
                "out, before the next was asked for; --capture fused needs that, or use --capture strict"
            )

    def _fail(self, message: str) -> BundleFailed:
        self._fault = self._fault or BundleFailed(message, rule=c.RULE_CAPTURE)
        return self._fault


def fingerprint(model: nn.Module) -> Tensor:
    """int64 [tensors]: a hash of every parameter's and buffer's bits, on their device.

    Taken twice a batch, so the modules are gone through by hand: `model.parameters()` would take as long as the hashes.
    """
    tensors: dict[int, Tensor] = {}  # tied ones once
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.numel():
                tensors[id(tensor)] = tensor
    with torch.no_grad():
        hashes = [torch.hash_tensor(_words(tensor)).view(torch.int64) for tensor in tensors.values()]
        return torch.stack(hashes) if hashes else torch.zeros(0, dtype=torch.int64)


def _words(tensor: Tensor) -> Tensor:
    """The tensor's memory as 8-byte words where it can be seen so: hashed three times as fast, and none the weaker."""
    if tensor.element_size() >= 8 or not tensor.is_contiguous():
        return tensor
    try:
        return tensor.view(-1).view(torch.int64)
    except RuntimeError:  # it does not end with a word, or begin with one
        return tensor
