"""Losses by float64 torch, a few lines each, differentiable: what every backend is held to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def loss_rows(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    z = logits.double()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    weight = None if weight is None else weight.double()
    target = target.long()
    loss = F.cross_entropy(
        z, target, weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    return loss + (z_loss * z.logsumexp(1) ** 2).masked_fill(target == ignore_index, 0.0)


def loss(logits: Tensor, target: Tensor, *, reduction: str = "mean", weight: Tensor | None = None, **options) -> Tensor:
    rows = loss_rows(logits, target, weight=weight, **options)
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    counted = target.long() != options.get("ignore_index", -100)
    if weight is None:
        return rows.sum() / counted.sum()
    return rows.sum() / weight.double()[target.long().masked_fill(~counted, 0)].masked_fill(~counted, 0.0).sum()
