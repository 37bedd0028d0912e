"""How this package starts a Python process: the one place that names the interpreter.

`python -m` and `python -c` put the folder they stand in first among those that modules are imported from, so that a
file `orjson.py` in a shell's folder, or beside a bundle, would run with this user's rights. A child of ours imports
from nowhere but Python's own folders and those that the user named: `-P` says so to it, PYTHONSAFEPATH to its
children, torchrun's workers among them. Whoever hosts a bundle puts the bundle's folder on the path itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

SAFE_PATH = "PYTHONSAFEPATH"
SEARCH_PATH = "PYTHONPATH"


def python_command(*arguments: str) -> list[str]:
    """The command line of a child: `python -P` with `arguments`."""
    return [sys.executable, "-P", *arguments]


def child_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs `module` in a child, as `python -m` does."""
    return python_command("-m", module, *arguments)


def child_environment(
    base: Mapping[str, str] | None = None, changes: Mapping[str, str] | None = None
) -> dict[str, str]:
    """`base` (this process's own environment when None) with `changes`, for a child that `child_command` starts.

    An empty entry of PYTHONPATH, as a stray colon leaves it, means "where I stand" to Python, and is dropped; one that
    is relative stays the folder that it names here.
    """
    environment = {**(os.environ if base is None else base), **(changes or {}), SAFE_PATH: "1"}
    folders = [os.path.abspath(entry) for entry in environment.pop(SEARCH_PATH, "").split(os.pathsep) if entry]
    if folders:
        environment[SEARCH_PATH] = os.pathsep.join(folders)
    return environment


@contextmanager
def nothing_to_read() -> Iterator[int]:
    """An input that has ended, of nobody else: the host's /dev/null is one file for all, and its owner's to change."""
    read, write = os.pipe()
    os.close(write)
    try:
        yield read
    finally:
        os.close(read)
