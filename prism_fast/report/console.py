"""The terminal of all tables: what a bundle, a path or a message says is printed as it is, never taken for markup."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def terminal(*, stderr: bool = False, piped_width: int | None = None) -> Console:
    """`piped_width`: columns where the output is no terminal, which has no width of its own."""
    console = Console(markup=False, emoji=False, highlight=False, soft_wrap=False, stderr=stderr)
    if piped_width is not None and not console.is_terminal:
        console.width = piped_width
    return console


def styled(*parts: str | tuple[str, str]) -> Text:
    """Text of plain parts and of (text, style) parts: `styled(("not run:", "yellow"), f" {reason}")`."""
    return Text.assemble(*parts)
