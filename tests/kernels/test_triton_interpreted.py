"""Runs interpreted_triton.py in a process of its own.

TRITON_INTERPRET is read once, when a kernel is defined, and changes what `triton.jit` means for a whole process. Set
here it would turn off the compiled kernels of every other test, or come too late; so the suite that needs it has a
process, and a name that pytest does not collect by itself.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("interpreted_triton.py")


@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_equal_float64_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", str(SUITE)]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
