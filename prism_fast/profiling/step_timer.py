"""Times work without waiting for it: the host's monotonic clock, or on a GPU events that are read later.

On a machine shared with others the host can also be asked for processor time, which they add little to.

Memory is bounded: a `StepTimer` keeps 8 bytes a step in a compact array, and at most `IN_FLIGHT` pairs of events.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

IN_FLIGHT = 256  # pairs of events not yet read before the oldest is waited for

Seconds = float | Callable[[], float]  # known, or known once the device has come so far


class Clock:
    """Marks moments where work is done: on the host, or on the device's current stream.

    `processor`: seconds that this process' threads had a CPU, in place of seconds gone by; the host's only.
    """

    def __init__(self, device_type: str, *, processor: bool = False) -> None:
        self._now = process_time if processor else perf_counter
        self._cuda: Any = None
        if device_type == "cuda":
            import torch

            self._cuda = torch.cuda

    @property
    def on_device(self) -> bool:
        return self._cuda is not None

    def mark(self) -> Any:
        if self._cuda is None:
            return self._now()
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, before: Any, after: Any) -> Seconds:
        """Seconds from one mark to a later one. On a GPU a function: it waits if the device is not that far yet."""
        if self._cuda is None:
            return after - before

        def seconds() -> float:
            after.synchronize()
            return before.elapsed_time(after) / 1e3

        return seconds


def seconds_of(value: Seconds) -> float:
    return value() if callable(value) else value


class StepTimer:
    """`start()` when a step begins, `stop()` when it ends; `seconds()` once all are over, float64 in step order.

    On a GPU an event is recorded on the current stream at both ends: the difference is the device's own time from
    the end of the work before to the end of the step's, with no synchronisation in the loop.
    """

    def __init__(self, device_type: str, *, processor: bool = False) -> None:
        self._clock = Clock(device_type, processor=processor)
        self._seconds = array("d")
        self._open: Any = None
        self._waiting: deque[tuple[Any, Any]] = deque()

    @property
    def on_device(self) -> bool:
        return self._clock.on_device

    def start(self) -> None:
        self._open = self._clock.mark()

    def stop(self) -> None:
        after = self._clock.mark()
        if not self.on_device:
            self._seconds.append(after - self._open)
            return
        self._waiting.append((self._open, after))
        while len(self._waiting) > IN_FLIGHT or (self._waiting and self._waiting[0][1].query()):
            self._read()

    def seconds(self) -> list[float]:
        while self._waiting:
            self._read()
        return self._seconds.tolist()

    def _read(self) -> None:
        self._seconds.append(seconds_of(self._clock.between(*self._waiting.popleft())))
