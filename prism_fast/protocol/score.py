"""The score, computed once, here, from the ledger's sums and the held-out sums. Higher is better.

Nothing observed (wall clock, GPU count, memory, anything a miner reports) is a parameter of any function in this
file; that is how "speed never ranks" is kept.

    bpb            = nats / ln 2 / bytes                              (prequential: each batch before its update)
    heldout_delta  = min(bpb of the random-init twin, bpb of the uniform code) - bpb of the trained weights
    final_score    = ((100 + heldout_delta) * p + secondary) * m
    secondary      = min(1e-3 p, 0.5 p 5e-3) / (1 + prequential bpb)

p = 0.5 when the train-to-val gap exceeds 1.0 bpb (memorisation), else 1; m = 0 on a step-0 anomaly or a broken rule,
else 1. Without held-out figures the score is degraded to m / (1 + bpb) and can never take the crown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleFailed


@dataclass(frozen=True)
class CodeLength:
    """A code length: nats over the scored targets, and what those targets cover."""

    nats: float
    bytes: int
    tokens: int

    @property
    def bits(self) -> float:
        return self.nats / c.LN2

    @property
    def bpb(self) -> float:
        """Bits per UTF-8 byte. Raises ValueError when nothing was covered."""
        if self.bytes <= 0:
            raise ValueError(f"no bits per byte: {self.bytes} bytes were covered")
        return self.nats / c.LN2 / self.bytes


def uniform_bpb(n_vocab: int, tokens: int, n_bytes: int) -> float:
    """Bits per byte of the code that gives every one of `n_vocab` tokens the same probability."""
    return tokens * math.log2(n_vocab) / n_bytes


@dataclass(frozen=True)
class HeldOut:
    """The held-out sums of one run, on one and the same split, and the converged sums on a train prefix."""

    trained: CodeLength
    twin: CodeLength
    train_prefix: CodeLength | None
    n_vocab: int

    @property
    def uniform(self) -> float:
        return uniform_bpb(self.n_vocab, self.trained.tokens, self.trained.bytes)


@dataclass(frozen=True)
class Score:
    """The figures of a manifest's `score` block."""

    final_score: float
    prequential_bpb: float
    heldout_delta: float | None
    val_bpb_trained: float | None
    val_bpb_random_init: float | None
    val_bpb_uniform: float | None
    train_bpb_converged: float | None
    train_heldout_gap: float | None
    anti_cheat_multiplier: float
    memorization_flag: bool
    memorization_penalty: float
    step0_anomaly: bool
    step0_anomaly_threshold_nats: float
    no_learning: bool
    degraded: bool
    flags: list[str] = field(default_factory=list)


def compute_score(
    online: CodeLength,
    *,
    step0_loss: float,
    head_width: int,
    faults: int,
    heldout: HeldOut | None,
    violations: Sequence[str] = (),
    cap_twin_at_uniform: bool = True,
) -> Score:
    """Folds the ledger's and the held-out sums to the score.

    `step0_loss`: mean nats per scored token of the first batch. `head_width`: the logits' last dimension.
    `violations`: rules that the run was seen to break (`prism:noncausal` ...); any of them zeroes the score.
    Raises BundleFailed (`prism:degenerate`) for a run that must not be ranked: nothing covered, not finite, bpb <= 0.
    """
    if online.bytes <= 0 or online.tokens <= 0:
        raise BundleFailed(
            f"the run covered {online.bytes} bytes in {online.tokens} scored tokens: nothing to score",
            rule=c.RULE_DEGENERATE,
        )
    bpb = online.bpb
    if not math.isfinite(bpb) or bpb <= 0.0:
        raise BundleFailed(
            f"the run's prequential bits per byte is {bpb!r}; expected a finite number above 0", rule=c.RULE_DEGENERATE
        )
    threshold = c.STEP0_ANOMALY_FRACTION * math.log(head_width)
    step0_anomaly = not step0_loss >= threshold
    flags: list[str] = list(violations)
    if step0_anomaly:
        flags.append("step0_anomaly")
    if faults:
        flags.append("nan_inf")
    if bpb > c.IMPLAUSIBLE_BPB:
        flags.append("implausible_bpb")
    multiplier = 0.0 if step0_anomaly or violations else 1.0

    if heldout is None:
        no_learning = bpb >= uniform_bpb(head_width, online.tokens, online.bytes)
        if no_learning:
            flags.append("no_learning")
        flags.append("degraded_no_heldout")
        return Score(
            final_score=multiplier / (1.0 + bpb),
            prequential_bpb=bpb,
            heldout_delta=None,
            val_bpb_trained=None,
            val_bpb_random_init=None,
            val_bpb_uniform=None,
            train_bpb_converged=None,
            train_heldout_gap=None,
            anti_cheat_multiplier=multiplier,
            memorization_flag=False,
            memorization_penalty=1.0,
            step0_anomaly=step0_anomaly,
            step0_anomaly_threshold_nats=threshold,
            no_learning=no_learning,
            degraded=True,
            flags=flags,
        )

    trained, twin, uniform = heldout.trained.bpb, heldout.twin.bpb, heldout.uniform
    for label, value in (("trained weights", trained), ("random-init twin", twin)):
        if not math.isfinite(value) or value <= 0.0:
            raise BundleFailed(
                f"held-out bits per byte of the {label} is {value!r}; expected a finite number above 0",
                rule=c.RULE_DEGENERATE,
            )
    reference = min(twin, uniform) if cap_twin_at_uniform else twin
    delta = reference - trained
    converged = heldout.train_prefix.bpb if heldout.train_prefix is not None else None
    gap = trained - converged if converged is not None else None
    memorised = gap is not None and gap > c.MEMORIZATION_GAP_BPB
    penalty = c.MEMORIZATION_MULTIPLIER if memorised else 1.0
    if memorised:
        flags.append("memorization")
    no_learning = delta <= 0.0
    if no_learning:
        flags.append("no_learning")
    secondary = min(c.SECONDARY_SCALE * penalty, c.SECONDARY_CEILING * penalty) / (1.0 + bpb)
    return Score(
        final_score=((c.PRIMARY_BASE + delta) * penalty + secondary) * multiplier,
        prequential_bpb=bpb,
        heldout_delta=delta,
        val_bpb_trained=trained,
        val_bpb_random_init=twin,
        val_bpb_uniform=uniform,
        train_bpb_converged=converged,
        train_heldout_gap=gap,
        anti_cheat_multiplier=multiplier,
        memorization_flag=memorised,
        memorization_penalty=penalty,
        step0_anomaly=step0_anomaly,
        step0_anomaly_threshold_nats=threshold,
        no_learning=no_learning,
        degraded=False,
        flags=flags,
    )
