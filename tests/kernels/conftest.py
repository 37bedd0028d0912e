"""Shared by the loss tests: every backend that runs on CPU tensors, and one thread unless a test asks for more.

(One thread: where other processes hold the cores, an OpenMP team spends most of its time waiting for its last member.)
"""

from __future__ import annotations

import pytest
import torch

from prism_fast.kernels import available_backends, use_backend

ON_CPU = [name for name in available_backends() if name in ("cpp", "torch")]


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=ON_CPU)
def backend(request: pytest.FixtureRequest):
    """Runs the test once on each CPU backend."""
    with use_backend(request.param):
        yield request.param


@pytest.fixture
def fused():
    """Runs the test on the compiled backend alone: what it is about, the reference does not do."""
    if "cpp" not in ON_CPU:
        pytest.fail("the compiled core does not load")
    with use_backend("cpp"):
        yield
