"""`prism-fast compare|rank|readiness|ladder|annex`: what is said about runs, and what a run is held to."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from prism_fast.protocol.errors import EXIT_ENGINE

Json = Annotated[bool, typer.Option("--json", help="Print the document as JSON on stdout.")]


Unverified = Annotated[
    bool, typer.Option("--unverified", help="Take manifests at their word instead of making them from their receipts.")
]


class Mode(StrEnum):
    arch = "ArchCompare"
    train = "TrainCompare"
    system = "SystemCompare"


def register(app: typer.Typer) -> None:
    for name, command in (
        ("compare", compare),
        ("rank", rank),
        ("readiness", readiness),
        ("ladder", ladder),
        ("annex", annex),
    ):
        app.command(name)(command)


def compare(
    a: Annotated[Path, typer.Argument(help="What `prism-fast score --out` wrote for one bundle.")],
    b: Annotated[Path, typer.Argument(help="The same for the other bundle, over the same seeds.")],
    mode: Annotated[
        Mode | None,
        typer.Option(help="ArchCompare: same training.py; TrainCompare: same architecture.py (default: found out)."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the report to this file.")] = None,
    unverified: Unverified = False,
    json: Json = False,
) -> None:
    """Compare two bundles over matched seeds: validity, held-out delta, bpb, overfit rate, variance, in this order."""
    from prism_fast.protocol.canonical import write_json
    from prism_fast.report.compare import compare_runs
    from prism_fast.report.scale_tables import print_comparison

    report = compare_runs(a, b, mode.value if mode else None, verify=not unverified)
    if out is not None:
        write_json(out, report)
    if json:
        _print_json(report)
    else:
        print_comparison(report)


def rank(
    runs: Annotated[list[Path], typer.Argument(help="Directories that `score --out` or `campaign --out` wrote.")],
    submissions: Annotated[
        Path | None,
        typer.Option(help='JSON file {submission_id: {"key": ..., "committed_at": block number or time}}.'),
    ] = None,
    unverified: Unverified = False,
    json: Json = False,
) -> None:
    """Rank runs: final score on a grid of 1e-9, then earliest commit, then submission id; the best row of each key."""
    from prism_fast.report.rank import rank_runs
    from prism_fast.report.scale_tables import print_leaderboard

    board = rank_runs(runs, submissions, verify=not unverified)
    if json:
        _print_json(board)
    else:
        print_leaderboard(board)


def readiness(
    train: Annotated[Path | None, typer.Option(help="Train mount (default: PRISM_BASE_EVAL_TRAIN_DATA_DIR).")] = None,
    val: Annotated[Path | None, typer.Option(help="Val mount (default: PRISM_BASE_EVAL_VAL_DATA_DIR).")] = None,
    phase2: Annotated[
        Path | None, typer.Option(help="sample-100BT mount (default: the train mount's sibling sample-100BT).")
    ] = None,
    json: Json = False,
) -> None:
    """Say whether the mounts of a full-scale run are there. Exit 0 READY, 5 BLOCKED; nothing is run."""
    from prism_fast.protocol.readiness import probe_full_scale_readiness
    from prism_fast.report.scale_tables import print_readiness

    found = probe_full_scale_readiness(train_data_dir=train, val_data_dir=val, phase2_data_dir=phase2)
    if json:
        _print_json(found.as_dict())
    else:
        print_readiness(found.as_dict())
    raise typer.Exit(0 if found.ok else EXIT_ENGINE)


def ladder(json: Json = False) -> None:
    """Show the scale ladder: its stages, caps and pins."""
    from prism_fast.protocol.scale import scale_ladder_document
    from prism_fast.report.scale_tables import print_ladder

    if json:
        _print_json(scale_ladder_document())
    else:
        print_ladder(scale_ladder_document())


def annex() -> None:
    """Print the research protocol annex as JSON: the views that are published beside the score and never enter it."""
    from prism_fast.protocol.scale import research_protocol_annex

    _print_json(research_protocol_annex())


def _print_json(document: dict[str, Any]) -> None:
    import orjson

    sys.stdout.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")
