"""The terminal of all tables: what a bundle, a path or a message says is printed as it is, never taken for markup."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text


class _Terminal(Console):
    """Neither markup nor control sequences get through."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(_shown(text), **options)


def terminal(*, stderr: bool = False, piped_width: int | None = None) -> Console:
    """`piped_width`: columns where the output is no terminal, which has no width of its own."""
    console = _Terminal(markup=False, emoji=False, highlight=False, stderr=stderr)
    if piped_width is not None and not console.is_terminal:
        console.width = piped_width
    return console


def styled(*parts: str | tuple[str, str]) -> Text:
    """Text of plain parts and of (text, style) parts: `styled(("not run:", "yellow"), f" {reason}")`."""
    return Text.assemble(*(_shown(p) if isinstance(p, str) else (_shown(p[0]), p[1]) for p in parts))


def _shown(text: str) -> str:
    return text if text.isprintable() else "".join(ch if ch.isprintable() or ch == "\n" else " " for ch in text)
