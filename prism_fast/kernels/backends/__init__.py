"""What a backend must be able to do, in one page; dispatch picks one of `torch`, `cpp`, `triton`.

A backend is a module of this package with the functions of `Backend` at its top level. The public functions bring
every input to these shapes: logits [N, V] (any strides, 0 included), target [N] (int32 or int64, contiguous), hidden
[N, H], weight [V, H], bias [V]. Losses are *per row and unreduced*; the public layer reduces them, so a backend never
sees "mean". Accumulation is float32 (float64 for float64 input); per-row numbers (losses, upstream gradients, class
weights) have that dtype too. A row is *ignored* when its target is `ignore_index`: its loss and its gradient are 0,
and its logits are not read. A row is *faulty* when its target is outside [0, V), or its log-sum-exp is NaN or every
logit is -inf: its loss and lse are NaN, `faults` (int32 [1] on the device of the logits) counts it once, and no other
row changes by a bit.

Per row, with z' = softcap * tanh(z / softcap) (or z), w the class weights (or 1), eps the smoothing:
    lse  = log sum_v exp(z'_v)
    loss = (1 - eps) * w_t * (lse - z'_t) + eps / V * sum_v w_v * (lse - z'_v) + z_loss * lse^2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class LossOptions:
    """The per-row options of a loss. `class_weight` is contiguous [V] in the accumulation dtype, or None."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    class_weight: Tensor | None = None


class RowNll(NamedTuple):
    """Per-row results of scoring, [N], in the accumulation dtype; `faults` int32 [1].

    `correct` is bool: the target is the first of the row's largest logits (what argmax gives). `entropy` is that of
    the predicted distribution, in nats. Ignored rows: 0 and False; faulty rows: NaN and False.
    """

    nll: Tensor
    lse: Tensor
    correct: Tensor | None
    entropy: Tensor | None
    faults: Tensor


class RowShard(NamedTuple):
    """One vocabulary shard's mergeable part of a row, over every class of the shard *but the target*.

    `max` (-inf if there is none), `sum` of exp(z - max), and `target_logit`, which is -inf on the shards that do not
    hold the target. Keeping the target apart is what lets the merge keep a loss of 1e-9. Ignored rows: (-inf, 0, -inf).
    """

    max: Tensor
    sum: Tensor
    target_logit: Tensor


class Backend(Protocol):
    """The functions a backend module offers. Nothing here synchronises with the device."""

    name: str

    def why_not(self, device: torch.device) -> str | None:
        """Why this backend cannot run on tensors of `device`, as a clause; None if it can. Must not raise."""
        ...

    def token_nll(
        self, logits: Tensor, target: Tensor, ignore_index: int, with_correct: bool, with_entropy: bool
    ) -> RowNll: ...

    def token_nll_shard(self, logits: Tensor, target: Tensor, ignore_index: int, vocab_start: int) -> RowShard:
        """`target` holds ids of the whole vocabulary; column 0 of `logits` is class `vocab_start`."""
        ...

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
        """-> (loss [N], lse [N] float64, faults [1]).

        `lse` is float64 so that the gradient's exp(z - lse) does not lose the digits of a large common offset; ignored
        rows: 0. On the CPU a target out of range raises IndexError.
        """
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
        """Writes d/dlogits of sum_i grad_loss[i] * loss[i] to `out` [N, V], which may be `logits` itself.

        `grad_loss` [N] may have stride 0. Rows with a target out of range get NaN or 0, never a stray read.
        """
        ...

    def cross_entropy_forward_backward(
        self, logits: Tensor, target: Tensor, grad_loss: Tensor, options: LossOptions, out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Forward and backward in one go, each row's gradient made while the row is in cache; as the two above.

        The public layer calls it when it knows the upstream gradient in advance (and `scale_rows` when it guessed
        wrong), with `out` the logits themselves for `inplace_grad`. Bits equal to forward, then backward.
        """
        ...

    def gradient_like(self, tensor: Tensor) -> Tensor:
        """Uninitialised memory for a gradient of `tensor`: its shape, dtype, device and, if dense, strides."""
        ...

    def scale_rows(self, rows: Tensor, factor: Tensor) -> None:
        """rows[i] *= factor[i], in place; rows whose factor is exactly 1 are neither read nor written."""
        ...

    def sum_rows(self, values: Tensor) -> Tensor:
        """Sum of `values` [N] -> [] in their dtype, through float64, in an order that only N decides."""
        ...

    def batch_code_length(
        self, nll: Tensor, target: Tensor, token_bytes: Tensor, fault_nats: float, ignore_index: int
    ) -> Tensor:
        """`nll`, `target` [B, L], `token_bytes` int32 [T] -> float64 [6]; see `prism_fast.kernels.bits_per_byte`."""
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
        """-> (loss [N], lse [N] float64, faults [1]); never holds [N, V]. `chunk_tokens` 0: the backend's choice."""
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

    def linear_cross_entropy_forward_backward(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        grad_loss: Tensor,
        options: LossOptions,
        chunk_tokens: int,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """-> (loss, lse, faults, d hidden, d weight, d bias): the logits are made once instead of twice."""
        ...
