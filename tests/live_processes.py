"""The machine's living processes, for tests that look for what a command started or left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Living(NamedTuple):
    pid: int
    parent: int
    words: list[str]  # the command line
    folder: Path  # below /proc

    def environment(self) -> str:
        """Nothing where it ended meanwhile or is another user's."""
        try:
            return (self.folder / "environ").read_bytes().decode(errors="replace")
        except OSError:
            return ""


def living() -> Iterator[Living]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if state != "Z":
            yield Living(int(folder.name), int(parent), words, folder)
