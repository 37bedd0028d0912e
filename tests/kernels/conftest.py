"""Shared by the loss tests: the float64 reference, and every backend that runs here."""

from __future__ import annotations

import pytest

from prism_fast.kernels import available_backends, use_backend

ON_CPU = [name for name in available_backends() if name in ("cpp", "torch")]


@pytest.fixture(params=ON_CPU)
def backend(request: pytest.FixtureRequest):
    """Runs the test once on each CPU backend."""
    with use_backend(request.param):
        yield request.param
