"""What one rank shows of itself beside its ledger records, when the functional contract is checked.

Installed by the trainer rank before the bundle is imported, and only then: a scored run is not watched.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism_fast.harness.process.jobs import digest_of_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from prism_fast.harness.trainer.instrument import BatchSource, Handed, Request

NAMED_PARAMETERS = 2000  # digests sent by name, so that the one that differs can be named


class RankReport:
    """Digests of the batches taken, of the parameters at the end and of every explicit all-reduce."""

    def __init__(self) -> None:
        self.batches: list[str] = []
        self._reduced = hashlib.sha256()
        self._reductions = 0

    def install(self) -> None:
        """Wraps `torch.distributed.all_reduce`; call before the bundle is imported."""
        import torch.distributed as dist

        original = dist.all_reduce

        def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            work = original(tensor, *args, **kwargs)
            # Of a group of its own, or not waited for, a result says nothing about all ranks now.
            if work is None and kwargs.get("group") is None and len(args) < 2:
                self._reduced.update(_tensor_bytes(tensor))
                self._reductions += 1
            return work

        dist.all_reduce = all_reduce  # type: ignore[assignment]
        dist.distributed_c10d.all_reduce = all_reduce  # type: ignore[assignment]

    def watch(self, source: Any) -> BatchSource:
        """The same source, with a digest kept of each batch that is handed out."""
        return _Watched(source, self)

    def artifacts_dir(self, common: str, rank: int) -> str:
        """A directory of this rank's own, also the current one, so that whatever it writes shows as its own."""
        own = Path(common) / f"rank-{rank}"
        own.mkdir(parents=True, exist_ok=True)
        os.chdir(own)
        return str(own)

    def document(self, state: dict[str, Tensor], *, sharded: bool) -> dict[str, Any]:
        """The fields of jobs.RankFacts. `state`: the model's, gathered by all ranks where `sharded` over them."""
        import torch.distributed as dist
        from torch import nn

        digests = {
            name: hashlib.sha256(_tensor_bytes(tensor)).hexdigest()[:16]
            for name, tensor in state.items()
            if isinstance(tensor, nn.Parameter)
        }
        everything = hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()
        return {
            "batches": self.batches,
            "parameters": dict(list(digests.items())[:NAMED_PARAMETERS]),
            "parameters_sha256": everything,
            "sharded_parameters": len(digests) if sharded else 0,
            "all_reduce_calls": self._reductions,
            "all_reduce_sha256": self._reduced.hexdigest(),
            "process_group_left": dist.is_available() and dist.is_initialized(),
        }


class _Watched:
    """Implements `instrument.BatchSource`."""

    def __init__(self, source: Any, report: RankReport) -> None:
        self._source, self._report = source, report

    def begin(self) -> None:
        self._source.begin()

    def start(self, request: Request) -> None:
        self._source.start(request)

    def take(self, index: int) -> Handed | str:
        handed = self._source.take(index)
        if not isinstance(handed, str):
            self._report.batches.append(digest_of_tokens(handed.tokens.cpu().numpy()))
        return handed

    def finish(self) -> None:
        self._source.finish()


def _tensor_bytes(tensor: Tensor) -> bytes:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return f"{tensor.dtype}{tuple(tensor.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes()
