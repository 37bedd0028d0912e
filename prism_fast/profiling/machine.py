"""What a figure was measured on. Every result file carries it."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

# How OpenMP's threads wait, in every process of a run. They share the cores with other processes, so they must not spin
# for long; but waking a sleeping thread takes longer than the pause between two operations of a small model, so they
# spin for some 50 us before they sleep. The count is libgomp's, which torch on Linux comes with; the policy is for
# others. Read when torch is first loaded.
THREADS_WAIT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cpus() -> int:
    """CPUs this process may run on; what a thread count should be measured against."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_age_s() -> float | None:
    """Seconds since this process was started, interpreter and imports included; None where /proc does not say."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def triton_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    for name in ("triton", "pytorch-triton-rocm", "pytorch-triton-xpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def describe_machine() -> dict[str, Any]:
    """The `machine` block of a throughput profile. Imports torch."""
    import torch

    from prism_fast.kernels.dispatch import backend_report

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    gpu_memory = torch.cuda.get_device_properties(0).total_memory if gpus else None
    return {
        "cpu": cpu_name(),
        "cpu_count": usable_cpus(),
        "memory_bytes": memory_bytes(),
        "gpus": gpus,
        "gpu_memory_bytes": gpu_memory,
        "driver": _driver(),
        "os": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": triton_version(),
        "backends": backend_report(),
    }


def _driver() -> str | None:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return None
