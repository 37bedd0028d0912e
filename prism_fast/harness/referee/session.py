"""The referee's side of sealed scoring: it owns the stream, the targets, the order, the budgets and the sums.

    referee:  batch k -> executor (copies weights k, predicts, marks, probes) -> record -> ledger
                                                     after the record -> trainer -> step -> weights k+1 (shared)

The nats of batch k exist before the trainer has seen batch k; order is the proof. The model reaches the executor as
programs that a tracer made and the referee froze before the first batch was shown; the trainer's scripts run in no
process that holds text.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from prism_fast.harness.bundle.bundle import Bundle
from prism_fast.harness.process import wire
from prism_fast.harness.process.environment import engine_environment
from prism_fast.harness.process.isolation import Sandbox
from prism_fast.harness.process.jobs import MAX_BATCH_SIZE, ShareRequest
from prism_fast.harness.process.shared_memory import SharedRegion
from prism_fast.harness.process.shared_state import first_difference, region_bytes, to_json, write_safetensors
from prism_fast.harness.referee.executing import Executor
from prism_fast.harness.referee.ledger import Ledger, pack_record
from prism_fast.harness.referee.tracing import ROWS, Traced, Tracer, check_cap
from prism_fast.protocol import constants as c
from prism_fast.protocol.budgets import budget_reached, steps_at_most
from prism_fast.protocol.canonical import file_sha256
from prism_fast.protocol.errors import BundleFailed, BundleRejected
from prism_fast.protocol.run_spec import RunSpec

FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})


@dataclass(frozen=True)
class SealedData:
    """What a sealed run reads. `tokenizer` made the corpus; `basis_tokenizer(basis)` is what its stream is made of."""

    split: Any
    tokenizer: Any
    byte_tokenizer: Any
    prefetch: int

    def basis_tokenizer(self, basis: str) -> Any:
        return self.tokenizer if basis == "tokens" else self.byte_tokenizer


@dataclass(frozen=True)
class Snapshot:
    """The weights that one batch was predicted from, kept."""

    index: int
    path: str
    sha256: str
    autocast: str  # in force around the bundle's loop then


class _Rank:
    """One rank's stream, executor and shared weights."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.region: SharedRegion | None = None
        self.stream: Any = None


class SealedSession:
    """Predicts and scores for one seed's trainer ranks. Owned by the referee's loop."""

    def __init__(
        self,
        spec: RunSpec,
        bundle: Bundle,
        sandbox: Sandbox,
        environment: dict[str, str],
        run_dir: Path,
        data: SealedData,
        ledger: Ledger,
        tokenizer_dir: str,
        deadline: Callable[[], float],
        heldout_widths: Sequence[int],
        on_frozen: Callable[[Traced, dict[str, Any]], None],
        snapshots: int = 0,
    ) -> None:
        """`heldout_widths`: of the rows that held-out text comes in. `on_frozen(programs, request)` is called once,
        before the first batch is shown. `snapshots`: batches, secretly chosen, whose weights are kept."""
        self.spec, self.data, self.ledger, self._run_dir = spec, data, ledger, run_dir
        self._deadline, self._on_frozen, self._wanted_snapshots = deadline, on_frozen, snapshots
        self.stopped_reason: str | None = None  # as the ranks were told; None: they were always given a batch
        self.model: dict[str, Any] | None = None
        self.traced: Traced | None = None
        self.trace_s = 0.0  # spent waiting for programs
        self.snapshots: list[Snapshot] = []
        self.request: dict[str, Any] | None = None
        self._tokens_seen = 0
        self._snapshot_at: frozenset[int] = frozenset()

        def trace(widths: Sequence[int], rows: int = ROWS, dtypes: dict[str, str] | None = None) -> Tracer:
            return Tracer(
                spec,
                bundle,
                sandbox,
                environment,
                run_dir / c.TRACER_LOG_FILE,
                tokenizer_dir=tokenizer_dir,
                widths=widths,
                rows=rows,
                dtypes=dtypes,
                compare=False,
            )

        self._trace = trace
        self._heldout_widths = tuple(heldout_widths)
        self._tracer: Tracer | None = trace((*heldout_widths, spec.sequence_length))
        log, own = run_dir / c.EXECUTOR_LOG_FILE, engine_environment(spec)
        self._ranks = [
            _Rank(Executor(spec, sandbox, own, log, deadline=deadline, rank=rank)) for rank in range(spec.world_size)
        ]

    # -------------------------------------------------------------------------------------------- weights are shown

    def share(self, rank: int, asked: ShareRequest) -> tuple[list[Any], SharedRegion]:
        """A rank says what it wants to be given: -> where its state belongs, and the region. Raises BundleRejected."""
        state = self._ranks[rank]
        if state.region is not None:
            raise BundleFailed(f"rank {rank} asked to be given batches twice", rule=c.RULE_RUNTIME_ERROR)
        request = checked_request(asked, self.spec)
        if self.request is None:
            self._freeze(asked, request)
        elif {k: self.request[k] for k in request} != request:
            raise BundleRejected(
                f"rank {rank} asked for {request}, another rank for other batches", rule=c.RULE_BATCH_REQUEST
            )
        assert self.traced is not None
        table = np.array(self.data.basis_tokenizer(request["basis"]).token_bytes, np.int32)
        state.executor.load(self.traced, table, asked.matmul_precision)
        state.region = SharedRegion.create("prism-weights", region_bytes(self.traced.slots))
        return to_json(self.traced.slots), state.region

    def _freeze(self, asked: ShareRequest, request: dict[str, Any]) -> None:
        """All programs exist from here on: for the run's rows and for held-out rows, in the dtypes that are trained."""
        began = perf_counter()
        assert self._tracer is not None
        traced = self._finish(self._tracer)
        _check_names(traced, asked.dtypes)
        changed = {s.name for s in traced.slots if asked.dtypes[s.name] != s.dtype}
        if odd := [n for n in changed if asked.dtypes[n] not in FLOATS]:
            raise BundleRejected(
                f"the trained model has {odd[0]} as {asked.dtypes[odd[0]]}; build_model(ctx)'s cannot be made that",
                rule=c.RULE_MODEL_MISMATCH,
            )
        width, rows = request["seq_len"], request["batch_size"]
        if changed:
            dtypes = {**asked.dtypes, **asked.other_dtypes}
            traced = self._finish(self._trace((*self._heldout_widths, width), ROWS, dtypes))
        found = traced.of_width(width)
        if found is None or not found.program.takes(rows):
            more = self._finish(self._trace((width,), rows, traced.dtypes))
            if more.programs[0].program.state != traced.programs[0].program.state or first_difference(
                traced.slots, traced.initial_state, more.initial_state
            ):
                raise BundleRejected(
                    f"build_model(ctx) gave another model when it was asked for rows of {width} tokens",
                    rule=c.RULE_NONDETERMINISTIC,
                )
            traced = traced.with_programs(more)
        check_cap(traced.parameters, self.spec)
        self.traced = traced
        parameters = sum(s.numbers for s in traced.slots if s.is_parameter and not s.tied)
        self.request = {**request, "model_params": parameters}
        self._on_frozen(traced, self.request)
        self.trace_s += perf_counter() - began

    def _finish(self, tracer: Tracer) -> Traced:
        self._tracer = tracer
        try:
            return tracer.finish(self._deadline)
        finally:
            tracer.close()
            self._tracer = None

    def mapped(self, rank: int) -> None:
        """The rank has its weights in the region, and nobody else may write there; the executor, which copies them,
        sees whether they are the forced init."""
        from prism_fast.data.stream import TokenStream

        state = self._ranks[rank]
        if state.region is None or self.request is None or self.traced is None or state.stream is not None:
            raise BundleFailed("a rank mapped weights it had no place for, or twice", rule=c.RULE_RUNTIME_ERROR)
        try:
            state.region.close_to_writers()
        except OSError:  # the trainer has sealed the region against seals
            raise BundleFailed(
                "a rank closed the memory that its weights are shown in", rule=c.RULE_RUNTIME_ERROR
            ) from None
        state.executor.adopt("live", state.region)
        request = self.request
        state.stream = TokenStream(
            self.data.split,
            request["seq_len"],
            request["batch_size"],
            basis="bytes" if request["basis"] == "bytes" and self.spec.tokenizer != "bytes" else "tokens",
            rank=rank,
            world=self.spec.world_size,
            prefetch=self.data.prefetch,
        )
        if rank == 0 and self._wanted_snapshots:
            batches = min(len(state.stream), self._batches_at_most(request))
            wanted = min(self._wanted_snapshots, batches)
            self._snapshot_at = frozenset(secrets.SystemRandom().sample(range(batches), wanted))

    def _batches_at_most(self, request: dict[str, Any]) -> int:
        """Batches of one rank that the budgets allow."""
        tokens_per_step = request["seq_len"] * request["batch_size"] * self.spec.world_size
        return steps_at_most(self.spec, tokens_per_step, request["model_params"])

    # ------------------------------------------------------------------------------------------ batches are scored

    def hand_out(self, index: int, autocast: dict[int, int], stop: str | None) -> dict[int, bytes] | str:
        """Every rank has asked for batch `index`: -> each rank's BATCH body, or why there is none."""
        answer = self._hand_out(index, autocast, stop)
        if isinstance(answer, str):
            self.stopped_reason = self.stopped_reason or answer
        return answer

    def _hand_out(self, index: int, autocast: dict[int, int], stop: str | None) -> dict[int, bytes] | str:
        if index != self.ledger.batches:
            raise BundleFailed(
                f"batch {index} was asked for; the next one is {self.ledger.batches}", rule=c.RULE_RUNTIME_ERROR
            )
        if self.request is None or any(self._ranks[r].stream is None for r in autocast):
            raise BundleFailed("a batch was asked for before the weights were shown", rule=c.RULE_RUNTIME_ERROR)
        if (reason := budget_reached(self.spec, self._tokens_seen, index, self.request["model_params"])) is not None:
            return reason
        if stop is not None:
            return stop
        if index >= min(len(self._ranks[r].stream) for r in autocast):
            return c.STOP_DATA_EXHAUSTED
        return {rank: self._score(rank, index, autocast[rank]) for rank in sorted(autocast)}

    def _score(self, rank: int, index: int, autocast: int) -> bytes:
        state = self._ranks[rank]
        assert self.traced is not None
        t0 = perf_counter()
        block = next(state.stream)
        t1 = perf_counter()
        record, _ = state.executor.predict(block.tokens, block.targets, state="live", autocast=autocast)
        check_cap(self.traced.parameters + record.trained_numbers, self.spec)
        if self.model is None:
            self._describe(state)
        rows, width = block.tokens.shape
        self.ledger.add(rank, pack_record(index, record[:6], rows * width, block.documents, rank, rows))
        self._tokens_seen += rows * width
        if rank == 0 and index in self._snapshot_at:
            self._keep_snapshot(state, index, autocast)
        t2 = perf_counter()
        predict_s = t2 - t1 - record.scoring_s
        return wire.BATCH_RECORD.pack(index, rows, width, t1 - t0, predict_s, record.scoring_s) + block.tokens.tobytes()

    def _keep_snapshot(self, state: _Rank, index: int, autocast: int) -> None:
        folder = self._run_dir / c.SNAPSHOTS_DIR
        folder.mkdir(exist_ok=True)
        path = folder / f"batch-{index:08d}.safetensors"
        state.executor.snapshot(path)
        name = f"{c.SNAPSHOTS_DIR}/{path.name}"
        self.snapshots.append(Snapshot(index, name, file_sha256(path), wire.AUTOCAST[autocast]))

    def _describe(self, state: _Rank) -> None:
        assert self.request is not None
        self.model = {
            **self.request,
            "head_width": state.executor.head_width,
            "plan": asdict(state.stream.plan_summary()),
            "backends": {"token_nll": "cpp" if state.executor.device == "cpu" else "triton"},
        }

    # ------------------------------------------------------------------------------------------------------ the end

    def check_scratch(self) -> None:
        """Raises ArtifactsQuotaExceeded where a tracer that still runs has written too much."""
        if self._tracer is not None:
            self._tracer.check_size()

    @property
    def processes(self) -> set[int]:
        return {state.executor.process.pid for state in self._ranks}

    @property
    def executor(self) -> Executor:
        """Rank 0's: it answers for held-out text too."""
        return self._ranks[0].executor

    @property
    def rules_broken(self) -> list[str]:
        return list(dict.fromkeys(rule for state in self._ranks for rule in state.executor.rules))

    @property
    def heldout_widths(self) -> tuple[int, ...]:
        """Widths that held-out rows are padded to, ascending."""
        return self._heldout_widths

    def check_trained_state(self) -> None:
        """Whatever has changed since the forced init was trained, buffers too, and counts towards the cap."""
        assert self.traced is not None
        check_cap(self.traced.parameters + self.executor.trained_numbers, self.spec)

    def adopt_trained(self) -> None:
        """The state as the trainer left it becomes the executor's state "trained"."""
        region = self._ranks[0].region
        assert region is not None
        self.executor.adopt("trained", region)

    def save_weights(self) -> None:
        """Writes the initial and the final state as safetensors, tied tensors under each of their names."""
        region = self._ranks[0].region
        assert region is not None and self.traced is not None
        write_safetensors(self.traced.slots, region, self._run_dir / c.WEIGHTS_FILE)

    def close(self) -> None:
        if self._tracer is not None:
            self._tracer.close()
        for state in self._ranks:
            state.executor.close()
            if state.stream is not None:
                state.stream.close()


def checked_request(asked: ShareRequest, spec: RunSpec) -> dict[str, Any]:
    """What a trainer asked for, held to the same bounds that its own process should have held it to.

    Raises BundleRejected.
    """
    for name, value, high in (
        ("seq_len", asked.seq_len, spec.sequence_length),
        ("batch_size", asked.batch_size, MAX_BATCH_SIZE),
    ):
        low = 2 if name == "seq_len" else 1
        if not low <= value <= high:
            raise BundleRejected(
                f"the trainer asked for {name}={value!r}; expected {low} to {high}", rule=c.RULE_BATCH_REQUEST
            )
    if spec.batch_size not in (None, asked.batch_size):
        raise BundleRejected(
            f"the trainer asked for batch_size={asked.batch_size}; this run pins it to {spec.batch_size}",
            rule=c.RULE_BATCH_REQUEST,
        )
    return {
        "batch_size": asked.batch_size,
        "seq_len": asked.seq_len,
        "basis": asked.basis,
        "matmul_precision": asked.matmul_precision,
    }


def _check_names(traced: Traced, dtypes: dict[str, str]) -> None:
    """Raises BundleRejected (`prism:model-mismatch`) unless the trainer's state has exactly the program's names."""
    known = {slot.name for slot in traced.slots}
    for problem, names in (
        ("the trained state is missing", known - dtypes.keys()),
        ("build_model(ctx) does not know", dtypes.keys() - known),
    ):
        if names:
            shown = ", ".join(sorted(names)[:3]) + (" ..." if len(names) > 3 else "")
            raise BundleRejected(
                f"the trained model is not the one build_model(ctx) declares: {problem} {shown}",
                rule=c.RULE_MODEL_MISMATCH,
            )
