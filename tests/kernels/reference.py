"""Losses by float64 torch, a few lines each, differentiable: what every backend is held to. And how closely."""

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
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """By torch's own operations in `dtype`."""
    z = logits.to(dtype)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    weight = None if weight is None else weight.to(dtype)
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
    return rows.sum() / weight.to(rows.dtype)[target.long().masked_fill(~counted, 0)].masked_fill(~counted, 0.0).sum()


def assert_as_close_as_torch(
    got: Tensor, by_torch: Tensor, exact: Tensor, *, times: float = 4.0, scale: float = 0.0
) -> None:
    """`got` is within `times` the error that torch's own operations in the same dtype make against float64.

    With a floor, since torch can be exact by luck: two roundings of the largest value, or of `scale` if larger (what
    the value is a small difference of). NaN and inf must be where they belong.
    """
    # The reference rounds too, in float64.
    rounding = torch.finfo(got.dtype).eps * (500 if got.dtype == torch.float64 else 1)
    got, by_torch, exact = got.detach().double(), by_torch.detach().double(), exact.detach().double()
    finite = exact.isfinite()
    assert torch.equal(got.isfinite(), finite)
    assert torch.equal(got[~finite & ~exact.isnan()], exact[~finite & ~exact.isnan()])
    if not finite.any():
        return
    largest = max(float(exact[finite].abs().max()), scale)
    allowed = times * float((by_torch - exact)[finite].abs().nan_to_num(0.0, 0.0, 0.0).max()) + 2 * rounding * largest
    error = float((got - exact)[finite].abs().max())
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e}, largest {largest:.3e}"
