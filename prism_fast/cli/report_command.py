"""`prism-fast report`: runs and probes as one page, a CSV file, TensorBoard events."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("report")(report)


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories (what `score --out` wrote) and JSON files of probes.")
    ],
    out: Annotated[Path | None, typer.Option(help="The page: one HTML file that needs no network.")] = None,
    csv: Annotated[Path | None, typer.Option(help="The train series of every seed, one row a point.")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard events, one run a seed.")] = None,
) -> None:
    """Draw runs and probes: loss, bits per byte, step time and its parts, kernels, seeds beside each other."""
    from prism_fast.protocol.errors import UsageError
    from prism_fast.report.exports import write_csv, write_tensorboard
    from prism_fast.report.page import read_sources, render

    if out is None and csv is None and tensorboard is None:
        raise UsageError("nothing asked for: give --out report.html, --csv FILE or --tensorboard DIR")
    for path in (out, csv):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{path}: no such directory as {path.absolute().parent}; make it first")
    sources = read_sources(runs)
    if out is not None:
        from prism_fast.protocol.canonical import write_atomically

        write_atomically(out, render(sources).encode())
        typer.echo(f"written: {out}", err=True)
    if csv is not None:
        write_csv(sources, csv)
        typer.echo(f"written: {csv}", err=True)
    if tensorboard is not None:
        for path in write_tensorboard(sources, tensorboard):
            typer.echo(f"written: {path}", err=True)
