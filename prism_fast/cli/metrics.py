"""`score --metrics FILE.prom`: a reporter that also keeps a Prometheus text file up to date."""

from __future__ import annotations

from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from prism_fast.report.prometheus import Sample, samples_of, write_metrics

if TYPE_CHECKING:
    from prism_fast.harness.referee.ledger import Ledger
    from prism_fast.harness.referee.request import Reporter
    from prism_fast.protocol.manifest import RunSummary
    from prism_fast.protocol.run_spec import RunSpec

EVERY_S = 10.0


class MetricsReporter:
    """Implements `harness.referee.Reporter` around another one."""

    def __init__(self, inner: Reporter, path: Path, submission: str) -> None:
        self._inner, self._path, self._submission = inner, path, submission
        self._last = -EVERY_S
        self._write(1, None, [])

    def stage(self, text: str) -> None:
        self._inner.stage(text)

    def warn(self, text: str) -> None:
        self._inner.warn(text)

    def packing(self, progress: Any) -> None:
        self._inner.packing(progress)

    def training(self, spec: RunSpec, ledger: Ledger, elapsed_s: float) -> None:
        self._inner.training(spec, ledger, elapsed_s)
        now = monotonic()
        if not ledger.positions or now - self._last < EVERY_S:
            return
        self._last = now
        values: dict[str, float | None] = {
            "tokens": ledger.positions,
            "token_budget": spec.token_budget,
            "bits_per_byte": ledger.code_length.bpb if ledger.bytes else None,
            "elapsed_seconds": elapsed_s,
        }
        labels = {"submission": f"{self._submission}-{spec.bundle_digest[:12]}", "seed": str(spec.seed)}
        self._write(1, None, [Sample(f"prism_seed_{k}", v, labels) for k, v in values.items() if v is not None])

    def finish(self, exit_code: int, run: Path | None = None, summary: RunSummary | None = None) -> None:
        """The last state: the job's exit code, and every seed's figures where there are any."""
        self._write(0, exit_code, samples_of(run, summary) if run is not None and summary is not None else [])

    def _write(self, running: int, exit_code: int | None, samples: list[Sample]) -> None:
        job = {"submission": self._submission}
        head = [Sample("prism_score_running", running, job)]
        if exit_code is not None:
            head.append(Sample("prism_score_exit_code", exit_code, job))
        head.append(Sample("prism_score_updated_timestamp_seconds", time(), job))
        write_metrics(self._path, [*head, *samples])
