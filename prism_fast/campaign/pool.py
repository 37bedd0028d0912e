"""Workers of a campaign on Ray: this machine's cores and GPUs, or a cluster's."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

from prism_fast.campaign.cluster import alive_nodes, connect
from prism_fast.campaign.job import Job, Outcome, run_job
from prism_fast.protocol.errors import UsageError

OBJECT_STORE_BYTES = 80 * 1024**2  # scripts and outcomes travel, nothing large


class Pool(Protocol):
    """Where jobs run."""

    def submit(self, job: Job) -> None: ...

    def finished(self, timeout_s: float) -> Sequence[tuple[Job, Outcome]]:
        """Jobs that have ended since; waits up to `timeout_s` for the first."""


class RayPool:
    """Each job is a Ray task that holds `cpus` cores and `gpus` GPUs. Ray retries nothing: that is the campaign's."""

    def __init__(self, address: str | None, cpus: int, gpus: int) -> None:
        self._ray = connect("campaign", address, OBJECT_STORE_BYTES)
        self._jobs: dict[Any, Job] = {}
        self._task = self._ray.remote(run_job).options(num_cpus=cpus, num_gpus=gpus, max_retries=0)
        self._check_room(cpus, gpus)

    def _check_room(self, cpus: int, gpus: int) -> None:
        largest = alive_nodes(self._ray)
        if any(n.get("CPU", 0) >= cpus and n.get("GPU", 0) >= gpus for n in largest):
            return
        room = ", ".join(f"{n.get('CPU', 0):.0f} cores and {n.get('GPU', 0):.0f} GPUs" for n in largest)
        self._ray.shutdown()
        raise UsageError(f"--cpus {cpus} --gpus {gpus}: no node has as much; the nodes have {room}")

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for reference in self._jobs:
            self._ray.cancel(reference, force=True)
        self._ray.shutdown()

    def submit(self, job: Job) -> None:
        self._jobs[self._task.remote(job)] = job

    def finished(self, timeout_s: float) -> list[tuple[Job, Outcome]]:
        if not self._jobs:
            return []
        pending = list(self._jobs)
        ready, _ = self._ray.wait(pending, num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = self._ray.wait(pending, num_returns=len(pending), timeout=0)
        return [(self._jobs.pop(reference), self._outcome(reference)) for reference in ready]

    def _outcome(self, reference: Any) -> Outcome:
        try:
            outcome: Outcome = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # our own code raised on the node
            return Outcome(None, str(error.cause or error).splitlines()[-1])
        except self._ray.exceptions.RayError as error:
            return Outcome(None, f"its worker died: {type(error).__name__}")
        return outcome
