"""The parameter ladder: explore (provisional) -> promote (confirms or revokes) -> full_scale (docs/concepts.md).

A bundle that leads at the explore cap holds its place provisionally. The same bundle is run again at the promote cap
and compared there: a win or a tie confirms it, a loss or an invalid run revokes it.
"""

from __future__ import annotations

from typing import Literal

from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import UsageError

STAGES = ("explore", "promote", "full_scale")
Outcome = Literal["win", "tie", "loss", "invalid"]
CrownStatus = Literal["none", "provisional", "confirmed", "revoked"]
OUTCOMES: tuple[Outcome, ...] = ("win", "tie", "loss", "invalid")


def require_stage(stage: str) -> str:
    """`stage`, if the ladder has it; UsageError otherwise: nothing falls back to explore unseen."""
    if stage not in STAGES:
        raise UsageError(f"unknown parameter ladder stage {stage!r}; expected {', '.join(STAGES[:-1])} or {STAGES[-1]}")
    return stage


def max_parameters_for_stage(stage: str) -> int:
    """The parameter cap of a stage. It binds the model that trains, before the first batch and after it."""
    return c.STAGE_PARAMETER_CAPS[require_stage(stage)]


def is_within_stage_cap(parameters: int, stage: str) -> bool:
    return parameters <= max_parameters_for_stage(stage)


def provisional_crown_eligible(stage: str, *, parameters: int, valid: bool) -> bool:
    """Whether a run may hold its place provisionally: a valid explore run within the explore cap."""
    return valid and require_stage(stage) == "explore" and is_within_stage_cap(parameters, stage)


def crown_status(previous: CrownStatus, stage: str, outcome: Outcome) -> CrownStatus:
    """The standing of a bundle after one more compared run of it.

    explore: anything but an invalid run makes an unranked bundle provisional, and changes no other standing.
    promote and full_scale: a win or a tie confirms, a loss or an invalid run revokes. What was revoked stays revoked:
    the same bundle under the same pin gives the same figures.
    """
    require_stage(stage)
    if outcome not in OUTCOMES:
        raise UsageError(f"unknown outcome {outcome!r}; expected {', '.join(OUTCOMES[:-1])} or {OUTCOMES[-1]}")
    if previous == "revoked":
        return "revoked"
    if stage == "explore":
        return "provisional" if previous == "none" and outcome != "invalid" else previous
    return "confirmed" if outcome in ("win", "tie") else "revoked"
