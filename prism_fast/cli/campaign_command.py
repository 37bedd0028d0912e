"""`prism-fast campaign`: many bundles, many seeds, as many machines as there are."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import UsageError

if TYPE_CHECKING:
    from prism_fast.protocol.campaign import CampaignRun

# Options of `score` that a campaign decides itself, or that it has under its own name.
OURS = {
    "--out",
    "--seeds",
    "--only-seeds",
    "--resume",
    "--json",
    "--log-format",
    "--metrics",
    "--data",
    "--val",
    "--pin",
    "--cache-dir",
    "--torch-threads",
    "--device",
}


def register(app: typer.Typer) -> None:
    app.command("campaign", context_settings={"allow_extra_args": True})(campaign)


def campaign(
    context: typer.Context,
    submissions: Annotated[Path, typer.Argument(help="A folder of bundles (folders and .zip files), or one bundle.")],
    data: Annotated[str, typer.Option(help="As in `score`; every node sees it under this path.")],
    out: Annotated[Path, typer.Option(help="The campaign's folder, on a file system that every node shares.")],
    pin: Annotated[str | None, typer.Option(help="Protocol pin that every run is scored under, as in `score`.")] = None,
    val: Annotated[str | None, typer.Option(help="As in `score`.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds of every bundle, with commas between.")] = (
        ",".join(map(str, c.PUBLIC_SEEDS))
    ),
    address: Annotated[str | None, typer.Option(help="A Ray cluster; default: this machine alone.")] = None,
    cpus: Annotated[int, typer.Option(min=1, help="Cores of a run; its torch threads, which are in its spec.")] = 1,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of a run; 0: it runs on the CPU.")] = 0,
    retries: Annotated[int, typer.Option(min=0, help="Further attempts after a machine's fault.")] = 2,
    cache_dir: Annotated[Path | None, typer.Option(help="Where packed text is cached, on each node.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print every run as JSON on stdout at the end.")] = False,
) -> None:
    """Score every bundle of a folder over every seed, on this machine or a Ray cluster.

    Options of `score` for all runs go behind `--`: prism-fast campaign SUBMISSIONS --data D --out O -- --seq-len 256

    What has its verdict is not run again: give the same command after an interruption. `prism-fast rank OUT` ranks.
    Exit 0: every run has a verdict (scored, rejected or failed). 5: some have none for faults of the machines.
    """
    from prism_fast.campaign.campaign import find_submissions, run_campaign
    from prism_fast.campaign.pool import RayPool
    from prism_fast.cli.score_command import _seeds
    from prism_fast.protocol.campaign import CAMPAIGN_FILE, read_campaign

    options = [f"--data={data}"]
    options += [f"--val={val}"] if val else []
    options += [f"--pin={pin}", f"--seeds={seeds}"] if pin else []
    options += [f"--cache-dir={cache_dir}"] if cache_dir else []
    # Threads move the last bits of matrix products, so they are the campaign's and not each machine's.
    options += [f"--torch-threads={cpus}", f"--device={'cuda' if gpus else 'cpu'}"]
    options += _passed_on(context.args)
    with _Terminal() as terminal:
        code = run_campaign(
            find_submissions(submissions),
            _seeds(seeds),
            out,
            options,
            lambda: RayPool(address, cpus, gpus),
            environment=os.environ,
            retries=retries,
            watcher=terminal,
        )
    runs = read_campaign(out / CAMPAIGN_FILE)
    if json:
        import orjson

        rows = [run.model_dump() for run in runs]
        document = {"schema": c.CAMPAIGN_SCHEMA, "runs": rows}
        sys.stdout.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        terminal.show(runs)
    raise typer.Exit(code)


def _passed_on(extra: Sequence[str]) -> list[str]:
    for word in extra:
        if word.split("=")[0] in OURS:
            raise UsageError(f"{word} behind `--`: the campaign decides it, or has an option for it")
    if extra and not extra[0].startswith("-"):
        raise UsageError(f"{extra[0]}: one SUBMISSIONS is expected; options of `score` go behind `--`")
    return list(_with_places(extra))


def _with_places(words: Sequence[str]) -> Iterator[str]:
    """Options of `score` as workers read them, who stand elsewhere: what names a place does so absolutely."""
    from prism_fast.cli.options import places_of
    from prism_fast.cli.score_command import score

    places, awaited = places_of(score), None
    for word in words:
        option, given, value = word.partition("=")
        if awaited is not None:
            yield places[awaited](word)
            awaited = None
        elif option in places and given:
            yield f"{option}={places[option](value)}"
        else:
            awaited = option if option in places else None
            yield word


class _Terminal:
    """A `campaign.Watcher`: a live table on a terminal, a line for every run that ends elsewhere. On stderr."""

    def __init__(self) -> None:
        from rich.live import Live

        from prism_fast.report.console import terminal

        self._console = terminal(stderr=True)
        self._live: Any = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def __enter__(self) -> _Terminal:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def changed(self, runs: Sequence[CampaignRun], running: Sequence[tuple[str, int]]) -> None:
        if self._live:
            from prism_fast.report.campaign_table import campaign_table

            self._live.update(campaign_table(runs, running), refresh=True)

    def ended(self, run: CampaignRun) -> None:
        if not self._live:
            score = "" if run.final_score is None else f" {run.final_score:.9f}"
            said = f": {run.message}" if run.message else ""
            rule = f" [{run.rule}]" if run.rule else ""
            line = f"{run.submission_id} seed {run.seed}: {run.status}{score}{said}{rule}"
            self._console.print(line, soft_wrap=True)

    def again(self, job: Any, outcome: Any) -> None:
        line = f"{job.bundle.submission_id} seed {job.seed}: again, {outcome.message or outcome.exit_code}"
        self._console.print(line, soft_wrap=True)

    def show(self, runs: Sequence[CampaignRun]) -> None:
        from prism_fast.report.campaign_table import campaign_table
        from prism_fast.report.console import terminal

        terminal().print(campaign_table(runs))
