"""The leaderboard: runs in total order by final score, earliest commit, submission id; the best row of each key."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from prism_fast.protocol import constants as c
from prism_fast.protocol.campaign import RUNS_DIR, CampaignRun, campaign_file, read_campaign
from prism_fast.protocol.errors import DataError, UsageError
from prism_fast.report.runs import read_run


class Submission(BaseModel):
    """What a validator knows of a submission besides its run. `committed_at`: a block number, or a time with zone."""

    model_config = ConfigDict(extra="forbid")

    key: str | None = None
    committed_at: int | datetime | None = None


@dataclass(frozen=True)
class Row:
    """One run. `final_score` is the mean over its seeds; `quantum` the same in whole units of 1e-9, which ranks.

    `committed_at`: block number or seconds since 1970; None is later than any.
    """

    key: str
    submission_id: str
    final_score: float
    committed_at: float | None = None
    seeds: tuple[int, ...] = ()
    crown_eligible: bool = False
    path: str = ""
    accounting: str = "exact"

    @property
    def quantum(self) -> int:
        return round(self.final_score / c.RANK_QUANTUM)

    @property
    def provisional(self) -> bool:
        return len(self.seeds) < c.PUBLIC_MIN_SEEDS


def rank(rows: Sequence[Row]) -> list[Row]:
    """The best row of every key, best first. A total order: equal rows in any order give one and the same list."""
    best: dict[str, Row] = {}
    for row in sorted(rows, key=_place):
        best.setdefault(row.key, row)
    return list(best.values())


def _place(row: Row) -> tuple[int, bool, float, str, str]:
    return (-row.quantum, row.committed_at is None, row.committed_at or 0.0, row.submission_id, row.path)


def rank_runs(paths: Sequence[Path], submissions: Path | None = None, *, verify: bool = False) -> dict[str, Any]:
    """The leaderboard of run directories and campaigns, JSON-ready (`prism_leaderboard.v1`).

    `submissions`: a JSON file {submission_id: {"key": ..., "committed_at": ...}}. Without a key of its own a
    submission is its own key. A run with a seed that was not scored, with a damaged file, or with `verify` a seed that
    does not follow from its receipts, is not ranked, and listed with the reason.
    Raises UsageError for runs of several accountings, whose scores are on different rulers.
    """
    known = read_submissions(submissions) if submissions is not None else {}
    rows: list[Any] = []
    unranked: list[Any] = []
    for path in paths:
        if (file := campaign_file(path)) is not None:
            for row, left_out in _campaign_rows(file, known, verify):
                (rows if row is not None else unranked).append(row or left_out)
            continue
        try:
            run = read_run(path, verify=verify)
        except DataError as error:
            unranked.append({"path": str(path), "submission_id": path.name, "reason": str(error)})
            continue
        if run.unscored or not run.scored:
            seed, reason = next(iter(run.unscored.items()))
            unranked.append({"path": str(path), "submission_id": run.submission_id, "reason": f"seed {seed} {reason}"})
            continue
        submission = known.get(run.submission_id, Submission())
        manifests = [r.manifest for r in run.scored.values()]
        rows.append(
            Row(
                key=submission.key or run.submission_id,
                submission_id=run.submission_id,
                final_score=statistics.fmean(m.score.final_score for m in manifests),
                committed_at=_instant(submission.committed_at),
                seeds=tuple(sorted(run.scored)),
                crown_eligible=all(m.score.emission_crown_eligible for m in manifests),
                path=str(path),
                accounting=", ".join(sorted({r.spec.accounting for r in run.scored.values()})),
            )
        )
    rulers = sorted({row.accounting for row in rows})
    if len(rulers) > 1 or any(", " in ruler for ruler in rulers):
        raise UsageError(
            f"runs of the accountings {', '.join(rulers)} are on different rulers; rank those of one alone"
        )
    ranked = rank(rows)
    return {
        "schema": c.LEADERBOARD_SCHEMA,
        "rule": "final_score_1e-9_desc_then_earliest_commit_then_submission_id",
        "best_row_per": "key",
        "rows": [
            {"rank": i, **asdict(row), "seeds": list(row.seeds), "provisional": row.provisional}
            for i, row in enumerate(ranked, 1)
        ],
        "crown": next((row.submission_id for row in ranked if row.crown_eligible), None),
        "unranked": unranked,
        "wall_clock_never_ranks": True,
    }


def _campaign_rows(
    file: Path, known: dict[str, Submission], verify: bool
) -> Iterator[tuple[Row | None, dict[str, str] | None]]:
    """Each submission of a campaign's results: its row, or why it has none."""
    for submission_id, group in groupby(read_campaign(file), key=lambda run: run.submission_id):
        runs = list(group)
        short = next((run for run in runs if run.status != "scored"), None)
        path = str(file.parent / RUNS_DIR / submission_id)
        if short is not None:
            said = f"{short.status}: {short.message}" if short.message else short.status
            yield None, {"path": path, "submission_id": submission_id, "reason": f"seed {short.seed} {said}"}
            continue
        reasons = ((run.seed, _unverified(file.parent, run)) for run in runs) if verify else ()
        wrong = next(((seed, reason) for seed, reason in reasons if reason is not None), None)
        if wrong is not None:
            yield None, {"path": path, "submission_id": submission_id, "reason": f"seed {wrong[0]} {wrong[1]}"}
            continue
        submission = known.get(submission_id, Submission())
        row = Row(
            key=submission.key or submission_id,
            submission_id=submission_id,
            final_score=statistics.fmean(run.final_score for run in runs if run.final_score is not None),
            committed_at=_instant(submission.committed_at),
            seeds=tuple(run.seed for run in runs),
            crown_eligible=all(run.crown_eligible for run in runs),
            path=path,
        )
        yield row, None


def _unverified(folder: Path, told: CampaignRun) -> str | None:
    """Why a run in a campaign's `folder` is not what its receipts make of it, or not what the campaign says."""
    try:
        run = read_run(folder / (told.run_dir or ""), verify=True)
    except (UsageError, DataError) as error:
        return str(error)
    found = run.scored.get(told.seed)
    if found is None:
        return run.unscored.get(told.seed, "is not there")
    score = found.manifest.score
    if (told.final_score, told.crown_eligible) != (score.final_score, score.emission_crown_eligible):
        return f"has final score {score.final_score!r}; the campaign states {told.final_score!r}"
    return None


def read_submissions(path: Path) -> dict[str, Submission]:
    """Raises DataError naming the file, the submission and the field; all `committed_at` are of one kind."""
    try:
        found = TypeAdapter(dict[str, Submission]).validate_json(path.read_bytes())
    except OSError as e:
        raise DataError(f"{path}: {e.strerror or e}") from e
    except ValidationError as e:
        first = e.errors()[0]
        raise DataError(
            f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; expected "
            '{submission_id: {"key": ..., "committed_at": a block number or a time}}'
        ) from e
    kinds = {type(s.committed_at) for s in found.values() if s.committed_at is not None}
    if len(kinds) > 1:
        raise DataError(f"{path}: committed_at is a block number for some and a time for others; expected one kind")
    naive = [i for i, s in found.items() if isinstance(s.committed_at, datetime) and s.committed_at.tzinfo is None]
    if naive:
        raise DataError(f"{path}: {naive[0]}: committed_at has no time zone; expected for example 2026-01-31T12:00:00Z")
    return found


def _instant(committed_at: int | datetime | None) -> float | None:
    if isinstance(committed_at, datetime):
        return committed_at.astimezone(UTC).timestamp()
    return None if committed_at is None else float(committed_at)
