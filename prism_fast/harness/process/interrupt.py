"""Ctrl-C and SIGTERM as a wish: the first stops the run gracefully and scores what there is, the second gives up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from prism_fast.protocol import constants as c


class StopFlag:
    """Set from a signal handler: the run is to stop gracefully and score what it has."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def set(self, reason: str = c.STOP_INTERRUPTED) -> None:
        self.reason = reason


@contextmanager
def graceful_interrupts(stop: StopFlag) -> Iterator[None]:
    """Installs the handlers for the block's time. Does nothing outside the main thread, which owns signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        if stop.reason is not None:
            raise KeyboardInterrupt
        stop.set()

    previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)
