"""A log that a sentence names exists: logs of runs whose directory goes away are kept where the sentence then says."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prism_fast.protocol.errors import PrismError

_NAMED = re.compile(r"(; )?see ([a-z]+\.log)\b")


def with_kept_logs(text: str, folder: Path) -> str:
    """`text`, in which "see trainer.log" names a file of `folder`, a directory that is about to be removed, with the
    path of a copy in its place. A log that is not there, or empty, is no longer spoken of."""

    def kept(match: re.Match[str]) -> str:
        log = folder / match[2]
        if not log.is_file() or not log.stat().st_size:
            return ""
        copy = Path(tempfile.mkdtemp(prefix="prism-log-")) / log.name
        shutil.copyfile(log, copy)
        return f"{match[1] or ''}see {copy}"

    return _NAMED.sub(kept, text)


@contextmanager
def keeping_logs(folder: Path) -> Iterator[None]:
    """Whatever PrismError leaves the block names logs of `folder` that outlive it."""
    try:
        yield
    except PrismError as error:
        text = with_kept_logs(str(error), folder)
        if text == str(error):
            raise
        raise type(error)(text, rule=error.rule) from error
