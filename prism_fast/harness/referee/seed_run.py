"""One seed of a scoring job: tracer, trainer, executor, held-out, score, files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

import prism_fast
from prism_fast.harness.marking.heldout import choose_widths, measure, row_lengths
from prism_fast.harness.process.environment import engine_environment
from prism_fast.harness.process.interrupt import StopFlag
from prism_fast.harness.process.isolation import Sandbox
from prism_fast.harness.process.jobs import handling
from prism_fast.harness.process.processes import descendants, end_processes
from prism_fast.harness.process.shared_state import write_safetensors
from prism_fast.harness.referee.executing import StatePredictor
from prism_fast.harness.referee.launch import HELDOUT_SECONDS, Trainer, TrainerResult
from prism_fast.harness.referee.ledger import Ledger
from prism_fast.harness.referee.request import Prepared, Reporter, ScoreRequest
from prism_fast.harness.referee.results import RunFacts, write_documents
from prism_fast.harness.referee.session import SealedData, SealedSession
from prism_fast.harness.referee.tracing import Traced, TracedWidth
from prism_fast.protocol import constants as c
from prism_fast.protocol import manifest as m
from prism_fast.protocol import receipts
from prism_fast.protocol.canonical import file_sha256, sha256_hex, write_atomically, write_json
from prism_fast.protocol.errors import EngineFault, one_line
from prism_fast.protocol.pins import scale_pin_public_ok
from prism_fast.protocol.run_spec import RunSpec
from prism_fast.protocol.score import HeldOut

ASSETS = Path(prism_fast.__file__).parent / "data" / "assets"
HELDOUT_ANSWER_SECONDS = 300.0  # one held-out forward


class SeedRun:
    """Runs one frozen spec in its directory. `run` returns the manifest it wrote, or raises the PrismError."""

    def __init__(
        self,
        request: ScoreRequest,
        prepared: Prepared,
        spec: RunSpec,
        run_dir: Path,
        reporter: Reporter,
        stop: StopFlag,
    ) -> None:
        self.request, self.prepared, self.spec, self.run_dir = request, prepared, spec, run_dir
        self.reporter, self.stop = reporter, stop
        self.sandbox = Sandbox(spec.isolation, hidden=prepared.hidden)
        self.environment = bundle_environment(prepared, spec, run_dir)
        self.session: SealedSession | None = None
        self.genesis: receipts.Genesis | None = None
        self._heldout_basis = "bytes" if spec.tokenizer == "bytes" else "tokens"

    def run(self) -> m.RunManifest:
        began = monotonic()
        keep = set(descendants(os.getpid()))
        write_json(self.run_dir / c.RUN_SPEC_FILE, self.spec.model_dump(mode="json"))
        self.prepared.bundle.write_to(self.run_dir / c.BUNDLE_DIR)
        self._ledger = ledger = Ledger(self.run_dir, self.spec.world_size)
        if self.spec.seal == "open":
            self._bind(ledger, None)
        try:
            trained = self._train(ledger)
            ledger.close()
            self.reporter.training(self.spec, ledger, trained.train_s)
            heldout_began = monotonic()
            heldout = self._held_out(trained)
            heldout_s = monotonic() - heldout_began if heldout is not None else None
        finally:
            ledger.close()
            if self.session is not None:
                self.session.close()
            end_processes(None, keep)
        return self._write(trained, ledger, heldout, monotonic() - began, heldout_s)

    # ------------------------------------------------------------------------------------------------------ training

    def _train(self, ledger: Ledger) -> TrainerResult:
        spec = self.spec
        sealed = spec.seal == "sealed"
        folder = "" if sealed else str(self.prepared.corpus.folder)
        widths = self._heldout_widths()
        with tempfile.TemporaryDirectory(prefix="prism-bundle-") as bundle_dir:
            self.prepared.bundle.write_to(Path(bundle_dir))
            self.reporter.stage(f"seed {spec.seed}: starting {spec.world_size} rank{'s' * (spec.world_size > 1)}")
            trainer = Trainer(
                spec,
                {
                    "bundle_dir": bundle_dir,
                    "corpus_dir": folder,
                    "train_shards": [] if sealed else [str(path) for path in self.prepared.train.shards],
                    "data_dir": folder,
                    "artifacts_dir": str(self.run_dir / c.ARTIFACTS_DIR),
                    "tokenizer_dir": str(ASSETS),
                    "weights_path": str(self.run_dir / c.WEIGHTS_FILE),
                    "prefetch": self.request.prefetch,
                    "heldout": None if sealed else self._heldout_job(widths),
                    "compare_state": self.request.compare_state,
                },
                self.run_dir,
                self.environment,
                ledger,
                self.stop,
                lambda seen, elapsed: self.reporter.training(spec, seen, elapsed),
                self.sandbox,
                (lambda deadline: self._start_session(ledger, deadline, widths)) if sealed else None,
            )
            trained = trainer.run()
        if self.session is not None:
            self.session.save_weights()
        return trained

    def _start_session(self, ledger: Ledger, deadline: Callable[[], float], widths: tuple[int, ...]) -> SealedSession:
        prepared = self.prepared
        self.session = SealedSession(
            self.spec,
            prepared.bundle,
            self.sandbox,
            self.environment,
            self.run_dir,
            SealedData(
                split=prepared.train,
                tokenizer=prepared.tokenizer,
                byte_tokenizer=prepared.byte_tokenizer,
                prefetch=self.request.prefetch,
            ),
            ledger,
            str(ASSETS),
            deadline,
            widths,
            self._frozen,
            self.request.snapshots,
        )
        return self.session

    def _frozen(self, traced: Traced, request: dict[str, Any]) -> None:
        """Programs and initial state are receipts from here on, and what they are is the ledger's beginning."""
        traced.write(self.run_dir / c.PROGRAM_DIR)
        write_safetensors(traced.slots, traced.initial_state, self.run_dir / c.INITIAL_STATE_FILE)
        assert self._ledger is not None
        self._bind(self._ledger, traced)

    # ------------------------------------------------------------------------------------------------------ held-out

    def _heldout_widths(self) -> tuple[int, ...]:
        """Widths of the programs that held-out rows need, ascending; a bundle that trains on bytes gets the same."""
        spec, val = self.spec, self.prepared.val_corpus
        if val is None:
            return (spec.sequence_length,)
        rows = row_lengths(val, "val", self._heldout_basis, spec.sequence_length, spec.val_byte_budget)
        return choose_widths(rows, spec.sequence_length)

    def _heldout_job(self, widths: tuple[int, ...]) -> dict[str, Any] | None:
        """What an open rank needs to measure held-out text in its own process."""
        prepared = self.prepared
        if prepared.val_corpus is None:
            return None
        return {
            "val_folder": str(prepared.val_corpus.folder),
            "val_mounts": _as_text(prepared.val_corpus.mounts),
            "train_folder": str(prepared.corpus.folder),
            "train_mounts": _as_text(prepared.corpus.mounts),
            "widths": list(widths),
            "val_byte_budget": self.spec.val_byte_budget,
            "documents_path": str(self.run_dir / c.HELDOUT_DOCUMENTS_FILE),
        }

    def _held_out(self, trained: TrainerResult) -> HeldOut | None:
        """The sums, or None without a val split. Writes heldout.json and its documents."""
        prepared, spec = self.prepared, self.spec
        if prepared.val_corpus is None or trained.model is None:
            return None
        if self.session is None:
            found = trained.done[0].heldout
            if found is None:
                return None
            with handling("rank 0's held-out report"):
                if (report := found["report"]) is None:
                    self.reporter.warn(f"no held-out figure, the score is degraded: {one_line(str(found['reason']))}")
                    return None
                heldout = receipts.heldout_of(report)
            write_json(self.run_dir / c.HELDOUT_FILE, report)
            return heldout
        self.reporter.stage(f"seed {spec.seed}: held-out scoring")
        stopped_before = self.stop.reason is not None
        end = monotonic() + HELDOUT_SECONDS + 2 * spec.budget_seconds

        def before_batch() -> None:
            """A stop asked for while training does not cut the held-out figures short; a new one gives up."""
            if self.stop.reason is not None and not stopped_before:
                raise EngineFault("interrupted in held-out scoring: the run is left without a score")

        session, executor = self.session, self.session.executor
        executor.set_deadline(lambda: min(monotonic() + HELDOUT_ANSWER_SECONDS, end))
        basis = "tokens" if spec.tokenizer == "bytes" else trained.model["basis"]
        session.adopt_trained()
        heldout, report = measure(
            StatePredictor(executor, "initial", probe=False),
            lambda: StatePredictor(executor, "trained", probe=True),
            corpus=prepared.corpus,
            val_corpus=prepared.val_corpus,
            basis=basis,
            basis_tokenizer=prepared.tokenizer if basis == "tokens" else prepared.byte_tokenizer,
            widths=session.heldout_widths,
            val_byte_budget=spec.val_byte_budget,
            documents_path=self.run_dir / c.HELDOUT_DOCUMENTS_FILE,
            before_batch=before_batch,
        )
        session.check_trained_state()
        write_json(self.run_dir / c.HELDOUT_FILE, report)
        return heldout

    # -------------------------------------------------------------------------------------------------------- results

    def _bind(self, ledger: Ledger, traced: Traced | None) -> None:
        """Writes genesis.json and begins the ledger with its digest: before the first record."""
        prepared, spec = self.prepared, self.spec
        submission_id = prepared.bundle.submission_id
        initial = self.run_dir / c.INITIAL_STATE_FILE
        self.genesis = receipts.Genesis(
            run_spec_sha256=spec.hash,
            submission_id=submission_id,
            run_id=f"{submission_id}-{spec.seed}-{spec.hash[:12]}",
            script_sha256={name: sha256_hex(script) for name, script in prepared.bundle.scripts.items()},
            data_dir=self.request.data,
            data_source=" then ".join(
                corpus.manifest.dataset.name for corpus in (prepared.corpus, prepared.phase2_corpus) if corpus
            ),
            shard_count=len(prepared.train.shards),
            available_bytes=prepared.train.bytes,
            programs=[] if traced is None else [_program_ref(each) for each in traced.programs],
            initial_state_sha256=None if traced is None else file_sha256(initial),
            pin=_pin_block(self.request),
            distributed_contract=_contract_block(prepared),
        )
        data = receipts.document_bytes(self.genesis)
        write_atomically(self.run_dir / c.GENESIS_FILE, data)
        ledger.bind(bytes.fromhex(sha256_hex(data)))

    def _write(
        self, trained: TrainerResult, ledger: Ledger, heldout: HeldOut | None, wall_s: float, heldout_s: float | None
    ) -> m.RunManifest:
        assert trained.model is not None and self.genesis is not None
        session = self.session
        of_executor: dict[str, Any] = {}
        if session is not None:
            of_executor = {
                "violations": session.rules_broken,
                "probed_rows": session.executor.probed_rows,
                "probe_mode": session.executor.probe_mode,
                "head": session.executor.head,
                "snapshots": tuple(m.SnapshotRef(**asdict(each)) for each in session.snapshots),
            }
        facts = RunFacts(
            spec=self.spec,
            genesis=self.genesis,
            run_dir=self.run_dir,
            hello=trained.hello[0],
            done=trained.done,
            model=trained.model,
            stopped_reason=trained.stopped_reason,
            heldout=heldout,
            startup_s={**self.prepared.seconds, **startup_parts(trained)},
            train_s=trained.train_s,
            wall_s=wall_s,
            heldout_s=heldout_s,
            **of_executor,
        )
        if trained.done[0].outside_state is not None:
            write_json(self.run_dir / c.OUTSIDE_STATE_FILE, trained.done[0].outside_state.model_dump())
        return write_documents(facts, ledger)


def _program_ref(each: TracedWidth) -> m.ProgramRef:
    return m.ProgramRef(
        width=each.program.width,
        batch=each.program.batch,
        operators=each.program.node_count,
        sha256=sha256_hex(each.program.to_bytes()),
        constants_bytes=len(each.constants),
        constants_sha256=sha256_hex(each.constants),
    )


def _as_text(mounts: Any) -> dict[str, str] | None:
    return {name: str(path) for name, path in mounts.items()} if mounts else None


def startup_parts(trained: TrainerResult) -> dict[str, float]:
    """Seconds from the spawn of the ranks to the first predicted batch, in parts that add up."""
    imports, prepare = trained.hello[0].import_s, trained.hello[0].prepare_s
    bundle, first = trained.started[0].bundle_import_s, trained.first_batch_s or 0.0
    return {
        "launch": max(
            0.0, trained.launch_s - imports - prepare
        ),  # sandbox, interpreter and, of several ranks, torchrun
        "imports": imports,
        "prepare": prepare,
        "bundle_import": bundle,
        "programs": trained.tracing_s,  # waiting for them, once the bundle has asked for its first batch
        "bundle_setup": max(0.0, first - trained.tracing_s),  # build_model, optimizer, and the first prediction
    }


def _pin_block(request: ScoreRequest) -> m.PinBlock | None:
    if request.pin is None or request.pin_name is None:
        return None
    guard = scale_pin_public_ok(request.pin)
    return m.PinBlock(name=request.pin_name, sha256=request.pin.digest, public_ok=guard.ok, reasons=list(guard.reasons))


def _contract_block(prepared: Prepared) -> m.ContractBlock | None:
    contract = prepared.contract
    if contract is None:
        return None
    off = contract.policy == "off"
    return m.ContractBlock(policy=contract.policy, ok=None if off else contract.ok, unmet=contract.flags)


def bundle_environment(prepared: Prepared, spec: RunSpec, run_dir: Path) -> dict[str, str]:
    """A bundle's environment: `engine_environment`, the contract's variables, and nothing else."""
    data_dir = "" if spec.seal == "sealed" else str(prepared.corpus.folder)
    # One node: ranks meet on loopback, whatever the host's name resolves to, and in a sandbox there is nothing else.
    loopback = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo") if spec.world_size > 1 else {}
    return {
        **engine_environment(spec),
        **loopback,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "PRISM_SUBMISSION_ID": prepared.bundle.submission_id,
        "PRISM_EXECUTION_MODE": spec.mode,
        "PRISM_GPU_COUNT": str(spec.world_size),
        "PRISM_DATA_DIR": data_dir,
        "PRISM_BASE_EVAL_TRAIN_DATA_DIR": data_dir,
        "PRISM_BASE_EVAL_VAL_DATA_DIR": "",
        "PRISM_ARTIFACT_OUTPUT_PATH": str(run_dir / c.ARTIFACTS_DIR),
        "PRISM_RUN_MANIFEST_PATH": str(run_dir / c.RUN_MANIFEST_FILE),
        "PRISM_REFERENCE_TOKENIZER_DIR": str(ASSETS),
        "PRISM_TOKEN_BUDGET": "" if spec.token_budget is None else str(spec.token_budget),
    }
