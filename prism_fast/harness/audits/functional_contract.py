"""The functional distributed contract (`check --functional`): the bundle itself, under torchrun and gloo.

Two and four ranks train for a few steps on the CPU. What must hold then: the loss falls, the parameters are the same
bytes on every rank, the ranks' batches are the stream's batches and nobody's twice, what the bundle all-reduces
agrees, the process group is taken down, and only rank 0 writes. One launcher serves this and scoring (`Trainer`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

import prism_fast
from prism_fast.harness.bundle.bundle import Bundle
from prism_fast.harness.bundle.static_contract import check_single_node
from prism_fast.harness.process import wire
from prism_fast.harness.process.artifacts import files_below
from prism_fast.harness.process.interrupt import StopFlag
from prism_fast.harness.process.isolation import Sandbox
from prism_fast.harness.process.jobs import RankFacts, digest_of_tokens
from prism_fast.harness.process.kept_logs import keeping_logs
from prism_fast.harness.referee.launch import Trainer, TrainerResult
from prism_fast.harness.referee.ledger import Ledger
from prism_fast.harness.referee.request import Prepared
from prism_fast.harness.referee.seed_run import ASSETS, bundle_environment
from prism_fast.protocol import constants as c
from prism_fast.protocol import ledger as layout
from prism_fast.protocol.errors import BudgetExceeded, EngineFault, PrismError
from prism_fast.protocol.file_names import escaped
from prism_fast.protocol.run_spec import RunSpec

WORLDS = (2, 4)
LIMIT_S = 180.0
NCCL_LIMIT_S = 60.0
TRAINING_SHARE = 0.6  # of the limit: a slow bundle stops there and is judged by the steps it took
STEPS = 16
SEQUENCE_LENGTH = 64

COMPLETES, LOSS, PARAMETERS, DATA, METRICS, TEARDOWN, WRITER = CHECKS = (
    "completes",
    "loss_falls",
    "parameters_identical",
    "data_disjoint_and_covering",
    "reduced_metrics_agree",
    "clean_teardown",
    "rank0_only_writer",
)


@dataclass(frozen=True)
class Check:
    """One assertion on one run. `met` is None when the run ended before it could be looked at."""

    name: str
    met: bool | None
    detail: str

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "met": self.met, "detail": self.detail}


@dataclass(frozen=True)
class RunReport:
    """One run of the bundle. `skipped`: why there was none; such a run is neither met nor unmet."""

    world_size: int
    backend: str
    seconds: float
    checks: tuple[Check, ...]
    skipped: str | None = None

    @property
    def ok(self) -> bool:
        return all(check.met is True for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "world_size": self.world_size,
            "backend": self.backend,
            "ok": self.ok,
            "seconds": self.seconds,
            "skipped": self.skipped,
            "checks": [check.as_dict() for check in self.checks],
        }


@dataclass(frozen=True)
class FunctionalReport:
    """Every run of the functional contract."""

    runs: tuple[RunReport, ...]

    @property
    def ok(self) -> bool:
        return all(run.ok for run in self.runs)

    @property
    def unmet(self) -> list[str]:
        """One sentence for each check of each run that is not met."""
        return [
            f"world size {run.world_size}: {check.name}: {check.detail}"
            for run in self.runs
            for check in run.checks
            if check.met is False
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": c.FUNCTIONAL_CONTRACT_SCHEMA,
            "ok": self.ok,
            "runs": [run.as_dict() for run in self.runs],
        }


@dataclass(frozen=True)
class Trial:
    """How a bundle is tried. `steps` per rank; `limit_s` from launch to the last rank's end, for each world size.

    `isolation`: "bwrap" or "none".
    """

    corpus: Any
    tokenizer: Any
    isolation: str = "none"
    steps: int = STEPS
    sequence_length: int = SEQUENCE_LENGTH
    limit_s: float = LIMIT_S
    seed: int = c.DEFAULT_SEED


def check_functional_contract(
    bundle: Bundle,
    trial: Trial,
    worlds: Sequence[int] = WORLDS,
    stage: Callable[[str], None] = lambda text: None,
) -> FunctionalReport:
    """Runs `bundle` at each world size under gloo on the CPU.

    What the bundle does wrong is in the report; a fault of ours or of the machine's is raised (EngineFault).
    """
    for world in worlds:
        check_single_node(world)
    runs = []
    for world in worlds:
        stage(f"{bundle.name}: {trial.steps} steps under gloo at world size {world}")
        runs.append(_run(bundle, trial, world, device="cpu", extra={"CUDA_VISIBLE_DEVICES": ""}))
    return FunctionalReport(tuple(runs))


def advise_on_nccl(bundle: Bundle, trial: Trial) -> RunReport:
    """Two processes share one GPU under NCCL. Indicative only: whatever comes of it is never a gate."""
    try:
        return _run(bundle, trial, 2, device="cuda", extra={"NCCL_P2P_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "0"})
    except EngineFault as error:
        return RunReport(2, "nccl", 0.0, (), skipped=str(error))


# ------------------------------------------------------------------------------------------------------------ one run


class _Trial(Trainer):
    """A trainer that must be done by `limit_s`, start-up included, and keeps what the ranks say of themselves."""

    limit_s = LIMIT_S
    returncode: int | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reports: dict[int, RankFacts] = {}

    def _take(self, connection: wire.Channel, frame: wire.Frame) -> None:
        super()._take(connection, frame)
        if frame.kind == wire.DONE and (rank := self._ranks[connection]) is not None:
            self.reports[rank] = RankFacts.model_validate(frame.json()["rank_report"])

    def _check_deadlines(self, now: float) -> None:
        if now - self._began > self.limit_s:
            self.fault = BudgetExceeded(
                f"still running after {self.limit_s:.0f} s, start-up included", rule=c.RULE_BUDGET_EXCEEDED
            )
        else:
            super()._check_deadlines(now)

    def _check_end(self, returncode: int | None) -> None:
        self.returncode = returncode
        super()._check_end(returncode)


def _run(bundle: Bundle, trial: Trial, world: int, *, device: str, extra: dict[str, str]) -> RunReport:
    spec = _spec(bundle, trial, world, device)
    backend = "gloo" if device == "cpu" else "nccl"
    began = monotonic()
    with tempfile.TemporaryDirectory(prefix="prism-check-") as private:
        run_dir = Path(private) / "run"
        artifacts = run_dir / c.ARTIFACTS_DIR
        artifacts.mkdir(parents=True)
        bundle.write_to(Path(private) / "bundle")
        folder = Path(trial.corpus.folder).absolute()
        prepared = Prepared(bundle, trial.corpus, None, trial.tokenizer, None, trial.isolation)
        ledger = Ledger(run_dir, world)
        ledger.bind(bytes.fromhex(spec.hash))
        trainer = _Trial(
            spec,
            {
                "bundle_dir": str(Path(private) / "bundle"),
                "corpus_dir": str(folder),
                "data_dir": str(folder),
                "artifacts_dir": str(artifacts),
                "tokenizer_dir": str(ASSETS),
                "weights_path": str(artifacts / c.WEIGHTS_FILE),
                "prefetch": 2,
                "rank_report": True,
            },
            run_dir,
            {**bundle_environment(prepared, spec, run_dir), **extra},
            ledger,
            StopFlag(),
            lambda seen, elapsed: None,
            Sandbox(trial.isolation, readable=(folder,)),  # these ranks read the stream themselves
        )
        trainer.limit_s = trial.limit_s if device == "cpu" else min(trial.limit_s, NCCL_LIMIT_S)
        try:
            with keeping_logs(run_dir):
                result = trainer.run()
        except EngineFault:
            raise
        except PrismError as error:
            return RunReport(world, backend, monotonic() - began, _ended_early(error, artifacts))
        finally:
            ledger.close()
        reports = dict(sorted(trainer.reports.items()))
        records = layout.read_records(run_dir / c.LEDGER_FILE, layout.LEDGER_MAGIC, layout.LEDGER_DTYPE)
        checks = (
            Check(COMPLETES, True, f"{ledger.batches} steps on each of {world} ranks"),
            _loss_falls(np.asarray(records), world),
            _parameters_identical(reports),
            _data_covered(reports, _expected_batches(spec, trial, result, world)),
            _metrics_agree(reports),
            _torn_down(reports, trainer.returncode),
            _only_rank0_wrote(artifacts, world),
        )
        return RunReport(world, backend, monotonic() - began, checks)


def _spec(bundle: Bundle, trial: Trial, world: int, device: str) -> RunSpec:
    return RunSpec(
        engine_version=prism_fast.__version__,
        bundle_digest=bundle.digest,
        seed=trial.seed,
        seal="open",
        isolation=trial.isolation,  # type: ignore[arg-type]
        tokenizer=trial.tokenizer.name,
        tokenizer_fingerprint=trial.tokenizer.fingerprint,
        corpus_fingerprint=trial.corpus.fingerprint,
        val_corpus_fingerprint=None,
        vocab_size=-(-trial.tokenizer.n_vocab // 64) * 64,
        sequence_length=trial.sequence_length,
        token_budget=None,
        step_budget=trial.steps,
        budget_seconds=TRAINING_SHARE * trial.limit_s,
        watchdog_grace_seconds=trial.limit_s,
        world_size=world,
        device=device,  # type: ignore[arg-type]
        torch_threads=1,
    )


def _ended_early(error: PrismError, artifacts: Path) -> tuple[Check, ...]:
    detail = str(error)
    if f"{artifacts}/rank-" in detail:
        detail += " (in this check every rank has an artifacts directory of its own)"
    return (Check(COMPLETES, False, detail), *(Check(name, None, "the run ended first") for name in CHECKS[1:]))


# ---------------------------------------------------------------------------------------------------------- the checks


def _loss_falls(records: np.ndarray, world: int) -> Check:
    """Mean nats per token of the first and of the last quarter of the steps, over all ranks."""
    nats = records["nats"].reshape(-1, world).sum(1)
    tokens = records["scored_tokens"].reshape(-1, world).sum(1)
    quarter = max(1, len(nats) // 4)
    with np.errstate(divide="ignore", invalid="ignore"):
        first, last = (nats[part].sum() / tokens[part].sum() for part in (slice(quarter), slice(-quarter, None)))
    detail = f"{first:.3f} nats per token in the first quarter of the steps, {last:.3f} in the last"
    return Check(LOSS, bool(last < first), detail)


def _parameters_identical(reports: dict[int, RankFacts]) -> Check:
    first = reports[0]
    if not first.parameters and first.sharded_parameters:
        return Check(PARAMETERS, True, f"all {first.sharded_parameters} are sharded over the ranks: none to compare")
    for rank, report in reports.items():
        if report.parameters_sha256 == first.parameters_sha256:
            continue
        names = [n for n, digest in first.parameters.items() if report.parameters.get(n) != digest]
        which = f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}" if names else "a parameter"
        return Check(PARAMETERS, False, f"ranks 0 and {rank} differ in {which}")
    return Check(PARAMETERS, True, f"{len(first.parameters)} parameters, the same bytes on {len(reports)} ranks")


def _expected_batches(spec: RunSpec, trial: Trial, result: TrainerResult, world: int) -> list[str]:
    """Digests of the stream's first batches in order, read here with one rank."""
    from prism_fast.data.stream import TokenStream

    assert result.model is not None
    on_bytes = spec.tokenizer != "bytes" and result.model["basis"] == "bytes"
    split = trial.corpus.split("train")
    seq_len, batch_size = result.model["seq_len"], result.model["batch_size"]
    with TokenStream(split, seq_len, batch_size, basis="bytes" if on_bytes else "tokens") as stream:
        return [digest_of_tokens(batch.tokens) for batch in islice(stream, trial.steps * world)]


def _data_covered(reports: dict[int, RankFacts], expected: list[str]) -> Check:
    world = len(reports)
    for rank, report in reports.items():
        for index, digest in enumerate(report.batches):
            wanted = index * world + rank
            if wanted >= len(expected) or expected[wanted] != digest:
                return Check(DATA, False, f"rank {rank}'s batch {index} is not the stream's batch {wanted}")
    steps = {rank: len(report.batches) for rank, report in reports.items()}
    if len(set(steps.values())) > 1:
        return Check(DATA, False, f"the ranks took {', '.join(map(str, steps.values()))} batches; expected equal steps")
    return Check(DATA, True, f"batches 0 to {sum(steps.values()) - 1} of the stream, each on one rank")


def _metrics_agree(reports: dict[int, RankFacts]) -> Check:
    calls = [report.all_reduce_calls for report in reports.values()]
    if len(set(calls)) > 1:
        return Check(METRICS, False, f"the ranks made {', '.join(map(str, calls))} all_reduce calls; expected as many")
    if len({report.all_reduce_sha256 for report in reports.values()}) > 1:
        return Check(METRICS, False, f"{calls[0]} all_reduce calls gave the ranks different results")
    if not calls[0]:
        return Check(METRICS, True, "the bundle all-reduces nothing itself; every rank took equal steps")
    return Check(METRICS, True, f"{calls[0]} all_reduce calls gave every rank the same bytes")


def _torn_down(reports: dict[int, RankFacts], returncode: int | None) -> Check:
    left = [rank for rank, report in reports.items() if report.process_group_left]
    if left:
        return Check(TEARDOWN, False, f"train(ctx) left the process group up on {_ranks(left)}")
    if returncode != 0:
        return Check(TEARDOWN, False, f"torchrun ended with code {returncode} after train(ctx) had returned")
    return Check(TEARDOWN, True, "the process group is down on every rank and torchrun ended with code 0")


def _only_rank0_wrote(artifacts: Path, world: int) -> Check:
    written = {
        rank: [escaped(path.relative_to(artifacts)) for path in files_below(artifacts / f"rank-{rank}")]
        for rank in range(world)
    }
    others = [name for rank in range(1, world) for name in written[rank]]
    if others:
        return Check(WRITER, False, f"a rank other than 0 wrote {', '.join(others[:3])}{' ...' * (len(others) > 3)}")
    return Check(WRITER, True, f"rank 0 wrote {len(written[0])} files, the others none")


def _ranks(ranks: Iterable[int]) -> str:
    listed = list(map(str, ranks))
    return f"rank {listed[0]}" if len(listed) == 1 else f"ranks {', '.join(listed)}"
