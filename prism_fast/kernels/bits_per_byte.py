"""Bits per byte: nats over scored targets, over ln 2, over the UTF-8 bytes of the same targets.

One mask: a target's loss counts if and only if its bytes count. A token of 0 bytes (a special token) is never scored;
its loss is tallied apart. Sums run in float64, left to right inside a row and rows in order, so the value depends on
nothing but the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from prism_fast.kernels.dispatch import backend_for
from prism_fast.kernels.operators import operator
from prism_fast.kernels.shapes import check_same_device

_LN2 = math.log(2.0)


def batch_code_length(
    nll: Tensor, target: Tensor, token_bytes: Tensor, fault_nats: float, *, ignore_index: int = -100
) -> Tensor:
    """A batch's sums for bits per byte, without synchronising with the device.

    Args:
        nll: float32 `[..., L]`, nats, as `token_nll` gives.
        target: integer `[..., L]`.
        token_bytes: integer `[T]`: UTF-8 bytes of each token id, 0 for special tokens.
        fault_nats: what a NaN or infinite loss is charged instead: the worst case, 2 ln V.
        ignore_index: targets with this id count nowhere.

    Returns:
        float64 [6] on the same device: nats over targets with bytes, nats over targets with 0 bytes, bytes, targets
        with bytes, targets with 0 bytes, faults. A fault is a loss that is NaN or infinite, or a target that is
        neither ignored nor in the table; the latter has no bytes, so it is counted and charged nowhere.
    """
    if nll.dtype != torch.float32:
        raise TypeError(f"nll must be float32, got {nll.dtype}")
    if nll.shape != target.shape:
        raise ValueError(f"nll {list(nll.shape)} and target {list(target.shape)} must have one shape")
    if target.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"target must be int32 or int64, got {target.dtype}")
    if token_bytes.dim() != 1 or token_bytes.is_floating_point() or len(token_bytes) == 0:
        raise ValueError(f"token_bytes must be integers [T], got {token_bytes.dtype} {list(token_bytes.shape)}")
    check_same_device(nll=nll, target=target, token_bytes=token_bytes)
    width = nll.shape[-1] if nll.dim() else 1
    rows = math.prod(nll.shape[:-1])
    return torch.ops.prism_fast.batch_code_length(
        nll.detach().reshape(rows, width).contiguous(),
        target.reshape(rows, width).contiguous(),
        token_bytes.to(torch.int32).contiguous(),
        fault_nats,
        ignore_index,
    )


@operator("batch_code_length")
def _batch_code_length(
    nll: Tensor, target: Tensor, token_bytes: Tensor, fault_nats: float, ignore_index: int
) -> Tensor:
    return backend_for(nll.device).batch_code_length(nll, target, token_bytes, fault_nats, ignore_index)


@_batch_code_length.register_fake
def _(nll: Tensor, target: Tensor, token_bytes: Tensor, fault_nats: float, ignore_index: int) -> Tensor:
    return nll.new_empty(6, dtype=torch.float64)


@dataclass(frozen=True)
class CodeLength:
    """Totals of a text's code length. `bpb` is NaN while no byte has been scored."""

    nats: float = 0.0
    special_nll_nats: float = 0.0
    bytes: int = 0
    tokens: int = 0
    special_tokens: int = 0
    faults: int = 0
    segments: Mapping[str, CodeLength] = field(default_factory=dict)

    @property
    def bpb(self) -> float:
        """Bits per byte."""
        return self.nats / _LN2 / self.bytes if self.bytes else math.nan

    @property
    def nll(self) -> float:
        """Mean loss per scored token, in nats."""
        return self.nats / self.tokens if self.tokens else math.nan


class BitsPerByte:
    """A meter that lives on the device: nothing synchronises until `compute()`.

    Args:
        token_bytes: integer `[V]`, the UTF-8 bytes that each token id stands for, 0 for special tokens.
        device: where the losses will be; by default that of `token_bytes`.
        fault_nats: charge for a NaN or infinite loss; by default 2 ln V, with V = len(token_bytes).

    `update(nll, target, segment="law")` also adds to the totals of a named segment; `compute().segments` has them.
    """

    def __init__(
        self,
        token_bytes: Tensor,
        device: torch.device | str | None = None,
        *,
        fault_nats: float | None = None,
        ignore_index: int = -100,
    ) -> None:
        if token_bytes.dim() != 1 or token_bytes.is_floating_point() or len(token_bytes) == 0:
            raise ValueError(f"token_bytes must be integers [V], got {token_bytes.dtype} {list(token_bytes.shape)}")
        if int(token_bytes.min()) < 0:
            raise ValueError(f"token_bytes must not be negative, got {int(token_bytes.min())}")
        self.token_bytes = token_bytes.to(device=device, dtype=torch.int32).contiguous()
        self.fault_nats = 2.0 * math.log(len(token_bytes)) if fault_nats is None else fault_nats
        self.ignore_index = ignore_index
        # Nats in float64, counts in int64: a float64 count stops counting at 2^53, a float32 one within a day.
        self._nats: dict[str | None, Tensor] = {}
        self._counts: dict[str | None, Tensor] = {}
        self._totals(None)

    @property
    def device(self) -> torch.device:
        return self.token_bytes.device

    def _totals(self, segment: str | None) -> tuple[Tensor, Tensor]:
        if segment not in self._nats:
            self._nats[segment] = torch.zeros(2, dtype=torch.float64, device=self.device)
            self._counts[segment] = torch.zeros(4, dtype=torch.int64, device=self.device)
        return self._nats[segment], self._counts[segment]

    def update(self, nll: Tensor, target: Tensor, segment: str | None = None) -> None:
        """Adds a batch: `nll` float32 and `target` integer, `[..., L]`, one row per line of text."""
        sums = batch_code_length(nll, target, self.token_bytes, self.fault_nats, ignore_index=self.ignore_index)
        if segment == "":
            raise ValueError("a segment needs a name")
        counts = sums[2:].long()
        for name in (None,) if segment is None else (None, segment):
            nats, integers = self._totals(name)
            nats += sums[:2]
            integers += counts

    def merge(self, other: BitsPerByte) -> None:
        """Adds another meter's totals (its token table must be the same)."""
        if not torch.equal(self.token_bytes.cpu(), other.token_bytes.cpu()):
            raise ValueError("cannot merge meters with different token_bytes")
        for name in other._nats:
            nats, counts = self._totals(name)
            nats += other._nats[name].to(self.device)
            counts += other._counts[name].to(self.device)

    def all_reduce(self, group: Any = None) -> None:
        """Gives every rank the totals of all, added in order of rank. Ranks may have seen different segments."""
        import torch.distributed as dist

        names: list[list[str | None]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(names, list(self._nats), group=group)
        every = list(dict.fromkeys(name for of_rank in names for name in of_rank))
        mine = [self._totals(name) for name in every]
        for totals in (torch.stack([nats for nats, _ in mine]), torch.stack([counts for _, counts in mine])):
            parts = [torch.empty_like(totals) for _ in names]
            dist.all_gather(parts, totals, group=group)
            total = torch.zeros_like(totals)
            for part in parts:
                total += part
            store = self._nats if totals.dtype == torch.float64 else self._counts
            store.update(zip(every, total.unbind(), strict=True))

    def compute(self) -> CodeLength:
        """The totals so far, and those of each segment. Waits for the device."""
        of = {name: self._read(name) for name in self._nats}
        return replace(of[None], segments={name: totals for name, totals in of.items() if name is not None})

    def _read(self, segment: str | None) -> CodeLength:
        nats, special_nll_nats = self._nats[segment].tolist()
        utf8_bytes, tokens, special_tokens, faults = map(int, self._counts[segment].tolist())
        return CodeLength(nats, special_nll_nats, utf8_bytes, tokens, special_tokens, faults)

    def reset(self) -> None:
        self._nats.clear()
        self._counts.clear()
        self._totals(None)

    def state_dict(self) -> dict[str, Any]:
        """The totals, for a checkpoint: tensors and plain values. The token table is the caller's to keep."""
        return {
            "tokens": len(self.token_bytes),
            "nats": {name or "": value.clone() for name, value in self._nats.items()},
            "counts": {name or "": value.clone() for name, value in self._counts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["tokens"] != len(self.token_bytes):
            raise ValueError(f"state is of {state['tokens']} tokens, this meter of {len(self.token_bytes)}")
        self._nats = {name or None: value.to(self.device).clone() for name, value in state["nats"].items()}
        self._counts = {name or None: value.to(self.device).clone() for name, value in state["counts"].items()}
