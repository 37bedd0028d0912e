"""Terminal tables of comparisons, the leaderboard, readiness and the distributed contract, from their documents."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_comparison(report: dict[str, Any], console: Console | None = None) -> None:
    """`prism-fast compare`: the verdict, every criterion with its interval, and the trajectories."""
    console = console or Console()
    a, b = (escape(report[f"side_{side}"]["label"]) for side in "ab")
    ranking = report["ranking"]
    seeds = ", ".join(map(str, report["seeds"]))
    console.print(f"{report['mode']}: [bold]a[/] = {a}, [bold]b[/] = {b}; seeds {seeds}", highlight=False)
    if report["accounting"] not in (None, "exact"):
        console.print(f"[yellow]accounting {report['accounting']}:[/] the original engine's rules", highlight=False)
    for reason in report["validity"]["reasons"]:
        console.print(f"[yellow]not valid:[/] {escape(reason)}", highlight=False)
    for name, values in report["differences_between_runs"].items():
        console.print(f"[yellow]not matched:[/] {name} is {values['a']} for a and {values['b']} for b", highlight=False)

    table = Table(title="what decides, in this order", title_justify="left")
    for column, justify in (("criterion", "left"), ("a", "right"), ("b", "right"), ("a - b", "right")):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("95 % interval", justify="right", overflow="fold")
    table.add_column("favours", no_wrap=True)
    for step in ranking["steps"]:
        name = step["criterion"]
        interval = report["intervals"].get(name)
        table.add_row(
            f"[bold]{name}[/]" if name == ranking["decided_by"] else name,
            _number(step["a"]),
            _number(step["b"]),
            _number(step["difference"]),
            f"{interval['low']:+.5f} {interval['high']:+.5f}" if isinstance(interval, dict) else "-",
            step["favours"],
        )
    console.print(table)
    console.print(f"differences of up to {ranking['eps_heldout']:g} bpb do not decide", highlight=False)
    if report["intervals"]["reason"]:
        console.print(f"no interval: {report['intervals']['reason']}", highlight=False)
    if report["trajectories"]:
        console.print(_trajectory_table(report["trajectories"]))
    console.print(_verdict(report), highlight=False)


def _trajectory_table(trajectories: dict[str, Any]) -> Table:
    title = f"bpb at the same tokens; the lead changes {trajectories['lead_changes']} times"
    table = Table(title=title, title_justify="left")
    for column in ("tokens", "a so far", "b so far", "a since the last mark", "b since the last mark"):
        table.add_column(column, justify="right")
    for i, tokens in enumerate(trajectories["tokens"]):
        table.add_row(
            f"{tokens:,}",
            *(f"{trajectories[side]['running_bpb'][i]:.4f}" for side in "ab"),
            *(f"{trajectories[side]['window_bpb'][i]:.4f}" for side in "ab"),
        )
    return table


def _verdict(report: dict[str, Any]) -> str:
    ranking = report["ranking"]
    if ranking["winner"] is None:
        return "[bold]no winner:[/] the pair is not valid"
    text = f"[bold]{'tie' if ranking['winner'] == 'tie' else 'winner: ' + ranking['winner']}[/]"
    if ranking["winner"] != "tie":
        text += f" ({escape(report['side_' + ranking['winner']]['label'])}), decided by {ranking['decided_by']}"
    if ranking["provisional"]:
        text += f"; provisional: a public claim needs {report['min_public_seeds']} seeds scored on both sides"
    return text


def print_leaderboard(board: dict[str, Any], console: Console | None = None) -> None:
    """`prism-fast rank`."""
    console = console or Console()
    table = Table()
    for column in ("rank", "final score", "key", "submission", "seeds", "committed", "standing"):
        number = column in ("rank", "final score", "seeds")
        table.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in board["rows"]:
        standing = ["crown"] if row["submission_id"] == board["crown"] else []
        standing += [] if row["crown_eligible"] else ["not crown eligible"]
        standing += ["provisional"] if row["provisional"] else []
        standing += [] if row["accounting"] == "exact" else [f"accounting {row['accounting']}"]
        table.add_row(
            str(row["rank"]),
            f"{row['final_score']:.9f}",
            escape(row["key"]),
            escape(row["submission_id"]),
            str(len(row["seeds"])),
            "-" if row["committed_at"] is None else f"{row['committed_at']:.0f}",
            ", ".join(standing) or "-",
        )
    console.print(table)
    for row in board["unranked"]:
        console.print(f"[yellow]not ranked:[/] {escape(row['path'])}: {escape(row['reason'])}", highlight=False)


def print_readiness(document: dict[str, Any], console: Console | None = None) -> None:
    """`prism-fast readiness`."""
    console = console or Console()
    colour = "green" if document["ok"] else "bold red"
    console.print(f"full scale: [{colour}]{document['status_label']}[/]")
    table = Table()
    for column in ("mount", "path", "state"):
        table.add_column(column, overflow="fold")
    for (check, ok), path in zip(document["checks"].items(), document["paths"].values(), strict=True):
        reason = next((r for r in document["reasons"] if r.endswith(f":{path}")), "")
        table.add_row(check, escape(path), "[green]ready[/]" if ok else f"[red]{reason.partition(':')[0]}[/]")
    console.print(table)
    console.print(
        f"phase 1: {document['phase_1_dataset_subset']}, {document['phase_1_token_target']:,} tokens; "
        f"phase 2: {document['phase_2_dataset_subset']}, {document['phase_2_token_target']:,} tokens; nothing was run"
    )


def print_ladder(document: dict[str, Any], console: Console | None = None) -> None:
    """`prism-fast ladder`."""
    console = console or Console()
    table = Table(title=f"scale ladder ({document['protocol_id']})", title_justify="left")
    for column in ("pin", "stage", "cap", "mode", "seq", "tokens", "seeds"):
        table.add_column(column, justify="right" if column in ("cap", "seq", "tokens") else "left", overflow="fold")
    for name, pin in document["phases"].items():
        table.add_row(
            name.upper(),
            pin["param_ladder_stage"],
            f"{pin['param_cap']:,}",
            pin["mode"],
            str(pin["seq_len"]),
            f"{pin['token_budget']:,}",
            ", ".join(map(str, pin["seeds"])),
        )
    console.print(table)
    for stage, detail in document["stage_detail"].items():
        if "standing" in detail:
            console.print(f"{stage}: {detail['standing']}", highlight=False)
    console.print(document["honesty"], highlight=False)


def print_contract(document: dict[str, Any], console: Console | None = None) -> None:
    """`prism-fast check`: the static part, then every run of the functional part, then the advisory."""
    console = console or Console()
    static = document["static"]
    if static["requirements"]:
        console.print(_requirements("static contract of training.py", static["requirements"], "where"))
    for title, run in _runs(document):
        if run.get("skipped"):
            console.print(f"{title}: skipped: {escape(run['skipped'])}", highlight=False)
        else:
            console.print(_requirements(f"{title} ({run['seconds']:.1f} s)", run["checks"], None))
    colour = "green" if document["ok"] else "bold red"
    console.print(f"contract: [{colour}]{'met' if document['ok'] else 'not met'}[/] (policy {static['policy']})")


def _runs(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    functional, advisory = document["functional"], document["nccl_advisory"]
    runs = (
        [(f"run under gloo, world size {run['world_size']}", run) for run in functional["runs"]] if functional else []
    )
    if advisory:
        runs.append(("advisory NCCL run, world size 2 (never a gate)", advisory))
    return runs


def _requirements(title: str, rows: list[dict[str, Any]], where: str | None) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("requirement", "met", *(["where"] if where else []), "detail"):
        table.add_column(column, overflow="fold")
    for row in rows:
        met = {True: "[green]yes[/]", False: "[bold red]no[/]", None: "[yellow]not seen[/]"}[row["met"]]
        place = [", ".join(row[where])] if where else []
        table.add_row(row["name"], met, *place, escape(row["detail"]))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}"
