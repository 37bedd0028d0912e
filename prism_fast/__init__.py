"""prism-fast: scores how well a model learns, with losses that miners can import.

Importing this package is cheap: torch and the compiled core are loaded when a loss is first touched, so the
command line answers at once and a miner pays only for what is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from prism_fast.kernels import (
        BitsPerByte,
        cross_entropy,
        linear_cross_entropy,
        nn,
        token_nll,
    )

_FROM_KERNELS = ("BitsPerByte", "cross_entropy", "linear_cross_entropy", "nn", "token_nll")

__all__ = ["BitsPerByte", "__version__", "cross_entropy", "linear_cross_entropy", "nn", "token_nll"]


def __getattr__(name: str) -> Any:
    if name in _FROM_KERNELS:
        import importlib

        value = getattr(importlib.import_module("prism_fast.kernels"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'prism_fast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
