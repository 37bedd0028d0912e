"""The results file of a campaign: `campaign.sqlite`, one row for every (submission, seed). Layout and reading.

`prism-fast campaign` alone writes it; `prism-fast rank` and anybody's SQL read it. The table is documented in
docs/campaign.md.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from prism_fast.protocol.errors import DataError

CAMPAIGN_FILE = "campaign.sqlite"
RUNS_DIR = "runs"
LAYOUT_VERSION = 1

TABLES = f"""
CREATE TABLE campaign (
    id TEXT NOT NULL,             -- drawn once; a worker that sees another is on another file system
    engine_version TEXT NOT NULL,
    options TEXT NOT NULL         -- JSON: the options of `prism-fast score` that all runs share
);
CREATE TABLE runs (
    submission_id TEXT NOT NULL,
    bundle_sha256 TEXT NOT NULL,
    seed INTEGER NOT NULL,
    status TEXT NOT NULL,         -- pending, scored, rejected, failed, fault
    attempts INTEGER NOT NULL,    -- runs begun, this campaign's restarts included
    exit_code INTEGER,
    rule TEXT,
    message TEXT,
    run_dir TEXT,                 -- below the campaign's folder
    node TEXT,
    seconds REAL,
    final_score REAL,
    prequential_bpb REAL,
    heldout_delta REAL,
    val_bpb_trained REAL,
    crown_eligible INTEGER,
    flags TEXT,                   -- JSON array
    PRIMARY KEY (submission_id, seed)
);
PRAGMA user_version = {LAYOUT_VERSION};
"""

Status = Literal["pending", "scored", "rejected", "failed", "fault"]
FINAL: tuple[Status, ...] = ("scored", "rejected", "failed")


class CampaignRun(BaseModel):
    """One row. `fault`: the machine's, with no attempt left; the same campaign asked for again tries it again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    submission_id: str
    bundle_sha256: str
    seed: int
    status: Status = "pending"
    attempts: int = 0
    exit_code: int | None = None
    rule: str | None = None
    message: str | None = None
    run_dir: str | None = None
    node: str | None = None
    seconds: float | None = None
    final_score: float | None = None
    prequential_bpb: float | None = None
    heldout_delta: float | None = None
    val_bpb_trained: float | None = None
    crown_eligible: bool | None = None
    flags: list[str] = Field(default_factory=list)

    @field_validator("flags", mode="before")
    @classmethod
    def _from_json(cls, value: object) -> object:
        import orjson

        return orjson.loads(value) if isinstance(value, str) else value or []


COLUMNS = tuple(CampaignRun.model_fields)


def campaign_file(path: Path) -> Path | None:
    """The results file that `path` is or holds, or None."""
    if path.name == CAMPAIGN_FILE and path.is_file():
        return path
    return path / CAMPAIGN_FILE if (path / CAMPAIGN_FILE).is_file() else None


def read_campaign(file: Path) -> list[CampaignRun]:
    """Every row, by submission and seed. Raises DataError naming the file when it is not a campaign's."""
    return list(_rows(file))


def _rows(file: Path) -> Iterator[CampaignRun]:
    try:
        # Not read-only: what a killed campaign left half-written is rolled back by whoever opens the file next, which
        # takes writing. Where that is not allowed, SQLite reads. rw, unlike the default, makes no file.
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", uri=True)) as database:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version != LAYOUT_VERSION:
                raise DataError(
                    f"{file}: campaign layout {version}; expected {LAYOUT_VERSION}, written by this version"
                )
            for row in database.execute(f"SELECT {', '.join(COLUMNS)} FROM runs ORDER BY submission_id, seed"):
                yield CampaignRun.model_validate(dict(zip(COLUMNS, row, strict=True)))
    except sqlite3.Error as error:
        raise DataError(f"{file}: not a campaign's results: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{file}: runs.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
