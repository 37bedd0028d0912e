"""Predicting a batch before it is trained on: the interface, and the in-process implementation (`open` mode).

`Predictor.predict` turns a batch into its code length. Where the forward runs (here, or in an evaluator process that
the trainer cannot reach) is the implementation's business; the instrument does not know.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from prism_fast.harness.referee.head_choice import REASONS, HeadChoice
from prism_fast.harness.trainer.head_capture import HeadInput, first_output, forward_to_head, is_compiled
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
    logits = first_output(output)
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

    def __init__(
        self, model: nn.Module, token_bytes: Tensor, *, cap: int, stage: str, head: HeadChoice | None = None
    ) -> None:
        """`token_bytes`: int32 [n_vocab] on the model's device, UTF-8 bytes of each id, 0 for special ids.
        `head`: whether to score from the head's input; None: from logits."""
        self._forward = EvalMode(model)
        self._model = model
        self._token_bytes = token_bytes
        self._n_vocab = token_bytes.numel()
        self._cap, self._stage = cap, stage
        self._clock = Clock(token_bytes.device.type)
        self.head_width: int | None = None
        self.head = head or HeadChoice("plain")
        if self.head.fused and is_compiled(model):
            self.head.give_up(REASONS["compiled"])
        self._batches = 0
        self.model_params = check_parameter_cap(model, cap, stage)

    def predict(self, tokens: Tensor, targets: Tensor) -> Prediction:
        began = self._clock.mark()
        if self.head.fused and self.head_width is None:
            self._try_head(tokens.shape[1])
        output, head = self._run(tokens, fused=self.head.fused)
        predicted = self._clock.mark()
        if head is not None:
            sums = self._code_length(_nll_of(head, targets), targets)
        else:
            sums = self.code_length(output, targets)
        del output, head  # giving the logits' memory back takes time too, and belongs to what is measured
        for row in self.head.rows_to_audit(self._batches, len(tokens)):
            one = slice(row, row + 1)
            nll, reason = self._nll(tokens[one], targets[one], fused=True)
            if reason is not None:
                self.head.give_up(reason)
                break
            self.head.compare(f"batch {self._batches}", nll, self._nll(tokens[one], targets[one], fused=False)[0])
        self._batches += 1
        between = self._clock.between
        return Prediction(sums, between(began, predicted), between(predicted, self._clock.mark()))

    def _run(self, tokens: Tensor, *, fused: bool) -> tuple[Any, HeadInput | None]:
        """-> (output, None) or (None, the head's input); gives `head` up where that was asked for and not had."""
        try:
            if not fused or self.head_width is None:
                return self._forward(tokens), None
            output, head, why = forward_to_head(self._forward, tokens, self.head_width)
            if head is None:
                self.head.give_up(REASONS[why])
            return output, head
        except (PrismError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as e:
            raise BundleFailed(
                f"the model's forward failed on tokens of shape {list(tokens.shape)}: {type(e).__name__}: "
                + " ".join(str(e).split())[:500],
                rule=c.RULE_RUNTIME_ERROR,
            ) from e

    def _try_head(self, width: int) -> None:
        """Before the first batch: on random ids, drawn without a trace in any generator of the bundle's."""
        drawn = np.random.default_rng().integers(0, self._n_vocab, (2, 1, width))
        tokens, targets = torch.from_numpy(drawn).to(self._token_bytes.device)
        self.head.try_out(lambda fused: self._nll(tokens, targets, fused=fused))

    def _nll(self, tokens: Tensor, targets: Tensor, *, fused: bool) -> tuple[Tensor, str | None]:
        """-> (nats, why they are the plain ones although the others were asked for)."""
        output, head = self._run(tokens, fused=fused)
        if head is not None:
            return _nll_of(head, targets), None
        nll = token_nll(self._checked(output, targets), targets)
        assert isinstance(nll, Tensor)
        return nll, self.head.reason if fused else None

    def code_length(self, output: Any, targets: Tensor) -> Tensor:
        """`kernels.batch_code_length` of a model's output, which is checked."""
        logits = self._checked(output, targets)
        with torch.no_grad():
            nll = token_nll(logits, targets)
        assert isinstance(nll, Tensor)
        return self._code_length(nll, targets)

    def _checked(self, output: Any, targets: Tensor) -> Tensor:
        logits = logits_of(output, targets.shape[0], targets.shape[1], self._n_vocab)
        if self.head_width is None:
            self.head_width = logits.shape[2]
            self.model_params = check_parameter_cap(self._model, self._cap, self._stage)
        elif logits.shape[2] != self.head_width:
            raise BundleFailed(
                f"the model's logits were {self.head_width} wide and are now {logits.shape[2]}",
                rule=c.RULE_OUTPUT_SHAPE,
            )
        return logits

    def _code_length(self, nll: Tensor, targets: Tensor) -> Tensor:
        assert self.head_width is not None
        with torch.no_grad():
            fault_nats = c.FAULT_CODE_LENGTH_FACTOR * math.log(self.head_width)
            return batch_code_length(nll, targets, self._token_bytes, fault_nats)


def _nll_of(head: HeadInput, targets: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast(targets.device.type, enabled=False):
        nll = token_nll(head.hidden, targets, weight=head.weight, bias=head.bias)
    assert isinstance(nll, Tensor)
    return nll
