"""Runs a campaign: what has no verdict yet goes to the pool, verdicts go to the store, machine faults go again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import prism_fast
from prism_fast.campaign.job import ID_FILE, KNOBS, LOG_FILE, WORK_DIR, Job, Outcome
from prism_fast.campaign.pool import Pool
from prism_fast.campaign.store import Store
from prism_fast.harness.bundle.bundle import SCRIPTS, Bundle, load_bundle
from prism_fast.protocol import constants as c
from prism_fast.protocol.campaign import FINAL, RUNS_DIR, CampaignRun, Status
from prism_fast.protocol.canonical import write_atomically
from prism_fast.protocol.errors import (
    EXIT_BUNDLE_REJECTED,
    EXIT_ENGINE,
    EXIT_SCORED,
    BundleRejected,
    DataError,
    UsageError,
)
from prism_fast.protocol.file_names import escaped
from prism_fast.protocol.manifest import RunManifest, RunStatus

POLL_S = 1.0
KEPT_LOG = "score-{seed}.log"  # of a run that left no directory of its own


@dataclass(frozen=True)
class Submissions:
    """The bundles found, by submission id, and those that are none, by name, with the reason."""

    bundles: dict[str, Bundle]
    rejected: dict[str, BundleRejected]


def find_submissions(path: Path) -> Submissions:
    """`path` is a bundle, or a folder whose folders and .zip files are each taken for one; hidden ones are passed over.

    Raises UsageError when there is none.
    """
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder; expected a bundle, or a folder of bundles")
    places = [path]
    if path.is_dir() and not any((path / script).is_file() for script in SCRIPTS):
        places = sorted(p for p in path.iterdir() if not p.name.startswith(".") and (p.is_dir() or p.suffix == ".zip"))
    bundles: dict[str, Bundle] = {}
    rejected: dict[str, BundleRejected] = {}
    for place in places:
        try:
            bundle = load_bundle(place)
        except BundleRejected as error:
            rejected[escaped(place.name)] = error
        except (UsageError, OSError) as error:  # among many submissions that is one submission's fault
            rejected[escaped(place.name)] = BundleRejected(str(error), rule=c.RULE_BUNDLE_SHAPE)
        else:
            bundles[bundle.submission_id] = bundle
    if not places:
        raise UsageError(
            f"{path}: no bundle in it; expected folders with {' and '.join(SCRIPTS)}, or .zip files of them"
        )
    return Submissions(bundles, rejected)


class Watcher(Protocol):
    """Told of every change; `running` names the runs whose worker has begun."""

    def changed(self, runs: Sequence[CampaignRun], running: Sequence[tuple[str, int]]) -> None: ...

    def ended(self, run: CampaignRun) -> None: ...

    def again(self, job: Job, outcome: Outcome) -> None: ...


class SilentWatcher:
    """Says nothing."""

    def changed(self, runs: Sequence[CampaignRun], running: Sequence[tuple[str, int]]) -> None: ...

    def ended(self, run: CampaignRun) -> None: ...

    def again(self, job: Job, outcome: Outcome) -> None: ...


def run_campaign(
    submissions: Submissions,
    seeds: Sequence[int],
    folder: Path,
    options: Sequence[str],
    pool: Callable[[], AbstractContextManager[Pool]],
    *,
    environment: Mapping[str, str] | None = None,
    retries: int = 2,
    watcher: Watcher | None = None,
) -> int:
    """Brings every (bundle, seed) to a verdict, in `folder`; -> the campaign's exit code.

    `options`: arguments of `prism-fast score`, the same for all, as are the `PRISM_` variables of `environment`; the
    nodes' own are not read. A run that has its verdict from an earlier call is
    not run again. `retries`: further attempts after a machine's fault, in this call. `pool` is not opened when there
    is nothing to run.

    0: every run has a verdict, whichever. 5: some have none for the machine's faults; the same call tries them again.
    Raises UsageError, with what `score` said, for options that it does not take.
    """
    watcher = watcher or SilentWatcher()
    folder = folder.absolute()
    knobs = tuple(sorted((k, v) for k, v in (environment or {}).items() if k.startswith(KNOBS)))
    with Store(folder, [*options, *(f"{name}={value}" for name, value in knobs)]) as store:
        campaign = _Campaign(store, submissions, tuple(options), knobs, retries, watcher)
        campaign.begin(seeds)
        waiting = campaign.waiting()
        if waiting:
            with pool() as workers:
                campaign.run(workers, waiting)
        asked = {*submissions.bundles, *submissions.rejected}
        left = [r for r in store.runs() if r.submission_id in asked and r.seed in seeds and r.status not in FINAL]
        return EXIT_ENGINE if left else EXIT_SCORED


class _Campaign:
    def __init__(
        self,
        store: Store,
        submissions: Submissions,
        options: tuple[str, ...],
        knobs: tuple[tuple[str, str], ...],
        retries: int,
        watcher: Watcher,
    ) -> None:
        self.store, self.submissions, self.options, self.knobs = store, submissions, options, knobs
        self.retries, self.watcher = retries, watcher
        self.rows: dict[tuple[str, int], CampaignRun] = {}
        self.asked: set[tuple[str, int]] = set()
        self.tried: dict[tuple[str, int], int] = {}

    def begin(self, seeds: Sequence[int]) -> None:
        folder = self.store.folder
        shutil.rmtree(folder / WORK_DIR, ignore_errors=True)  # what a killed campaign's workers left
        write_atomically(folder / ID_FILE, self.store.id.encode())
        self.store.add(
            CampaignRun(submission_id=bundle.submission_id, bundle_sha256=bundle.digest, seed=seed)
            for bundle in self.submissions.bundles.values()
            for seed in seeds
        )
        for name, error in self.submissions.rejected.items():
            for seed in seeds:
                row = CampaignRun(submission_id=name, bundle_sha256="", seed=seed, status="rejected")
                said = {"exit_code": EXIT_BUNDLE_REJECTED, "rule": error.rule, "message": str(error)}
                self.store.write(row.model_copy(update=said))
        self.rows = {(r.submission_id, r.seed): r for r in self.store.runs()}
        self.asked = {(name, seed) for name in self.submissions.bundles for seed in seeds}

    def waiting(self) -> list[tuple[str, int]]:
        return sorted(key for key in self.asked if self.rows[key].status not in FINAL)

    def run(self, pool: Pool, waiting: Sequence[tuple[str, int]]) -> None:
        for key in waiting:
            self._submit(pool, key)
        while self.tried:
            self.watcher.changed(list(self.rows.values()), self._running())
            for job, outcome in pool.finished(POLL_S):
                if self._settle(job, outcome):
                    del self.tried[job.key]
                else:
                    self.watcher.again(job, outcome)
                    self._submit(pool, job.key)
        self.watcher.changed(list(self.rows.values()), [])

    def _submit(self, pool: Pool, key: tuple[str, int]) -> None:
        self.tried[key] = self.tried.get(key, 0) + 1
        row = self._write(self.rows[key].model_copy(update={"attempts": self.rows[key].attempts + 1}))
        folder, name = str(self.store.folder), key[0]
        bundle = self.submissions.bundles[name]
        version = prism_fast.__version__
        pool.submit(Job(bundle, key[1], row.attempts, folder, self.store.id, version, self.options, self.knobs))

    def _running(self) -> list[tuple[str, int]]:
        """Jobs whose worker has begun: its folder is there."""
        work = self.store.folder / WORK_DIR
        there = {p.name for p in work.iterdir()} if work.is_dir() else set()
        return [key for key in self.tried if f"{key[0]}-{key[1]}-{self.rows[key].attempts}" in there]

    def _settle(self, job: Job, outcome: Outcome) -> bool:
        """Writes down what an attempt came to; False when it is to be tried again."""
        if outcome.is_usage:
            raise UsageError(outcome.message or f"`score` does not take {' '.join(self.options)}")
        row = self.rows[job.key]
        facts = {"node": outcome.node, "seconds": outcome.seconds, "exit_code": outcome.exit_code}
        if not outcome.is_verdict:
            last = self.tried[job.key] > self.retries
            message = outcome.message or f"ended with exit code {outcome.exit_code}"
            status: Status = "fault" if last else "pending"
            row = self._write(row.model_copy(update={**facts, "status": status, "message": message}))
            shutil.rmtree(job.work, ignore_errors=True)
            if last:
                self.watcher.ended(row)
            return last
        run_dir = self._keep(job)
        row = row.model_copy(update={**facts, "run_dir": run_dir, **_figures(self.store.folder, run_dir, outcome)})
        self.watcher.ended(self._write(row))
        return True

    def _keep(self, job: Job) -> str | None:
        """Moves the seed's directory to its place, by one rename; -> its path below the campaign's folder."""
        name = f"seed-{job.seed}"
        target = self.store.folder / RUNS_DIR / job.bundle.submission_id
        target.mkdir(parents=True, exist_ok=True)
        kept = None
        if (job.work / name / c.RUN_STATUS_FILE).is_file():
            shutil.rmtree(target / name, ignore_errors=True)
            (job.work / name).rename(target / name)
            kept = f"{RUNS_DIR}/{job.bundle.submission_id}/{name}"
        if (job.work / LOG_FILE).is_file():
            (job.work / LOG_FILE).replace(target / KEPT_LOG.format(seed=job.seed))
        shutil.rmtree(job.work, ignore_errors=True)
        return kept

    def _write(self, row: CampaignRun) -> CampaignRun:
        self.store.write(row)
        self.rows[row.submission_id, row.seed] = row
        return row


def _figures(folder: Path, run_dir: str | None, outcome: Outcome) -> dict[str, object]:
    """Status, rule and score as the run's own files have them."""
    if run_dir is None:
        status = "rejected" if outcome.exit_code == EXIT_BUNDLE_REJECTED else "failed"
        return {"status": status, "message": outcome.message}
    directory = folder / run_dir
    try:
        said = RunStatus.model_validate_json((directory / c.RUN_STATUS_FILE).read_bytes())
        if said.status != "scored":
            return {"status": said.status, "rule": said.rule, "message": said.message}
        score = RunManifest.model_validate_json((directory / c.RUN_MANIFEST_FILE).read_bytes()).score
    except (OSError, ValueError) as error:
        raise DataError(f"{directory}: not the files of a run: {error}") from error
    return {
        "status": "scored",
        "rule": None,
        "message": None,
        "final_score": score.final_score,
        "prequential_bpb": score.prequential_bpb,
        "heldout_delta": score.heldout_delta,
        "val_bpb_trained": score.val_bpb_trained,
        "crown_eligible": score.emission_crown_eligible,
        "flags": score.flags,
    }
