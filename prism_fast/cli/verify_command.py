"""`prism-fast verify`: is a run what it says it is?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("verify")(verify)


def verify(
    runs: Annotated[list[Path], typer.Argument(help="RUN or RUN/seed-<seed> directories.")],
    data: Annotated[
        str | None, typer.Option(help="The corpus the run was scored on: checks every batch's bytes against it.")
    ] = None,
    phase2: Annotated[
        str | None, typer.Option(help="The second corpus of a full-scale run (default: --data's sibling sample-100BT).")
    ] = None,
    bundle: Annotated[Path | None, typer.Option(help="The bundle, for --replay.")] = None,
    replay: Annotated[int, typer.Option(help="Execute the first N batches again and compare their bits.", min=0)] = 0,
    cache_dir: Annotated[Path | None, typer.Option(help="Where packed text is cached.")] = None,
) -> None:
    """Recompute every figure of a run from its receipts, check every digest, and name whatever was altered.

    Exit code 0: the run is what it says. 1: something does not agree; each disagreement is a line on stdout.
    """
    from prism_fast.harness.audits.verify import verify_run
    from prism_fast.protocol.errors import UsageError

    found = 0
    for run in runs:
        seeds = sorted(run.glob("seed-*")) if not run.name.startswith("seed-") else [run]
        if not seeds:
            raise UsageError(f"{run}: no seed-<seed> directory; expected the --out directory of `prism-fast score`")
        for seed_dir in seeds:
            faults = list(
                verify_run(seed_dir, data=data, phase2=phase2, bundle=bundle, replay=replay, cache_dir=cache_dir)
            )
            found += len(faults)
            for fault in faults:
                print(fault)
            if not faults:
                print(f"{seed_dir}: verified", file=sys.stderr)
    raise typer.Exit(1 if found else 0)
