"""`prism-fast`: the command line. Each group of commands registers itself; errors become one sentence and a code."""

from __future__ import annotations

import sys
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
    report_command,
    score_command,
    verify_command,
)
from prism_fast.protocol.errors import EXIT_ENGINE, PrismError

app = typer.Typer(
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


def main() -> None:
    """The console script. A PrismError is the run's own verdict: its sentence on stderr, its exit code."""
    try:
        app()
    except PrismError as error:
        rule = f" [{error.rule}]" if error.rule else ""
        print(f"prism-fast: {error}{rule}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(EXIT_ENGINE)
    except OSError as error:  # a full disk, a directory that cannot be written to
        print(f"prism-fast: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        sys.exit(EXIT_ENGINE)


if __name__ == "__main__":
    main()
