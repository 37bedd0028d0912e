"""Memory shared between processes by file descriptor: no name, no file, gone with the last process that maps it.

Regions are sealed against shrinking, so that no peer can pull a page from under a reader, and can be closed to new
writers, so that what a trainer wrote can be read by an executor and by nobody be written again but the trainer.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator
from typing import Any

F_ADD_SEALS, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE = 1033, 0x0002, 0x0004, 0x0010
ALIGNMENT = 64  # bytes; the alignment torch gives its own CPU tensors, which some matrix kernels' last bits depend on


class SharedRegion:
    """One mapping of a shared region in this process."""

    def __init__(self, fd: int, *, writable: bool) -> None:
        """Takes ownership of `fd`."""
        self.fd = fd
        self.size = os.fstat(fd).st_size
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, self.size, mmap.MAP_SHARED, protection) if self.size else b""

    @classmethod
    def create(cls, name: str, size: int) -> SharedRegion:
        """A new region of at least one page, sealed against resizing, mapped read-only here."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, max(size, mmap.PAGESIZE))
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
        return cls(fd, writable=False)

    def close_to_writers(self) -> None:
        """No process can map the region writable, or write to it, from now on; existing maps stay."""
        fcntl.fcntl(self.fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE)

    def tensor(self, dtype: Any, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Any:
        """A torch tensor over the region. Writing to one of a read-only mapping kills the process."""
        import warnings

        import torch

        count = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
        if count == 0:
            return torch.empty_strided(shape, stride, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "buffer is not writable": that is the point
            flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
        return flat.as_strided(shape, stride)

    def array(self) -> Any:
        """The whole region, numpy uint8, writable where the mapping is."""
        import numpy as np

        return np.frombuffer(self._map, np.uint8)

    @classmethod
    @contextlib.contextmanager
    def writer(cls, region: SharedRegion) -> Iterator[SharedRegion]:
        """A writable mapping of `region` for a while: its owner fills it. Not after `close_to_writers`."""
        mapping = cls(os.dup(region.fd), writable=True)
        try:
            yield mapping
        finally:
            mapping.close()

    def close(self) -> None:
        """Closes the descriptor; the mapping lives as long as tensors over it do."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
