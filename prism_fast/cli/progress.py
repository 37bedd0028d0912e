"""A live progress line on stderr: one rewritten line on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prism_fast.data.pack import Progress
    from prism_fast.harness.referee.ledger import Ledger
    from prism_fast.protocol.run_spec import RunSpec

PLAIN_EVERY_S = 10.0


class TerminalReporter:
    """Implements `harness.referee.Reporter`."""

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream or sys.stderr
        self._live = bool(getattr(self._stream, "isatty", lambda: False)())
        self._shown = False
        self._last = 0.0
        self._packing_since: float | None = None
        self._window: tuple[float, int] = (0.0, 0)
        self._rate: float | None = None

    def __enter__(self) -> TerminalReporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._clear()

    def stage(self, text: str) -> None:
        self._packing_since = None
        self._window, self._rate = (0.0, 0), None
        if self._live:
            self._show(text + " ...")
        else:
            self._print(text)
        self._last = 0.0

    def warn(self, text: str) -> None:
        self._clear()
        self._print(f"warning: {text}")

    def packing(self, progress: Progress) -> None:
        now = monotonic()
        done_bytes, total_bytes = progress.bytes_done, progress.bytes_total
        if self._packing_since is None:
            self._packing_since = now
            if not self._live:
                self._last = now  # there is no rate yet; a short run says what it made when it is done
        elapsed = now - self._packing_since
        rate = done_bytes / elapsed if elapsed > 0 else 0.0
        eta = (total_bytes - done_bytes) / rate if rate > 0 else None
        share = 100 * done_bytes / total_bytes if total_bytes else 100.0
        self._update(f"{progress.stage} {share:3.0f} %  {rate / 1e6:.1f} MB/s  ETA {_duration(eta)}", False)

    def training(self, spec: RunSpec, ledger: Ledger, elapsed_s: float) -> None:
        tokens = ledger.positions
        if not tokens or elapsed_s <= 0:
            return
        since, before = self._window
        if elapsed_s - since >= 1.0:
            recent = (tokens - before) / (elapsed_s - since)
            self._rate = recent if self._rate is None else 0.7 * self._rate + 0.3 * recent
            self._window = (elapsed_s, tokens)
        rate = self._rate or tokens / elapsed_s
        of = f"{tokens:,}" if spec.token_budget is None else f"{tokens:,}/{spec.token_budget:,}"
        bpb = ledger.code_length.bpb if ledger.bytes else float("nan")
        left = None
        if spec.token_budget is not None and rate > 0:
            left = min(max(0, spec.token_budget - tokens) / rate, max(0.0, spec.budget_seconds - elapsed_s))
        self._update(
            f"seed {spec.seed}  {of} tokens  {bpb:.4f} bpb  {rate:,.0f} tokens/s  ETA {_duration(left)}", False
        )

    # ------------------------------------------------------------------------------------------------------------

    def _update(self, text: str, final: bool) -> None:
        now = monotonic()
        every = 0.1 if self._live else PLAIN_EVERY_S
        if not final and now - self._last < every:
            return
        self._last = now
        if self._live:
            self._show(text)
        else:
            self._print(text)

    def _show(self, text: str) -> None:
        self._stream.write("\r\x1b[2K" + text)
        self._stream.flush()
        self._shown = True

    def _clear(self) -> None:
        if self._shown:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._shown = False

    def _print(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
