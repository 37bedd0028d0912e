"""What a process may take of the machine, set before it runs bundle code; unprivileged code cannot raise it again.

Time needs no limit here: the watchdog's is on the wall clock, which nobody can spend slower than the processor's.
"""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

MEMORY_SHARE = 0.9  # of the machine's memory or the control group's, whichever is less
MAX_PROCESSES = 4096  # and threads, of this user in this sandbox; the superuser is exempt


def limit_process(file_bytes: int, memory_bytes: int | None = None) -> None:
    """No file longer than `file_bytes`, no more than `memory_bytes` of its own memory, a bounded number of processes,
    no core dump; and first in line when the machine is out of memory.

    `memory_bytes` (default: 0.9 of what there is) bounds each process's private writable memory, so that a runaway
    allocation is that process's MemoryError and not the end of others. Mapped weights and text do not count.
    """
    for kind, limit in (
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_DATA, int(usable_memory() * MEMORY_SHARE) if memory_bytes is None else memory_bytes),
        (resource.RLIMIT_NPROC, MAX_PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def usable_memory() -> int:
    """Bytes: the machine's memory, or this control group's bound on it if that is less. Without a bound where there is
    a GPU, whose driver maps host memory as it likes.
    """
    if Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists():
        return 1 << 62
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return min(machine, int(Path(name).read_text()))
    return machine
