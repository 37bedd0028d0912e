"""Where each tensor of a model's state lies in a shared region: computed by the trainer, adopted by an evaluator.

Adoption is strict: exactly the names of `build_model`'s own state, each in its own shape. What a miner keeps outside
`state_dict()` is in no layout and so does nothing.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prism_fast.harness.process.shared_memory import ALIGNMENT, SharedRegion
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleRejected

DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}
MAX_ENTRIES = 100_000


@dataclass(frozen=True)
class Entry:
    """One state tensor. Tied tensors have equal offsets. `stride` in elements, `offset` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_parameter: bool

    @property
    def numel(self) -> int:
        """Numbers in it: a complex element is two."""
        return math.prod(self.shape) * (2 if self.dtype.startswith("complex") else 1)

    @property
    def nbytes(self) -> int:
        if not all(self.shape):
            return 0
        elements = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return elements * DTYPES[self.dtype].itemsize

    def view(self, region: SharedRegion) -> Tensor:
        return region.tensor(DTYPES[self.dtype], self.shape, self.stride, self.offset)


def layout_of(model: nn.Module) -> list[Entry]:
    """The layout of `model`'s state dict. Raises BundleRejected for state that no evaluator could adopt."""
    entries: list[Entry] = []
    placed: dict[tuple[Any, ...], int] = {}
    end = 0
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        _refuse_lazy(name, tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or tensor.layout != torch.strided:
            raise BundleRejected(
                f"the model's {name} is a {tensor.layout} tensor of {dtype}; expected a dense tensor of a plain dtype",
                rule=c.RULE_MODEL_MISMATCH,
            )
        stride = tensor.stride() if _is_dense(tensor) else torch.empty(tensor.shape).stride()
        key = (tensor.data_ptr(), tensor.device, dtype, tuple(tensor.shape), stride)
        if key not in placed or not tensor.numel():
            end = -(-end // ALIGNMENT) * ALIGNMENT
            placed[key] = end
            end += tensor.numel() * tensor.element_size()
        entries.append(
            Entry(name, dtype, tuple(tensor.shape), tuple(stride), placed[key], isinstance(tensor, nn.Parameter))
        )
    return entries


def _refuse_lazy(name: str, tensor: Tensor) -> None:
    if isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
        raise BundleRejected(
            f"the model's {name} is lazy, of no shape yet; expected build_model(ctx) to return it materialised",
            rule=c.RULE_MODEL_MISMATCH,
        )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda x: x[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def region_bytes(entries: list[Entry]) -> int:
    return max((e.offset + e.nbytes for e in entries), default=0)


def to_json(entries: list[Entry]) -> list[Any]:
    return [[e.name, e.dtype, list(e.shape), list(e.stride), e.offset, e.is_parameter] for e in entries]


def from_json(document: Any) -> list[Entry]:
    """Parses a layout that another process sent; every number is checked. Raises BundleRejected."""
    try:
        if len(document) > MAX_ENTRIES:
            raise ValueError(f"{len(document)} entries")
        entries = []
        for name, dtype, shape, stride, offset, is_parameter in document:
            if dtype not in DTYPES or len(shape) != len(stride) or offset < 0 or offset % ALIGNMENT:
                raise ValueError(f"entry {name!r}")
            if any(not isinstance(n, int) or not 0 <= n < 2**48 for n in (*shape, *stride, offset)):
                raise ValueError(f"entry {name!r}")
            entries.append(Entry(str(name), dtype, tuple(shape), tuple(stride), offset, bool(is_parameter)))
    except (TypeError, ValueError, KeyError) as e:
        raise BundleRejected(f"the trainer described its state wrongly: {e}", rule=c.RULE_MODEL_MISMATCH) from None
    return entries


class Adopter:
    """The evaluator's side: a model of its own whose parameters become views of the trainer's memory."""

    def __init__(self, model: nn.Module, entries: list[Entry], region: SharedRegion) -> None:
        """Raises BundleRejected (`prism:model-mismatch`) unless names and shapes are exactly the model's own."""
        self.model = model
        own = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        for name, tensor in own.items():
            _refuse_lazy(name, tensor)
        by_name = {e.name: e for e in entries}
        for problem, names in (
            ("the trained state is missing", own.keys() - by_name.keys()),
            ("build_model(ctx) does not know", by_name.keys() - own.keys()),
            (
                "build_model(ctx) has in another shape",
                {n for n in own.keys() & by_name.keys() if tuple(own[n].shape) != by_name[n].shape},
            ),
        ):
            if names:
                shown = ", ".join(sorted(names)[:3]) + (" ..." if len(names) > 3 else "")
                raise BundleRejected(
                    f"the trained model is not the one build_model(ctx) declares: {problem} {shown}",
                    rule=c.RULE_MODEL_MISMATCH,
                )
        self._views = {e.name: e.view(region) for e in entries}
        self._own = own
        self._copied: list[tuple[Tensor, Tensor]] = []

    def differs_from_init(self) -> str | None:
        """The first state tensor whose shared value is not, bit for bit, what `build_model` gave here; or None."""
        for name, own in self._own.items():
            shared = self._views[name]
            if not torch.equal(_bits(own.detach().to("cpu", shared.dtype)), _bits(shared)):
                return name
        return None

    def adopt(self) -> None:
        """Points parameters at the shared memory (on a GPU: copies at each refresh); buffers are always copies."""
        for name, own in self._own.items():
            view = self._views[name]
            if isinstance(own, nn.Parameter) and own.device.type == "cpu":
                own.requires_grad_(False)
                if own.dtype == view.dtype:
                    own.data = view
                else:
                    self._replace(name, nn.Parameter(view, requires_grad=False))
                continue
            if own.dtype != view.dtype:
                own = own.detach().to(view.dtype)
                self._replace(name, nn.Parameter(own, requires_grad=False) if name in self._parameters() else own)
            self._copied.append((own.detach(), view))
        self.refresh()

    def refresh(self) -> None:
        """Takes over what is not shared in place: buffers, and on a GPU the parameters too."""
        for own, view in self._copied:
            own.copy_(view, non_blocking=True)

    def _parameters(self) -> set[str]:
        return {n for n, t in self._own.items() if isinstance(t, nn.Parameter)}

    def _replace(self, name: str, value: Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        holder = module._parameters if leaf in module._parameters else module._buffers
        holder[leaf] = value  # type: ignore[assignment]


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, so that NaN equals NaN and -0 does not equal 0."""
    return tensor.contiguous().flatten().view(torch.uint8)


class WeightShare:
    """The trainer's side: the model's parameters live in the shared region; buffers are copied there each batch."""

    def __init__(self, model: nn.Module, entries: list[Entry], region: SharedRegion) -> None:
        self._slots: list[tuple[dict[str, Any], str, Tensor, bool]] = []
        for entry in entries:
            path, _, leaf = entry.name.rpartition(".")
            module = model.get_submodule(path)
            holder = module._parameters if leaf in module._parameters else module._buffers
            in_place = entry.is_parameter and holder[leaf].device.type == "cpu"  # type: ignore[union-attr]
            self._slots.append((holder, leaf, entry.view(region), in_place))  # type: ignore[arg-type]
        self.refresh()

    def refresh(self) -> None:
        """Brings the region up to date. A parameter whose storage was replaced is copied and shared again."""
        with torch.no_grad():
            for holder, leaf, view, in_place in self._slots:
                tensor = holder[leaf]
                if in_place:
                    if tensor.data_ptr() != view.data_ptr():
                        view.copy_(tensor)
                        tensor.data = view
                else:
                    view.copy_(tensor)


def load_state(path: Path) -> tuple[Any, SharedRegion]:
    """A safetensors file as (layout document, region), for an evaluator to adopt."""
    from safetensors.torch import load_file

    state = load_file(path)
    entries, end = [], 0
    for name, tensor in state.items():
        end = -(-end // ALIGNMENT) * ALIGNMENT
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(name, dtype, tuple(tensor.shape), tuple(tensor.stride()), end, False))
        end += tensor.numel() * tensor.element_size()
    region = SharedRegion.create("prism-weights", end)
    writer = SharedRegion(os.dup(region.fd), writable=True)
    for entry in entries:
        entry.view(writer).copy_(state[entry.name])
    writer.close()
    region.close_to_writers()
    return to_json(entries), region
