"""Device values on their way to the host, without waiting for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IN_FLIGHT = 64  # values not yet read before the oldest is waited for


class DeferredReads:
    """Calls back with the values of small device tensors once they are on the host, in the order they were given.

    On the CPU that is at once. On a GPU the copy is asynchronous and its event is polled at later calls.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[list[float]], None], Tensor, Any]] = deque()

    def read(self, values: Tensor, then: Callable[[list[float]], None]) -> None:
        """`values`: a float64 tensor [n]."""
        event = None
        if values.device.type != "cpu":
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            values = host
        self._waiting.append((then, values, event))
        self.poll(wait=False)

    def poll(self, *, wait: bool) -> None:
        """Delivers what has arrived; with `wait`, everything."""
        while self._waiting:
            then, values, event = self._waiting[0]
            if event is not None and not event.query():
                if not wait and len(self._waiting) <= IN_FLIGHT:
                    return
                event.synchronize()
            self._waiting.popleft()
            then(values.numpy().tolist())
