"""The scale ladder under one name: pins, modes, stages, readiness, and the two documents that describe them.

from prism_fast.protocol.scale import scale_p1_protocol_pin, probe_full_scale_readiness
"""

from __future__ import annotations

from typing import Any

from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import UsageError
from prism_fast.protocol.ladder import (
    STAGES,
    crown_status,
    is_within_stage_cap,
    max_parameters_for_stage,
    provisional_crown_eligible,
    require_stage,
)
from prism_fast.protocol.modes import (
    SAMPLE_10BT,
    SAMPLE_100BT,
    Phase,
    execution_mode_targets,
    phases_of,
    runtime_policy_defaults,
)
from prism_fast.protocol.pins import (
    SCALE_PHASES,
    PinGuard,
    ProtocolPin,
    ScalePhase,
    assert_public_multi_seed_pin,
    assert_scale_pin_floor,
    explore_protocol_pin,
    prism_context_from_protocol_pin,
    protocol_pin,
    scale_p0_protocol_pin,
    scale_p1_protocol_pin,
    scale_p2_protocol_pin,
    scale_p3_protocol_pin,
    scale_pin_public_ok,
)
from prism_fast.protocol.readiness import FullScaleReadiness, probe_full_scale_readiness

__all__ = [
    "SAMPLE_10BT",
    "SAMPLE_100BT",
    "SCALE_PHASES",
    "STAGES",
    "FullScaleReadiness",
    "Phase",
    "PinGuard",
    "ProtocolPin",
    "ScalePhase",
    "assert_public_multi_seed_pin",
    "assert_research_protocol_annex",
    "assert_scale_pin_floor",
    "crown_status",
    "execution_mode_targets",
    "explore_protocol_pin",
    "is_within_stage_cap",
    "max_parameters_for_stage",
    "phases_of",
    "prism_context_from_protocol_pin",
    "probe_full_scale_readiness",
    "protocol_pin",
    "provisional_crown_eligible",
    "require_stage",
    "research_protocol_annex",
    "runtime_policy_defaults",
    "scale_ladder_document",
    "scale_p0_protocol_pin",
    "scale_p1_protocol_pin",
    "scale_p2_protocol_pin",
    "scale_p3_protocol_pin",
    "scale_pin_public_ok",
]


def scale_ladder_document() -> dict[str, Any]:
    """The ladder as one JSON-ready document (`prism_scale_ladder.v1`)."""
    p0, p2, p3 = (SCALE_PHASES[name] for name in ("p0", "p2", "p3"))
    return {
        "schema": c.SCALE_LADDER_SCHEMA,
        "protocol_id": c.PROTOCOL_ID,
        "stages": list(STAGES),
        "stage_detail": {
            "explore": {
                **_rung(p0),
                "standing": "provisional",
                "helpers": ["scale_p0_protocol_pin", "scale_p1_protocol_pin", "explore_protocol_pin"],
            },
            "promote": {
                **_rung(p2),
                "standing": "a win or a tie confirms, a loss or an invalid run revokes",
                "helpers": ["scale_p2_protocol_pin"],
            },
            "full_scale": {
                **_rung(p3),
                "execution_mode": p3.mode,
                "phase_1_dataset_subset": SAMPLE_10BT.dataset_subset,
                "phase_1_token_target": SAMPLE_10BT.tokens,
                "phase_2_dataset_subset": SAMPLE_100BT.dataset_subset,
                "phase_2_token_target": SAMPLE_100BT.tokens,
                "dry_run_readiness_without_100bt_spend": True,
                "helpers": ["scale_p3_protocol_pin", "probe_full_scale_readiness"],
            },
        },
        "phases": {name: protocol_pin(name).as_dict() for name in SCALE_PHASES},
        "min_public_seeds": c.PUBLIC_MIN_SEEDS,
        "default_public_seeds": list(c.PUBLIC_SEEDS),
        "k1_is_provisional": True,
        "public_posture_requires_k_ge": c.PUBLIC_MIN_SEEDS,
        "emission_primary": "heldout_delta",
        "emission_secondary": "prequential_bpb",
        "wall_clock_never_ranks": True,
        "honesty": (
            f"Fewer than {c.PUBLIC_MIN_SEEDS} distinct seeds are provisional: they say nothing public about which "
            "architecture is better."
        ),
    }


def _rung(phase: ScalePhase) -> dict[str, Any]:
    return {
        "param_ladder_stage": phase.stage,
        "param_cap": max_parameters_for_stage(phase.stage),
        "seq_len_default": phase.seq_len,
        "token_budget_default": phase.token_budget,
    }


def research_protocol_annex() -> dict[str, Any]:
    """Names the research views that are published beside the score and never enter it."""
    return {
        "schema": c.RESEARCH_ANNEX_SCHEMA,
        "annex_id": "research_protocol_annex.v1",
        "role": "scientific_research_grade",
        "non_emission": True,
        "emission_weight_crown": False,
        "silent_emission_rewrite": False,
        "protocol_id": c.PROTOCOL_ID,
        "multimetric_scorecard_id": "multimetric.v1.1",
        "complete_view_scorecard_id": "multimetric.complete.v1.3",
        "complete_view_schema": "complete_view.v1.3",
        "densify_entrypoints_schema": "prism_scale_densify_entrypoints.v1",
        "scale_ladder_schema": c.SCALE_LADDER_SCHEMA,
        "min_public_seeds": c.PUBLIC_MIN_SEEDS,
        "wall_clock_never_ranks": True,
        "tee_package": "absent",
        "notes": (
            "Research views are published beside the score. The score stays held-out first, prequential bits per byte "
            "second; changing that takes a new protocol version."
        ),
    }


def assert_research_protocol_annex(document: dict[str, Any]) -> None:
    """Raises UsageError naming every field in which `document` is not the annex, a claim on the crown above all."""
    wanted = research_protocol_annex()
    wrong = [key for key in wanted if document.get(key) != wanted[key]]
    wrong += [f"{key} (unknown)" for key in document if key not in wanted]
    if wrong:
        raise UsageError(f"not the non-emission research protocol annex {wanted['annex_id']}: {', '.join(wrong)}")
