"""What a process of a run finds in its environment: nothing that it was not given here."""

from __future__ import annotations

import os

from prism_fast.profiling.machine import THREADS_WAIT
from prism_fast.protocol.run_spec import RunSpec

PASSED_ENVIRONMENT = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH", "TZ")
PASSED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "TRITON_", "TORCHINDUCTOR_")


def engine_environment(spec: RunSpec) -> dict[str, str]:
    """What torch needs of ours in every process of a run, and nothing else."""
    passed = {k: v for k, v in os.environ.items() if k in PASSED_ENVIRONMENT or k.startswith(PASSED_PREFIXES)}
    return {
        **passed,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONHASHSEED": str(spec.seed % 2**32),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(spec.torch_threads),
        **THREADS_WAIT,
    }
