"""What `prism-fast profile` found, from its JSON document alone: a terminal table, notes below it, and a chart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from prism_fast.protocol.canonical import write_atomically, write_json
from prism_fast.protocol.errors import DataError
from prism_fast.report.svg import Bars, Series, bar_chart, line_chart

Rows = tuple[str, list[str], list[list[str]], list[str]]  # title, columns, cells, notes


def print_probe(document: dict[str, Any], console: Console | None = None) -> None:
    title, columns, cells, notes = _drawing(document)[0](document)
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=160)  # piped output has no width of its own
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in cells:
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)


def probe_chart(document: dict[str, Any], *, alone: bool = True) -> str:
    """The document's chart as SVG text."""
    return _drawing(document)[1](document, alone)


def write_probe(document: dict[str, Any], folder: Path) -> list[Path]:
    """Writes NAME.json and NAME.svg into `folder` and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    name = document["schema"].removeprefix("prism_profile_").partition(".")[0]
    paths = [folder / f"{name}.json", folder / f"{name}.svg"]
    write_json(paths[0], document)
    write_atomically(paths[1], probe_chart(document).encode())
    return paths


# ----------------------------------------------------------------------------------------------------------- scaling


def _scaling_rows(d: dict[str, Any]) -> Rows:
    cells = [
        [
            str(p["width"]),
            f"{p['measured_s'] * 1e3:,.2f}",
            f"{p['fitted_s'] * 1e3:,.2f}",
            f"{p['residual']:+.2%}",
            f"{d['linear_share'][str(p['width'])]:.1%}",
            f"{d['quadratic_share'][str(p['width'])]:.1%}",
            f"{d['constant_share'][str(p['width'])]:.1%}",
            str(p["steps"]),
        ]
        for p in d["points"]
    ]
    statistic = {"median": "median", "min": "fastest"}[d["statistic"]]
    notes = [
        f"A = {d['A']:.4e} s/token, B = {d['B']:.4e} s/token^2, constant = {d['constant']:.4e} s; "
        f"residuals up to {d['residual_max']:.2%}",
        d["verdict"],
    ]
    return (
        f"{d['submission_id']} on {d['device']}: one step of {d['batch_size']} rows, {statistic} of the steps",
        ["width (tokens)", "measured (ms)", "fitted (ms)", "residual", "linear", "quadratic", "constant", "steps"],
        cells,
        notes,
    )


def _scaling_chart(d: dict[str, Any], alone: bool) -> str:
    widths = [p["width"] for p in d["points"]]
    low, high = widths[0], widths[-1]
    dense = [low + (high - low) * i / 60 for i in range(61)]
    parts = {
        "fit": [1e3 * (d["A"] * w + d["B"] * w * w + d["constant"]) for w in dense],
        "linear part": [1e3 * d["A"] * w for w in dense],
        "quadratic part": [1e3 * d["B"] * w * w for w in dense],
    }
    series = [Series("measured", widths, [1e3 * p["measured_s"] for p in d["points"]], line=False, marks=True)]
    series += [Series(name, dense, values) for name, values in parts.items()]
    return line_chart("Step time by width", "width (tokens per row)", "step (ms)", series, from_zero=True, alone=alone)


# ---------------------------------------------------------------------------------------------------------- overhead


def _overhead_rows(d: dict[str, Any]) -> Rows:
    cells = [
        [
            r["mode"],
            f"{r['vocab']:,}" if r["vocab"] else "-",
            str(r["seq"]),
            f"{r['params']:,}",
            f"{r['tokens_per_s']:,.1f}",
            "-" if r["ratio"] is None else f"{r['ratio']:.3f}",
            " ".join(f"{v:,.1f}" for v in r["tokens_per_s_all"]),
        ]
        for r in d["rows"]
    ]
    notes = ["ratio: the bare loop's tokens/s over this mode's; 1 is free."]
    if (counters := d["counters"]) is not None:
        notes.append(
            f"observing a step takes {counters['observe_s'] * 1e6:.1f} us, {counters['observe_share']:.4%} of a bare "
            f"step of {counters['step_s'] * 1e3:.1f} ms; a gradient norm for a bundle that computes none "
            f"{counters['grad_norm_s'] * 1e6:.0f} us, {counters['grad_norm_share']:.3%}."
        )
    return (
        f"{d['submission_id']} on {d['device']}: median of {d['repeats']} runs of {d['steps']} steps a mode, in turn",
        ["mode", "vocab", "seq", "params", "tokens/s", "ratio", "each run"],
        cells,
        notes,
    )


def _overhead_chart(d: dict[str, Any], alone: bool) -> str:
    rows = d["rows"]
    bars = Bars(
        [r["mode"] for r in rows],
        {"step": [1e3 * r["seq"] * r["batch"] / r["tokens_per_s"] for r in rows]},
        ["" if r["ratio"] is None else f"{r['ratio']:.2f}x" for r in rows],
    )
    return bar_chart("Step time by mode", "step (ms)", bars, alone=alone)


# ------------------------------------------------------------------------------------------------------------- table

Drawing = tuple[Callable[[dict[str, Any]], Rows], Callable[[dict[str, Any], bool], str]]
DRAWINGS: dict[str, Drawing] = {
    "prism_profile_scaling.v1": (_scaling_rows, _scaling_chart),
    "prism_profile_overhead.v1": (_overhead_rows, _overhead_chart),
}


def _drawing(document: dict[str, Any]) -> Drawing:
    schema = document.get("schema")
    if schema not in DRAWINGS:
        raise DataError(f"a document with schema {schema!r}; expected one of {', '.join(DRAWINGS)}")
    return DRAWINGS[schema]
