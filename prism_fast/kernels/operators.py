"""Operators of this package in torch's dispatcher, so that torch.compile, export and FakeTensor know them.

`torch.library.custom_op` would do, but the first call of such an operator imports all of torch._dynamo: a second or
more
of processor time in every process that only wants a loss.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("prism_fast", "FRAGMENT")


class Operator:
    """`torch.ops.prism_fast.<name>`, run by `function` on every device, which writes to none of its arguments."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.qualified = f"prism_fast::{name}"
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, _untraced(function), "CompositeExplicitAutograd")
        self.overload = getattr(torch.ops.prism_fast, name).default

    def __call__(self, *arguments: Any) -> Any:
        return self.overload(*arguments)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: the shapes, dtypes and devices of the results."""
        torch.library.register_fake(self.qualified, function, lib=_LIBRARY)
        return function

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., Any] | None = None
    ) -> None:
        torch.library.register_autograd(self.qualified, backward, setup_context=setup_context, lib=_LIBRARY)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Decorator: registers a function of annotated tensors and numbers as `torch.ops.prism_fast.<name>`."""
    return lambda function: Operator(name, function)


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which torch._dynamo leaves alone if anyone has loaded it: raw addresses are none of its business."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*arguments)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*arguments)

    return run
