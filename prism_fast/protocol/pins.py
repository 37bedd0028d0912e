"""Protocol pins: what two runs must share before their scores may be compared (docs/concepts.md).

A pin reaches the bundle unchanged: whatever `seq_len` and `token_budget` it names are what `PrismContext` holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from prism_fast.protocol import constants as c
from prism_fast.protocol.canonical import canonical_json, sha256_hex
from prism_fast.protocol.context import PrismContext
from prism_fast.protocol.errors import UsageError
from prism_fast.protocol.ladder import max_parameters_for_stage, require_stage

PRIMARY_FORMS = ("heldout_delta", "val_bpb_trained")


@dataclass(frozen=True)
class ProtocolPin:
    """Sizes in tokens, `param_cap` in parameters. `wall_clock_seconds` only stops a run; it never ranks."""

    protocol_id: str = c.PROTOCOL_ID
    mode: str = "gpu_proxy_eval"
    param_ladder_stage: str = "explore"
    param_cap: int = c.STAGE_PARAMETER_CAPS["explore"]
    seq_len: int = c.DEFAULT_SEQUENCE_LENGTH
    token_budget: int = c.DEFAULT_TOKEN_BUDGET
    step_budget: int | None = None
    wall_clock_seconds: float = c.DEFAULT_BUDGET_SECONDS
    seeds: tuple[int, ...] = c.PUBLIC_SEEDS
    batch_size: int = 4
    tokenizer: str = "gpt2"
    vocab_size: int = c.DEFAULT_VOCAB_SIZE
    scored_nproc: int = 1
    val_byte_budget: int | None = None
    gap_threshold_bpb: float = c.MEMORIZATION_GAP_BPB
    primary_form: str = "heldout_delta"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seeds": list(self.seeds), "wall_clock_never_ranks": True}

    @property
    def digest(self) -> str:
        """sha256 of the pin's canonical JSON: two sides of a comparison share it."""
        return sha256_hex(canonical_json(self.as_dict()))

    def prism_context_kwargs(self) -> dict[str, Any]:
        """Arguments for `PrismContext`; the seed is the pin's first."""
        return {
            "vocab_size": self.vocab_size,
            "sequence_length": self.seq_len,
            "token_budget": self.token_budget,
            "step_budget": self.step_budget,
            "budget_seconds": self.wall_clock_seconds,
            "seed": self.seeds[0] if self.seeds else c.DEFAULT_SEED,
            "param_ladder_stage": require_stage(self.param_ladder_stage),
            "max_parameters": self.param_cap,
        }


def prism_context_from_protocol_pin(pin: ProtocolPin, *, seed: int | None = None, **overrides: Any) -> PrismContext:
    """The context a bundle sees under `pin`, for one of its seeds. `overrides` are PrismContext's own fields."""
    fields = pin.prism_context_kwargs()
    if seed is not None:
        fields["seed"] = seed
    return PrismContext(**{**fields, **overrides})


@dataclass(frozen=True)
class ScalePhase:
    """One rung of the scale ladder: its defaults, how far they may be raised, and what they may not fall below."""

    name: str
    stage: str
    mode: str
    seq_len: int
    token_budget: int
    seq_len_floor: int
    token_budget_floor: int
    seq_len_target: int
    token_budget_high: int


SCALE_PHASES: dict[str, ScalePhase] = {
    p.name: p
    for p in (
        ScalePhase("p0", "explore", "gpu_proxy_eval", 128, 500_000, 2, 1, 128, 500_000),
        ScalePhase("p1", "explore", "gpu_proxy_eval", 256, 1_000_000, 256, 1_000_000, 512, 2_000_000),
        ScalePhase("p2", "promote", "gpu_proxy_eval", 256, 1_000_000, 256, 1_000_000, 256, 1_000_000),
        ScalePhase("p3", "promote", "full_scale_eval", 256, 1_000_000, 256, 1_000_000, 256, 1_000_000),
    )
}


PIN_NAMES = tuple(SCALE_PHASES)


@dataclass(frozen=True)
class PinGuard:
    """Whether a pin may carry a public claim, and every reason why not."""

    ok: bool
    seed_count: int
    min_public_seeds: int
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "reasons": list(self.reasons)}


def scale_pin_public_ok(pin: ProtocolPin) -> PinGuard:
    """Looks for every reason why `pin` cannot carry a public claim; `seed_count` counts distinct seeds."""
    distinct = len(set(pin.seeds))
    reasons = []
    if distinct < c.PUBLIC_MIN_SEEDS:
        reasons.append(f"seed_count_below_public_min:K={distinct}<{c.PUBLIC_MIN_SEEDS}")
    if distinct != len(pin.seeds):
        reasons.append("duplicate_seeds")
    if pin.primary_form not in PRIMARY_FORMS:
        reasons.append(f"unknown_primary_form:{pin.primary_form}")
    if pin.token_budget <= 0:
        reasons.append("non_positive_token_budget")
    if pin.seq_len <= 0:
        reasons.append("non_positive_seq_len")
    return PinGuard(not reasons, distinct, c.PUBLIC_MIN_SEEDS, tuple(reasons))


def assert_public_multi_seed_pin(pin: ProtocolPin) -> None:
    """Raises UsageError naming every reason when `pin` cannot carry a public claim."""
    guard = scale_pin_public_ok(pin)
    if not guard.ok:
        raise UsageError(
            f"not a public pin: {'; '.join(guard.reasons)}; a public claim needs at least "
            f"{c.PUBLIC_MIN_SEEDS} distinct seeds and positive budgets"
        )


def assert_scale_pin_floor(pin: ProtocolPin, phase: str) -> None:
    """Raises UsageError naming everything in which `pin` falls below the rung `phase` ("p0" to "p3")."""
    rung = _phase(phase)
    cap = max_parameters_for_stage(rung.stage)
    below = []
    if pin.seq_len < rung.seq_len_floor:
        below.append(f"seq_len {pin.seq_len} is below {rung.seq_len_floor} (target {rung.seq_len_target})")
    if pin.token_budget < rung.token_budget_floor:
        below.append(f"token_budget {pin.token_budget:,} is below {rung.token_budget_floor:,}")
    if pin.param_ladder_stage != rung.stage:
        below.append(f"param_ladder_stage is {pin.param_ladder_stage!r}, not {rung.stage!r}")
    if pin.param_cap != cap:
        below.append(f"param_cap is {pin.param_cap:,}, not {cap:,}")
    if pin.mode != rung.mode:
        below.append(f"mode is {pin.mode!r}, not {rung.mode!r}")
    if below:
        raise UsageError(f"not a {phase.upper()} pin: {'; '.join(below)}")


def protocol_pin(
    phase: str,
    *,
    seeds: Sequence[int] | None = None,
    token_budget: int | None = None,
    seq_len: int | None = None,
    batch_size: int | None = None,
    require_public_k: bool = True,
    require_floor: bool = True,
) -> ProtocolPin:
    """The pin of a rung ("p0" to "p3", as `--pin` names it), with what is given in place of the rung's defaults.

    Raises UsageError for a pin that cannot carry a public claim (unless `require_public_k=False`, for provisional
    runs) or that falls below its rung's floors (unless `require_floor=False`).
    """
    rung = _phase(phase)
    pin = ProtocolPin(
        mode=rung.mode,
        param_ladder_stage=rung.stage,
        param_cap=max_parameters_for_stage(rung.stage),
        seq_len=rung.seq_len if seq_len is None else seq_len,
        token_budget=rung.token_budget if token_budget is None else token_budget,
        seeds=c.PUBLIC_SEEDS if seeds is None else tuple(seeds),
        batch_size=ProtocolPin.batch_size if batch_size is None else batch_size,
    )
    if require_public_k:
        assert_public_multi_seed_pin(pin)
    if require_floor:
        assert_scale_pin_floor(pin, phase)
    return pin


scale_p0_protocol_pin = partial(protocol_pin, "p0")
scale_p1_protocol_pin = partial(protocol_pin, "p1")
scale_p2_protocol_pin = partial(protocol_pin, "p2")
scale_p3_protocol_pin = partial(protocol_pin, "p3")
explore_protocol_pin = partial(protocol_pin, "p0", require_public_k=False, require_floor=False)


def _phase(name: str) -> ScalePhase:
    if name not in SCALE_PHASES:
        raise UsageError(f"unknown pin {name!r}; expected {', '.join(SCALE_PHASES)}")
    return SCALE_PHASES[name]
