"""Predicting a batch strictly before it is trained on, in the miner's own process (`open` mode)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prism_fast.harness.marking.sums import batch_sums, logits_of, nll_of
from prism_fast.harness.trainer.full_state import FullState, is_sharded
from prism_fast.profiling.step_timer import Clock, Seconds
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleFailed, BundleRejected, PrismError


class Prediction(NamedTuple):
    """`sums`: float64 [6] on the model's device in the order of `marking.sums.BatchSums`; seconds of the two parts."""

    sums: Tensor
    forward_s: Seconds
    scoring_s: Seconds


def parameter_count(model: nn.Module) -> int:
    """Elements of all distinct parameters; those not yet materialised (lazy modules) count once they are, those sharded
    over ranks count whole (all ranks ask together)."""
    return FullState(model).parameter_count()


def check_parameter_cap(model: nn.Module, cap: int, stage: str) -> int:
    """Raises BundleRejected (`prism:param-cap`) above the cap; returns the count."""
    count = parameter_count(model)
    if count > cap:
        raise BundleRejected(
            f"the model has {count:,} parameters; the {stage} stage allows at most {cap:,} ({c.MARKER_PARAM_CAP})",
            rule=c.RULE_PARAM_CAP,
        )
    return count


class EvalMode:
    """Runs a forward as evaluation, leaving no trace: no gradient, eval mode, random state and module flags restored.

    An enclosing autocast is kept, without its weight cache: weights cached under no_grad would reach the training
    forward without their gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def __call__(self, tokens: Tensor) -> Any:
        model, kind = self._model, self._device.type
        training = [m for m in model.modules() if m.training]
        devices = [self._device] if kind == "cuda" else []
        autocast = torch.autocast(
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=False,
        )
        if training:
            model.eval()
        try:
            with torch.random.fork_rng(devices=devices), torch.no_grad(), autocast:
                return model(tokens)
        finally:
            if training:
                model.train(model in training)
                for m in model.modules():
                    m.training = False
                for m in training:
                    m.training = True


class ForwardOrBlame:
    """A forward as evaluation; whatever the model raises in it is the bundle's failure, with the shape it was given."""

    def __init__(self, model: nn.Module) -> None:
        self._forward = EvalMode(model)

    def __call__(self, tokens: Tensor) -> Any:
        with blame_for_forward(tokens):
            return self._forward(tokens)


@contextlib.contextmanager
def blame_for_forward(tokens: Tensor) -> Iterator[None]:
    """Turns what a model's forward over `tokens` raises into BundleFailed."""
    try:
        yield
    except (PrismError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        raise BundleFailed(
            f"the model's forward failed on tokens of shape {list(tokens.shape)}: {type(e).__name__}: "
            + " ".join(str(e).split())[:500],
            rule=c.RULE_RUNTIME_ERROR,
        ) from e


class InProcessPredictor:
    """The `open`, strict predictor: a separate forward of the miner's model, in the miner's process."""

    def __init__(self, model: nn.Module, token_bytes: Tensor, *, cap: int, stage: str) -> None:
        """`token_bytes`: int32 [n_vocab] on the model's device, UTF-8 bytes of each id, 0 for special ids."""
        self._forward = ForwardOrBlame(model)
        self._model = model
        self._token_bytes = token_bytes
        self._cap, self._stage = cap, stage
        self._clock = Clock(token_bytes.device.type)
        self.head_width: int | None = None
        self.model_params = check_parameter_cap(model, cap, stage)

    def predict(self, tokens: Tensor, targets: Tensor) -> Prediction:
        began = self._clock.mark()
        output = self._forward(tokens)
        predicted = self._clock.mark()
        rows, width = targets.shape
        logits = logits_of(output, rows, width, self._token_bytes.numel())
        head_width = self._checked_width(logits.shape[2])
        sums = batch_sums(nll_of(logits, targets), targets, self._token_bytes, head_width)
        del output, logits  # giving the logits' memory back takes time too, and belongs to what is measured
        between = self._clock.between
        return Prediction(sums, between(began, predicted), between(predicted, self._clock.mark()))

    def _checked_width(self, found: int) -> int:
        if self.head_width is None:
            self.head_width = found
            if not is_sharded(self._model):  # whose parameters exist, all of them, before they are sharded
                self.model_params = check_parameter_cap(self._model, self._cap, self._stage)
        elif found != self.head_width:
            raise BundleFailed(
                f"the model's logits were {self.head_width} wide and are now {found}", rule=c.RULE_OUTPUT_SHAPE
            )
        return found
