"""`prism-fast densify`: a closer look at a scored run. Research grade; never ranks."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from prism_fast.protocol.errors import UsageError


class Isolation(StrEnum):
    auto = "auto"
    bwrap = "bwrap"
    none = "none"


def register(app: typer.Typer) -> None:
    app.command("densify")(densify)


def densify(
    run: Annotated[Path, typer.Argument(help="RUN or RUN/seed-<seed>: what `prism-fast score --out` wrote.")],
    bundle: Annotated[Path | None, typer.Option(help="The bundle (default: the copy the run kept).")] = None,
    data: Annotated[str | None, typer.Option(help="The corpus (default: as the manifest names it).")] = None,
    val: Annotated[str | None, typer.Option(help="The held-out corpus, where it was another.")] = None,
    val_byte_budget: Annotated[int, typer.Option(min=1, help="Bytes of validation text that are read.")] = 65_536,
    isolation: Annotated[Isolation, typer.Option(help="Sandbox around architecture.py.")] = Isolation.auto,
    cache_dir: Annotated[Path | None, typer.Option(help="Where packed text is cached.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the documents as a JSON array on stdout.")] = False,
) -> None:
    """Look closer at a scored run: what it does with its context, and how fast it learned. Never ranks.

    Writes prism_densify.v1.json beside each seed's files and touches none of them; what cannot be measured is null
    with the reason. Exit 0 when written, 2 where there is no scored run, 5 when a file is not what the manifest says.
    """
    from prism_fast.cli.progress import TerminalReporter
    from prism_fast.harness.audits.densify import DensifyRequest, densify_run
    from prism_fast.report.densify_tables import print_densified

    seeds = [run] if run.name.startswith("seed-") else sorted(run.glob("seed-*"))
    if not seeds:
        raise UsageError(f"{run}: no seed-<seed> directory; expected the --out directory of `prism-fast score`")
    request = DensifyRequest(bundle, data, val, val_byte_budget, isolation.value, cache_dir)
    with TerminalReporter() as reporter:
        documents = [densify_run(seed, request, reporter) for seed in seeds]
    if json:
        import orjson

        sys.stdout.write(orjson.dumps(documents, option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    for document in documents:
        print_densified(document)
