"""The losses as modules, with the arguments of torch.nn.CrossEntropyLoss."""

from __future__ import annotations

import torch
from torch import Tensor

from prism_fast.kernels.from_hidden import linear_cross_entropy
from prism_fast.kernels.from_logits import cross_entropy
from prism_fast.kernels.reduction import check_reduction


class _Loss(torch.nn.Module):
    """Holds the options; the class weights are a buffer, so that they follow the module to its device."""

    class_weight: Tensor | None

    def __init__(
        self,
        class_weight: Tensor | None,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
        z_loss: float,
        softcap: float | None,
    ) -> None:
        super().__init__()
        check_reduction(reduction)
        self.register_buffer("class_weight", class_weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap

    def extra_repr(self) -> str:
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}, z_loss={self.z_loss}, softcap={self.softcap}"
        )


class CrossEntropyLoss(_Loss):
    """`prism_fast.cross_entropy` as a module: `loss(logits, target)`."""

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        inplace_grad: bool = False,
    ) -> None:
        super().__init__(weight, ignore_index, reduction, label_smoothing, z_loss, softcap)
        self.inplace_grad = inplace_grad

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(
            logits,
            target,
            self.class_weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            inplace_grad=self.inplace_grad,
        )


class LinearCrossEntropyLoss(_Loss):
    """`prism_fast.linear_cross_entropy` as a module: `loss(hidden, head.weight, target, head.bias)`.

    The head stays with the model, which may tie it to the embedding; the module holds options alone.
    """

    def __init__(
        self,
        class_weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        chunk_tokens: int | str = "auto",
    ) -> None:
        super().__init__(class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap)
        self.chunk_tokens = chunk_tokens

    def forward(self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_cross_entropy(
            hidden,
            weight,
            target,
            bias=bias,
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            chunk_tokens=self.chunk_tokens,
        )
