"""What a process may take of the machine, set before it runs bundle code; unprivileged code cannot raise it again."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path


def limit_process(file_bytes: int) -> None:
    """No file longer than `file_bytes`, no core dump, and first in line when the machine is out of memory."""
    for kind, limit in ((resource.RLIMIT_FSIZE, file_bytes), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
