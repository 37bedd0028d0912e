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
        str | None,
        typer.Option(
            help="The corpus the run was scored on: every batch's bytes are checked against it, and a sealed run is "
            "executed again from program and weights, without running anybody's code."
        ),
    ] = None,
    val: Annotated[str | None, typer.Option(help="The held-out corpus, where the run had one of its own.")] = None,
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
    from prism_fast.harness.audits.verify import verify_run, verify_summary
    from prism_fast.protocol.constants import RUN_STATUS_FILE
    from prism_fast.protocol.errors import UsageError

    found = 0
    for run in runs:
        is_seed = run.name.startswith("seed-") or (run / RUN_STATUS_FILE).is_file()
        seeds = [run] if is_seed else sorted(run.glob("seed-*"))
        if not seeds:
            raise UsageError(f"{run}: no seed-<seed> directory; expected the --out directory of `prism-fast score`")
        if not is_seed:
            for fault in verify_summary(run):
                found += 1
                print(fault)
        for seed_dir in seeds:
            asked = {"data": data, "val": val, "phase2": phase2, "bundle": bundle, "cache_dir": cache_dir}
            faults = list(verify_run(seed_dir, **asked, replay=replay))  # type: ignore[arg-type]
            found += len(faults)
            for fault in faults:
                print(fault)
            if not faults:
                print(f"{seed_dir}: verified", file=sys.stderr)
    raise typer.Exit(1 if found else 0)
