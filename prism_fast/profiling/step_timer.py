"""Times steps without waiting for them: the host's monotonic clock, or on a GPU events that are read later.

Memory is bounded: a `StepTimer` keeps 8 bytes a step in a compact array, and at most `IN_FLIGHT` pairs of events.
"""

from __future__ import annotations

from array import array
from collections import deque
from time import perf_counter
from typing import Any

IN_FLIGHT = 256  # pairs of events not yet read before the oldest is waited for


class StepTimer:
    """`start()` when a step begins, `stop()` when it ends; `seconds()` once all are over, float64 in step order.

    On a GPU an event is recorded on the current stream at both ends: the difference is the device's own time from
    the end of the work before to the end of the step's, with no synchronisation in the loop.
    """

    def __init__(self, device_type: str) -> None:
        self._cuda: Any = None
        if device_type == "cuda":
            import torch

            self._cuda = torch.cuda
        self.on_device = self._cuda is not None
        self._seconds = array("d")
        self._open: Any = None
        self._waiting: deque[tuple[Any, Any]] = deque()

    def start(self) -> None:
        self._open = self._now()

    def stop(self) -> None:
        if self._cuda is None:
            self._seconds.append(perf_counter() - self._open)
            return
        self._waiting.append((self._open, self._now()))
        while len(self._waiting) > IN_FLIGHT or (self._waiting and self._waiting[0][1].query()):
            self._read()

    def seconds(self) -> list[float]:
        while self._waiting:
            self._read()
        return self._seconds.tolist()

    def _now(self) -> Any:
        if self._cuda is None:
            return perf_counter()
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read(self) -> None:
        before, after = self._waiting.popleft()
        after.synchronize()
        self._seconds.append(before.elapsed_time(after) / 1e3)
