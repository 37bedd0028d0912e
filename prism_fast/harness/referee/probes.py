"""Probes of a prediction: another suffix must leave earlier logits exactly equal, in another process too.

A batch is read as one line of text: rows in order, positions in order. On secretly chosen batches everything after a
secret cut is replaced by real text from elsewhere and given to a *shadow* evaluator, a second process that reads the
same weights and has seen none of the batches. Up to the cut its logits must equal the scored ones bit for bit. They
cannot if the model looks ahead (at later tokens, or at the rows after), answers from what it remembers of earlier
batches, or at random; and the evaluator that is scored sees nothing by which to tell a probed batch from another.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np

from prism_fast.harness.referee.evaluator_client import Evaluator, Prediction
from prism_fast.protocol import constants as c

PROBE_ONE_IN = 16
FIRST_PROBE_WITHIN = 8  # batches: a run of any length is probed
SUSPECTS = 8  # positions of a batch
# Logits this close count as equal. A model whose matrix products have data-dependent shapes (routed experts) rounds
# differently when other tokens change; a look ahead that moves no logit by more gains under 2e-4 nats a token.
TOLERANCE = 1e-4
POSITIONS_COMPARED = 512  # at a time: their logits are copies


class ProbePlan:
    """Which batches are probed, and where. Drawn from the system's randomness, which no bundle can reproduce."""

    def __init__(self, batches: int) -> None:
        self._random = secrets.SystemRandom()
        self._first = self._random.randrange(max(1, min(FIRST_PROBE_WITHIN, batches)))

    def probes(self, index: int) -> bool:
        return index == self._first or self._random.randrange(PROBE_ONE_IN) == 0

    def cut(self, positions: int) -> int:
        """Positions kept: at least 1, and at least one is replaced."""
        return self._random.randrange(1, positions)

    def cut_after(self, surprise: np.ndarray) -> int:
        """A cut that half the time falls right after one of the positions predicted suspiciously well.

        `surprise` [B, L]: nats by which a position's target was predicted better than its frequency explains. A
        model that looks ahead at a few positions only would slip past uniform cuts; but it must look where that pays.
        """
        flat = np.nan_to_num(surprise.reshape(-1)[:-1], nan=-np.inf, neginf=-np.inf)
        if self._random.randrange(2):
            return self.cut(flat.size + 1)
        best = np.argpartition(flat, -min(SUSPECTS, flat.size))[-min(SUSPECTS, flat.size) :]
        return int(best[self._random.randrange(len(best))]) + 1


class TokenFrequencies:
    """How often each id has been a target so far: what a token costs before anything is learned of its context."""

    def __init__(self, n_vocab: int) -> None:
        self._counts = np.ones(n_vocab, np.int64)
        self._total = n_vocab

    def add(self, targets: np.ndarray) -> None:
        """`targets`: int64 of any shape; negative ones are not scored and do not count."""
        scored = targets[targets >= 0]
        np.add.at(self._counts, scored, 1)
        self._total += scored.size

    def nats(self, targets: np.ndarray) -> np.ndarray:
        """float64 of the same shape; -inf where there is no target."""
        cost = np.log(self._total) - np.log(self._counts[np.maximum(targets, 0)])
        return np.where(targets >= 0, cost, -np.inf)


def broken_rule(
    scored: Prediction, tokens: np.ndarray, other: np.ndarray, cut: int, shadow: Evaluator, autocast: int = 0
) -> str | None:
    """Asks the shadow for `tokens` with `other`'s suffix: -> the rule that the scored answer is seen to break, or None.

    After a difference the shadow is given the very tokens that were scored: if it then agrees, the suffix made the
    difference; if not, the answers are not a function of weights and tokens.
    """
    variant, fused = with_other_suffix(tokens, other, cut), scored.head is not None
    if same_answers(scored, shadow.predict(variant, autocast, fused=fused), cut):
        return None
    same = same_answers(scored, shadow.predict(tokens, autocast, fused=fused), tokens.size)
    return c.RULE_NONCAUSAL if same else c.RULE_NONDETERMINISTIC


def with_other_suffix(tokens: np.ndarray, other: np.ndarray, cut: int) -> np.ndarray:
    """`tokens` [B, L] up to position `cut` of its flattened form, then `other`'s text (recycled when it is shorter)."""
    variant = tokens.copy().reshape(-1)
    variant[cut:] = np.resize(other.reshape(-1), variant.size)[cut:]
    return variant.reshape(tokens.shape)


def same_answers(first: Prediction, second: Prediction, cut: int) -> bool:
    """`same_prefix` of two answers' logits. Those of heads are equal where what goes into the head is, bit for bit, and
    are made and compared where it is not."""
    if first.head_width != second.head_width:
        return False
    if first.head is not None and second.head is not None:
        one, other = (p.head.hidden.view(-1, p.head.hidden.shape[2])[:cut] for p in (first, second))  # type: ignore[union-attr]
        if one.shape == other.shape and one.dtype == other.dtype and _same_bits(one, other):
            return True
    for begin in range(0, cut, POSITIONS_COMPARED):
        end = min(cut, begin + POSITIONS_COMPARED)
        if not same_prefix(
            first.logits_between(begin, end)[None], second.logits_between(begin, end)[None], end - begin
        ):
            return False
    return True


def _same_bits(first: Any, second: Any) -> bool:
    import torch

    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return torch.equal(first.reshape(-1).view(word), second.reshape(-1).view(word))


def same_prefix(first: Any, second: Any, cut: int) -> bool:
    """Whether two logits tensors [B, L, V] are equal at every position before `cut`: bit for bit, or to TOLERANCE."""
    import torch

    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    kept = cut * first.shape[2]
    first, second = first.reshape(-1)[:kept], second.reshape(-1)[:kept]
    if _same_bits(first, second):
        return True
    return torch.allclose(first.double(), second.double(), rtol=0.0, atol=TOLERANCE, equal_nan=True)
