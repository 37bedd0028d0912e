"""Names of files that a bundle chose, as text: printable, and faithful to every byte."""

from __future__ import annotations

import os
import re
from pathlib import Path


def escaped(name: str | Path) -> str:
    """A file name as printable text: control characters and bytes that are no UTF-8 as `\\xNN`, `\\` doubled."""
    text = os.fsencode(name).decode(errors="surrogateescape")
    return "".join(_escaped_character(character) for character in text)


def _escaped_character(character: str) -> str:
    if character == "\\":
        return "\\\\"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def unescaped(text: str) -> str:
    """The file name that `escaped` made `text` of, as Python's file functions take it."""
    data = re.sub(
        rb"\\(?:\\|x([0-9a-f]{2}))", lambda m: bytes([int(m[1], 16)]) if m[1] else b"\\", text.encode(errors="replace")
    )
    return os.fsdecode(data)
