"""Terminal tables of `prism-fast densify`, from its document."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from prism_fast.report.console import styled, terminal


def print_densified(document: dict[str, Any]) -> None:
    """One line a measurement: what was found, and what chance would give."""
    console = terminal()
    context, efficiency = document["panels"]["long_context"], document["panels"]["sample_efficiency"]
    console.print(f"{document['run_id']}: research grade, never ranks")
    table = Table()
    for column, justify in (("what", "left"), ("where", "left"), ("found", "right"), ("chance", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for row in context["bpb_at_length"] or []:
        table.add_row("bpb in rows of", f"{row['tokens']} tokens", _number(row["bpb"]), _number(row["chance"]))
    for row in context["needle_by_depth"] or []:
        table.add_row("needle", f"depth {row['depth']:.0%}", _share(row["accuracy"]), _share(row["chance"]))
    for row in context["associative_recall"] or []:
        where = f"{row['pairs']} pairs, the {row['queried']}"
        table.add_row("associative recall", where, _share(row["accuracy"]), _share(row["chance"]))
    if context["induction"]:
        found = context["induction"]
        table.add_row("induction gain (nats)", "second copy", _number(found["gain_nats"]), _number(found["chance"]))
    for row in context["loss_by_lag"] or []:
        lag = "not before" if row["lag_from"] is None else f"lag {row['lag_from']}+"
        table.add_row("nats by lag", f"{lag}, {row['tokens']:,} tokens", _number(row["nats"]), _number(row["chance"]))
    table.add_section()
    for row in efficiency["at_tokens"] or []:
        table.add_row("running bpb at", f"{row['tokens']:,} tokens", _number(row["running_bpb"]), "")
    table.add_row("mean bpb over tokens", "area under the curve", _number(efficiency["area_under_curve_bpb"]), "")
    for name, value in (efficiency["stability"] or {}).items():
        table.add_row("stability", name, _number(value), "")
    console.print(table)
    for panel in (context, efficiency):
        for name, reason in panel["reasons"].items():
            console.print(styled(("not run:", "yellow"), f" {name}: {reason}"))
    for row in context["bpb_at_length"] or []:
        if row["reason"]:
            console.print(styled(("not run:", "yellow"), f" {row['tokens']} tokens: {row['reason']}"))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
