"""`prism-fast init|try`: a bundle to start from, and what official scoring would say of it, in a minute."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Pin(StrEnum):
    p0 = "p0"
    p1 = "p1"
    p2 = "p2"
    p3 = "p3"


class Seal(StrEnum):
    sealed = "sealed"
    open = "open"


class Isolation(StrEnum):
    auto = "auto"
    bwrap = "bwrap"
    none = "none"


def register(app: typer.Typer) -> None:
    app.command("init")(init)
    app.command("try")(try_)


def init(
    directory: Annotated[Path | None, typer.Argument(help="Where the bundle goes; made if it is not there.")] = None,
    example: Annotated[str, typer.Option(help="Which example to copy; --list shows them.")] = "fused_loss",
    list_: Annotated[bool, typer.Option("--list", help="Show the examples and stop.")] = False,
) -> None:
    """Write a working bundle: architecture.py and training.py, ready to be changed."""
    from prism_fast.harness.bundle.starter import examples, summary, write_starter
    from prism_fast.protocol.errors import UsageError

    if list_:
        for name, path in examples().items():
            typer.echo(f"{name:18}{summary(path)}")
        return
    if directory is None:
        raise UsageError("init: no directory given; expected for example `prism-fast init my_bundle`, or --list")
    for file in write_starter(directory, example):
        typer.echo(f"{file}")
    typer.echo(f"next: prism-fast try {directory}", err=True)


def try_(
    bundle: Annotated[Path, typer.Argument(help="Directory or .zip holding architecture.py and training.py.")],
    data: Annotated[str, typer.Option(help="As in `score`: 'sample', a packed corpus, or a directory.")] = "sample",
    pin: Annotated[Pin, typer.Option(help="The protocol pin to be scored under later.")] = Pin.p0,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds to train for.")] = 20.0,
    seal: Annotated[Seal, typer.Option(help="As in `score`; open looks at less.")] = Seal.sealed,
    isolation: Annotated[Isolation, typer.Option(help="As in `score`.")] = Isolation.auto,
    cache_dir: Annotated[Path | None, typer.Option(help="Where packed text is cached.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON on stdout.")] = False,
) -> None:
    """List what official scoring would reject, and say how long it would take: a dry run of about a minute.

    Exit 0: nothing. Otherwise the exit code that official scoring would end with.
    """
    from prism_fast.cli.progress import TerminalReporter
    from prism_fast.harness.audits.dry_run import try_bundle
    from prism_fast.protocol.pins import protocol_pin
    from prism_fast.report.dry_run_table import print_dry_run

    with TerminalReporter() as reporter:
        found = try_bundle(
            bundle,
            data,
            protocol_pin(pin.value),
            reporter,
            seconds=seconds,
            seal=seal.value,
            isolation=isolation.value,
            cache_dir=cache_dir,
        )
    if json:
        import orjson

        sys.stdout.write(orjson.dumps(found.as_dict(), option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        print_dry_run(found.as_dict())
    raise typer.Exit(found.exit_code)
