"""What `prism-fast profile` found, from its JSON document alone: a terminal table, notes below it, and a chart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from prism_fast.protocol.canonical import write_atomically, write_json
from prism_fast.protocol.errors import DataError
from prism_fast.report.console import terminal
from prism_fast.report.svg import Bars, Series, bar_chart, line_chart

Rows = tuple[str, list[str], list[list[str]], list[str]]  # title, columns, cells, notes


def print_probe(document: dict[str, Any]) -> None:
    title, columns, cells, notes = _drawing(document)[0](document)
    console = terminal(piped_width=160)
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in cells:
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)


def probe_table(document: dict[str, Any]) -> Rows:
    """-> (title, columns, cells, notes)."""
    return _drawing(document)[0](document)


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
        f"{d['submission_id']} on {d['device']}: one step of {d['batch_size']} rows, {statistic} of the steps"
        + (", processor time" if d["clock"] == "processor" else ""),
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


# ----------------------------------------------------------------------------------------------------------- kernels

SHOWN_KERNELS = 15


def kernel_cells(rank: dict[str, Any], steps: int) -> tuple[list[list[str]], list[list[str]]]:
    """-> (cells of the groups, cells of the largest rows). Milliseconds are of one step."""
    grouped = [
        [g["group"], f"{1e3 * g['seconds'] / steps:,.2f}", f"{g['share']:.1%}", f"{g['calls'] / steps:,.0f}"]
        for g in rank["groups"]
    ]
    rows = [
        [
            r["name"],
            f"{1e3 * r['seconds'] / steps:,.2f}",
            f"{r['share']:.1%}",
            f"{r['calls'] / steps:,.0f}",
            r["group"],
            "-" if r["built_for"] is None else f"sm_{r['built_for']}",
        ]
        for r in rank["rows"][:SHOWN_KERNELS]
    ]
    return grouped, rows


def _kernels_rows(d: dict[str, Any]) -> Rows:
    rank, steps = d["ranks"][0], d["steps"]
    grouped, rows = kernel_cells(rank, steps)
    cells = [[*g[:1], *g[1:], "", ""] for g in grouped] + [["", "", "", "", "", ""]] + rows
    notes = [
        f"rows cover {rank['covered']:.2%} of the {'busy device' if rank['capability'] else 'step'}; "
        f"{rank['named']:.2%} of it in named groups"
        + (f"; the device idles {rank['idle_share']:.1%} of the window" if rank["idle_share"] is not None else "")
    ]
    if (flops := rank["flops"]) is not None:
        share = "peak not known" if flops["mfu"] is None else f"{flops['mfu']:.1%} of {flops['peak_flops']:.4g} FLOP/s"
        notes.append(
            f"{flops['step']:.4g} FLOPs a step ({flops['attention'] / max(1, flops['step']):.1%} attention), "
            f"{flops['per_second']:.4g} FLOP/s: {share}"
        )
        if flops["unknown"]:
            notes.append(f"not counted, no formula for: {', '.join(flops['unknown'])}")
    notes += [f"warning: {w}" for r in d["ranks"] for w in r["warnings"]]
    notes += [f"trace: {r['trace']}" for r in d["ranks"] if r["trace"]]
    return (
        f"{d['submission_id']} on {d['device']}: {d['batch_size']} rows of {d['width']}, {steps} steps"
        + (f", rank 0 of {len(d['ranks'])}" if len(d["ranks"]) > 1 else ""),
        ["group, then kernel", "ms a step", "share", "calls a step", "group", "built for"],
        cells,
        notes,
    )


def _kernels_chart(d: dict[str, Any], alone: bool) -> str:
    return kernels_chart(d["ranks"][0], d["steps"], alone=alone)


def kernels_chart(rank: dict[str, Any], steps: int, *, alone: bool = False) -> str:
    shown = rank["groups"]
    bars = Bars(
        [g["group"] for g in shown],
        {"time": [1e3 * g["seconds"] / steps for g in shown]},
        [f"{g['share']:.1%}" for g in shown],
    )
    return bar_chart("Time by kind of kernel", "time per step (ms)", bars, alone=alone)


# ----------------------------------------------------------------------------------------------------------- padding


def _bucket_name(row: dict[str, Any]) -> str:
    return "file order" if row["bucket"] is None else str(row["bucket"])


def _padding_rows(d: dict[str, Any]) -> Rows:
    timed = d["rows"][0]["predicted_step_s"] is not None
    cells = [
        [
            _bucket_name(r),
            f"{r['padded_tokens']:,}",
            f"{r['waste']:.2%}",
            f"{r['width_p50']}/{r['width_p90']}/{r['width_p99']}",
            f"{r['zero_pad_micro_batches']:,}/{r['micro_batches']:,}",
            f"{r['adjacent_correlation']:+.3f}",
            f"{r['saved_padded_tokens']:.1%}",
            *([f"{1e3 * r['predicted_step_s']:,.1f}", f"{r['saved_time']:.1%}"] if timed else []),
        ]
        for r in d["rows"]
    ]
    columns = [
        "bucket (records)",
        "padded tokens",
        "waste",
        "width p50/p90/p99",
        "zero-pad",
        "adjacent r",
        "tokens saved",
    ]
    first = d["rows"][0]
    return (
        f"{d['corpus']}: {first['records']:,} records, {first['real_tokens']:,} tokens",
        columns + (["step (ms)", "time saved"] if timed else []),
        cells,
        [d["verdict"]],
    )


def _padding_chart(d: dict[str, Any], alone: bool) -> str:
    bars = Bars(
        [_bucket_name(r) for r in d["rows"]],
        {
            "real tokens": [float(r["real_tokens"]) for r in d["rows"]],
            "padding": [float(r["padded_tokens"] - r["real_tokens"]) for r in d["rows"]],
        },
        [f"{r['waste']:.1%}" for r in d["rows"]],
    )
    return bar_chart("Padding by bucket size", "tokens fed to the model", bars, alone=alone)


# -------------------------------------------------------------------------------------------------------------- mask


def _mask_rows(d: dict[str, Any]) -> Rows:
    cells = [
        [
            f"{c['layers']} x {'is_causal' if c['is_causal'] else c['mask'] or 'no mask'}",
            "x".join(map(str, c["query"])),
            "x".join(map(str, c["key"])),
            "yes" if c["causal"] else "NO",
            f"{c['allowed_min']} to {c['allowed_max']}",
            "",
            "",
        ]
        for c in d["calls"]
    ]
    for timed in d["times"]:
        cells += [
            [r["mask"], "x".join(map(str, timed["query"])), "x".join(map(str, timed["key"])), "", "",
             f"{r['ms']:.3f}", f"{r['ratio']:.3f}"]
            for r in timed["rows"]
        ]  # fmt: skip
    notes = list(d["findings"])
    if d["window_holds"] is not None:
        notes.append(f"window {d['window']}: {'holds' if d['window_holds'] else 'DOES NOT HOLD'}")
    return (
        f"{d['submission_id']} on {d['device']}: attention of one step, {d['batch_size']} rows of {d['width']}",
        ["mask", "query", "key", "causal", "keys a row", "fwd+bwd (ms)", "over is_causal"],
        cells,
        notes,
    )


def _mask_chart(d: dict[str, Any], alone: bool) -> str:
    first = d["times"][0]
    bars = Bars(
        [r["mask"] for r in first["rows"]],
        {"time": [r["ms"] for r in first["rows"]]},
        [f"{r['ratio']:.2f}x" for r in first["rows"]],
    )
    return bar_chart("Attention by mask, forward and backward", "time (ms)", bars, alone=alone)


# ------------------------------------------------------------------------------------------------------------- table

Drawing = tuple[Callable[[dict[str, Any]], Rows], Callable[[dict[str, Any], bool], str]]
DRAWINGS: dict[str, Drawing] = {
    "prism_profile_scaling.v1": (_scaling_rows, _scaling_chart),
    "prism_profile_kernels.v1": (_kernels_rows, _kernels_chart),
    "prism_profile_padding.v1": (_padding_rows, _padding_chart),
    "prism_profile_mask.v1": (_mask_rows, _mask_chart),
    "prism_profile_overhead.v1": (_overhead_rows, _overhead_chart),
}


def _drawing(document: dict[str, Any]) -> Drawing:
    schema = document.get("schema")
    if schema not in DRAWINGS:
        raise DataError(f"a document with schema {schema!r}; expected one of {', '.join(DRAWINGS)}")
    return DRAWINGS[schema]
