"""Predicting a batch before it is trained on: the interface, and the in-process implementation (`open` mode).

`Predictor.predict` turns a batch into its code length. Where the forward runs (here, or in an evaluator process that
the trainer cannot reach) is the implementation's business; the instrument does not know.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from prism_fast.kernels import batch_code_length, token_nll
from prism_fast.profiling.step_timer import Clock, Seconds
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleFailed, BundleRejected, PrismError


class Prediction(NamedTuple):
    """`sums`: float64 [6] on the model's device (see `kernels.batch_code_length`); seconds of the two parts."""

    sums: Tensor
    forward_s: Seconds
    scoring_s: Seconds


class Predictor(Protocol):
    head_width: int | None

    def predict(self, tokens: Tensor, targets: Tensor) -> Prediction: ...


def unwrap(model: nn.Module) -> nn.Module:
    """The module under torch.compile and DistributedDataParallel wrappers: the one `build_model` declared."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def parameter_count(model: nn.Module) -> int:
    """Elements of all distinct parameters; those not yet materialised (lazy modules) count once they are."""
    return sum(p.numel() for p in model.parameters() if not isinstance(p, nn.parameter.UninitializedParameter))


def check_parameter_cap(model: nn.Module, cap: int, stage: str) -> int:
    """Raises BundleRejected (`prism:param-cap`) above the cap; returns the count."""
    count = parameter_count(model)
    if count > cap:
        raise BundleRejected(
            f"the model has {count:,} parameters; the {stage} stage allows at most {cap:,} ({c.MARKER_PARAM_CAP})",
            rule=c.RULE_PARAM_CAP,
        )
    return count


def logits_of(output: Any, batch: int, width: int, n_vocab: int) -> Tensor:
    """The logits [B, L, V] in a model's output: a tensor, `.logits`, or the first of a tuple.

    Raises BundleFailed (`prism:output-shape`) for anything else and BundleRejected (`prism:vocab-mismatch`) when V is
    below the tokenizer's vocabulary.
    """
    logits = output
    if not isinstance(logits, Tensor):
        logits = getattr(output, "logits", None)
        if logits is None and isinstance(output, tuple | list) and output:
            logits = output[0]
    expected = f"float logits of shape [{batch}, {width}, V]"
    if not isinstance(logits, Tensor):
        raise BundleFailed(f"the model returned {type(output).__name__}; expected {expected}", rule=c.RULE_OUTPUT_SHAPE)
    if type(logits) is not Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            logits = logits.as_subclass(Tensor)
    if logits.dim() == 2 and batch == 1:
        logits = logits.unsqueeze(0)
    if logits.dim() != 3 or logits.shape[0] != batch or logits.shape[1] != width or not logits.is_floating_point():
        raise BundleFailed(
            f"the model returned {str(logits.dtype).removeprefix('torch.')} of shape {list(logits.shape)}; "
            f"expected {expected}",
            rule=c.RULE_OUTPUT_SHAPE,
        )
    if logits.shape[2] < n_vocab:
        raise BundleRejected(
            f"the model's logits are {logits.shape[2]} wide; the tokenizer has {n_vocab} ids and each needs its own",
            rule=c.RULE_VOCAB_MISMATCH,
        )
    return logits


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


class InProcessPredictor:
    """The `open`, strict predictor: a separate forward of the miner's model, in the miner's process."""

    def __init__(self, model: nn.Module, token_bytes: Tensor, *, cap: int, stage: str) -> None:
        """`token_bytes`: int32 [n_vocab] on the model's device, UTF-8 bytes of each id, 0 for special ids."""
        self._forward = EvalMode(model)
        self._model = model
        self._token_bytes = token_bytes
        self._n_vocab = token_bytes.numel()
        self._cap, self._stage = cap, stage
        self._clock = Clock(token_bytes.device.type)
        self.head_width: int | None = None
        self.model_params = check_parameter_cap(model, cap, stage)

    def predict(self, tokens: Tensor, targets: Tensor) -> Prediction:
        began = self._clock.mark()
        try:
            output = self._forward(tokens)
        except (PrismError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as e:
            raise BundleFailed(
                f"the model's forward failed on tokens of shape {list(tokens.shape)}: {type(e).__name__}: "
                + " ".join(str(e).split())[:500],
                rule=c.RULE_RUNTIME_ERROR,
            ) from e
        predicted = self._clock.mark()
        sums = self.code_length(output, targets)
        del output  # giving the logits' memory back takes time too, and belongs to what is measured
        between = self._clock.between
        return Prediction(sums, between(began, predicted), between(predicted, self._clock.mark()))

    def code_length(self, output: Any, targets: Tensor) -> Tensor:
        """`kernels.batch_code_length` of a model's output, which is checked."""
        logits = logits_of(output, targets.shape[0], targets.shape[1], self._n_vocab)
        if self.head_width is None:
            self.head_width = logits.shape[2]
            self.model_params = check_parameter_cap(self._model, self._cap, self._stage)
        elif logits.shape[2] != self.head_width:
            raise BundleFailed(
                f"the model's logits were {self.head_width} wide and are now {logits.shape[2]}",
                rule=c.RULE_OUTPUT_SHAPE,
            )
        with torch.no_grad():
            nll = token_nll(logits, targets)
            assert isinstance(nll, Tensor)
            fault_nats = c.FAULT_CODE_LENGTH_FACTOR * math.log(self.head_width)
            return batch_code_length(nll, targets, self._token_bytes, fault_nats)
