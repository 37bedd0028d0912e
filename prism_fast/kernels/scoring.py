"""Scoring: the negative log-likelihood of each token, in one pass over the logits, without a gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prism_fast.kernels.backends.torch import accumulation_dtype
from prism_fast.kernels.dispatch import backend_for
from prism_fast.kernels.shapes import as_logit_rows


class TokenNll(NamedTuple):
    """What `token_nll` gives when more than the loss is asked for; a field not asked for is None.

    nll, lse, entropy: float32 (float64 for float64 logits), shaped like target, in nats.
    correct: bool, shaped like target. faults: int32 [1], the number of faulty rows, on the device of the logits.
    """

    nll: Tensor
    lse: Tensor | None
    correct: Tensor | None
    entropy: Tensor | None
    faults: Tensor | None


def token_nll(
    logits_or_hidden: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    with_lse: bool = False,
    with_correct: bool = False,
    with_entropy: bool = False,
    with_faults: bool = False,
) -> Tensor | TokenNll:
    """-ln p(target) of each token, for scoring: one pass, no gradient, no synchronisation with the device.

    Args:
        logits_or_hidden: logits `[..., V]`; or, with `weight`, hidden states `[..., H]`, and then no [N, V] is held.
            float64, float32, bfloat16 or float16, any strides; never written to.
        target: class ids `[...]`, integer.
        weight, bias: the head, `[V, H]` and `[V]`, in the dtype of the hidden states.
        ignore_index: targets with this id are skipped: their logits are not read, their results are 0.
        with_lse: also ln sum_v exp(logit_v).
        with_correct: also whether the target is the argmax (the first of the largest logits).
        with_entropy: also the entropy of the predicted distribution.
        with_faults: also the count of faulty rows, as a tensor, so that reading it can wait.

    Returns:
        nll, float32 (float64 for float64 logits), nats, shaped like `target`; with any `with_*` flag a `TokenNll`.
        A faulty row (target outside [0, V), NaN or +inf among its logits, or all of them -inf) is NaN and leaves
        every other row's bits alone. A loss is never negative, a vocabulary of one gives exactly 0, and a row's bits
        depend neither on the rows beside it nor on the number of threads.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    if weight is None:
        if bias is not None:
            raise ValueError("bias without weight: pass the head's weight [V, H] too, or logits alone")
        rows, ids = as_logit_rows(logits_or_hidden.detach(), target, class_dim_1=False)
        results = torch.ops.prism_fast.token_nll(rows, ids, ignore_index, with_correct, with_entropy)
    else:
        raise NotImplementedError
    nll, lse, correct, entropy, faults = results
    nll = nll.view(target.shape)
    if not (with_lse or with_correct or with_entropy or with_faults):
        return nll
    return TokenNll(
        nll,
        lse.view(target.shape) if with_lse else None,
        correct.view(target.shape) if with_correct else None,
        entropy.view(target.shape) if with_entropy else None,
        faults if with_faults else None,
    )


@torch.library.custom_op("prism_fast::token_nll", mutates_args=())
def _token_nll(
    logits: Tensor, target: Tensor, ignore_index: int, with_correct: bool, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    r = backend_for(logits.device).token_nll(logits, target, ignore_index, with_correct, with_entropy)
    nothing = logits.new_empty(0, dtype=torch.bool)
    return (
        r.nll,
        r.lse,
        nothing if r.correct is None else r.correct,
        r.nll.new_empty(0) if r.entropy is None else r.entropy,
        r.faults,
    )


@_token_nll.register_fake
def _(
    logits: Tensor, target: Tensor, ignore_index: int, with_correct: bool, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    nll = logits.new_empty(rows, dtype=accumulation_dtype(logits.dtype))
    return (
        nll,
        torch.empty_like(nll),
        logits.new_empty(rows if with_correct else 0, dtype=torch.bool),
        nll.new_empty(rows if with_entropy else 0),
        logits.new_empty(1, dtype=torch.int32),
    )
