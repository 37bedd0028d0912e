"""The sandbox around bundle code: bubblewrap, one for the trainer, one for each tracer and one for each executor.

Nothing of the host is visible but what is listed here: the system's libraries, this Python and its packages, and the
role's own few paths. The trainer sees no data, a tracer neither data nor training code, an executor nothing of the
bundle at all. Text that lies below what is visible is covered. No network (loopback is brought up, since torchrun's
rendezvous needs it), own PID space, private /tmp and caches in it, dies with the referee.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from prism_fast.protocol.errors import EngineFault, UsageError

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
MASK_BYTES = 1 << 20  # of what covers a folder: nothing is to be kept there
PRIVATE = "/tmp"
# Whatever compiles or caches does so in its own sandbox: the user's folders are not there, and no two sandboxes share.
PRIVATE_FOLDERS = {
    "HOME": f"{PRIVATE}/home",
    "TMPDIR": PRIVATE,
    "TRITON_CACHE_DIR": f"{PRIVATE}/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{PRIVATE}/inductor",
    "CUDA_CACHE_PATH": f"{PRIVATE}/cuda",
}


@dataclass(frozen=True)
class Sandbox:
    """Wraps a command for a role. `kind`: bwrap or none.

    `hidden`: folders and files of text that are covered wherever the sandbox would show them, beside the text that
    ships with the package and the default cache, which always are; see `data_places` and `check_hideable`.
    `readable`: what the trainer may read beside its bundle.
    """

    kind: str
    hidden: tuple[Path, ...] = ()
    readable: tuple[Path, ...] = ()

    def trainer(self, command: list[str], bundle_dir: Path, channel_dir: Path, artifacts_dir: Path) -> list[str]:
        """Sees the bundle and the referee's socket; writes to its artifacts and a private /tmp alone."""
        return self._wrapped(command, read=(bundle_dir, channel_dir, *self.readable), write=artifacts_dir)

    def tracer(self, command: list[str], bundle_dir: Path, out_dir: Path) -> list[str]:
        """Sees architecture.py; writes to `out_dir` and a private /tmp alone."""
        return self._wrapped(command, read=(bundle_dir,), write=out_dir)

    def executor(self, command: list[str]) -> list[str]:
        """Sees nothing of a bundle, and no text but what comes through its inherited socket; writes to /tmp alone."""
        return self._wrapped(command)

    def _wrapped(self, command: list[str], read: Sequence[Path] = (), write: Path | None = None) -> list[str]:
        """`command`, standing in the folder that it may write to."""
        if self.kind == "none":
            return command
        masks = _masks((*self.hidden, *_always_hidden()))
        arguments = [*_base(), *(option for place, folder in masks for option in _cover(place, folder))]
        for path in read:
            arguments += ["--ro-bind", str(path), str(path)]
        if write is not None:
            arguments += ["--bind", str(write), str(write)]
        for name, folder in PRIVATE_FOLDERS.items():
            arguments += [*(("--dir", folder) if folder != PRIVATE else ()), "--setenv", name, folder]
        for place, is_folder in masks:
            arguments += ["--remount-ro", place] * is_folder
        return [*arguments, *READ_ONLY_ROOT, "--chdir", str(write or PRIVATE), "--", *command]


# ------------------------------------------------------------------------------------------------------ what is hidden


def data_places(*corpora: Any, places: Iterable[str | None] = ()) -> tuple[Path, ...]:
    """Every folder that holds text of a run: the packed `corpora` (None is passed over), wherever their splits lie,
    and the text that `places`, the values of --data, --val and --phase2, name themselves."""
    found: list[Path] = []
    for corpus in corpora:
        if corpus is not None:
            found += [Path(corpus.folder), *(shard.parent for s in corpus.splits for shard in corpus.split(s).shards)]
    found += [Path(place) for place in places if place and os.path.exists(place)]
    return tuple(dict.fromkeys(path.absolute() for path in found))


def check_hideable(hidden: Iterable[Path]) -> None:
    """Raises UsageError for text that a sandbox cannot cover, since Python or the system would go with it."""
    for path in hidden:
        if (shown := _shown_inside(path)) is not None:
            raise UsageError(
                f"{path}: the sandbox shows {shown} to a bundle, and this text cannot be hidden without it; keep the "
                "text in a folder of its own"
            )


def _shown_inside(hidden: Path) -> str | None:
    real = os.path.realpath(hidden)
    needed = sorted({*_shown(), *_python_folders()}, key=len)
    return next((folder for folder in needed if _below(os.path.realpath(folder), real)), None)


def _always_hidden() -> list[Path]:
    """The text that ships with the package, and what was packed of anybody's."""
    import prism_fast
    from prism_fast.data.corpus import default_cache_dir

    shipped = sorted((Path(prism_fast.__file__).parent / "data" / "assets").glob("*.jsonl.gz"))
    return [*shipped, default_cache_dir()]


def _masks(hidden: Iterable[Path]) -> list[tuple[str, bool]]:
    """Where in the sandbox `hidden` would be seen, and whether it is a folder; outermost first, each once.

    What is shown is shown under its own name, which may lead through links: a mask goes where the link's end appears.
    """
    found: dict[str, bool] = {}
    for path in hidden:
        real = os.path.realpath(path)
        if not os.path.exists(real) or _shown_inside(path) is not None:
            continue
        for root in _shown():
            real_root = os.path.realpath(root)
            if _below(real, real_root) and real != real_root:
                found[root + real[len(real_root) :]] = os.path.isdir(real)
    outermost: list[tuple[str, bool]] = []
    for place in sorted(found, key=len):
        if not any(_below(place, other) for other, is_folder in outermost if is_folder):
            outermost.append((place, found[place]))
    return outermost


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _cover(place: str, is_folder: bool) -> list[str]:
    return _tmpfs(place, MASK_BYTES) if is_folder else ["--ro-bind", "/dev/null", place]


# ------------------------------------------------------------------------------------------------------- what is shown


def _shown() -> list[str]:
    """Folders of the host that every sandbox shows."""
    return [*(path for path in (*SYSTEM_PATHS, *SYSTEM_FILES) if os.path.isdir(path)), *_python_paths()]


def _base() -> list[str]:
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
        *_tmpfs(PRIVATE),
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
    return arguments


def _tmpfs(path: str, size: int = TMPFS_BYTES) -> list[str]:
    return [*(("--size", str(size)) if _bwrap_knows_sizes() else ()), "--tmpfs", path]


@cache
def _bwrap_knows_sizes() -> bool:
    """bwrap 0.7 and later."""
    bwrap = shutil.which("bwrap")
    return bwrap is not None and "--size" in subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout


def _python_paths() -> list[str]:
    """This Python, its packages and ours; outermost only, so that no bind shadows another."""
    wanted = _python_folders()
    system = tuple(p for p in SYSTEM_PATHS if os.path.isdir(p))
    found = sorted({os.path.realpath(p) for p in wanted} | wanted, key=len)
    kept: list[str] = []
    for path in found:
        covered = any(path == k or path.startswith(k.rstrip("/") + "/") for k in (*kept, *system))
        if not covered and os.path.isdir(path) and path != "/":
            kept.append(path)
    return kept


def _python_folders() -> set[str]:
    import prism_fast

    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return {sys.prefix, sys.base_prefix, *folders, str(Path(prism_fast.__file__).parent)}
