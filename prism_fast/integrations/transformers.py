"""The fused linear loss inside a causal language model of Hugging Face transformers: `patch(model)`.

A causal LM of that library multiplies hidden states by its head, and hands the logits [B, L, V] to
`model.loss_function`. While the model trains with labels, a patched model's head computes nothing and its loss
function makes the loss from the head's input: `prism_fast.linear_cross_entropy`, which never holds [B, L, V].
Everything else (the model's own forward, auxiliary losses, shifting, `num_items_in_batch`, evaluation, generation) is
as it was. The library itself is not changed, only the one model object.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from prism_fast.kernels import linear_cross_entropy

Model = TypeVar("Model", bound=nn.Module)

_ATTRIBUTE = "_prism_fast_patch"
_PROBE_TOKENS = 5
_PROBE_TOLERANCE = 1e-3  # relative; a scale, a bias or a cap after the head moves logits by far more


def patch(model: Model) -> Model:
    """Makes `model` train with the fused linear loss; returns `model`. A second call changes nothing.

    Args:
        model: a causal LM of transformers (GPT-2, Llama, Qwen, Gemma, ...) with its weights in place: its head is an
            `nn.Linear` and its loss the library's own causal LM loss. A final soft cap (`final_logit_softcapping`) is
            kept. Call this before the model is wrapped (DDP, FSDP, Accelerate) or compiled.

    In training mode with `labels`, `output.loss` has the value and the gradients it had, and `output.logits` is empty
    (`[B, L, 0]`). Without labels, and in `eval()`, nothing differs from the unpatched model.

    Raises:
        TypeError: the model has no such head, or another loss.
        ValueError: something follows the head that this loss would leave out. Found by one forward of 5 tokens.
    """
    if hasattr(model, _ATTRIBUTE):
        return model
    head = _head(model)
    _check_loss(model)
    softcap = _softcap(model)
    _check_nothing_follows(model, head, softcap)
    setattr(model, _ATTRIBUTE, _Patch(model, head, softcap))
    return model


def unpatch(model: Model) -> Model:
    """Takes `patch` back; returns `model`."""
    installed = model.__dict__.pop(_ATTRIBUTE, None)
    if installed is not None:
        installed.remove()
    return model


class _Patch:
    """What is installed on one model. The head and the loss function meet here, within one forward of the model."""

    def __init__(self, model: Any, head: Any, softcap: float | None) -> None:
        self.model, self.head, self.softcap = model, head, softcap
        self.signature = inspect.signature(model.forward)
        self.hidden: Tensor | None = None
        self.fusing = False
        self.original_loss = model.loss_function
        self.handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]
        head.forward = self._head
        model.loss_function = self._loss

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        del self.head.forward
        self.model.loss_function = self.original_loss

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels = kwargs.get("labels")
        if labels is None and args:
            labels = self.signature.bind_partial(*args).arguments.get("labels")
        self.fusing = model.training and labels is not None

    def _after(self, *_: Any) -> None:
        self.fusing, self.hidden = False, None

    def _head(self, hidden: Tensor) -> Tensor:
        if not self.fusing:
            return nn.functional.linear(hidden, self.head.weight, self.head.bias)
        self.hidden = hidden
        return hidden[..., :0]  # whatever the model does to its logits, it does to nothing

    def _loss(self, logits: Tensor, labels: Tensor, vocab_size: int | None = None, **kwargs: Any) -> Tensor:
        if self.hidden is None:
            unfused: Tensor = self.original_loss(logits, labels, vocab_size=vocab_size, **kwargs)
            return unfused
        return causal_lm_loss(
            self.hidden,
            self.head.weight,
            labels,
            bias=self.head.bias,
            softcap=self.softcap,
            **{k: v for k, v in kwargs.items() if k in ("num_items_in_batch", "ignore_index", "shift_labels")},
        )


def causal_lm_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor | None,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """transformers' causal LM loss, from hidden states `[B, L, H]` and the head `[V, H]` -> scalar, float32 (float64).

    `labels` int64 `[B, L]` are shifted here; `shift_labels` stand as they are. The mean is over labels that are not
    `ignore_index`, or, with `num_items_in_batch`, the sum divided by it.
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("causal_lm_loss: neither labels nor shift_labels; expected one of them")
        # Padded and not cut, so that hidden stays one contiguous block: its last position has nothing to predict.
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(hidden.device)
    loss = linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        target,
        bias=bias,
        ignore_index=ignore_index,
        softcap=softcap,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch)


# -------------------------------------------------------------------------------------------------------------- checks


def _head(model: nn.Module) -> nn.Linear:
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    if type(head) is not nn.Linear:
        found = "none" if head is None else type(head).__name__
        raise TypeError(
            f"{type(model).__name__}: its head (get_output_embeddings) is {found}; expected the nn.Linear of a "
            "transformers causal LM, patched before it is wrapped or given adapters"
        )
    return head


def _softcap(model: Any) -> float | None:
    cap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return cap


def _check_loss(model: nn.Module) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        raise TypeError(
            f"{type(model).__name__}: its loss_function is {getattr(model, 'loss_function', None)!r}; expected "
            "transformers' ForCausalLMLoss, which is what the fused loss computes"
        )


def _check_nothing_follows(model: Any, head: nn.Linear, softcap: float | None) -> None:
    """One forward without labels: are the logits the head's output, capped if the config says so, and nothing else?"""
    if head.weight.device.type == "meta":
        raise ValueError(f"{type(model).__name__}: its weights are on the meta device; patch it once they are loaded")
    seen: list[Tensor] = []
    handle = head.register_forward_hook(lambda module, args, output: seen.append(output))
    was_training = model.training
    try:
        tokens = torch.arange(_PROBE_TOKENS, device=head.weight.device)[None] % head.out_features
        with torch.no_grad():
            logits = model.eval()(input_ids=tokens, use_cache=False).logits
    finally:
        handle.remove()
        model.train(was_training)
    if len(seen) != 1:
        raise ValueError(f"{type(model).__name__}: its head ran {len(seen)} times in one forward; expected once")
    expected = seen[0].float()
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)
    if expected.shape != logits.shape:
        raise ValueError(
            f"{type(model).__name__}: its head gives {tuple(expected.shape)} and its logits are "
            f"{tuple(logits.shape)}; expected the same"
        )
    scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    apart = ((logits.float() - expected).abs().max() / scale).item()
    if not apart <= _PROBE_TOLERANCE:
        raise ValueError(
            f"{type(model).__name__}: its logits differ from its head's output by {apart:.2g} of their size; the fused "
            "loss would leave out what follows the head, so this model is not patched"
        )
