"""Execution modes, the corpora that they walk, and the knobs a run starts from (docs/cli.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import UsageError
from prism_fast.protocol.ladder import STAGES, max_parameters_for_stage

if TYPE_CHECKING:
    from prism_fast.protocol.settings import PrismSettings


@dataclass(frozen=True)
class Phase:
    """One corpus of a mode: the FineWeb-Edu subset and how many tokens of it are the target."""

    dataset_subset: str
    tokens: int


SAMPLE_10BT = Phase("sample-10BT", 10_000_000_000)
SAMPLE_100BT = Phase("sample-100BT", 100_000_000_000)
FULL_SCALE = "full_scale_eval"
MODE_PHASES: dict[str, tuple[Phase, ...]] = {
    "gpu_proxy_eval": (SAMPLE_10BT,),
    FULL_SCALE: (SAMPLE_10BT, SAMPLE_100BT),
}


def phases_of(mode: str) -> tuple[Phase, ...]:
    """The corpora of a mode, in the order they are walked. Raises UsageError for an unknown mode."""
    if mode not in MODE_PHASES:
        raise UsageError(f"unknown execution mode {mode!r}; expected {' or '.join(MODE_PHASES)}")
    return MODE_PHASES[mode]


def execution_mode_targets() -> dict[str, dict[str, Any]]:
    """What each mode aims at. `max_tokens` is the first phase's target; scored runs use one process (`gpu_count`)."""
    (proxy,) = MODE_PHASES["gpu_proxy_eval"]
    first, second = MODE_PHASES["full_scale_eval"]
    return {
        "gpu_proxy_eval": {
            "official_score": True,
            "gpu_count": 1,
            "max_tokens": proxy.tokens,
            "dataset_subset": proxy.dataset_subset,
            "dataset_tokens": proxy.tokens,
        },
        "full_scale_eval": {
            "official_score": True,
            "gpu_count": 1,
            "max_tokens": first.tokens,
            "phase_1_max_tokens": first.tokens,
            "phase_1_dataset_subset": first.dataset_subset,
            "phase_1_dataset_tokens": first.tokens,
            "phase_2_max_tokens": second.tokens,
            "phase_2_dataset_subset": second.dataset_subset,
            "phase_2_dataset_tokens": second.tokens,
        },
    }


def runtime_policy_defaults(settings: PrismSettings | None = None) -> dict[str, Any]:
    """The policy a run starts from under `settings` (default: the environment's), as one JSON-ready document."""
    from prism_fast.protocol.settings import read_settings

    settings = settings or read_settings()
    return {
        "execution_mode_targets": execution_mode_targets(),
        "context": settings.prism_context_kwargs(),
        "param_ladder_caps": {stage: max_parameters_for_stage(stage) for stage in STAGES},
        "data": {
            "base_eval_train_data_dir": settings.base_eval_train_data_dir,
            "base_eval_val_data_dir": settings.base_eval_val_data_dir,
            "phase2_data_dir": settings.phase2_data_dir,
        },
        "limits": {
            "max_gpu_count": c.MAX_NPROC,
            "scored_nproc": 1,
            "budget_seconds": settings.budget_seconds,
            "watchdog_grace_seconds": c.WATCHDOG_GRACE_SECONDS,
            "artifacts_quota_bytes": c.ARTIFACTS_QUOTA_BYTES,
        },
        "wall_clock_never_ranks": True,
    }
