"""Reads a run's directory: the seeds that were scored, with the files that a comparison needs."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import DataError, UsageError
from prism_fast.protocol.manifest import RunManifest, RunStatus, ThroughputProfile, TrainSeries
from prism_fast.protocol.receipts import disagreements
from prism_fast.protocol.run_spec import RunSpec

M = TypeVar("M", bound=BaseModel)
MOST = 1e9  # of a score, of bits per byte


@dataclass(frozen=True)
class Documents:
    """Per validation document: UTF-8 bytes int64 [D], and nats float64 [D] of the trained weights and of the twin."""

    utf8_bytes: np.ndarray
    nats_trained: np.ndarray
    nats_twin: np.ndarray


@dataclass(frozen=True)
class SeedRun:
    """One scored seed."""

    directory: Path
    spec: RunSpec
    manifest: RunManifest

    @property
    def seed(self) -> int:
        return self.spec.seed

    @property
    def tokens_per_batch(self) -> int:
        """Positions fed to the model in one step of all ranks."""
        return self.manifest.engine.batch_size * self.manifest.engine.seq_len * self.spec.world_size

    def series(self) -> TrainSeries:
        return _read(self.directory / c.TRAIN_SERIES_FILE, TrainSeries)

    def profile(self) -> ThroughputProfile:
        return _read(self.directory / c.THROUGHPUT_PROFILE_FILE, ThroughputProfile)

    def documents(self) -> Documents | None:
        """Per-document held-out losses, or None when the run has no held-out figure."""
        path = self.directory / c.HELDOUT_DOCUMENTS_FILE
        if not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as arrays:
                found = Documents(*(arrays[name] for name in ("utf8_bytes", "nats_trained", "nats_twin")))
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as e:
            raise DataError(f"{path}: not held-out documents: {e}") from e
        shapes = {a.shape for a in (found.utf8_bytes, found.nats_trained, found.nats_twin)}
        if len(shapes) != 1 or found.utf8_bytes.ndim != 1 or not len(found.utf8_bytes):
            raise DataError(f"{path}: arrays of shapes {sorted(shapes)}; expected three of one length, at least 1")
        for name, array in vars(found).items():
            if array.dtype.kind not in "iuf" or not (np.abs(array) < 2.0**53).all():
                raise DataError(f"{path}: {name} is not an array of amounts")
        if not found.utf8_bytes.any() or found.utf8_bytes.min() < 0:
            raise DataError(f"{path}: documents without a byte, or with fewer than none")
        return found


@dataclass(frozen=True)
class Run:
    """A run's directory: its scored seeds by seed, and what became of the others. `unverified`: those that are among
    the others because they do not follow from their receipts."""

    path: Path
    scored: dict[int, SeedRun]
    unscored: dict[int, str]
    unverified: frozenset[int] = frozenset()

    @property
    def submission_id(self) -> str:
        return next(iter(self.scored.values())).manifest.submission_id if self.scored else self.path.name


def read_run(path: Path, *, verify: bool = False) -> Run:
    """Reads `path`: what `prism-fast score --out` wrote, or one of its seed directories.

    `verify`: a seed that does not follow from its receipts counts as not scored, with the first disagreement. So does
    one whose figures are no finite numbers, verified or not.

    Raises UsageError when it is neither, DataError when a file of a scored seed is not what it should be.
    """
    if not path.is_dir():
        raise UsageError(f"{path}: no such directory; expected the --out of a `prism-fast score`")
    directories = sorted(d for d in path.glob("seed-*") if (d / c.RUN_STATUS_FILE).is_file())
    if (path / c.RUN_STATUS_FILE).is_file():
        directories = [path]
    if not directories:
        raise UsageError(f"{path}: no run in it; expected seed-*/{c.RUN_STATUS_FILE} as `prism-fast score` writes them")
    scored, unscored, unverified = {}, {}, set()
    for directory in directories:
        status = _read(directory / c.RUN_STATUS_FILE, RunStatus)
        spec_path = directory / c.RUN_SPEC_FILE
        if status.status != "scored":
            seed = _read(spec_path, RunSpec).seed if spec_path.is_file() else int(directory.name.rpartition("-")[2])
            unscored[seed] = f"{status.status}: {status.message}" if status.message else status.status
            continue
        run = SeedRun(directory, _read(spec_path, RunSpec), _read(directory / c.RUN_MANIFEST_FILE, RunManifest))
        fault = next(disagreements(directory), None) if verify else None
        if fault is None and (name := _not_finite(run.manifest)) is not None:
            fault = f"score.{name} is no finite number below {MOST:g}"
        if fault is not None:
            unscored[run.seed] = f"does not verify: {fault}" if verify else fault
            if verify:
                unverified.add(run.seed)
            continue
        if run.seed in scored:
            raise DataError(f"{directory}: seed {run.seed} is there twice; expected each seed once")
        scored[run.seed] = run
    bundles = {s.manifest.engine.bundle_sha256 for s in scored.values()}
    if len(bundles) > 1:
        raise DataError(f"{path}: seeds of {len(bundles)} different bundles; expected the seeds of one")
    return Run(path, scored, unscored, frozenset(unverified))


def _not_finite(manifest: RunManifest) -> str | None:
    """The first figure of the score that is not finite, or too large to be one."""
    figures = manifest.score.model_dump()
    return next((n for n, v in figures.items() if isinstance(v, float) and not abs(v) < MOST), None)


def _read(path: Path, model: type[M]) -> M:
    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as e:
        raise DataError(f"{path}: {e.strerror or e}; a scored seed has this file") from e
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: {where}: {first['msg']}; expected a {model.__name__}") from e
