"""The two clocks. The device's is exercised on events of the test's own making: their order and number count."""

import subprocess
import sys

import pytest
import torch

from prism_fast.profiling import step_timer
from prism_fast.profiling.step_timer import Clock, StepTimer, seconds_of


class Device:
    """A queue that has come as far as `done`: an event is its place in it, 5 ms from one to the next."""

    def __init__(self):
        self.recorded, self.done, self.waits, self.alive = 0, 0, 0, 0

    def event(self, enable_timing):
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device):
        self.device = device
        device.alive += 1

    def __del__(self):
        self.device.alive -= 1

    def record(self):
        self.device.recorded += 1
        self.place = self.device.recorded

    def query(self):
        return self.place <= self.device.done

    def synchronize(self):
        if not self.query():
            self.device.waits += 1
            self.device.done = self.place

    def elapsed_time(self, later):
        assert later.query(), "read before the device was there"
        return 5.0 * (later.place - self.place)


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    return device


def test_the_host_clock_gives_seconds_at_once():
    clock = Clock("cpu")
    a = clock.mark()
    assert not clock.on_device and 0 <= seconds_of(clock.between(a, clock.mark())) < 10


def test_processor_time_passes_with_work_and_not_with_the_clock():
    clock = Clock("cpu", processor=True)
    before = clock.mark()
    waited = subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)
    between = clock.mark()
    sum(range(10**6))
    after = clock.mark()
    assert waited.returncode == 0
    assert clock.between(before, between) >= 0 and clock.between(between, after) > 0


def test_a_device_mark_is_read_only_when_it_is_asked_for(device):
    clock = Clock("cuda")
    before, after = clock.mark(), clock.mark()
    took = clock.between(before, after)
    assert device.waits == 0 and seconds_of(took) == pytest.approx(0.005) and device.waits == 1


def test_steps_are_timed_without_waiting_and_with_bounded_events(device):
    timer, most = StepTimer("cuda"), 0
    for step in range(2000):
        timer.start()
        timer.stop()
        most = max(most, device.alive)
        if step < 1000:
            device.done = max(0, device.recorded - 20)  # a device ten steps behind
    # It stopped at step 1,000: from then on the oldest is waited for, one at a time.
    assert most <= 2 * step_timer.IN_FLIGHT + 4 and 700 < device.waits <= 1000
    assert timer.seconds() == pytest.approx([0.005] * 2000)


def test_a_device_that_keeps_up_is_never_waited_for(device):
    timer = StepTimer("cuda")
    for _ in range(500):
        timer.start()
        timer.stop()
        device.done = device.recorded
    assert device.waits == 0 and len(timer.seconds()) == 500
