"""Memory for large gradients on the CPU, used again by the next step.

The C library gives memory of this size back to the system when a tensor dies, and the next step pays for every page
again: for [2048, 50304] float32 the page faults take longer than the loss and its gradient together.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

_LARGE_BYTES = 4 << 20

# Ends of tensors may come at any moment and on any thread: only single, atomic operations on the deque, and no lock.
_idle: deque[mmap.mmap] = deque(maxlen=2)


def empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A contiguous CPU tensor with undefined content. Once it has died, its memory is kept for a tensor like it."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    region = _take(size)
    memory = np.frombuffer(region, dtype=np.uint8, count=size)
    weakref.finalize(memory, _idle.append, region).atexit = False
    return torch.from_numpy(memory).view(dtype).view(shape)


def _take(size: int) -> mmap.mmap:
    for _ in range(len(_idle)):
        try:
            region = _idle.popleft()
        except IndexError:
            break
        if size <= len(region) <= 2 * size:
            return region
        _idle.append(region)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return region


def empty_cache() -> None:
    """Gives idle memory back to the system."""
    _idle.clear()
