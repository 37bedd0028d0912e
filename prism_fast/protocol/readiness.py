"""Whether the mounts of a full-scale run are there. Looks and reports: nothing is read through, trained or spent."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from prism_fast.protocol import constants as c
from prism_fast.protocol.modes import FULL_SCALE, SAMPLE_10BT, SAMPLE_100BT
from prism_fast.protocol.settings import PrismSettings, phase2_sibling, read_settings


@dataclass(frozen=True)
class FullScaleReadiness:
    """What `probe_full_scale_readiness` found. READY says that the mounts are there, and nothing about a score."""

    paths: dict[str, str]
    checks: dict[str, bool]
    reasons: tuple[str, ...]
    dry_run: bool

    @property
    def ok(self) -> bool:
        return not self.reasons

    @property
    def status(self) -> str:
        return "READY" if self.ok else "BLOCKED"

    @property
    def status_label(self) -> str:
        return "READY" if self.ok else "BLOCKED_with_reason"

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": c.READINESS_SCHEMA,
            "status": self.status,
            "status_label": self.status_label,
            "ok": self.ok,
            "dry_run": self.dry_run,
            "reasons": list(self.reasons),
            "checks": dict(self.checks),
            "paths": dict(self.paths),
            "execution_mode": FULL_SCALE,
            "ladder_stage": "full_scale",
            "phase_1_dataset_subset": SAMPLE_10BT.dataset_subset,
            "phase_1_token_target": SAMPLE_10BT.tokens,
            "phase_2_dataset_subset": SAMPLE_100BT.dataset_subset,
            "phase_2_token_target": SAMPLE_100BT.tokens,
            "min_public_seeds": c.PUBLIC_MIN_SEEDS,
            "requires_100bt_spend": False,
            "full_scale_train_executed": False,
            "emission_changed": False,
            "invented_metrics": False,
            "wall_clock_never_ranks": True,
        }


def probe_full_scale_readiness(
    *,
    train_data_dir: str | os.PathLike[str] | None = None,
    val_data_dir: str | os.PathLike[str] | None = None,
    phase2_data_dir: str | os.PathLike[str] | None = None,
    dry_run: bool = True,
    settings: PrismSettings | None = None,
) -> FullScaleReadiness:
    """Looks at the train, val and sample-100BT mounts; a path not given comes from `settings` (the environment).

    Without a path of its own, phase 2 is the train mount's sibling `sample-100BT`. A mount is ready when it is a
    readable directory with a manifest (in it or beside it) that is JSON, and holds something besides.
    """
    settings = settings or read_settings()
    train = os.fspath(train_data_dir) if train_data_dir is not None else settings.base_eval_train_data_dir
    val = os.fspath(val_data_dir) if val_data_dir is not None else settings.base_eval_val_data_dir
    if phase2_data_dir is not None:
        phase2 = os.fspath(phase2_data_dir)
    else:
        phase2 = settings.phase2_data_dir if train_data_dir is None else phase2_sibling(train)
    mounts = (
        ("train", "train_mount", train),
        ("val", "val_mount", val),
        ("phase_2_sample_100BT", "phase_2_mount", phase2),
    )
    checks, reasons = {}, []
    for label, check, path in mounts:
        blocked = _blocked_by(Path(path))
        checks[check] = blocked is None
        if blocked is not None:
            reasons.append(f"BLOCKED_{blocked}:{label}:{path}")
    return FullScaleReadiness(
        paths={"train_data_dir": train, "val_data_dir": val, "phase2_data_dir": phase2},
        checks=checks,
        reasons=tuple(reasons),
        dry_run=dry_run,
    )


def _blocked_by(mount: Path) -> str | None:
    """The first thing that is wrong with a mount, or None."""
    try:
        os.stat(mount)
    except (FileNotFoundError, NotADirectoryError):
        return "missing_mount"
    except OSError:
        return "unreadable_mount"
    if not mount.is_dir():
        return "not_directory"
    try:
        names = {entry.name for entry in os.scandir(mount)}
        manifest = mount / c.CORPUS_MANIFEST_FILE
        if c.CORPUS_MANIFEST_FILE not in names:
            manifest = mount.parent / c.CORPUS_MANIFEST_FILE
            if not manifest.is_file():
                return "missing_manifest"
        if not names - {c.CORPUS_MANIFEST_FILE}:
            return "empty_mount"
        if not isinstance(orjson.loads(manifest.read_bytes()), dict):
            return "unreadable_mount"
    except (OSError, orjson.JSONDecodeError):
        return "unreadable_mount"
    return None
