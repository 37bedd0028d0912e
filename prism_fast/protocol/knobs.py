"""What a run is held to, from three sources: what was given, a protocol pin, the PRISM_ environment.

What is given (a command-line option) is taken; where nothing is given a pin decides; where there is no pin the
environment does, and the short default where that is silent. A pin is not for bending: whatever contradicts it is
refused, and the environment cannot change it unseen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prism_fast.protocol.errors import UsageError
from prism_fast.protocol.ladder import require_stage
from prism_fast.protocol.modes import FULL_SCALE, phases_of
from prism_fast.protocol.pins import PIN_NAMES, SCALE_PHASES, ProtocolPin, protocol_pin
from prism_fast.protocol.settings import PrismSettings, phase2_sibling, read_settings

NO_LIMIT = 0  # `--token-budget 0`


@dataclass(frozen=True)
class Given:
    """What was asked for; None: nothing was. Sizes in tokens, `token_budget` 0: no limit, times in seconds."""

    data: str | None = None
    val: str | None = None
    phase2: str | None = None
    mode: str | None = None
    stage: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    sequence_length: int | None = None
    batch_size: int | None = None
    token_budget: int | None = None
    step_budget: int | None = None
    flops_budget: float | None = None
    budget_seconds: float | None = None
    val_byte_budget: int | None = None
    seeds: tuple[int, ...] | None = None
    nproc: int | None = None
    accounting: str | None = None
    seal: str | None = None


@dataclass(frozen=True)
class Knobs:
    """What came of it. `token_budget` None: no limit. `vocab_size` None: the tokenizer's. `phase2`: full scale only."""

    data: str
    val: str | None
    phase2: str | None
    mode: str
    stage: str
    tokenizer: str
    vocab_size: int | None
    sequence_length: int
    batch_size: int | None
    token_budget: int | None
    step_budget: int | None
    flops_budget: float | None
    budget_seconds: float
    val_byte_budget: int | None
    seeds: tuple[int, ...]
    nproc: int
    accounting: str
    seal: str
    pin_name: str | None = None
    pin: ProtocolPin | None = None


def settle_knobs(given: Given, pin_name: str | None = None, settings: PrismSettings | None = None) -> Knobs:
    """Settles every knob. `pin_name`: "p0" to "p3"; `settings`: the environment's when None.

    Raises UsageError, in one sentence, for whatever contradicts the pin, an unknown name, and data that is nowhere.
    """
    settings = settings or read_settings()
    pin = None if pin_name is None else _pinned(given, pin_name)
    if pin is not None:
        budget: int | None = pin.token_budget  # as given, where that is within the pin
    elif given.token_budget is not None:
        budget = None if given.token_budget == NO_LIMIT else given.token_budget
    else:
        budget = settings.token_budget
    environment_vocabulary = settings.vocab_size if "vocab_size" in settings.model_fields_set else None

    def settled(name: str, pinned: Any, default: Any) -> Any:
        value = getattr(given, name)
        return value if value is not None else default if pin is None else pinned

    mode = settled("mode", pin and pin.mode, settings.execution_mode)
    phases_of(mode)
    data, val, phase2 = _places(given, mode, settings)
    accounting = given.accounting or "exact"
    return Knobs(
        data=data,
        val=val,
        phase2=phase2,
        mode=mode,
        stage=require_stage(settled("stage", pin and pin.param_ladder_stage, settings.param_ladder_stage)),
        tokenizer=settled("tokenizer", pin and pin.tokenizer, "gpt2"),
        vocab_size=settled("vocab_size", pin and pin.vocab_size, environment_vocabulary),
        sequence_length=settled("sequence_length", pin and pin.seq_len, settings.sequence_length),
        batch_size=settled("batch_size", pin and pin.batch_size, None),
        token_budget=budget,
        step_budget=settled("step_budget", pin and pin.step_budget, settings.step_budget),
        flops_budget=given.flops_budget,
        budget_seconds=settled("budget_seconds", pin and pin.wall_clock_seconds, settings.budget_seconds),
        val_byte_budget=given.val_byte_budget,
        seeds=settled("seeds", pin and pin.seeds, (settings.seed,)),
        nproc=settled("nproc", pin and pin.scored_nproc, 1),
        accounting=accounting,
        seal=given.seal or ("sealed" if accounting == "exact" else "open"),  # the original knew no seal
        pin_name=pin_name,
        pin=pin,
    )


def _pinned(given: Given, name: str) -> ProtocolPin:
    """The pin with what may be chosen under it. Raises UsageError naming everything that contradicts it."""
    if name not in SCALE_PHASES:
        raise UsageError(f"--pin {name}: expected {', '.join(PIN_NAMES[:-1])} or {PIN_NAMES[-1]}")
    rung, pin = SCALE_PHASES[name], protocol_pin(name)
    wrong = []
    for option, value, low, high in (
        ("--seq-len", given.sequence_length, rung.seq_len, rung.seq_len_target),
        ("--token-budget", given.token_budget, rung.token_budget, rung.token_budget_high),
    ):
        if value is not None and not low <= value <= high:
            wrong.append(f"{option} {value} (the pin: {f'{low}' if low == high else f'{low} to {high}'})")
    for option, fixed, pinned in (
        ("--step-budget", given.step_budget, pin.step_budget),
        ("--flops-budget", given.flops_budget, None),
        ("--batch-size", given.batch_size, pin.batch_size),
        ("--tokenizer", given.tokenizer, pin.tokenizer),
        ("--vocab-size", given.vocab_size, pin.vocab_size),
        ("--stage", given.stage, pin.param_ladder_stage),
        ("--mode", given.mode, pin.mode),
        ("--nproc", given.nproc, pin.scored_nproc),
    ):
        if fixed is not None and fixed != pinned:
            wrong.append(f"{option} {fixed} (the pin: {'none' if pinned is None else pinned})")
    if wrong:
        raise UsageError(f"--pin {name} is contradicted by {'; '.join(wrong)}; leave out the one or the other")
    chosen: dict[str, Any] = {
        "seq_len": given.sequence_length,
        "token_budget": given.token_budget,
        "seeds": given.seeds,
        "wall_clock_seconds": given.budget_seconds,
        "val_byte_budget": given.val_byte_budget,
    }
    return replace(pin, **{field: value for field, value in chosen.items() if value is not None})


def _places(given: Given, mode: str, settings: PrismSettings) -> tuple[str, str | None, str | None]:
    """-> (data, val, phase 2). The mounts that the environment names stand in for what is not given."""
    data, val = given.data, given.val
    if mode == FULL_SCALE:
        phase2 = given.phase2 or (settings.phase2_data_dir if data is None else phase2_sibling(data))
        return data or settings.base_eval_train_data_dir, val or settings.base_eval_val_data_dir, phase2
    if given.phase2 is not None:
        raise UsageError(f"--phase2 {given.phase2}: only {FULL_SCALE} has a second phase; add --mode {FULL_SCALE}")
    if data is None:
        data = settings.base_eval_train_data_dir
        if not Path(data).is_dir():
            raise UsageError(
                f"--data is missing and {data} (PRISM_BASE_EVAL_TRAIN_DATA_DIR) is no directory; "
                "give --data sample for the bundled text"
            )
        if val is None and Path(settings.base_eval_val_data_dir).is_dir():
            val = settings.base_eval_val_data_dir
    return data, val, None
