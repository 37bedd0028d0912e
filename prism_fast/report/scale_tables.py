"""Terminal tables of comparisons, the leaderboard, readiness and the distributed contract, from their documents."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from prism_fast.report.console import styled, terminal


def print_comparison(report: dict[str, Any]) -> None:
    """`prism-fast compare`: the verdict, every criterion with its interval, and the trajectories."""
    console = terminal()
    a, b = (report[f"side_{side}"]["label"] for side in "ab")
    ranking = report["ranking"]
    seeds = ", ".join(map(str, report["seeds"]))
    console.print(styled(f"{report['mode']}: ", ("a", "bold"), f" = {a}, ", ("b", "bold"), f" = {b}; seeds {seeds}"))
    if report["accounting"] not in (None, "exact"):
        console.print(styled((f"accounting {report['accounting']}:", "yellow"), " the original engine's rules"))
    for reason in report["validity"]["reasons"]:
        console.print(styled(("not valid:", "yellow"), f" {reason}"))
    for name, values in report["differences_between_runs"].items():
        console.print(styled(("not matched:", "yellow"), f" {name} is {values['a']} for a and {values['b']} for b"))

    table = Table(title="what decides, in this order", title_justify="left")
    for column, justify in (("criterion", "left"), ("a", "right"), ("b", "right"), ("a - b", "right")):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("95 % interval", justify="right", overflow="fold")
    table.add_column("favours", no_wrap=True)
    for step in ranking["steps"]:
        name = step["criterion"]
        interval = report["intervals"].get(name)
        table.add_row(
            styled((name, "bold" if name == ranking["decided_by"] else "")),
            _number(step["a"]),
            _number(step["b"]),
            _number(step["difference"]),
            f"{interval['low']:+.5f} {interval['high']:+.5f}" if isinstance(interval, dict) else "-",
            step["favours"],
        )
    console.print(table)
    console.print(f"differences of up to {ranking['eps_heldout']:g} bpb do not decide")
    if report["intervals"]["reason"]:
        console.print(f"no interval: {report['intervals']['reason']}")
    if report["trajectories"]:
        console.print(_trajectory_table(report["trajectories"]))
    console.print(_verdict(report))


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


def _verdict(report: dict[str, Any]) -> Text:
    ranking = report["ranking"]
    if ranking["winner"] is None:
        return styled(("no winner:", "bold"), " the pair is not valid")
    text = styled(("tie" if ranking["winner"] == "tie" else f"winner: {ranking['winner']}", "bold"))
    if ranking["winner"] != "tie":
        text += f" ({report['side_' + ranking['winner']]['label']}), decided by {ranking['decided_by']}"
    if ranking["provisional"]:
        text += f"; provisional: a public claim needs {report['min_public_seeds']} seeds scored on both sides"
    return text


def print_leaderboard(board: dict[str, Any]) -> None:
    """`prism-fast rank`."""
    console = terminal()
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
            row["key"],
            row["submission_id"],
            str(len(row["seeds"])),
            "-" if row["committed_at"] is None else f"{row['committed_at']:.0f}",
            ", ".join(standing) or "-",
        )
    console.print(table)
    for row in board["unranked"]:
        console.print(styled(("not ranked:", "yellow"), f" {row['path']}: {row['reason']}"))


def print_readiness(document: dict[str, Any]) -> None:
    """`prism-fast readiness`."""
    console = terminal()
    colour = "green" if document["ok"] else "bold red"
    console.print(styled("full scale: ", (document["status_label"], colour)))
    table = Table()
    for column in ("mount", "path", "state"):
        table.add_column(column, overflow="fold")
    for (check, ok), path in zip(document["checks"].items(), document["paths"].values(), strict=True):
        reason = next((r for r in document["reasons"] if r.endswith(f":{path}")), "")
        table.add_row(check, path, styled(("ready", "green") if ok else (reason.partition(":")[0], "red")))
    console.print(table)
    console.print(
        f"phase 1: {document['phase_1_dataset_subset']}, {document['phase_1_token_target']:,} tokens; "
        f"phase 2: {document['phase_2_dataset_subset']}, {document['phase_2_token_target']:,} tokens; nothing was run"
    )


def print_ladder(document: dict[str, Any]) -> None:
    """`prism-fast ladder`."""
    console = terminal()
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
            console.print(f"{stage}: {detail['standing']}")
    console.print(document["honesty"])


def print_contract(document: dict[str, Any]) -> None:
    """`prism-fast check`: the static part, then every run of the functional part, then the advisory."""
    console = terminal()
    static = document["static"]
    if static["requirements"]:
        console.print(_requirements("static contract of training.py", static["requirements"], "where"))
    for title, run in _runs(document):
        if run.get("skipped"):
            console.print(f"{title}: skipped: {run['skipped']}")
        else:
            console.print(_requirements(f"{title} ({run['seconds']:.1f} s)", run["checks"], None))
    colour = "green" if document["ok"] else "bold red"
    console.print(
        styled("contract: ", ("met" if document["ok"] else "not met", colour), f" (policy {static['policy']})")
    )


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
        met = styled({True: ("yes", "green"), False: ("no", "bold red"), None: ("not seen", "yellow")}[row["met"]])
        place = [", ".join(row[where])] if where else []
        table.add_row(row["name"], met, *place, row["detail"])
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}"
