"""The terminal list of `prism-fast try`, from its document."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

COLOURS = {"reject": "bold red", "warn": "yellow", "ok": "green"}


def print_dry_run(document: dict[str, Any], console: Console | None = None) -> None:
    """Every finding (what would be rejected first), then the time official scoring of one seed would take."""
    console = console or Console()
    table = Table(title=f"{escape(document['submission_id'])}: what official scoring would say", title_justify="left")
    for column in ("", "what", "detail"):
        table.add_column(column, overflow="fold")
    for finding in sorted(document["findings"], key=lambda f: list(COLOURS).index(f["kind"])):
        rule = f" [{finding['rule']}]" if finding["rule"] else ""
        kind = f"[{COLOURS[finding['kind']]}]{finding['kind']}[/]"
        table.add_row(kind, escape(finding["what"]), escape(finding["detail"] + rule))
    console.print(table)
    rejected = sum(f["kind"] == "reject" for f in document["findings"])
    console.print("nothing would be rejected" if not rejected else f"[bold red]{rejected} would be rejected[/]")
    if (estimate := document["estimate"]) is not None:
        console.print(
            f"one seed here: about {_minutes(estimate['total_s'])} (start {_minutes(estimate['start_s'])}, "
            f"training {_minutes(estimate['train_s'])} for {estimate['tokens']:,} tokens, held-out "
            f"{_minutes(estimate['heldout_s'])})",
            highlight=False,
            soft_wrap=True,
        )


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
