"""The Triton backend: CUDA, ROCm, XPU; on the CPU only under Triton's interpreter (TRITON_INTERPRET=1), for tests.

Importing this package needs no Triton; the first use of a function does. What each function must do stands in
`prism_fast.kernels.backends`.

    fold.py                  a row of logits -> (max, sum), the same bits however it is stored or shared
    rows.py                  forward over logits: scoring, loss, vocabulary shards
    rows_backward.py         gradient over logits; rows_fused.py: with the loss, in one read
    linear_tiles.py          tiles of logits from hidden states: linear_forward.py, linear_gradient.py
    rows_scale.py, sums.py    a gradient mended; sums over rows in a fixed order
    numerics.py, launch.py   arithmetic the hardware lacks; launch parameters
    host.py, host_linear.py  the functions that `Backend` asks for
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

name = "triton"

_MODULES = {
    "host": (
        "token_nll",
        "token_nll_shard",
        "cross_entropy_forward",
        "cross_entropy_backward",
        "cross_entropy_forward_backward",
        "gradient_like",
        "scale_rows",
        "sum_rows",
        "batch_code_length",
    ),
    "host_linear": (
        "linear_token_nll",
        "linear_cross_entropy_forward",
        "linear_cross_entropy_backward",
        "linear_cross_entropy_forward_backward",
    ),
}
_FUNCTIONS = {function: module for module, functions in _MODULES.items() for function in functions}


def why_not(device: torch.device) -> str | None:
    """Why this backend cannot run on tensors of `device`, as a clause; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu":
        from prism_fast.kernels.backends.triton.launch import interpreting

        return None if interpreting() else "triton runs on GPUs (on the CPU only interpreted, TRITON_INTERPRET=1)"
    if device.type not in ("cuda", "xpu"):
        return f"triton does not run on {device.type}"
    return None


def __getattr__(attribute: str) -> Any:
    if attribute not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")
    function = getattr(importlib.import_module(f"{__name__}.{_FUNCTIONS[attribute]}"), attribute)
    globals()[attribute] = function
    return function
