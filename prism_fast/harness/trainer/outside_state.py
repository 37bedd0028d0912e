"""What a trained model depends on outside its state dict: a schedule kept in an attribute, a counter.

Only the state dict is scored. So the live model is compared with a fresh one that holds the same state: where their
eval forwards differ, the difference lies outside, and attributes that differ between the two are the likely cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from prism_fast.harness.marking.sums import first_output
from prism_fast.harness.trainer.full_state import plain_model, wrapped_module
from prism_fast.harness.trainer.open_heldout import FreshModel
from prism_fast.harness.trainer.predictor import ForwardOrBlame

ROWS = 2
MAX_NAMES = 20
MAX_DEPTH = 3  # of lists in attributes
_OF_TORCH = frozenset(nn.Module().__dict__) | {"_is_full_backward_hook", "_compiled_call_impl"}
_MISSING = object()


def compare_with_fresh(live: nn.Module, fresh: FreshModel, width: int, n_vocab: int) -> dict[str, Any]:
    """-> {"differs": largest difference of two logits, "attributes": names}. `fresh` holds the live model's state.

    Tokens are random ids, ROWS rows of `width`. `differs` is 1e308 where the outputs cannot be compared.
    """
    drawn = torch.randint(0, n_vocab, (ROWS, width), generator=torch.Generator().manual_seed(0)).to(fresh.device)
    model = plain_model(live)
    with torch.autocast(fresh.device.type, enabled=False):
        ours = first_output(ForwardOrBlame(model)(drawn.clone()))
    differs = _distance(ours, first_output(fresh.output(drawn.clone())))
    names = list(different_attributes(model, plain_model(fresh.model)))[:MAX_NAMES] if differs else []
    return {"differs": differs, "attributes": names}


def different_attributes(live: nn.Module, fresh: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names of numbers, texts and tensors outside the state dict that differ between two models, modules in turn."""
    live, fresh = _inside(live), _inside(fresh)
    for name in dict.fromkeys([*live.__dict__, *fresh.__dict__]):
        if name not in _OF_TORCH and _different(_get(live, name), _get(fresh, name)):
            yield prefix + name
    for name in dict.fromkeys([*live._buffers, *fresh._buffers]):
        if name in live._non_persistent_buffers_set and _different(live._buffers.get(name), fresh._buffers.get(name)):
            yield prefix + name
    for name in dict.fromkeys([*live._modules, *fresh._modules]):
        ours, theirs = live._modules.get(name), fresh._modules.get(name)
        if ours is not None and theirs is not None:
            yield from different_attributes(ours, theirs, f"{prefix}{name}.")
        elif ours is not theirs:
            yield prefix + name


def _inside(module: nn.Module) -> nn.Module:
    while (inner := wrapped_module(module)) is not None:
        module = inner
    return module


def _get(module: nn.Module, name: str) -> Any:
    """The attribute as the forward sees it: the class's own where the instance has none."""
    return module.__dict__.get(name, getattr(type(module), name, _MISSING))


def _different(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether two plain values differ. What is neither number, text, tensor nor a list of them is not looked into."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
            return True
        if one.shape != other.shape or one.dtype != other.dtype:
            return True
        return not torch.equal(one.detach().cpu(), other.detach().cpu())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and depth < MAX_DEPTH:
        return len(one) != len(other) or any(_different(a, b, depth + 1) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict) and depth < MAX_DEPTH:
        return one.keys() != other.keys() or any(_different(one[k], other[k], depth + 1) for k in one)
    plain = (bool, int, float, complex, str, bytes, type(None))
    if isinstance(one, plain) or isinstance(other, plain):
        return type(one) is not type(other) or (one != other and not (one != one and other != other))
    return False


def _distance(ours: Any, theirs: Any) -> float:
    if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor)) or ours.shape != theirs.shape:
        return 1e308
    found = float((ours.detach().double() - theirs.detach().double()).abs().max()) if ours.numel() else 0.0
    if math.isfinite(found):
        return found
    return 0.0 if torch.equal(ours.detach().nan_to_num(), theirs.detach().nan_to_num()) else 1e308
