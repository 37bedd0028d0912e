"""The compute budgets of a run, in the order in which they bind: tokens, then steps, then FLOPs (docs/cli.md).

FLOPs are counted as 6 N D (Kaplan et al., 2020: 2 N for a token's forward, 4 N for its backward), N being the model's
distinct parameters as the referee counts them and D the tokens it handed out. That is the only count no bundle can
steer: a counter of operations would run where the model runs, in the bundle's own process, and could be patched there.
It is exact for dense models and says nothing of attention's quadratic part or of parameters used more than once.
"""

from __future__ import annotations

from prism_fast.protocol import constants as c
from prism_fast.protocol.run_spec import RunSpec

FLOPS_PER_PARAMETER_AND_TOKEN = 6.0


def training_flops(parameters: int, tokens: int) -> float:
    """6 N D of `parameters` distinct parameters over `tokens` positions fed to the model."""
    return FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens


def budget_reached(spec: RunSpec, tokens_seen: int, steps: int, parameters: int) -> str | None:
    """Why no further batch may be handed out after `tokens_seen` tokens over all ranks in `steps` steps, or None."""
    if spec.token_budget is not None and tokens_seen >= spec.token_budget:
        return c.STOP_TOKEN_BUDGET
    if spec.step_budget is not None and steps >= spec.step_budget:
        return c.STOP_STEP_BUDGET
    if spec.flops_budget is not None and training_flops(parameters, tokens_seen) >= spec.flops_budget:
        return c.STOP_FLOPS_BUDGET
    return None


def steps_at_most(spec: RunSpec, tokens_per_step: int, parameters: int) -> int:
    """Steps that the budgets allow at `tokens_per_step` tokens over all ranks; 2^62 without one."""
    limits = [1 << 62]
    if spec.step_budget is not None:
        limits.append(spec.step_budget)
    if spec.token_budget is not None:
        limits.append(-(-spec.token_budget // tokens_per_step))
    if spec.flops_budget is not None:
        limits.append(int(-(-spec.flops_budget // training_flops(parameters, tokens_per_step))))
    return min(limits)
