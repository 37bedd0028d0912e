"""The reference backend: plain torch on any device, float64-capable, differentiable twice. Clear before fast.

Every other backend is tested against this one in float64. It holds whole [N, V] tensors and reads them many times.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prism_fast.kernels.backends import LossOptions, RowNll, RowShard

name = "torch"


def why_not(device: torch.device) -> str | None:
    return None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Rows(NamedTuple):
    logits: Tensor  # relative to the row's maximum, softcapped, ignored rows 0
    max: Tensor
    target: Tensor  # 0 where ignored or faulty
    ignored: Tensor
    target_logit: Tensor  # relative to the maximum
    nll: Tensor
    lse: Tensor  # relative to the maximum
    faulty: Tensor


def _rows(logits: Tensor, target: Tensor, ignore_index: int, softcap: float | None = None) -> _Rows:
    vocab = logits.shape[1]
    ignored = target == ignore_index
    outside = ~ignored & ((target < 0) | (target >= vocab))
    index = target.masked_fill(ignored | outside, 0).long()[:, None]
    # Ignored rows are not read: what they hold, NaN included, must reach neither value nor gradient.
    z = logits.to(accumulation_dtype(logits.dtype)).masked_fill(ignored[:, None], 0.0)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    top = z.detach().amax(1)
    z = z - top.masked_fill(top == -torch.inf, 0.0)[:, None]
    target_logit = z.gather(1, index)[:, 0]
    # lse over the other classes first: nll = log(1 + exp(rest - target)) keeps a loss of 1e-9, and is never negative.
    others = z.scatter(1, index, -torch.inf)
    alone = (others == -torch.inf).all(1)
    rest = torch.logsumexp(others.masked_fill(alone[:, None], 0.0), 1).masked_fill(alone, -torch.inf)
    nothing = torch.zeros((), dtype=z.dtype, device=z.device)
    nll = torch.logaddexp(rest - target_logit, nothing)
    lse = torch.logaddexp(rest, target_logit)
    faulty = outside | (~ignored & (lse.isnan() | (lse == -torch.inf) | (lse == torch.inf) | top.isnan()))
    nll = nll.masked_fill(faulty, torch.nan).masked_fill(ignored, 0.0)
    return _Rows(z, top, index, ignored, target_logit, nll, lse.masked_fill(faulty, torch.nan), faulty)


def _count(faulty: Tensor) -> Tensor:
    return faulty.sum(dtype=torch.int32).reshape(1)


def check_targets(target: Tensor, vocab: int, ignore_index: int) -> None:
    """Raises IndexError for the first target that is neither ignored nor in range. CPU only: it synchronises."""
    outside = (target != ignore_index) & ((target < 0) | (target >= vocab))
    if bool(outside.any()):
        row = int(outside.nonzero()[0, 0])
        raise index_error(row, int(target[row]), vocab, ignore_index)


def index_error(row: int, target: int, vocab: int, ignore_index: int) -> IndexError:
    return IndexError(
        f"target of row {row} is {target}: expected a class in [0, {vocab}) or ignore_index ({ignore_index})"
    )


def token_nll(logits: Tensor, target: Tensor, ignore_index: int, with_correct: bool, with_entropy: bool) -> RowNll:
    r = _rows(logits, target, ignore_index)
    lse = (r.max + r.lse).masked_fill(r.ignored, 0.0)
    bad = r.ignored | r.faulty
    correct = (r.logits.argmax(1) == r.target[:, 0]) & ~bad if with_correct else None
    entropy = None
    if with_entropy:
        log_p = r.logits - r.lse[:, None]
        p = log_p.exp()
        entropy = -(p * log_p).masked_fill(p == 0, 0.0).sum(1)
        entropy = entropy.clamp(min=0).masked_fill(r.faulty, torch.nan).masked_fill(r.ignored, 0.0)
    return RowNll(r.nll, lse, correct, entropy, _count(r.faulty))


def token_nll_shard(logits: Tensor, target: Tensor, ignore_index: int, vocab_start: int) -> RowShard:
    vocab = logits.shape[1]
    ignored = target == ignore_index
    local = target.long() - vocab_start
    here = ~ignored & (local >= 0) & (local < vocab)
    z = logits.to(accumulation_dtype(logits.dtype))
    index = local.masked_fill(~here, 0)[:, None]
    target_logit = z.gather(1, index)[:, 0].masked_fill(~here, -torch.inf)
    is_target = torch.zeros_like(z, dtype=torch.bool).scatter(1, index, here[:, None])
    others = z.masked_fill(is_target | ignored[:, None], -torch.inf)
    top = others.amax(1)
    total = (others - top.masked_fill(top == -torch.inf, 0.0)[:, None]).exp().sum(1)
    return RowShard(top, total, target_logit)


def linear_token_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    with_correct: bool,
    with_entropy: bool,
) -> RowNll:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return token_nll(logits, target, ignore_index, with_correct, with_entropy)


def loss_rows(logits: Tensor, target: Tensor, options: LossOptions) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [N], lse [N] float64, faults [1]) as one differentiable expression."""
    if logits.device.type == "cpu" and not torch._C._are_functorch_transforms_active():
        check_targets(target, logits.shape[1], options.ignore_index)
    r = _rows(logits, target, options.ignore_index, options.softcap)
    eps, weight = options.label_smoothing, options.class_weight
    hit = (1.0 - eps) * r.nll
    loss = hit if weight is None else hit * weight[r.target[:, 0]]
    if eps:
        away = r.lse[:, None] - r.logits
        loss = loss + (eps / logits.shape[1]) * (away if weight is None else away * weight).sum(1)
    lse = r.max.double() + r.lse.double()
    if options.z_loss:
        loss = loss + options.z_loss * (r.max + r.lse) ** 2
    loss = loss.masked_fill(r.faulty, torch.nan).masked_fill(r.ignored, 0.0)
    return loss, lse.masked_fill(r.ignored, 0.0), _count(r.faulty)


def cross_entropy_forward(logits: Tensor, target: Tensor, options: LossOptions) -> tuple[Tensor, Tensor, Tensor]:
    return loss_rows(logits.detach(), target, options)


def cross_entropy_backward(
    logits: Tensor, target: Tensor, lse: Tensor, grad_loss: Tensor, options: LossOptions, out: Tensor
) -> None:
    eps, vocab = options.label_smoothing, logits.shape[1]
    ignored = target == options.ignore_index
    outside = ~ignored & ((target < 0) | (target >= vocab))
    index = target.masked_fill(ignored | outside, 0).long()
    z = logits.detach().to(accumulation_dtype(logits.dtype))
    slope = None
    if options.softcap is not None:
        tanh = torch.tanh(z / options.softcap)
        z, slope = options.softcap * tanh, 1.0 - tanh * tanh
    weight = torch.ones(vocab, dtype=z.dtype, device=z.device)
    if options.class_weight is not None:
        weight = options.class_weight
    high = lse.to(z.dtype)
    p = ((z - high[:, None]) - (lse - high).to(z.dtype)[:, None]).exp()
    hit = (1.0 - eps) * weight[index]
    rest = eps / vocab * weight.sum() + 2.0 * options.z_loss * high
    grad = (hit + rest)[:, None] * p - eps / vocab * weight
    log_p = (z.gather(1, index[:, None])[:, 0].double() - lse).to(z.dtype)
    at_target = hit * torch.expm1(log_p) + rest * log_p.exp() - eps / vocab * weight[index]
    grad = grad.scatter(1, index[:, None], at_target[:, None])
    if slope is not None:
        grad = grad * slope
    grad = grad * grad_loss[:, None]
    out.copy_(grad.masked_fill((ignored | outside)[:, None], 0.0))


def cross_entropy_forward_backward(
    logits: Tensor, target: Tensor, grad_loss: Tensor, options: LossOptions, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    loss, lse, faults = cross_entropy_forward(logits, target, options)
    cross_entropy_backward(logits, target, lse, grad_loss, options, out)
    return loss, lse, faults


def linear_cross_entropy_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: LossOptions,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return cross_entropy_forward(torch.nn.functional.linear(hidden, weight, bias), target, options)


def linear_cross_entropy_backward(
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
    grad = torch.nn.functional.linear(hidden, weight, bias)
    cross_entropy_backward(grad, target, lse, grad_loss, options, grad)
    return (
        grad @ weight if needs[0] else None,
        grad.T @ hidden if needs[1] else None,
        grad.sum(0, dtype=accumulation_dtype(grad.dtype)).to(grad.dtype) if needs[2] else None,
    )


def linear_cross_entropy_forward_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    grad_loss: Tensor,
    options: LossOptions,
    chunk_tokens: int,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    forward = linear_cross_entropy_forward(hidden, weight, bias, target, options, chunk_tokens)
    grads = linear_cross_entropy_backward(
        hidden, weight, bias, target, forward[1], grad_loss, options, chunk_tokens, needs
    )
    return *forward, *grads


def gradient_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


def scale_rows(rows: Tensor, factor: Tensor) -> None:
    rows.mul_(factor[:, None])


def sum_rows(values: Tensor) -> Tensor:
    # In lines of fixed length: one long sum is cut by the number of threads.
    line = 1024
    wide = torch.nn.functional.pad(values.double(), (0, -len(values) % line)).view(-1, line)
    return wide.sum(1).sum().to(values.dtype)


def batch_code_length(nll: Tensor, target: Tensor, token_bytes: Tensor, fault_nats: float, ignore_index: int) -> Tensor:
    scored = target != ignore_index
    known = scored & (target >= 0) & (target < len(token_bytes))
    spelled = token_bytes[target.masked_fill(~known, 0).long()].masked_fill(~known, 0)
    text, special = known & (spelled > 0), known & (spelled == 0)
    broken = known & ~nll.isfinite()
    nats = nll.double().masked_fill(broken, fault_nats)

    def in_order(values: Tensor) -> Tensor:
        rows = torch.zeros(values.shape[0], dtype=torch.float64, device=values.device)
        for column in range(values.shape[1]):
            rows = rows + values[:, column]
        total = torch.zeros((), dtype=torch.float64, device=values.device)
        for row in range(values.shape[0]):
            total = total + rows[row]
        return total

    sums = (
        in_order(nats.masked_fill(~text, 0.0)),
        in_order(nats.masked_fill(~special, 0.0)),
        spelled.sum(dtype=torch.int64),
        text.sum(dtype=torch.int64),
        special.sum(dtype=torch.int64),
        (broken | (scored & ~known)).sum(dtype=torch.int64),
    )
    return torch.stack([value.double() for value in sums])
