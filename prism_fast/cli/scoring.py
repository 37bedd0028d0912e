"""Runs a scoring job with its progress on stderr, as text or JSON lines, and its metrics in a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from prism_fast.protocol.errors import PrismError

if TYPE_CHECKING:
    from prism_fast.harness.referee.request import ScoreRequest
    from prism_fast.protocol.manifest import RunSummary


def score_and_report(request: ScoreRequest, *, as_json: bool, metrics: Path | None) -> RunSummary:
    """`score_bundle`, reported. What goes wrong before any seed is said here in JSON mode, and ends the command."""
    from prism_fast.cli.json_log import JsonReporter
    from prism_fast.cli.metrics import MetricsReporter
    from prism_fast.cli.progress import TerminalReporter
    from prism_fast.harness.referee.referee import score_bundle

    with JsonReporter() if as_json else TerminalReporter() as terminal:
        watched: MetricsReporter | None = None
        try:
            if metrics is not None:
                watched = MetricsReporter(terminal, metrics, request.bundle.resolve().name.removesuffix(".zip"))
            summary = score_bundle(request, watched or terminal)
            if watched is not None:
                watched.finish(summary.exit_code, request.out, summary)
        except PrismError as error:
            if watched is not None:
                watched.finish(error.exit_code)
            if not isinstance(terminal, JsonReporter):
                raise
            terminal.error(error)
            raise typer.Exit(error.exit_code) from None
    for seed in summary.seeds:
        if isinstance(terminal, JsonReporter):
            terminal.result(seed)
        elif seed.message is not None:
            rule = f" [{seed.rule}]" if seed.rule else ""
            print(f"prism-fast: seed {seed.seed}: {seed.message}{rule}", file=sys.stderr)
    return summary
