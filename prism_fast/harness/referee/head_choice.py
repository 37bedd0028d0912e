"""Whether predictions are scored from the head's input (`--head fused`): asked for, tried, audited, given up.

One rule for every process that scores: the fused figure must be the plain one to HEAD_TOLERANCE, on random text before
the first batch and, in secret, after batches that were scored; one disagreement and the rest of the run is plain. A
batch is audited once it has been scored: what an audit shows a model it has seen.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

from prism_fast.protocol import constants as c

# Why a model's output is plain logits, by the code an evaluator gives (its word: it can only slow its own run down).
REASONS = {
    "accelerator": "the model is on an accelerator and the scorer is not: moving its head there would cost more",
    "compiled": "the model is compiled, which hides its operations",
    "processed": "the model's output is not one linear head's product as it is",
    "not a parameter": "the head's weight is not a parameter of the model",
    "failed": "the forward failed when its head was left out",
}


class HeadChoice:
    """The state of one run. `fused`: predictions are to be asked for as the head's input."""

    def __init__(self, asked: str, reason: str | None = None) -> None:
        """`reason`: why it is plain from the start, whatever was asked for."""
        self.asked = asked
        self.fused = asked == "fused" and reason is None
        self.reason = reason
        self.audits = 0  # rows predicted both ways
        self.disagreement = 0.0  # the largest seen, relative to the plain figure
        self._secret = random.SystemRandom()

    def give_up(self, reason: str) -> None:
        self.fused = False
        self.reason = self.reason or reason

    def rows_to_audit(self, index: int, rows: int) -> Iterable[int]:
        """Rows of a batch that are also predicted plainly: all of the first, a secret one of a secret share."""
        if not self.fused:
            return ()
        if index == 0:
            return range(rows)
        return (self._secret.randrange(rows),) if self._secret.random() < c.HEAD_AUDIT_SHARE else ()

    def compare(self, where: str, fused: Any, plain: Any) -> None:
        """`fused`, `plain`: nats of the same tokens [...], tensors; `where`: the batch, for the reason given."""
        self.audits += 1
        ours, theirs = fused.double(), plain.double()
        finite = theirs.isfinite()
        one, other = float(ours[finite].sum()), float(theirs[finite].sum())
        difference = abs(one - other) / max(abs(other), 1.0)
        if not bool((ours.isfinite() == finite).all()):
            difference = math.inf
        self.disagreement = max(self.disagreement, difference)
        if not difference <= c.HEAD_TOLERANCE:
            self.give_up(
                f"{where} costs {one:.6f} nats from the head's input and {other:.6f} from the logits, "
                f"which is more than {c.HEAD_TOLERANCE:g} apart"
            )

    def try_out(self, predict: Callable[[bool], tuple[Any, str | None]]) -> None:
        """Before the first batch, on text that is nobody's. `predict(fused)` -> (nats, why it was plain or None)."""
        if not self.fused:
            return
        plain, _ = predict(False)
        fused, reason = predict(True)
        if reason is not None:
            self.give_up(reason)
            return
        self.compare("random text", fused, plain)

    def document(self) -> dict[str, Any]:
        """The manifest's `engine.head`, but for held-out scoring."""
        return {
            "asked": self.asked,
            "used": "fused" if self.fused else "plain",
            "reason": self.reason,
            "audits": self.audits,
            "disagreement": self.disagreement if math.isfinite(self.disagreement) else None,
        }


def compare_rows(
    choice: HeadChoice, where: str, evaluator: Any, tokens: Any, targets: Any, row: int, autocast: int = 0
) -> None:
    """An audit: one row of a batch that has been scored, predicted both ways. `tokens`: numpy; `targets`: a tensor."""
    one = slice(row, row + 1)
    plain = evaluator.predict(tokens[one], autocast).nll(targets[one])
    answer = evaluator.predict(tokens[one], autocast, fused=True)
    if answer.head is None:
        choice.give_up(REASONS[answer.why_plain or "processed"])
        return
    choice.compare(where, answer.nll(targets[one]), plain)
