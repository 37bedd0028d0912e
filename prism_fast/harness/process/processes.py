"""Finding and ending process trees through /proc: torchrun starts workers in sessions of their own, bundles fork."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

TERMINATE_GRACE_S = 5.0


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = Path(f"/proc/{entry}/stat").read_text()
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, queue = [], [pid]
    while queue:
        for child in children.get(queue.pop(0), []):
            found.append(child)
            queue.append(child)
    return found


def end_processes(process: subprocess.Popen[bytes] | None, keep: set[int]) -> None:
    """Ends `process` and every descendant of ours that is neither in `keep` nor below it: politely, then surely."""
    if process is not None and process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATE_GRACE_S)
    if process is not None and process.poll() is None:
        process.kill()
        process.wait()
    for _ in range(50):
        spared = keep.union(*(descendants(pid) for pid in keep))
        rest = [p for p in descendants(os.getpid()) if p not in spared]
        if not rest:
            return
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in rest:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
