"""Limits hold in the process that set them, for real."""

from __future__ import annotations

import subprocess
import sys

from prism_fast.harness.process.limits import MEMORY_SHARE, usable_memory

MEMORY = """
import resource
from prism_fast.harness.process.limits import limit_process
limit_process(1 << 20, 256 << 20)
held = []
try:
    while len(held) < 1000:
        held.append(bytearray(16 << 20))
except MemoryError:
    print("MemoryError after", len(held) * 16, "MiB")
try:
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, 1 << 40))
except ValueError:
    print("cannot be raised")
"""


def test_memory_runs_out_at_the_limit_and_for_this_process_alone():
    drop = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]  # the superuser may raise limits again
    done = subprocess.run([*drop, sys.executable, "-c", MEMORY], capture_output=True, text=True)
    first, *rest = done.stdout.splitlines()
    assert first.startswith("MemoryError after ") and 100 <= int(first.split()[2]) < 256, done.stderr
    assert rest == ["cannot be raised"]


def test_a_process_is_left_most_of_the_machine():
    assert 0.5 <= MEMORY_SHARE < 1.0
    assert usable_memory() > 1 << 30
