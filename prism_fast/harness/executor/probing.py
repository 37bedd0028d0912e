"""Probes of a prediction: another suffix must leave the earlier tokens' nats as they were.

A batch is read as one line of text: rows in order, positions in order. After a batch has been marked, single rows of it
are run again by themselves with everything after a secret cut replaced by other text; up to the cut their nats must be
those that were marked. They cannot if the program looks ahead, at later tokens or at other rows. Rows by themselves
round differently in some models (bfloat16, routed experts): so a difference is only a suspicion, and the verdict comes
from the whole batch, run again in the shape that was marked. Where suspicions turn out to be rounding, whole batches
are probed from then on, fewer of them.

When a batch is probed, and where, is drawn from the system's randomness: weights are fixed before a batch is predicted,
so a trainer that could foresee a probe could switch a look ahead off for it.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable

import numpy as np

from prism_fast.protocol import constants as c

FIRST_PROBE_WITHIN = 8  # batches of a width: a run of any length is probed, and each of its programs
SUSPECTS = 8  # positions of a batch
# Nats this close count as equal: a program that gains less by looking ahead gains nothing. Products whose shapes depend
# on the data (routed experts) round differently when other tokens change.
TOLERANCE = 1e-4
FALSE_ALARMS = 3  # rows that differed while their whole batch did not; then rows are no longer asked
KEPT_ROWS = 64  # of earlier batches, as text that is never later text of the run

# nats float32 [rows, width] of (tokens, targets), int64 [rows, width] each, under the weights that were marked
Nats = Callable[[np.ndarray, np.ndarray], np.ndarray]


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


class Prober:
    """Probes of one stream of batches. `share`: of the rows, on average; `mode`: "rows" or "batches"."""

    def __init__(
        self,
        nats: Nats,
        n_vocab: int,
        share: float,
        *,
        rows_alone: bool = True,
        first_within: int = FIRST_PROBE_WITHIN,
    ) -> None:
        """`rows_alone`: whether a single row can be run for the price of one. `first_within`: batches of each width,
        one of which is surely probed; 1 where nobody can change the weights between them."""
        self._nats, self._share, self._first_within = nats, share, first_within
        self._random = secrets.SystemRandom()
        self._frequencies = TokenFrequencies(n_vocab)
        self._seen: deque[np.ndarray] = deque(maxlen=KEPT_ROWS)
        self._until_first: dict[int, int] = {}  # width -> batches of it before the one that is surely probed
        self._alarms = 0
        self.mode = "rows" if rows_alone else "batches"
        self.rule: str | None = None
        self.rows = 0  # rows run for probes

    def after(self, tokens: np.ndarray, targets: np.ndarray, nats: np.ndarray) -> None:
        """A batch has been marked: int64 [B, L] tokens and targets, float32 [B, L] nats. Sets `rule` on a finding."""
        count, width = tokens.shape
        left = self._until_first.setdefault(width, self._random.randrange(self._first_within))
        self._until_first[width] = left - 1
        if self.rule is None:
            first = left == 0
            if self.mode == "batches":
                probes = 1 if first or self._random.random() < self._share else 0
            else:
                probes = max(int(first), sum(self._random.random() < self._share for _ in range(count)))
            surprise = self._frequencies.nats(targets) - nats if probes else None
            for _ in range(probes):
                assert surprise is not None
                row, cut = self._place(surprise)
                self.rule = self.rule or self._probe(tokens, targets, nats, row, cut)
        self._frequencies.add(targets)
        self._seen.extend(tokens[-min(count, KEPT_ROWS) :].copy())

    def _place(self, surprise: np.ndarray) -> tuple[int, int]:
        """-> (row, positions of it that are kept): right after a position that was scored. Half the time any one of
        them; else one predicted suspiciously well: who looks ahead at few positions must look where that pays."""
        flat = surprise.reshape(-1)
        scored = np.flatnonzero(np.isfinite(flat))
        if not scored.size:
            return 0, 1
        count = scored.size if self._random.randrange(2) else min(SUSPECTS, scored.size)
        best = np.argpartition(flat[scored], -count)[-count:] if count < scored.size else np.arange(count)
        row, position = divmod(int(scored[best[self._random.randrange(count)]]), surprise.shape[1])
        return row, position + 1

    def _probe(self, tokens: np.ndarray, targets: np.ndarray, nats: np.ndarray, row: int, cut: int) -> str | None:
        """-> the rule that is seen to be broken, or None."""
        if self.mode == "rows":
            variant = tokens[row : row + 1].copy()
            variant[0, cut:] = self._other_text(tokens, row, variant.shape[1] - cut)
            self.rows += 1
            alone = self._nats(variant, targets[row : row + 1])
            if _close(alone[0, :cut], nats[row, :cut]):
                return None
        variant = tokens.copy().reshape(-1)
        kept = row * tokens.shape[1] + cut
        variant[kept:] = self._other_text(tokens, row, variant.size - kept)
        self.rows += len(tokens)
        whole = self._nats(variant.reshape(tokens.shape), targets)
        if _close(whole.reshape(-1)[:kept], nats.reshape(-1)[:kept]):
            if self.mode == "rows":
                self._alarms += 1
                self.mode = "batches" if self._alarms >= FALSE_ALARMS else "rows"
            return None
        self.rows += len(tokens)
        same = _close(self._nats(tokens, targets), nats)
        return c.RULE_NONCAUSAL if same else c.RULE_NONDETERMINISTIC

    def _other_text(self, tokens: np.ndarray, row: int, count: int) -> np.ndarray:
        """`count` tokens of earlier batches; before there are any, of this batch from a place further on."""
        if count <= 0:
            return tokens[0, :0]
        if self._seen:
            text = np.concatenate(list(self._seen))
        else:
            text = np.roll(tokens.reshape(-1), -(row * tokens.shape[1] + tokens.shape[1] // 2))
        return np.resize(np.roll(text, -self._random.randrange(text.size)), count)


def _close(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal to TOLERANCE; what is not finite is equal to itself."""
    return bool(np.allclose(one, other, rtol=0.0, atol=TOLERANCE, equal_nan=True))
