"""Which device a process computes on."""

from __future__ import annotations

from typing import Any

from prism_fast.protocol.errors import EngineFault


def resolve_device(requested: str, local_rank: int) -> Any:
    """`auto`, `cpu` or `cuda` -> a torch.device, made current. Raises EngineFault where cuda is asked for in vain."""
    import torch

    if requested == "cuda" and not torch.cuda.is_available():
        raise EngineFault("--device cuda was asked for, but torch sees no CUDA device")
    if requested != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")
