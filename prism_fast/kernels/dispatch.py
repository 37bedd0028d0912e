"""Which backend runs: the fastest that can, unless `use_backend` names another."""

from __future__ import annotations

import functools
import importlib
from types import TracebackType
from typing import cast

import torch

from prism_fast.kernels.backends import Backend

# In order of preference; a backend that cannot run on a device gives way to the next. cpp runs on the CPU alone, and
# there it comes before triton, whose interpreter is for tests.
_NAMES = ("cpp", "triton", "torch")

_chosen: str | None = None


@functools.cache
def _module(name: str) -> Backend | str:
    """The backend's module, or why it does not import."""
    try:
        return cast(Backend, importlib.import_module(f"prism_fast.kernels.backends.{name}"))
    except ImportError as error:
        return f"it does not import ({error})"


@functools.cache
def _why_not(name: str, device: torch.device) -> str | None:
    backend = _module(name)
    return backend if isinstance(backend, str) else backend.why_not(device)


def _devices() -> list[torch.device]:
    devices = [torch.device("cpu")]
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            devices.insert(0, torch.device(accelerator.type))
    return devices


def backend_for(device: torch.device) -> Backend:
    """The backend that runs on tensors of `device`. Raises ValueError if the one asked for cannot."""
    if _chosen is not None:
        reason = _why_not(_chosen, device)
        if reason is not None:
            raise ValueError(f"backend {_chosen!r} cannot run on {device}: {reason}; choose it with use_backend(None)")
        return cast(Backend, _module(_chosen))
    name = next(name for name in _NAMES if _why_not(name, device) is None)
    return cast(Backend, _module(name))


def backend_report() -> dict[str, str]:
    """Every backend, and for each whether it runs here, on what, or why not. For manifests and bug reports."""
    report = {}
    for name in _NAMES:
        reasons = {device.type: _why_not(name, device) for device in _devices()}
        usable = [kind for kind, reason in reasons.items() if reason is None]
        if not usable:
            report[name] = "unavailable: " + "; ".join(f"{reason}" for reason in dict.fromkeys(reasons.values()))
            continue
        serves = [kind for kind in usable if backend_for(torch.device(kind)).name == name]
        text = f"runs on {', '.join(usable)}"
        if name == "cpp":
            from prism_fast.kernels.backends import cpp

            text += f" ({cpp.instruction_set()})"
        report[name] = text + (f"; in use on {', '.join(serves)}" if serves else "")
    return report


def available_backends() -> dict[str, str]:
    """The backends that can run in this process, best first, each with what it runs on and where it is in use."""
    return {name: text for name, text in backend_report().items() if not text.startswith("unavailable")}


class use_backend:
    """Makes one backend serve every loss, from now on or inside a `with` block.

        use_backend("torch")            # for the rest of the process
        with use_backend("torch"): ...  # for the block
        use_backend(None)               # back to the best one for each device

    Raises ValueError, with the reason, for a backend that cannot run on any device of this process. The choice is the
    process's, not the thread's: autograd runs backward passes on threads of its own.
    """

    def __init__(self, name: str | None) -> None:
        global _chosen
        if name is not None:
            if name not in _NAMES:
                raise ValueError(f"unknown backend {name!r}: expected one of {', '.join(map(repr, sorted(_NAMES)))}")
            reasons = [_why_not(name, device) for device in _devices()]
            if all(reasons):
                raise ValueError(f"backend {name!r} cannot run here: {'; '.join(dict.fromkeys(map(str, reasons)))}")
        self._before = _chosen
        _chosen = name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _chosen
        _chosen = self._before
