"""The terminal list of `prism-fast try`, from its document."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from prism_fast.report.console import styled, terminal

COLOURS = {"reject": "bold red", "warn": "yellow", "ok": "green"}


def print_dry_run(document: dict[str, Any]) -> None:
    """Every finding (what would be rejected first), then the time official scoring of one seed would take."""
    console = terminal()
    table = Table(title=f"{document['submission_id']}: what official scoring would say", title_justify="left")
    for column in ("", "what", "detail"):
        table.add_column(column, overflow="fold")
    for finding in sorted(document["findings"], key=lambda f: list(COLOURS).index(f["kind"])):
        rule = f" [{finding['rule']}]" if finding["rule"] else ""
        kind = styled((finding["kind"], COLOURS[finding["kind"]]))
        table.add_row(kind, finding["what"], finding["detail"] + rule)
    console.print(table)
    rejected = sum(f["kind"] == "reject" for f in document["findings"])
    verdict = "of what was run, nothing would be rejected"
    console.print(styled((f"{rejected} would be rejected", "bold red")) if rejected else verdict)
    for title, sentences in (("ran", document["ran"]), ("not run", document["not_run"])):
        for sentence in sentences:
            console.print(f"{title}: {sentence}", highlight=False, soft_wrap=True, markup=False)
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
