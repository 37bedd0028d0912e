"""`prism-fast program`: the model that was scored, or would be, as code that a person can read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Isolation(StrEnum):
    auto = "auto"
    bwrap = "bwrap"
    none = "none"


def register(app: typer.Typer) -> None:
    app.command("program")(program)


def program(
    place: Annotated[
        Path, typer.Argument(metavar="RUN|BUNDLE", help="RUN, RUN/seed-<seed>, or a bundle, which is traced now.")
    ],
    width: Annotated[
        int | None, typer.Option(help="The program for rows of so many tokens alone (default: all; of a bundle: 128).")
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="Of a bundle: gpt2 or bytes.")] = "gpt2",
    isolation: Annotated[Isolation, typer.Option(help="Of a bundle: the sandbox around its code.")] = Isolation.auto,
    out: Annotated[Path | None, typer.Option(help="Write the text to this file.")] = None,
) -> None:
    """Print the model as readable code: one line an operator, as the engine executes it.

    Exit 0 when printed, 2 where there is no program, 3 or 4 where a bundle's model cannot be traced, 5 for a damaged
    file.
    """
    from prism_fast.harness.audits.programs import listings
    from prism_fast.protocol.canonical import write_atomically

    found = listings(place, width=width, tokenizer=tokenizer, isolation=isolation.value)
    text = "\n".join(f"# {source}\n{listing.rstrip()}\n" for source, listing in found)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_atomically(out, text.encode())
        typer.echo(f"written: {out}", err=True)
