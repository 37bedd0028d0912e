"""The referee's handle on a tracer: starts it, waits for its end, reads what it wrote as what a stranger wrote.

Nothing is read while the tracer lives. Each program is checked against format and allow-list, its constants and the
initial state against their sizes, and counted; then they are frozen: what was read here is what runs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import numpy as np
import orjson

from prism_fast.harness.bundle.bundle import Bundle
from prism_fast.harness.process.artifacts import directory_bytes, entry_bytes
from prism_fast.harness.process.commands import child_command, child_environment, nothing_to_read
from prism_fast.harness.process.isolation import Sandbox
from prism_fast.harness.process.jobs import TraceJob, TraceResult, handling, read
from prism_fast.harness.process.processes import descendants, end_processes
from prism_fast.harness.process.shared_memory import SharedRegion
from prism_fast.harness.process.shared_state import Slot, region_bytes, slots_of
from prism_fast.program import operators
from prism_fast.program.format import Program, ProgramError, check_constants
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import ArtifactsQuotaExceeded, BudgetExceeded, BundleFailed, BundleRejected
from prism_fast.protocol.run_spec import RunSpec

MAX_RESULT_BYTES = 16 << 20
SIZE_EVERY_S = 0.25
MAX_PROGRAM_BYTES = 256 << 20  # of one width: text and constants
MIN_STATE_LIMIT = 1 << 30  # bytes, or 16 a parameter of the cap
ROWS = 2  # rows that a program is traced with; of no consequence where any number will do
# What a model's constants may hold before they count as parameters: a mask of every pair of positions, and tables of
# this many numbers a position (rotary angles, decays).
TABLE_NUMBERS_PER_POSITION = 1024


@dataclass(frozen=True)
class TracedWidth:
    """A frozen program, its constants as a safetensors file, and what the tracer said of both."""

    program: Program
    constants: bytes
    differs: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Traced:
    """Programs by ascending width, and the state that `build_model` made under the forced seed."""

    programs: tuple[TracedWidth, ...]
    slots: list[Slot]
    initial_state: SharedRegion
    dtypes: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def parameters(self) -> int:
        """Numbers of distinct parameters, and of constants beyond what tables of that width need."""
        return sum(s.numbers for s in self.slots if s.is_parameter and not s.tied) + self.constants_counted

    @property
    def numbers(self) -> int:
        """What counts towards the cap at most: parameters, constants, and every buffer as if it were trained."""
        return self.parameters + sum(s.numbers for s in self.slots if not s.is_parameter and not s.tied)

    @property
    def constants_counted(self) -> int:
        return max(
            max(0, t.program.constant_elements - t.program.width * (t.program.width + TABLE_NUMBERS_PER_POSITION))
            for t in self.programs
        )

    def of_width(self, width: int) -> TracedWidth | None:
        return next((t for t in self.programs if t.program.width == width), None)

    def with_programs(self, more: Traced) -> Traced:
        """These programs and others of the same model and state."""
        widths = {t.program.width: t for t in (*self.programs, *more.programs)}
        return Traced(
            tuple(widths[w] for w in sorted(widths)), self.slots, self.initial_state, self.dtypes, self.seconds
        )

    def write(self, directory: Path) -> None:
        """Keeps the programs as receipts: `width-<w>.json` and `width-<w>.safetensors`."""
        directory.mkdir(exist_ok=True)
        for each in self.programs:
            (directory / f"width-{each.program.width}.json").write_bytes(each.program.to_bytes())
            (directory / f"width-{each.program.width}.safetensors").write_bytes(each.constants)


class Tracer:
    """One tracer process, running beside whatever else starts."""

    def __init__(
        self,
        spec: RunSpec,
        bundle: Bundle,
        sandbox: Sandbox,
        environment: dict[str, str],
        log_path: Path,
        *,
        tokenizer_dir: str,
        widths: Sequence[int],
        rows: int = ROWS,
        dtypes: dict[str, str] | None = None,
        compare: bool = True,
    ) -> None:
        self._spec, self._widths = spec, sorted(set(widths))
        self._dtypes = dtypes or {}
        self._began = monotonic()
        self._private = tempfile.TemporaryDirectory(prefix="prism-tracer-")
        bundle_dir, self._out = Path(self._private.name) / "bundle", Path(self._private.name) / "out"
        bundle.write_to(bundle_dir, ("architecture.py",))
        self._out.mkdir()
        job = TraceJob(
            spec=spec.model_dump(mode="json"),
            bundle_dir=str(bundle_dir),
            tokenizer_dir=tokenizer_dir,
            out_dir=str(self._out),
            widths=self._widths,
            rows=rows,
            dtypes=self._dtypes,
            compare=compare,
        )
        (self._out / "job.json").write_bytes(orjson.dumps(job.model_dump(mode="json")))
        command = child_command("prism_fast.harness.tracer.main", str(self._out))
        self._log = log_path
        with open(log_path, "ab") as log, nothing_to_read() as stdin:
            self.process = subprocess.Popen(
                sandbox.tracer(command, bundle_dir, self._out),
                env=child_environment(environment),
                stdin=stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._private.name,
                start_new_session=True,
            )

    def finish(self, deadline: Callable[[], float]) -> Traced:
        """Waits for the tracer's end and freezes what it made. Raises BundleRejected, BundleFailed, BudgetExceeded."""
        try:
            while self.process.poll() is None:
                left = deadline() - monotonic()
                if left <= 0:
                    raise BudgetExceeded(
                        f"build_model or the capture of its forward was still running at the end of the run's time "
                        f"({c.MARKER_BUDGET_EXCEEDED})",
                        rule=c.RULE_BUDGET_EXCEEDED,
                    )
                self.check_size()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(min(left, SIZE_EVERY_S))
            self.check_size()
        finally:
            end_processes(self.process, set(descendants(os.getpid())) - {self.process.pid})
        with handling("the tracer"):
            return self._read()

    def check_size(self) -> None:
        """Raises ArtifactsQuotaExceeded where the tracer has written more than its files can need."""
        asked = [f"width-{width}.{kind}" for width in self._widths for kind in ("json", "safetensors")]
        own = 0
        for name in ("job.json", "result.json", "initial_state.bin", *asked):
            with contextlib.suppress(OSError):
                own += entry_bytes(os.lstat(self._out / name))
        used, most = directory_bytes(self._out), self._state_limit + len(self._widths) * MAX_PROGRAM_BYTES
        if own > most or used - own > self._spec.artifacts_quota_bytes:
            raise ArtifactsQuotaExceeded(
                f"architecture.py made the tracer write {min(used, 1 << 62):,} bytes; the quota beside state and "
                f"programs is {self._spec.artifacts_quota_bytes:,} ({c.MARKER_ARTIFACTS_QUOTA})",
                rule=c.RULE_ARTIFACTS_QUOTA,
            )

    def _read(self) -> Traced:
        if not (self._out / "result.json").exists():
            raise BundleFailed(
                f"the tracer ended without a result (code {self.process.returncode}); see {self._log.name}",
                rule=c.RULE_RUNTIME_ERROR,
            )
        result = read(TraceResult, self._file("result.json", MAX_RESULT_BYTES))
        if result.fault is not None:
            raise result.fault.error(ours_possible=False)
        if [p.width for p in result.programs] != self._widths:
            raise BundleFailed("the tracer made other programs than it was asked for", rule=c.RULE_RUNTIME_ERROR)
        programs: list[TracedWidth] = []
        for told in result.programs:
            try:
                program = Program.from_bytes(self._file(f"width-{told.width}.json", 64 << 20))
                operators.check(program)
                constants = self._file(f"width-{told.width}.safetensors", MAX_PROGRAM_BYTES)
                check_constants(constants, program)
            except ProgramError as error:
                raise BundleRejected(str(error), rule=c.RULE_NOT_EXPORTABLE) from None
            if program.width != told.width or program.state != (programs[0].program if programs else program).state:
                raise BundleFailed("the tracer's programs are not of one model", rule=c.RULE_RUNTIME_ERROR)
            programs.append(TracedWidth(program, constants, told.differs, tuple(told.notes)))
        slots = slots_of(programs[0].program.state)
        size = region_bytes(slots)
        if size > self._state_limit:
            raise BundleRejected(
                f"the model's state takes {size:,} bytes; at most {self._state_limit:,} are shared",
                rule=c.RULE_PARAM_CAP,
            )
        region = SharedRegion.create("prism-initial", size)
        with SharedRegion.writer(region) as writer:
            whole = np.frombuffer(self._file("initial_state.bin", size, size), np.uint8)
            for slot in slots:
                end = slot.offset + slot.nbytes
                writer.array()[slot.offset : end] = whole[slot.offset : end]
        region.close_to_writers()
        return Traced(tuple(programs), slots, region, self._dtypes, monotonic() - self._began)

    @property
    def _state_limit(self) -> int:
        return max(MIN_STATE_LIMIT, 16 * self._spec.max_parameters)

    def _file(self, name: str, limit: int, exactly: int | None = None) -> bytes:
        """A regular file of at most `limit` bytes that the tracer left, never through a link."""
        try:
            fd = os.open(self._out / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            raise BundleFailed(f"the tracer left no file {name}", rule=c.RULE_RUNTIME_ERROR) from None
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit or exactly not in (None, found.st_size):
            os.close(fd)
            raise BundleFailed(
                f"the tracer's {name} has {found.st_size:,} bytes; at most {limit:,} are taken",
                rule=c.RULE_RUNTIME_ERROR,
            )
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def close(self) -> None:
        """Ends the process if it still runs, and removes what it wrote."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(OSError):
            self._private.cleanup()
        shutil.rmtree(self._private.name, ignore_errors=True)


def check_cap(count: int, spec: RunSpec) -> None:
    """Raises BundleRejected (`prism:param-cap`) above the stage's cap."""
    if count > spec.max_parameters:
        raise BundleRejected(
            f"the model trains {count:,} parameters; the {spec.param_ladder_stage} stage allows at most "
            f"{spec.max_parameters:,} ({c.MARKER_PARAM_CAP})",
            rule=c.RULE_PARAM_CAP,
        )


def trace_bundle(
    bundle: Bundle, spec: RunSpec, sandbox: Sandbox, environment: dict[str, str], widths: Sequence[int], seconds: float
) -> Traced:
    """A bundle's programs without a run. Raises as `Tracer.finish`; the tracer's log goes with it."""
    from prism_fast.harness.referee.seed_run import ASSETS

    with tempfile.TemporaryDirectory(prefix="prism-trace-") as private:
        tracer = Tracer(
            spec,
            bundle,
            sandbox,
            environment,
            Path(private) / c.TRACER_LOG_FILE,
            tokenizer_dir=str(ASSETS),
            widths=widths,
        )
        end = monotonic() + seconds
        try:
            return tracer.finish(lambda: end)
        finally:
            tracer.close()
