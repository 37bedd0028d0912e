"""Forced seeds and deterministic flags, set before any bundle code is imported, and again before every build."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any


def seed_everything(seed: int) -> None:
    """Seeds Python's, numpy's and torch's generators (all devices)."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_deterministic(threads: int, deterministic: bool) -> None:
    """Fixes torch's thread count and asks for deterministic algorithms (a warning where torch has none).

    Filling uninitialised memory is left to model building (`seeded_builder`): on every allocation of a step it would
    cost a pass over memory, and no operation of ours reads what it did not write.
    """
    import torch

    torch.set_num_threads(threads)
    # use_deterministic_algorithms would import the compiler for its flag: more than a second in every process
    torch.set_deterministic_debug_mode("warn" if deterministic else "default")
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1" if deterministic else "0"
    _fill_uninitialized_memory(False)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = deterministic


def seeded_builder(build_model: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """Wraps a bundle's `build_model` so that every call starts from the forced seed.

    Memory from `torch.empty` is filled (with NaN) while the model is built: a parameter nobody initialised is then
    the same, and visibly wrong, in every process.
    """

    def build(*args: Any, **kwargs: Any) -> Any:
        seed_everything(seed)
        _fill_uninitialized_memory(True)
        try:
            return build_model(*args, **kwargs)
        finally:
            _fill_uninitialized_memory(False)

    build.__name__ = getattr(build_model, "__name__", "build_model")
    build.__doc__ = getattr(build_model, "__doc__", None)
    build.__wrapped__ = build_model  # type: ignore[attr-defined]
    return build


def _fill_uninitialized_memory(wanted: bool) -> None:
    import torch

    torch.utils.deterministic.fill_uninitialized_memory = wanted  # type: ignore[attr-defined]
