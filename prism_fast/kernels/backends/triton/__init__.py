"""The Triton backend: CUDA, ROCm, XPU; on the CPU only under Triton's interpreter (TRITON_INTERPRET=1), for tests.

Importing this package needs no Triton; the first use of a function does. What each function must do stands in
`prism_fast.kernels.backends`.

    fold.py                  a row of logits -> (max, sum), the same bits however it is stored or shared
    rows.py                  forward over logits: scoring, loss, vocabulary shards
    rows_backward.py         gradient over logits
    numerics.py, launch.py   arithmetic the hardware lacks; launch parameters
    host.py                  the functions below
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

name = "triton"

_FUNCTIONS = frozenset(
    {
        "token_nll",
        "token_nll_shard",
        "cross_entropy_forward",
        "cross_entropy_backward",
        "cross_entropy_with_gradient",
    }
)


def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def __getattr__(attribute: str) -> Any:
    if attribute in _FUNCTIONS:
        return getattr(importlib.import_module(f"{__name__}.host"), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")
