"""Ray, begun here or joined: what the campaign's runs and the packer's encoders share."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from prism_fast.harness.process.commands import SAFE_PATH
from prism_fast.profiling.machine import usable_cpus
from prism_fast.protocol.errors import EngineFault, UsageError

LOCAL = "local"


def connect(command: str, address: str | None, object_store_bytes: int) -> Any:
    """The `ray` module, connected: to this machine's cores alone (`address` None or "local") or to a cluster.

    Raises UsageError where Ray is not installed, EngineFault where the cluster does not answer.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a validator's machine tells nobody anything
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise UsageError(f"{command}: ray is not installed; pip install 'prism-fast[ray]'") from None
    local: dict[str, Any] = {}
    if address in (None, LOCAL):
        address = LOCAL  # never a cluster that an environment variable names
        local = {
            "num_cpus": usable_cpus(),
            "include_dashboard": False,
            "object_store_memory": object_store_bytes,
        }
    try:
        with _standing_at_root():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise EngineFault(f"--address {address}: Ray does not answer: {error}") from error
    return ray


@contextlib.contextmanager
def _standing_at_root() -> Iterator[None]:
    """Ray's workers import from the folder that the driver stands in when it connects: none of the user's."""
    stood = os.open(".", os.O_RDONLY)
    safe = os.environ.get(SAFE_PATH)
    os.chdir("/")
    os.environ[SAFE_PATH] = "1"  # for what Ray starts here
    try:
        yield
    finally:
        os.fchdir(stood)
        os.close(stood)
        os.environ.pop(SAFE_PATH)
        if safe is not None:
            os.environ[SAFE_PATH] = safe


def alive_nodes(ray: Any) -> list[dict[str, float]]:
    """Resources of each node that lives: "CPU", "GPU"."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
