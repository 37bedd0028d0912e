"""Scoring: the negative log-likelihood of each token, in one pass over the logits, without a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prism_fast.kernels.backends import RowNll, RowShard
from prism_fast.kernels.backends.torch import accumulation_dtype
from prism_fast.kernels.dispatch import backend_for
from prism_fast.kernels.operators import operator
from prism_fast.kernels.shapes import as_hidden_rows, as_logit_rows, autocast_head


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
        hidden, weight, bias = autocast_head(logits_or_hidden.detach(), weight.detach(), bias)
        hidden, weight, bias, ids = as_hidden_rows(hidden, weight, None if bias is None else bias.detach(), target)
        results = torch.ops.prism_fast.linear_token_nll(
            hidden, weight, bias, ids, ignore_index, with_correct, with_entropy
        )
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


def merge_shards(shards: Sequence[RowShard], target: Tensor, *, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """(nll, lse), shaped like target, from `token_nll_shard` of every part of the vocabulary, in order of its classes.

    Gather the three vectors of each shard (an all-gather of 3 N numbers) and call this on every rank. It does not
    matter on which shard the target lies; if on none, the row is +inf, as for a target whose logit is -inf.
    """
    top, total, target_logit = (torch.stack(parts).double() for parts in zip(*shards, strict=True))
    target_logit = target_logit.amax(0)
    most = top.amax(0)
    rest = (total * (top - most.masked_fill(most == -torch.inf, 0.0)).exp()).sum(0)
    # ln(1 + sum of the others / target): exact for small losses, never negative. As in the unsharded kernels.
    others = rest.log() + most
    nll = torch.logaddexp(others - target_logit, torch.zeros_like(most))
    nll = torch.where(rest == 0.0, torch.where(target_logit == -torch.inf, torch.nan, 0.0), nll)
    lse = torch.where(target_logit == -torch.inf, others, target_logit + nll)
    ignored = target.reshape(-1) == ignore_index
    kind, shape = shards[0].max.dtype, target.shape
    nll, lse = (value.masked_fill(ignored, 0.0).to(kind).view(shape) for value in (nll, lse))
    return nll, lse


def token_nll_shard(logits: Tensor, target: Tensor, *, vocab_start: int, ignore_index: int = -100) -> RowShard:
    """The part of `token_nll` that one shard of the vocabulary contributes; `merge_shards` puts the parts together.

    Args:
        logits: `[..., V_shard]`, the classes [vocab_start, vocab_start + V_shard) of the whole vocabulary.
        target: class ids of the whole vocabulary, `[...]`.

    Returns:
        `(max, sum, target_logit)`, float32 (float64 for float64 logits), `[N]` with N the number of targets.
    """
    rows, ids = as_logit_rows(logits.detach(), target, class_dim_1=False)
    return RowShard(*torch.ops.prism_fast.token_nll_shard(rows, ids, ignore_index, vocab_start))


@operator("token_nll")
def _token_nll(
    logits: Tensor, target: Tensor, ignore_index: int, with_correct: bool, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _without_none(backend_for(logits.device).token_nll(logits, target, ignore_index, with_correct, with_entropy))


@_token_nll.register_fake
def _(
    logits: Tensor, target: Tensor, ignore_index: int, with_correct: bool, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _fake_rows(logits, with_correct, with_entropy)


@operator("linear_token_nll")
def _linear_token_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    with_correct: bool,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    backend = backend_for(hidden.device)
    return _without_none(
        backend.linear_token_nll(hidden, weight, bias, target, ignore_index, with_correct, with_entropy)
    )


@_linear_token_nll.register_fake
def _(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _fake_rows(hidden, *rest[-2:])


@operator("token_nll_shard")
def _token_nll_shard(
    logits: Tensor, target: Tensor, ignore_index: int, vocab_start: int
) -> tuple[Tensor, Tensor, Tensor]:
    shard = backend_for(logits.device).token_nll_shard(logits, target, ignore_index, vocab_start)
    return shard.max, shard.sum, shard.target_logit


@_token_nll_shard.register_fake
def _(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    like = logits.new_empty(logits.shape[0], dtype=accumulation_dtype(logits.dtype))
    return like, torch.empty_like(like), torch.empty_like(like)


# A registered operator returns tensors, never None: what was not asked for is an empty one.


def _without_none(r: RowNll) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    correct = r.nll.new_empty(0, dtype=torch.bool) if r.correct is None else r.correct
    return r.nll, r.lse, correct, r.nll.new_empty(0) if r.entropy is None else r.entropy, r.faults


def _fake_rows(rows: Tensor, with_correct: bool, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    count = rows.shape[0]
    nll = rows.new_empty(count, dtype=accumulation_dtype(rows.dtype))
    return (
        nll,
        torch.empty_like(nll),
        rows.new_empty(count if with_correct else 0, dtype=torch.bool),
        nll.new_empty(count if with_entropy else 0),
        rows.new_empty(1, dtype=torch.int32),
    )
