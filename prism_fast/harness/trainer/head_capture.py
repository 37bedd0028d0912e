"""Takes the input of a model's linear head in place of its logits, so that [N, V] is never made.

The call of the head is answered with logits that have a shape, a dtype and a device, but no numbers yet. If the model
returns them as they are, their recipe (hidden states, weight, bias) is what is scored. Whatever else is done with them
(a cap, a scale, a mask, a slice, another dtype) first makes them, by the very call that the model made, and goes on
with them: the output is then the plain forward's. So nothing has to be known of a model, and no way of using its logits
can be overlooked; only the tensors of the recipe must not be written to afterwards, which their versions show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # what autocast casts, and what it casts to


class HeadInput(NamedTuple):
    """logits = hidden [B, L, H] @ weight [V, H].T + bias [V], all of one dtype. `weight`, `bias`: as the model has them
    in `own_weight`, `own_bias`, which an autocast may have made another dtype of."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    own_weight: Tensor
    own_bias: Tensor | None


class _Written(Exception):
    """A tensor of the recipe was written to before the logits were needed."""


class UnmadeLogits(Tensor):
    """Logits that are made at the first operation on them; without storage until then, and after."""

    head: HeadInput
    made: Tensor | None
    _make: Callable[[], Tensor]
    _versions: tuple[int, ...]

    @staticmethod
    def __new__(cls, head: HeadInput, make: Callable[[], Tensor]) -> UnmadeLogits:
        self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            (*head.hidden.shape[:-1], head.weight.shape[0]),
            dtype=head.hidden.dtype,
            device=head.hidden.device,
            requires_grad=False,
        )
        self.head, self._make, self.made = head, make, None
        self._versions = self._read_versions()
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(UnmadeLogits, UnmadeLogits.value, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"UnmadeLogits({tuple(self.shape)})"

    def value(self) -> Tensor:
        """The logits themselves."""
        if self.made is None:
            self.check_unwritten()
            self.made = self._make()
        return self.made

    def check_unwritten(self) -> None:
        if self._read_versions() != self._versions:
            raise _Written

    def _read_versions(self) -> tuple[int, ...]:
        head = self.head
        own = (head.own_weight,) if head.own_bias is None else (head.own_weight, head.own_bias)
        return tuple(t._version for t in (head.hidden, *own))


class _Watch(TorchFunctionMode):
    """Answers products with a [width, H] matrix with `UnmadeLogits`; everything else runs as ever."""

    def __init__(self, tokens_shape: torch.Size, width: int) -> None:
        super().__init__()
        self._leading, self._width = tokens_shape, width

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            logits = self._linear(*args, **kwargs)
        elif func in _PRODUCTS and len(args) == 2 and not kwargs:
            logits = self._product(*args)
        else:
            logits = None
        return func(*args, **kwargs) if logits is None else logits

    def _linear(self, input: Any, weight: Any, bias: Any = None) -> UnmadeLogits | None:
        if not (isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] == self._width):
            return None
        return self._unmade(input, weight, bias, lambda x, w, b: F.linear(x, w, b))

    def _product(self, input: Any, matrix: Any) -> UnmadeLogits | None:
        """hidden @ weight.T: the weight is the matrix' own transpose."""
        if not (isinstance(matrix, Tensor) and matrix.dim() == 2 and matrix.shape[1] == self._width):
            return None
        return self._unmade(input, matrix.t(), None, lambda x, w, _: torch.matmul(x, w.t()))

    def _unmade(self, hidden: Any, weight: Tensor, bias: Any, make: Any) -> UnmadeLogits | None:
        tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
        plain = all(type(t) in (Tensor, nn.Parameter) and not t.is_inference() for t in tensors)
        if not plain or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        kind = hidden.device.type
        if hidden.shape != (*self._leading, weight.shape[1]) or any(t.device != hidden.device for t in tensors):
            return None
        own_weight, own_bias = weight, bias
        if torch.is_autocast_enabled(kind):
            if any(t.dtype not in _DTYPES for t in tensors):
                return None
            cast = torch.get_autocast_dtype(kind)
            hidden, weight = hidden.to(cast), weight.to(cast)
            bias = None if bias is None else bias.to(cast)
        if len({t.dtype for t in (hidden, weight, *([] if bias is None else [bias]))}) > 1:
            return None
        if bias is not None and bias.shape != weight.shape[:1]:
            return None

        def made() -> Tensor:
            with torch.autocast(kind, enabled=False), torch.no_grad():
                return make(hidden, weight, bias)

        return UnmadeLogits(HeadInput(hidden, weight, bias, own_weight, own_bias), made)


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile hides operations of the model."""
    return any(
        type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) is not None
        for m in model.modules()
    )


def first_output(output: Any) -> Any:
    """What a model's logits are taken from: its output, `.logits`, or the first of a tuple."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, tuple | list) and output:
        return output[0]
    return logits


def forward_to_head(forward: Callable[[Tensor], Any], tokens: Tensor, width: int) -> tuple[Any, HeadInput | None, str]:
    """Runs `forward(tokens)` with a head of `width` classes left out: -> (output, None, why) or (None, head, "").

    `forward` runs without gradient. A forward that cannot go without its logits' numbers is run again, plainly.
    """
    try:
        with _Watch(tokens.shape, width):
            output = forward(tokens)
        found = first_output(output)
        if type(found) is not UnmadeLogits:
            return output, None, "processed"
        if found.made is not None:
            return found.made, None, "processed"
        found.check_unwritten()
        return None, found.head, ""
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # the bundle's code saw a tensor unlike others; whether it fails by itself is seen now
        return forward(tokens), None, "failed"
