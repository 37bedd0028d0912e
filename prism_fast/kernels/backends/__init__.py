"""What a backend must be able to do, in one page; dispatch picks one of `torch`, `cpp`, `triton`.

The public functions bring every input to these shapes: logits [N, V] (any strides), target [N] (int32 or int64),
hidden [N, H], weight [V, H], bias [V]. Losses are *per row and unreduced*; the public layer reduces them, so a
backend never sees "mean". Accumulation is float32 (float64 for float64 input). A row is *ignored* when its target is
`ignore_index`: its loss is 0, its gradient is 0, and its logits are not read. A row is *faulty* when its target is
outside [0, V), or its log-sum-exp is NaN or every logit is -inf: its loss is NaN, `faults` (int32 [1] on the
device of the logits) is incremented once, and no other row changes by a bit.

Per row, with z' = softcap * tanh(z / softcap) (or z), w the class weights (or 1), eps the smoothing:
    lse  = log sum_v exp(z'_v)
    loss = (1 - eps) * w_t * (lse - z'_t) + eps / V * sum_v w_v * (lse - z'_v) + z_loss * lse^2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LossOptions:
    """The per-row options of a loss. `class_weight` is float32 [V] or None."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    class_weight: Tensor | None = None


class RowNll(NamedTuple):
    """Per-row results of scoring; float32 [N] (float64 for float64 logits), bool [N] for `correct`."""

    nll: Tensor
    lse: Tensor
    correct: Tensor | None
    entropy: Tensor | None
    faults: Tensor


class RowShard(NamedTuple):
    """One vocabulary shard's mergeable part of a row: running max, sum of exp(z - max), target logit.

    `target_logit` is -inf on the shards that do not hold the target.
    """

    max: Tensor
    sum: Tensor
    target_logit: Tensor


class Backend(Protocol):
    """The functions a backend module offers. Nothing here synchronises with the device."""

    name: str

    def token_nll(
        self, logits: Tensor, target: Tensor, ignore_index: int, with_correct: bool, with_entropy: bool
    ) -> RowNll: ...

    def token_nll_shard(self, logits: Tensor, target: Tensor, ignore_index: int, vocab_start: int) -> RowShard: ...

    def linear_token_nll(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        with_correct: bool,
        with_entropy: bool,
    ) -> RowNll: ...

    def cross_entropy_forward(
        self, logits: Tensor, target: Tensor, options: LossOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> (loss [N], lse [N], faults [1])."""
        ...

    def cross_entropy_backward(
        self,
        logits: Tensor,
        target: Tensor,
        lse: Tensor,
        grad_loss: Tensor,
        options: LossOptions,
        out: Tensor,
    ) -> None:
        """Writes d/dlogits of sum_i grad_loss[i] * loss[i] to `out` [N, V], which may be `logits` itself."""
        ...

    def linear_cross_entropy_forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: LossOptions,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> (loss [N], lse [N], faults [1]); never holds [N, V]."""
        ...

    def linear_cross_entropy_backward(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        lse: Tensor,
        grad_loss: Tensor,
        options: LossOptions,
        chunk_tokens: int,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """-> gradients of (hidden, weight, bias) in their dtypes, each None unless needed; dW sums in float32."""
        ...
