"""Brings what callers pass to the shapes that backends take, and says what is wrong with the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TARGET_DTYPES = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def check_same_device(**tensors: Tensor | None) -> None:
    """Raises ValueError unless all tensors given are on one device."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"tensors must be on one device: {where}")


def as_target_rows(target: Tensor) -> Tensor:
    """Class ids as a contiguous int32 or int64 vector."""
    if target.dtype not in _TARGET_DTYPES:
        hint = "; class probabilities are not supported, use torch's cross_entropy" * target.is_floating_point()
        raise TypeError(f"target must hold integer class ids, got {target.dtype}{hint}")
    if target.dtype not in (torch.int32, torch.int64):
        target = target.long()
    return target.reshape(-1).contiguous()


def as_logit_rows(logits: Tensor, target: Tensor, *, class_dim_1: bool) -> tuple[Tensor, Tensor]:
    """(logits [N, V], target [N]) from `[..., V]` with `[...]`, or from torch's `[N, C, d1...]` with `[N, d1...]`.

    The second form is taken only if `class_dim_1`. Where both would fit (`[N, C, C]` with `[N, C]`) the call is
    refused rather than guessed at.
    """
    if logits.dtype not in FLOAT_DTYPES:
        raise TypeError(f"logits must be float64, float32, bfloat16 or float16, got {logits.dtype}")
    check_same_device(logits=logits, target=target)
    shape = tuple(logits.shape)
    if not shape:
        raise ValueError("logits must have a class dimension, got a scalar")
    last = tuple(target.shape) == shape[:-1]
    first = class_dim_1 and len(shape) > 2 and tuple(target.shape) == shape[:1] + shape[2:]
    if last and first:
        raise ValueError(
            f"logits {list(shape)} with target {list(target.shape)} fit both [..., V] and [N, C, d1...]: "
            "flatten them to [N, V] and [N]"
        )
    if not last and not first:
        forms = "[..., V] with [...]" + (" or [N, C, d1...] with [N, d1...]" if class_dim_1 else "")
        raise ValueError(f"logits {list(shape)} and target {list(target.shape)} do not fit together: expected {forms}")
    if first:
        logits = logits.movedim(1, -1)
    vocab = logits.shape[-1]
    if vocab == 0:
        raise ValueError(f"logits {list(shape)} have no classes")
    return logits.reshape(math.prod(logits.shape[:-1]), vocab), as_target_rows(target)


def autocast_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states and head in the dtype that autocast would give torch's linear."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)

    def cast(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)

    return cast(hidden), cast(weight), None if bias is None else cast(bias)


def as_hidden_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(hidden [N, H], weight [V, H], bias [V], target [N]) from hidden `[..., H]` with target `[...]`.

    Raises one clear error for a head that is not a whole [V, H] matrix here: a sharded (DTensor), flattened or
    emptied parameter must be gathered by the caller first.
    """
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if type(tensor).__name__ == "DTensor":
            raise ValueError(f"{name} is a DTensor: gather it first ({name}.full_tensor())")
        if tensor.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {tensor.dtype}")
    check_same_device(hidden=hidden, weight=weight, bias=bias, target=target)
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(
            f"weight must be a whole [V, H] matrix, got {list(weight.shape)}: a sharded or flattened parameter "
            "(FSDP, ZeRO-3) must be gathered first"
        )
    vocab, width = weight.shape
    if hidden.dim() == 0 or hidden.shape[-1] != width or tuple(target.shape) != tuple(hidden.shape[:-1]):
        raise ValueError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and target {list(target.shape)} do not fit "
            "together: expected [..., H], [V, H] and [...]"
        )
    if bias is not None and tuple(bias.shape) != (vocab,):
        raise ValueError(f"bias must be [{vocab}] for weight {list(weight.shape)}, got {list(bias.shape)}")
    dtypes = {tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}
    if len(dtypes) > 1:
        raise TypeError(
            f"hidden is {hidden.dtype}, weight {weight.dtype}"
            + (f", bias {bias.dtype}" if bias is not None else "")
            + ": they must have one dtype (outside autocast)"
        )
    return hidden.reshape(-1, width), weight, bias, as_target_rows(target)
