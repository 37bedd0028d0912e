"""One seed of a scoring job: trainer, evaluators, held-out, score, files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import prism_fast
from prism_fast.harness.process.interrupt import StopFlag
from prism_fast.harness.process.isolation import Sandbox
from prism_fast.harness.process.processes import descendants, end_processes
from prism_fast.harness.referee.evaluator_client import Evaluator
from prism_fast.harness.referee.head_choice import HeadChoice
from prism_fast.harness.referee.heldout import score_heldout
from prism_fast.harness.referee.launch import Trainer, TrainerResult
from prism_fast.harness.referee.ledger import Ledger
from prism_fast.harness.referee.request import Prepared, Reporter, ScoreRequest
from prism_fast.harness.referee.results import RunFacts, build_documents
from prism_fast.harness.referee.sealed import SealedData, SealedSession
from prism_fast.profiling.machine import THREADS_WAIT, usable_cpus
from prism_fast.protocol import constants as c
from prism_fast.protocol import manifest as m
from prism_fast.protocol.canonical import canonical_json, sha256_hex, write_atomically, write_json
from prism_fast.protocol.errors import BundleFailed, EngineFault
from prism_fast.protocol.pins import scale_pin_public_ok
from prism_fast.protocol.run_spec import RunSpec
from prism_fast.protocol.score import HeldOut, Score, compute_score

ASSETS = Path(prism_fast.__file__).parent / "data" / "assets"
HELDOUT_ANSWER_SECONDS = 300.0  # one held-out forward, and building the model before the first
HELDOUT_SECONDS = 600.0  # all of held-out scoring, plus twice what training was given
PASSED_ENVIRONMENT = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH", "TZ")
PASSED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "TRITON_", "TORCHINDUCTOR_")


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
        self.sandbox = Sandbox(spec.isolation, hidden=tuple(sorted(ASSETS.glob("*.jsonl.gz"))))
        self.environment = bundle_environment(prepared, spec, run_dir)
        self.session: SealedSession | None = None
        self._probes = 0  # in held-out scoring
        self._head: dict[str, Any] | None = None  # of training and held-out scoring together

    def run(self) -> m.RunManifest:
        began = monotonic()
        keep = set(descendants(os.getpid()))
        write_json(self.run_dir / c.RUN_SPEC_FILE, self.spec.model_dump(mode="json"))
        self.prepared.bundle.write_to(self.run_dir / c.BUNDLE_DIR)
        ledger = Ledger(self.run_dir, self.spec.world_size)
        try:
            trained = self._train(ledger)
            ledger.close()
            self.reporter.training(self.spec, ledger, trained.train_s)
            heldout_began = monotonic()
            heldout, broken = self._held_out(trained)
            heldout_s = monotonic() - heldout_began if heldout is not None else None
        finally:
            ledger.close()
            if self.session is not None:
                self.session.close()
            end_processes(None, keep)
        violations = dict.fromkeys([*(self.session.violations if self.session else []), *broken])
        assert trained.model is not None
        score = compute_score(
            ledger.code_length,
            step0_loss=ledger.step0_loss,
            head_width=self.spec.baseline_width(trained.model["head_width"]),
            faults=ledger.faults,
            heldout=heldout,
            violations=list(violations),
            cap_twin_at_uniform=self.spec.exact,
        )
        return self._write(trained, ledger, score, monotonic() - began, heldout_s)

    # ------------------------------------------------------------------------------------------------------ training

    def _train(self, ledger: Ledger) -> TrainerResult:
        spec = self.spec
        sealed = spec.seal == "sealed"
        folder = "" if sealed else str(self.prepared.corpus.folder)
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
                },
                self.run_dir,
                self.environment,
                ledger,
                self.stop,
                lambda seen, elapsed: self.reporter.training(spec, seen, elapsed),
                self.sandbox,
                (lambda deadline: self._start_session(ledger, deadline)) if sealed else None,
            )
            trained = trainer.run()
        if self.session is not None:
            self.session.check_trained_state()
            self.session.save_weights(self.run_dir / c.WEIGHTS_FILE)
        return trained

    def _start_session(self, ledger: Ledger, deadline: Callable[[], float]) -> SealedSession:
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
            self.request.scorer_threads or usable_cpus(),
        )
        return self.session

    # ------------------------------------------------------------------------------------------------------ held-out

    def _held_out(self, trained: TrainerResult) -> tuple[HeldOut | None, list[str]]:
        """-> (sums, rules broken); (None, []) without a val split. Writes heldout.json and its documents."""
        prepared, spec = self.prepared, self.spec
        if prepared.val_corpus is None or trained.model is None:
            return None, []
        self.reporter.stage(f"seed {spec.seed}: held-out scoring")
        stopped_before = self.stop.reason is not None

        def before_batch() -> None:
            """A stop asked for while training does not cut the held-out figures short; a new one gives up."""
            if self.stop.reason is not None and not stopped_before:
                raise EngineFault("interrupted in held-out scoring: the run is left without a score")

        end = monotonic() + HELDOUT_SECONDS + 2 * spec.budget_seconds

        def deadline() -> float:
            return min(monotonic() + HELDOUT_ANSWER_SECONDS, end)

        evaluator = Evaluator(
            spec,
            prepared.bundle,
            self.sandbox,
            self.environment,
            self.run_dir / c.EVALUATOR_LOG_FILE,
            tokenizer_dir=str(ASSETS),
            deadline=deadline,
        )
        try:
            import torch

            from prism_fast.harness.process.state_layout import load_state

            torch.set_num_threads(self.request.scorer_threads or usable_cpus())
            if self.session is not None:
                layout, region = self.session.final_state()
                self.session.set_shadow_deadline(deadline)
            else:
                layout, region = load_state(self.run_dir / c.WEIGHTS_FILE)
            if not spec.exact:
                return self._held_out_v2(evaluator, layout, region, before_batch), []
            basis = "tokens" if spec.tokenizer == "bytes" else trained.model["basis"]
            basis_tokenizer = prepared.tokenizer if basis == "tokens" else prepared.byte_tokenizer
            evaluator.n_vocab = basis_tokenizer.n_vocab
            head = HeadChoice(trained.done[0]["head"]["used"])
            heldout, report = score_heldout(
                evaluator,
                self.session.shadow if self.session is not None else None,
                layout,
                region,
                corpus=prepared.corpus,
                val_corpus=prepared.val_corpus,
                basis=basis,
                basis_tokenizer=basis_tokenizer,
                seq_len=spec.sequence_length,
                val_byte_budget=spec.val_byte_budget,
                run_dir=self.run_dir,
                before_batch=before_batch,
                head=head,
            )
            self._head = {**trained.done[0]["head"], "heldout": "fused" if head.fused else "plain"}
            self._head["reason"] = self._head["reason"] or head.reason
            self._head["audits"] += head.audits
        finally:
            evaluator.close()
        write_json(self.run_dir / c.HELDOUT_FILE, report)
        self._probes = sum(report[p]["probes"] for p in ("trained", "train_prefix"))
        return heldout, sorted({r for p in ("trained", "train_prefix") for r in report[p]["broken_rules"]})

    def _held_out_v2(
        self, evaluator: Evaluator, layout: Any, region: Any, before_batch: Callable[[], None]
    ) -> HeldOut | None:
        """By the original's rules; a model that fails there has no held-out figure, as it had none there."""
        from prism_fast.harness.trainer.prism_v2 import score_heldout_v2

        spec, prepared = self.spec, self.prepared
        try:
            heldout, report = score_heldout_v2(
                evaluator,
                layout,
                region,
                corpus=prepared.corpus,
                val_corpus=prepared.val_corpus,
                seq_len=spec.sequence_length,
                vocab_size=spec.vocab_size,
                byte_budget=spec.val_byte_budget,
                before_batch=before_batch,
            )
        except BundleFailed as error:
            self.reporter.warn(f"no held-out figure, the score is degraded: {error}")
            return None
        write_json(self.run_dir / c.HELDOUT_FILE, report)
        return heldout

    # -------------------------------------------------------------------------------------------------------- results

    def _write(
        self, trained: TrainerResult, ledger: Ledger, score: Score, wall_s: float, heldout_s: float | None
    ) -> m.RunManifest:
        prepared, spec, run_dir = self.prepared, self.spec, self.run_dir
        assert trained.model is not None
        train_split = prepared.train
        stopped_reason = trained.done[0]["stopped_reason"]
        submission_id = prepared.bundle.submission_id
        facts = RunFacts(
            spec=spec,
            submission_id=submission_id,
            run_id=f"{submission_id}-{spec.seed}-{spec.hash[:12]}",
            run_dir=run_dir,
            data_dir=self.request.data,
            data_source=" then ".join(
                corpus.manifest.dataset.name for corpus in (prepared.corpus, prepared.phase2_corpus) if corpus
            ),
            shard_count=len(train_split.shards),
            available_bytes=train_split.bytes,
            hello=trained.hello,
            started=trained.started,
            model=trained.model,
            done=trained.done,
            stopped_reason=stopped_reason,
            startup_s={
                **prepared.seconds,
                **startup_parts(trained),
            },
            train_s=trained.train_s,
            wall_s=wall_s,
            heldout_s=heldout_s,
            ineligible_reasons=_ineligible(spec, stopped_reason, score, prepared),
            head=m.HeadBlock.model_validate(self._head or trained.done[0]["head"]),
            pin=_pin_block(self.request),
            distributed_contract=_contract_block(prepared),
            script_sha256={name: sha256_hex(script) for name, script in prepared.bundle.scripts.items()},
            probes=self._probes + (self.session.probes if self.session is not None else 0),
        )
        manifest, series, profile = build_documents(facts, ledger, score)
        write_atomically(run_dir / c.TRAIN_SERIES_FILE, canonical_json(series.model_dump(mode="json")))
        write_json(run_dir / c.THROUGHPUT_PROFILE_FILE, profile.model_dump(mode="json"))
        write_json(run_dir / c.RUN_MANIFEST_FILE, manifest.model_dump(mode="json"))
        return manifest


def startup_parts(trained: TrainerResult) -> dict[str, float]:
    """Seconds from the spawn of the ranks to the first predicted batch, in parts that add up."""
    imports, prepare = trained.hello[0]["import_s"], trained.hello[0]["prepare_s"]
    bundle, first = trained.started[0]["bundle_import_s"], trained.first_batch_s or 0.0
    return {
        "launch": max(
            0.0, trained.launch_s - imports - prepare
        ),  # sandbox, interpreter and, of several ranks, torchrun
        "imports": imports,
        "prepare": prepare,
        "bundle_import": bundle,
        "evaluators": trained.adoption_s,
        "bundle_setup": max(0.0, first - trained.adoption_s),  # build_model, optimizer, and the first prediction
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


def _ineligible(spec: RunSpec, stopped_reason: str, score: Score, prepared: Prepared) -> list[str]:
    """Why this run cannot take the crown, whatever its score."""
    reasons = []
    if spec.seal != "sealed":
        reasons.append("seal is open: the bundle ran in the process that scored it")
    if spec.isolation != "bwrap":
        reasons.append("isolation is none")
    if spec.accounting != "exact":
        reasons.append(f"accounting is {spec.accounting}")
    if spec.world_size != 1:
        reasons.append(f"scored runs use one process; this one used {spec.world_size}")
    if stopped_reason == c.STOP_INTERRUPTED:
        reasons.append("the run was interrupted")
    if score.degraded:
        reasons.append("no held-out figure")
    if prepared.contract is not None and prepared.contract.policy == "off":
        reasons.append("the distributed contract was not looked at")
    elif prepared.contract is not None and not prepared.contract.ok:
        reasons.append(f"the distributed contract is not met: {', '.join(prepared.contract.flags)}")
    return reasons


def bundle_environment(prepared: Prepared, spec: RunSpec, run_dir: Path) -> dict[str, str]:
    """A bundle's environment: what torch needs of ours, the contract's variables, and nothing else."""
    passed = {k: v for k, v in os.environ.items() if k in PASSED_ENVIRONMENT or k.startswith(PASSED_PREFIXES)}
    data_dir = "" if spec.seal == "sealed" else str(prepared.corpus.folder)
    # One node: ranks meet on loopback, whatever the host's name resolves to, and in a sandbox there is nothing else.
    loopback = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo") if spec.world_size > 1 else {}
    return {
        **passed,
        **loopback,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONHASHSEED": str(spec.seed % 2**32),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(spec.torch_threads),
        **THREADS_WAIT,
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
