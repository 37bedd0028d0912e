"""`prism-fast`: the command line. Each group of commands registers itself."""

from __future__ import annotations

from typing import Annotated

import typer

from prism_fast import __version__
from prism_fast.cli import (
    campaign_command,
    check_command,
    compare_commands,
    data_commands,
    densify_command,
    doctor_command,
    miner_commands,
    plan_commands,
    profile_commands,
    program_command,
    report_command,
    score_command,
    verify_command,
)
from prism_fast.cli.options import Commands

app = Commands(
    name="prism-fast",
    help="Scores how well a model learns: prequential bits per byte of a re-executed training run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"prism-fast {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for commands in (
    score_command,
    campaign_command,
    check_command,
    verify_command,
    program_command,
    compare_commands,
    densify_command,
    data_commands,
    plan_commands,
    profile_commands,
    report_command,
    doctor_command,
    miner_commands,
):
    commands.register(app)
