"""The one writer of a campaign's results file. Every change is a transaction: a killed campaign loses no row."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

import prism_fast
from prism_fast.protocol.campaign import CAMPAIGN_FILE, COLUMNS, TABLES, CampaignRun, read_campaign
from prism_fast.protocol.errors import DataError, UsageError


class Store:
    """Opens or begins the campaign in `folder`, and holds it: one campaign command at a time.

    Raises UsageError when another command holds it, or when it was begun by another version or with other options.
    """

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / CAMPAIGN_FILE
        self._lock = os.open(folder / ".campaign.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UsageError(f"{folder}: another prism-fast campaign is at work on it; wait for it or end it") from None
        try:
            self._open(list(options))
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self, options: list[str]) -> None:
        self._database = sqlite3.connect(self.file, isolation_level=None)
        try:
            begun = self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > 0
        except sqlite3.DatabaseError as error:
            raise DataError(f"{self.file}: not a campaign's results: {error}") from error
        if begun:
            read_campaign(self.file)
        else:
            said = orjson.dumps(options).decode()
            self._database.executescript("BEGIN;" + TABLES)  # whole or not at all, with the row that names it
            self._database.execute(
                "INSERT INTO campaign VALUES (?, ?, ?)", (uuid.uuid4().hex, prism_fast.__version__, said)
            )
            self._database.execute("COMMIT")
        self.id, version, stored = self._database.execute("SELECT id, engine_version, options FROM campaign").fetchone()
        if version != prism_fast.__version__:
            raise UsageError(
                f"{self.file}: begun by prism-fast {version}, this is {prism_fast.__version__}; scores of two versions "
                "are not one campaign, choose another --out"
            )
        if orjson.loads(stored) != options:
            raise UsageError(
                f"{self.file}: begun with {' '.join(orjson.loads(stored))}; asked now for {' '.join(options)}; "
                "give the same options, or another --out"
            )

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._database.close()
        os.close(self._lock)

    def add(self, runs: Iterable[CampaignRun]) -> None:
        """New rows; one that is there stays as it is."""
        with self._database:
            self._database.execute("BEGIN")
            self._database.executemany(
                "INSERT OR IGNORE INTO runs (submission_id, bundle_sha256, seed, status, attempts) "
                "VALUES (?, ?, ?, 'pending', 0)",
                [(r.submission_id, r.bundle_sha256, r.seed) for r in runs],
            )

    def runs(self) -> list[CampaignRun]:
        return read_campaign(self.file)

    def write(self, run: CampaignRun) -> None:
        """Puts `run` in its row's place, on disk when this returns."""
        values: dict[str, Any] = {**run.model_dump(), "flags": orjson.dumps(run.flags).decode()}
        self._database.execute(
            f"INSERT OR REPLACE INTO runs ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})",
            [values[column] for column in COLUMNS],
        )
