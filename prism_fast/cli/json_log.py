"""`score --log-format json`: one JSON object a line on stderr, for whatever collects a validator's logs.

Every line has `time` (RFC 3339, UTC), `level` (info, warning, error) and `event`; the rest depends on the event
(docs/validators.md).
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

import orjson

from prism_fast.protocol.errors import PrismError

if TYPE_CHECKING:
    from prism_fast.data.pack import Progress
    from prism_fast.harness.referee.ledger import Ledger
    from prism_fast.protocol.manifest import SeedResult
    from prism_fast.protocol.run_spec import RunSpec

EVERY_S = 10.0


class JsonReporter:
    """Implements `harness.referee.Reporter`; progress comes every ten seconds, everything else when it happens."""

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream or sys.stderr
        self._last = -EVERY_S

    def __enter__(self) -> JsonReporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return None

    def stage(self, text: str) -> None:
        self._write("info", "stage", message=text)
        self._last = -EVERY_S

    def warn(self, text: str) -> None:
        self._write("warning", "warning", message=text)

    def packing(self, progress: Progress) -> None:
        if self._due():
            self._write(
                "info",
                "packing",
                stage=progress.stage,
                bytes_done=progress.bytes_done,
                bytes_total=progress.bytes_total,
            )

    def training(self, spec: RunSpec, ledger: Ledger, elapsed_s: float) -> None:
        if ledger.positions and self._due():
            self._write(
                "info",
                "training",
                seed=spec.seed,
                tokens=ledger.positions,
                token_budget=spec.token_budget,
                batches=ledger.batches,
                bytes=ledger.bytes,
                bpb=ledger.code_length.bpb if ledger.bytes else None,
                elapsed_s=round(elapsed_s, 3),
            )

    def result(self, seed: SeedResult) -> None:
        """How a seed ended, with its score."""
        level = "info" if seed.status == "scored" else "error"
        self._write(level, "result", **seed.model_dump(mode="json"))

    def error(self, error: PrismError) -> None:
        """What ended the command before any seed began."""
        self._write("error", "error", message=str(error), rule=error.rule, exit_code=error.exit_code)

    def _due(self) -> bool:
        now = monotonic()
        if now - self._last < EVERY_S:
            return False
        self._last = now
        return True

    def _write(self, level: str, event: str, **fields: Any) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._stream.write(orjson.dumps({"time": time, "level": level, "event": event, **fields}).decode() + "\n")
        self._stream.flush()
