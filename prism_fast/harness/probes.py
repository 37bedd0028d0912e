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

from prism_fast.harness.evaluator_client import Evaluator
from prism_fast.protocol import constants as c

PROBE_ONE_IN = 16
FIRST_PROBE_WITHIN = 8  # batches: a run of any length is probed


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


def broken_rule(
    scored: Any, tokens: np.ndarray, other: np.ndarray, cut: int, shadow: Evaluator, autocast: int = 0
) -> str | None:
    """Asks the shadow for `tokens` with `other`'s suffix: -> the rule that `scored` logits are seen to break, or None.

    After a difference the shadow is given the very tokens that were scored: if it then agrees, the suffix made the
    difference; if not, the answers are not a function of weights and tokens.
    """
    variant = with_other_suffix(tokens, other, cut)
    if same_prefix(scored, shadow.predict(variant, autocast).logits, cut):
        return None
    same = same_prefix(scored, shadow.predict(tokens, autocast).logits, tokens.size)
    return c.RULE_NONCAUSAL if same else c.RULE_NONDETERMINISTIC


def with_other_suffix(tokens: np.ndarray, other: np.ndarray, cut: int) -> np.ndarray:
    """`tokens` [B, L] up to position `cut` of its flattened form, then `other`'s text (recycled when it is shorter)."""
    variant = tokens.copy().reshape(-1)
    variant[cut:] = np.resize(other.reshape(-1), variant.size)[cut:]
    return variant.reshape(tokens.shape)


def same_prefix(first: Any, second: Any, cut: int) -> bool:
    """Whether two logits tensors [B, L, V] are equal, bit for bit, at every position before `cut`."""
    import torch

    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    kept = cut * first.shape[2]
    return torch.equal(first.reshape(-1)[:kept].view(word), second.reshape(-1)[:kept].view(word))
