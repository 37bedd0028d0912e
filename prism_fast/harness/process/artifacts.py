"""What a bundle leaves in its artifacts directory: how much it is, by what names, and nothing that ordinary tools
cannot remove.

A bundle calls its files what it likes. Where a name of theirs is written down (manifest, report, sentence) it goes
through `escaped`, which is text whatever the name's bytes are, and from which `unescaped` finds the file again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from prism_fast.protocol.canonical import file_sha256
from prism_fast.protocol.file_names import escaped

MAX_DEPTH = 64  # of directories
BLOCK_BYTES = 4096
EVERYTHING = 1 << 62  # more than any quota


def entry_bytes(st: os.stat_result) -> int:
    """Bytes that one entry allocates or claims, a block at least."""
    return max(st.st_size, st.st_blocks * 512, BLOCK_BYTES)


def directory_bytes(path: Path) -> int:
    """Bytes allocated or claimed (whichever is more) below `path`; links are not followed.

    Every entry takes a block at least, so that empty files count, and a directory that cannot be looked into, being
    too deep or closed to its owner, counts as EVERYTHING.
    """
    total, todo = 0, [(str(path), 0)]
    while todo:
        directory, depth = todo.pop()
        if depth > MAX_DEPTH:
            return EVERYTHING
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        st = entry.stat(follow_symlinks=False)
                        total += entry_bytes(st)
                        if entry.is_dir(follow_symlinks=False):
                            todo.append((entry.path, depth + 1))
        except PermissionError:
            return EVERYTHING
        except OSError:
            continue  # gone meanwhile
    return total


def files_below(directory: Path, *, regular: bool = False) -> list[Path]:
    """Everything below `directory` that is no directory, links not followed, in order of the names' bytes.

    `regular`: regular files alone, without links, pipes and sockets.
    """
    entries = (entry for entry in _entries(str(directory)) if not regular or entry.is_file(follow_symlinks=False))
    return sorted((Path(entry.path) for entry in entries), key=os.fsencode)


def _entries(directory: str) -> Iterator[os.DirEntry[str]]:
    todo = [directory]
    while todo:
        with contextlib.suppress(OSError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                else:
                    yield entry


def artifact_digests(run_dir: Path, directory: Path, limit: int) -> list[tuple[str, int, str]]:
    """Name (escaped, below `run_dir`), bytes and sha256 of the first `limit` regular files below `directory`."""
    found = []
    for path in files_below(directory, regular=True)[:limit]:
        if not path.lstat().st_mode & stat.S_IRUSR:  # closed to its owner: no name of the bundle's keeps a run's score
            path.chmod(0o600)
        found.append((escaped(path.relative_to(run_dir)), path.stat().st_size, file_sha256(path)))
    return found


def make_removable(path: Path) -> None:
    """Opens closed directories below `path` to their owner and removes what lies more than MAX_DEPTH directories deep.

    `shutil.rmtree` recurses once a level and a path has at most 4,096 bytes, so a chain of thousands of directories
    could be neither read nor removed by whoever comes next. Only for when no process of the bundle lives any more.
    """
    todo = [(str(path), 0)]
    while todo:
        directory, depth = todo.pop()
        with contextlib.suppress(OSError):
            for inner in _directories_in(directory):
                if depth < MAX_DEPTH:
                    todo.append((inner, depth + 1))
                else:
                    _remove_chain(inner, path)


def _open_to_owner(directory: str) -> None:
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        os.chmod(directory, 0o700)


def _directories_in(directory: str) -> list[str]:
    _open_to_owner(directory)
    with os.scandir(directory) as entries:
        return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def _remove_chain(directory: str, scratch_parent: Path) -> None:
    """Removes a tree of any depth: directories are moved up, side by side, before their own are looked at."""
    scratch = tempfile.mkdtemp(dir=scratch_parent)
    moved = 0

    def move_up(source: str) -> str:
        nonlocal moved
        moved += 1
        _open_to_owner(source)  # a directory that moves is written to: its `..` changes
        os.rename(source, os.path.join(scratch, str(moved)))
        return os.path.join(scratch, str(moved))

    todo = [move_up(directory)]
    while todo:
        current = todo.pop()
        todo += [move_up(inner) for inner in _directories_in(current)]
        shutil.rmtree(current)
    os.rmdir(scratch)
