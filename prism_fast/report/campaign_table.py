"""The live table of a campaign: one row a submission, one column a seed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from prism_fast.protocol.campaign import CampaignRun
from prism_fast.report.console import styled

COLOURS = {"scored": "green", "rejected": "red", "failed": "red", "fault": "bold red", "pending": "dim"}


def campaign_table(runs: Sequence[CampaignRun], running: Sequence[tuple[str, int]] = (), limit: int = 40) -> Table:
    """What every run has come to; submissions with work left come first when there are more than `limit`."""
    seeds = sorted({run.seed for run in runs})
    by_submission: dict[str, dict[int, CampaignRun]] = {}
    for run in runs:
        by_submission.setdefault(run.submission_id, {})[run.seed] = run
    done = sum(run.status != "pending" for run in runs)
    table = Table(title=f"{done} of {len(runs)} runs done, {len(running)} running", title_justify="left")
    table.add_column("submission", overflow="fold")
    for seed in seeds:
        table.add_column(f"seed {seed}", justify="right")
    table.add_column("mean", justify="right")
    names = sorted(
        by_submission, key=lambda name: (all(r.status != "pending" for r in by_submission[name].values()), name)
    )
    for name in names[:limit]:
        row = by_submission[name]
        scores = [run.final_score for run in row.values() if run.final_score is not None]
        mean = f"{sum(scores) / len(scores):.6f}" if len(scores) == len(row) else ""
        table.add_row(name, *(_cell(row.get(seed), running) for seed in seeds), mean)
    if len(names) > limit:
        table.caption = f"and {len(names) - limit} more submissions"
    return table


def _cell(run: CampaignRun | None, running: Sequence[tuple[str, int]]) -> Text:
    if run is None:
        return styled("-")
    if run.status == "pending":
        return styled(("running", "cyan") if (run.submission_id, run.seed) in running else ("waiting", "dim"))
    text = f"{run.final_score:.6f}" if run.final_score is not None else run.rule or run.status
    return styled((text, COLOURS[run.status]))
