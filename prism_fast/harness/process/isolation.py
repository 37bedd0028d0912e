"""The sandbox around bundle code: bubblewrap, one for the trainer and one for each evaluator.

Nothing of the host is visible but what is listed here: the system's libraries, this Python and its packages, and the
role's own few paths. The trainer sees no data; an evaluator sees neither data nor training code. No network (loopback
is brought up, since torchrun's rendezvous needs it), own PID space, private /tmp, dies with the referee.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from prism_fast.protocol.errors import EngineFault

SYSTEM_PATHS = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/opt/rocm",
)
SYSTEM_FILES = (
    "/etc/passwd",
    "/etc/group",
    "/etc/nsswitch.conf",
    "/etc/localtime",
    "/sys/devices/system",
    "/etc/hosts",
)
TMPFS_BYTES = 4 << 30  # of each private directory: they take memory
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


@cache
def bwrap_fault() -> str | None:
    """Why bubblewrap cannot isolate here, or None if it can. Tried, not assumed."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return "bwrap is not installed (Debian and Ubuntu: apt-get install bubblewrap)"
    probe = subprocess.run(
        [
            bwrap,
            "--ro-bind",
            "/",
            "/",
            "--unshare-all",
            "--die-with-parent",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "true",
        ],
        capture_output=True,
        text=True,
        timeout=30,
    )
    if probe.returncode:
        return f"{bwrap} cannot make namespaces here: {' '.join(probe.stderr.split()) or probe.returncode}"
    return None


def resolve_isolation(requested: str) -> str:
    """`auto`, `bwrap` or `none` -> what is used. Raises EngineFault when `bwrap` was asked for and cannot be had."""
    if requested == "none":
        return "none"
    fault = bwrap_fault()
    if fault is None:
        return "bwrap"
    if requested == "bwrap":
        raise EngineFault(f"--isolation bwrap: {fault}")
    return "none"


READ_ONLY_ROOT = ("--remount-ro", "/")  # last: mount points are made in it until then


@dataclass(frozen=True)
class Sandbox:
    """Wraps a command for a role. `kind`: bwrap or none. `hidden`: paths masked though their parent is visible."""

    kind: str
    hidden: tuple[Path, ...] = field(default_factory=tuple)

    def trainer(self, command: list[str], bundle_dir: Path, channel_dir: Path, artifacts_dir: Path) -> list[str]:
        """Sees the bundle and the referee's socket; writes to its artifacts and a private /tmp alone."""
        if self.kind == "none":
            return command
        return [
            *self._base(),
            *_bind("--ro-bind", bundle_dir),
            *_bind("--ro-bind", channel_dir),
            *_bind("--bind", artifacts_dir),
            *READ_ONLY_ROOT,
            "--chdir",
            str(artifacts_dir),
            "--",
            *command,
        ]

    def evaluator(self, command: list[str], bundle_dir: Path) -> list[str]:
        """Sees architecture.py and an inherited socket; writes nowhere but a private /tmp."""
        if self.kind == "none":
            return command
        return [*self._base(), *_bind("--ro-bind", bundle_dir), *READ_ONLY_ROOT, "--chdir", "/tmp", "--", *command]

    def _base(self) -> list[str]:
        bwrap = shutil.which("bwrap")
        assert bwrap is not None
        arguments = [
            bwrap,
            "--unshare-all",
            "--die-with-parent",
            "--new-session",
            "--cap-drop",
            "ALL",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            *_tmpfs("/tmp"),
            *_tmpfs("/dev/shm"),
        ]
        for path in SYSTEM_PATHS:
            if os.path.islink(path):
                arguments += ["--symlink", os.readlink(path), path]
            elif os.path.exists(path):
                arguments += ["--ro-bind", path, path]
        for path in SYSTEM_FILES:
            if os.path.exists(path):
                arguments += ["--ro-bind", path, path]
        for name in sorted(os.listdir("/dev")):
            path = f"/dev/{name}"
            if path.startswith(DEVICES):
                arguments += ["--dev-bind", path, path]
        for path in _python_paths():
            arguments += ["--ro-bind", path, path]
        for hidden in self.hidden:
            if hidden.is_dir():
                arguments += ["--tmpfs", str(hidden)]
            elif hidden.exists():
                arguments += ["--ro-bind", "/dev/null", str(hidden)]
        return arguments


def _tmpfs(path: str) -> list[str]:
    return [*(("--size", str(TMPFS_BYTES)) if _bwrap_knows_sizes() else ()), "--tmpfs", path]


@cache
def _bwrap_knows_sizes() -> bool:
    """bwrap 0.7 and later."""
    bwrap = shutil.which("bwrap")
    return bwrap is not None and "--size" in subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout


def _bind(option: str, path: Path) -> list[str]:
    return [option, str(path), str(path)]


def _python_paths() -> list[str]:
    """This Python, its packages and ours; outermost only, so that no bind shadows another."""
    import prism_fast

    wanted = {
        sys.prefix,
        sys.base_prefix,
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        str(Path(prism_fast.__file__).parent),
    }
    system = tuple(p for p in SYSTEM_PATHS if os.path.isdir(p))
    found = sorted({os.path.realpath(p) for p in wanted} | wanted, key=len)
    kept: list[str] = []
    for path in found:
        covered = any(path == k or path.startswith(k.rstrip("/") + "/") for k in (*kept, *system))
        if not covered and os.path.isdir(path) and path != "/":
            kept.append(path)
    return kept
