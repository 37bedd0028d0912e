"""Where each tensor of a model's state lies in a shared region. The referee lays it out, from the program; nobody else.

A trainer says nothing of its memory that anyone relies on: it is told where each named tensor of the program's state
belongs, and what it does not put there does not exist. So a layout cannot overlap, leave bytes that nobody counts, or
hide one tensor behind another. Tied tensors have one place.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from prism_fast.harness.process.shared_memory import ALIGNMENT, SharedRegion
from prism_fast.program.format import DTYPE_BYTES, SAFETENSORS_DTYPE, StateTensor
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleRejected, DataError

MAX_SAFETENSORS_HEADER = 64 << 20


@dataclass(frozen=True, slots=True)
class Slot:
    """One state tensor's place: contiguous, `offset` in bytes, a multiple of ALIGNMENT. Tied names share a place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    is_parameter: bool
    tied: bool  # to an earlier slot

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape, dtype=object)) if self.shape else 1

    @property
    def numbers(self) -> int:
        """Elements, a complex one counted twice."""
        return self.elements * (2 if self.dtype.startswith("complex") else 1)

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


def slots_of(state: Iterable[StateTensor]) -> list[Slot]:
    """The layout of a program's state, in its order. Raises BundleRejected for a dtype no weights file can hold."""
    slots: dict[str, Slot] = {}
    end = 0
    for tensor in state:
        if tensor.dtype not in SAFETENSORS_DTYPE:
            raise BundleRejected(
                f"the model's {tensor.name} is of {tensor.dtype}; expected one of {', '.join(SAFETENSORS_DTYPE)}",
                rule=c.RULE_MODEL_MISMATCH,
            )
        if tensor.tied_to is not None:
            offset = slots[tensor.tied_to].offset
        else:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
        slot = Slot(tensor.name, tensor.dtype, tensor.shape, offset, tensor.is_parameter, tensor.tied_to is not None)
        end = max(end, offset + slot.nbytes)
        slots[tensor.name] = slot
    return list(slots.values())


def region_bytes(slots: list[Slot]) -> int:
    return max((s.offset + s.nbytes for s in slots), default=0)


def to_json(slots: list[Slot]) -> list[Any]:
    return [[s.name, s.dtype, list(s.shape), s.offset, s.is_parameter, s.tied] for s in slots]


def from_json(document: list[Any]) -> list[Slot]:
    """What `to_json` made, in a process that trusts who sent it."""
    return [Slot(n, d, tuple(shape), offset, p, tied) for n, d, shape, offset, p, tied in document]


def view(slot: Slot, region: SharedRegion) -> Any:
    """The tensor over the region. Writing to one of a read-only mapping kills the process."""
    import torch

    strides, step = [], 1
    for size in reversed(slot.shape):
        strides.append(step)
        step *= max(1, size)
    return region.tensor(getattr(torch, slot.dtype), slot.shape, tuple(reversed(strides)), slot.offset)


def bytes_at(slot: Slot, region: SharedRegion) -> np.ndarray:
    """uint8 [nbytes], the slot's memory."""
    return region.array()[slot.offset : slot.offset + slot.nbytes]


def first_difference(slots: list[Slot], one: SharedRegion, other: SharedRegion) -> str | None:
    """The name of the first tensor whose bytes are not the same in both regions."""
    for slot in slots:
        if not slot.tied and not np.array_equal(bytes_at(slot, one), bytes_at(slot, other)):
            return slot.name
    return None


def write_safetensors(slots: list[Slot], region: SharedRegion, path: Path) -> None:
    """Writes the state under every name, tied tensors twice, as `safetensors` lays it out. Raises OSError."""
    header: dict[str, Any] = {}
    end = 0
    ordered = sorted(slots, key=lambda s: (-DTYPE_BYTES[s.dtype], s.name))  # widest first keeps all aligned
    for slot in ordered:
        header[slot.name] = {
            "dtype": SAFETENSORS_DTYPE[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [end, end + slot.nbytes],
        }
        end += slot.nbytes
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    try:
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for slot in ordered:
                file.write(bytes_at(slot, region).data)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def safetensors_dtypes(path: Path) -> dict[str, str]:
    """The dtype of every tensor in a safetensors file, by name. Raises DataError."""
    names = {short: name for name, short in SAFETENSORS_DTYPE.items()}
    with open(path, "rb") as file:
        header, _ = _header(file, path)
    try:
        return {name: names[entry["dtype"]] for name, entry in header.items()}
    except (KeyError, TypeError):
        raise DataError(f"{path}: its header is not that of a safetensors file") from None


def _header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    """-> (entries by name, offset of the data)."""
    size = os.fstat(file.fileno()).st_size
    head = file.read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
    if not 0 <= length <= min(MAX_SAFETENSORS_HEADER, size - 8):
        raise DataError(f"{path}: not a safetensors file of {size} bytes")
    try:
        header = orjson.loads(file.read(length))
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise DataError(f"{path}: its header is not that of a safetensors file")
    header.pop("__metadata__", None)
    return header, 8 + length


def read_safetensors(path: Path, slots: list[Slot]) -> SharedRegion:
    """A region holding exactly the state that `slots` names. Raises DataError naming what is not as expected."""

    def fail(what: str) -> DataError:
        return DataError(f"{path}: {what}")

    with open(path, "rb") as file:
        header, start = _header(file, path)
        if set(header) != {s.name for s in slots}:
            odd = sorted(set(header) ^ {s.name for s in slots})[0]
            raise fail(f"tensor {odd!r} is in only one of the file and the program's state")
        region = SharedRegion.create("prism-state", region_bytes(slots))
        with SharedRegion.writer(region) as writer:
            for slot in slots:
                try:
                    entry = header[slot.name]
                    begin, end = entry["data_offsets"]
                    told = (entry["dtype"], tuple(entry["shape"]), end - begin)
                    file.seek(start + begin)
                except (ValueError, KeyError, TypeError, OverflowError, OSError):
                    raise fail(f"tensor {slot.name!r} has no proper entry in the header") from None
                if told != (SAFETENSORS_DTYPE[slot.dtype], slot.shape, slot.nbytes):
                    raise fail(
                        f"tensor {slot.name!r} is {told[0]} {list(told[1])}, not {slot.dtype} {list(slot.shape)}"
                    )
                if file.readinto(memoryview(bytes_at(slot, writer))) != slot.nbytes:  # type: ignore[arg-type]
                    raise fail(f"tensor {slot.name!r} ends after the file does")
        region.close_to_writers()
        return region
