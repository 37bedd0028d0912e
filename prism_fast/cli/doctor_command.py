"""`prism-fast doctor`: what this machine can do for a run, and what is missing."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Show which backends, tokenizers, isolation and devices are there, and what is missing.

    Exit 0 if a run can start, 5 if something it needs is broken.
    """
    import orjson

    from prism_fast.harness.audits.doctor import examine
    from prism_fast.report.tables import print_findings

    findings = examine()
    if json:
        sys.stdout.write(orjson.dumps([f.__dict__ for f in findings], option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        print_findings([(f.area, f.name, f.state, f.detail) for f in findings])
    raise typer.Exit(0 if all(f.state != "broken" for f in findings) else 5)
