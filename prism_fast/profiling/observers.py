"""What looks at the steps of a bundle's bare loop; made inside the bundle's process from the job's `observe`."""

from __future__ import annotations

from typing import Any

from prism_fast.profiling.step_timer import StepTimer
from prism_fast.protocol.errors import UsageError


class TimedSteps:
    """Seconds of every step. Result: `step_s`, in step order, warm-up included; the reader leaves that out."""

    def __init__(self, device_type: str, processor: bool = False) -> None:
        if processor and device_type != "cpu":
            raise UsageError(f"processor time says nothing of work on {device_type}; use the wall clock")
        self._timer = StepTimer(device_type, processor=processor)
        self._clock = "events" if self._timer.on_device else "processor" if processor else "monotonic"

    def begin(self, index: int, model: Any, tokens: Any) -> None:
        self._timer.start()

    def end(self, index: int) -> None:
        self._timer.stop()

    def result(self) -> dict[str, Any]:
        return {"step_s": self._timer.seconds(), "clock": self._clock}


def make_observer(asked: dict[str, Any], device_type: str, rank: int) -> Any:
    """`asked["what"]`: steps, kernels, mask or flops; its other keys are the observer's arguments."""
    arguments = {name: value for name, value in asked.items() if name != "what"}
    what = asked["what"]
    if what == "steps":
        return TimedSteps(device_type, **arguments)
    if what == "kernels":
        from prism_fast.profiling.kernels import KernelWindow

        return KernelWindow(device_type=device_type, rank=rank, **arguments)
    if what == "mask":
        from prism_fast.profiling.mask import AttentionWatch

        return AttentionWatch(**arguments)
    raise ValueError(f"no observer named {what!r}")
