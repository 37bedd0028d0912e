"""The referee: scores a bundle, seed by seed, and writes every official file. Never imports bundle code.

`score_bundle` is the whole job behind `prism-fast score`. A seed's directory holds a `status.json` from its first
moment; it says "incomplete" until the manifest beside it is whole, so a killed run can not be taken for a scored one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
from pathlib import Path
from time import monotonic
from typing import Any

import prism_fast
from prism_fast.harness.bundle.bundle import Bundle, load_bundle
from prism_fast.harness.bundle.static_contract import StaticReport, check_single_node, check_static_contract
from prism_fast.harness.process.interrupt import StopFlag, graceful_interrupts
from prism_fast.harness.process.isolation import bwrap_fault, check_hideable, data_places, resolve_isolation
from prism_fast.harness.referee.request import Prepared, Reporter, ScoreRequest, SilentReporter
from prism_fast.harness.referee.seed_run import SeedRun
from prism_fast.profiling.machine import THREADS_WAIT, usable_cpus
from prism_fast.protocol import constants as c
from prism_fast.protocol import manifest as m
from prism_fast.protocol.canonical import write_json
from prism_fast.protocol.errors import EXIT_SCORED, BundleRejected, EngineFault, PrismError, UsageError
from prism_fast.protocol.ladder import max_parameters_for_stage
from prism_fast.protocol.modes import FULL_SCALE
from prism_fast.protocol.pins import scale_pin_public_ok
from prism_fast.protocol.readiness import probe_full_scale_readiness
from prism_fast.protocol.run_spec import RunSpec
from prism_fast.protocol.settings import read_settings

PUBLIC_SEEDS = c.PUBLIC_MIN_SEEDS
SEED_FILES = (
    c.RUN_MANIFEST_FILE,
    c.TRAIN_SERIES_FILE,
    c.THROUGHPUT_PROFILE_FILE,
    c.RUN_SPEC_FILE,
    c.LEDGER_FILE,
    c.OBSERVATIONS_FILE,
    c.HELDOUT_FILE,
    c.HELDOUT_DOCUMENTS_FILE,
    c.LEDGER_CHAIN_FILE,
    c.WEIGHTS_FILE,
    c.TRAINER_LOG_FILE,
    c.TRACER_LOG_FILE,
    c.EXECUTOR_LOG_FILE,
    c.INITIAL_STATE_FILE,
    c.GENESIS_FILE,
    c.RECEIPT_FILE,
    c.DENSIFY_FILE,
    c.OUTSIDE_STATE_FILE,
)


def score_bundle(
    request: ScoreRequest,
    reporter: Reporter | None = None,
    stop: StopFlag | None = None,
) -> m.RunSummary:
    """Scores every seed of `request`, writes `RUN/seed-<seed>/` and `RUN/summary.json`, returns the summary.

    Raises PrismError for what is wrong before any seed starts (usage, data, bundle shape). What goes wrong in a seed
    is in the summary: its exit code, rule and sentence; the seeds after it are not run.
    """
    reporter = reporter or SilentReporter()
    stop = stop or StopFlag()
    for name, value in THREADS_WAIT.items():
        os.environ.setdefault(name, value)
    with graceful_interrupts(stop):
        prepared = _prepare(request, reporter)
        request.out.mkdir(parents=True, exist_ok=True)
        results: list[m.SeedResult] = []
        for seed in request.seeds if request.only_seeds is None else request.only_seeds:
            results.append(_score_seed(request, prepared, seed, reporter, stop))
            if results[-1].status != "scored" or stop.reason is not None:
                break
        summary = summarise(prepared.bundle.submission_id, results, request.accounting)
        write_json(request.out / c.SUMMARY_FILE, summary.model_dump(mode="json"))
        return summary


# ------------------------------------------------------------------------------------------------------- preparation


def _prepare(request: ScoreRequest, reporter: Reporter) -> Prepared:
    from prism_fast.data.corpus import resolve_data, verify_corpus
    from prism_fast.data.tokenizers import reference_tokenizer

    seconds = {} if request.command_s is None else {"command": request.command_s}
    began = monotonic()
    _check_request(request, reporter)
    bundle = load_bundle(request.bundle)
    contract = _check_contract(request, bundle, reporter)
    tokenizer = reference_tokenizer(request.tokenizer)
    _check_vocabulary(request, tokenizer)
    isolation = "none"
    if request.seal == "sealed":
        isolation = resolve_isolation(request.isolation)
        if isolation == "none" and request.isolation == "auto":
            reporter.warn(f"isolation: none, the bundle runs unsandboxed as this user: {bwrap_fault()}")
    seconds["checks"] = monotonic() - began

    began = monotonic()
    if request.mode == FULL_SCALE:
        _check_mounts(request)

    def resolve(place: str, split: str) -> Any:
        reporter.stage(f"reading {place}")
        return resolve_data(place, tokenizer, request.cache_dir, reporter.packing, mount_of=split)

    corpus = resolve(request.data, "train")
    phase2_corpus = resolve(request.phase2, "train") if request.phase2 else None
    val_corpus = resolve(request.val, "val") if request.val else corpus
    seconds["data_resolve"] = monotonic() - began

    began = monotonic()
    reporter.stage("verifying checksums")
    corpora = [corpus, val_corpus, *([phase2_corpus] if phase2_corpus else [])]
    for found in {(each.folder, str(each.mounts)): each for each in corpora}.values():
        verify_corpus(found.folder, mounts=found.mounts)
    seconds["data_verify"] = monotonic() - began
    for place, phase in ((request.data, corpus), (request.phase2, phase2_corpus)):
        if phase is not None and ("train" not in phase.splits or not phase.split("train").tokens):
            raise UsageError(f"{place}: no train split with text in it; splits: {', '.join(phase.splits) or 'none'}")
    if not _has_val(val_corpus):
        if request.val:
            raise UsageError(f"{request.val}: no val split with text in it; splits: {', '.join(val_corpus.splits)}")
        reporter.warn(f"{request.data} has no val split and no --val was given: the score is degraded")
    text = data_places(corpus, val_corpus, phase2_corpus, places=(request.data, request.val, request.phase2))
    if isolation == "bwrap":
        check_hideable(text)
    return Prepared(
        bundle=bundle,
        corpus=corpus,
        val_corpus=val_corpus if _has_val(val_corpus) else None,
        tokenizer=tokenizer,
        byte_tokenizer=reference_tokenizer("bytes"),
        isolation=isolation,
        contract=contract,
        phase2_corpus=phase2_corpus,
        hidden=(*text, *([request.cache_dir.absolute()] if request.cache_dir else []), request.out.absolute()),
        seconds=seconds,
    )


def _check_contract(request: ScoreRequest, bundle: Bundle, reporter: Reporter) -> StaticReport:
    """The static distributed contract, before anything runs. Raises BundleRejected where the policy says so."""
    policy = request.policy or read_settings().distributed_contract_policy
    contract = check_static_contract(bundle, policy or ("reject" if request.nproc > 1 else "flag"))
    contract.enforce()
    if not contract.ok:
        named = ", ".join(requirement.name for requirement in contract.unmet)
        reporter.warn(f"training.py does not meet the distributed contract ({named}): see `prism-fast check`")
    return contract


def _check_mounts(request: ScoreRequest) -> None:
    """Raises EngineFault naming everything that blocks a full-scale run's mounts; READY is never assumed."""
    found = probe_full_scale_readiness(
        train_data_dir=request.data, val_data_dir=request.val, phase2_data_dir=request.phase2, dry_run=False
    )
    if not found.ok:
        raise EngineFault(
            f"{FULL_SCALE} is BLOCKED: {'; '.join(found.reasons)}; mount them (see `prism-fast readiness`) or score "
            "with --mode gpu_proxy_eval"
        )


def _check_vocabulary(request: ScoreRequest, tokenizer: Any) -> None:
    if request.vocab_size is not None and request.vocab_size < tokenizer.n_vocab and request.accounting == "exact":
        raise UsageError(
            f"--vocab-size {request.vocab_size}: the tokenizer {tokenizer.name} has {tokenizer.n_vocab} ids and each "
            "needs its own; only --accounting prism-v2 folds ids"
        )


def _check_request(request: ScoreRequest, reporter: Reporter) -> None:
    check_single_node(request.nproc)
    if request.pin is not None and not (guard := scale_pin_public_ok(request.pin)).ok:
        reporter.warn(f"provisional, no public claim can be made of it: {', '.join(guard.reasons)}")
    if request.accounting != "exact":
        if request.seal != "open" or request.nproc != 1:
            raise UsageError(
                f"--accounting {request.accounting} scores as the original engine did, in the bundle's one process, "
                f"not --seal {request.seal} --nproc {request.nproc}; use --seal open --nproc 1"
            )
        reporter.warn(
            f"accounting {request.accounting}: the original engine's rules, to compare with its figures alone"
        )
    if request.seal == "open" and request.isolation == "bwrap":
        raise UsageError(
            "--isolation bwrap: open mode runs the bundle in the process that scores it; use --seal sealed"
        )
    if not request.seeds:
        raise UsageError("--seeds names no seed; give at least one, for example --seeds 1337")
    if len(set(request.seeds)) != len(request.seeds):
        raise UsageError(f"--seeds {','.join(map(str, request.seeds))}: each seed once")
    if request.only_seeds is not None and (strangers := set(request.only_seeds) - set(request.seeds)):
        raise UsageError(f"--only-seeds {min(strangers)}: not one of --seeds {','.join(map(str, request.seeds))}")
    if request.sequence_length < 2:
        raise UsageError(f"--seq-len {request.sequence_length}: expected at least 2")
    positive: tuple[tuple[str, float | None], ...] = (
        ("--batch-size", request.batch_size),
        ("--token-budget", request.token_budget),
        ("--step-budget", request.step_budget),
        ("--flops-budget", request.flops_budget),
        ("--vocab-size", request.vocab_size),
        ("--budget-seconds", request.budget_seconds),
        ("--val-byte-budget", request.val_byte_budget),
        ("--torch-threads", request.torch_threads),
        ("--prefetch", request.prefetch),
    )
    for name, number in positive:
        if number is not None and number <= 0:
            raise UsageError(f"{name} {number}: expected more than 0")
    if any(not 0 <= seed < 2**63 for seed in request.seeds):
        raise UsageError(f"--seeds {','.join(map(str, request.seeds))}: a seed is 0 or more, and less than 2^63")


def _has_val(corpus: Any) -> bool:
    return "val" in corpus.splits and corpus.split("val").tokens > 0


# ---------------------------------------------------------------------------------------------------------- one seed


def _score_seed(
    request: ScoreRequest, prepared: Prepared, seed: int, reporter: Reporter, stop: StopFlag
) -> m.SeedResult:
    run_dir = (request.out / f"seed-{seed}").absolute()
    spec = _freeze_spec(request, prepared, seed)
    if request.resume and (finished := _finished(run_dir, spec)) is not None:
        reporter.stage(f"seed {seed}: already scored, skipped")
        return finished
    _fresh_directory(run_dir)
    _write_status(run_dir, "incomplete", spec, None)
    try:
        manifest = SeedRun(request, prepared, spec, run_dir, reporter, stop).run()
        _write_status(run_dir, "scored", spec, None)
    except KeyboardInterrupt:
        raise EngineFault(f"interrupted twice: {run_dir} is left incomplete") from None
    except (PrismError, OSError) as error:
        fault = (
            error
            if isinstance(error, PrismError)
            else EngineFault(f"{error.filename or run_dir}: {error.strerror or error}")
        )
        for name in (c.RUN_MANIFEST_FILE, c.TRAIN_SERIES_FILE):  # written before what failed, they would look complete
            (run_dir / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # on a full disk, "incomplete" stays
            _write_status(run_dir, "rejected" if isinstance(fault, BundleRejected) else "failed", spec, fault)
        return seed_result(seed, run_dir, error=fault)
    return seed_result(seed, run_dir, manifest=manifest)


def _freeze_spec(request: ScoreRequest, prepared: Prepared, seed: int) -> RunSpec:
    exact = request.accounting == "exact"
    threads = request.torch_threads or max(1, usable_cpus() // request.nproc)
    return RunSpec(
        engine_version=prism_fast.__version__,
        bundle_digest=prepared.bundle.digest,
        mode=request.mode,  # type: ignore[arg-type]
        param_ladder_stage=request.stage,  # type: ignore[arg-type]
        max_parameters=max_parameters_for_stage(request.stage),
        seed=seed,
        seal=request.seal,  # type: ignore[arg-type]
        isolation=prepared.isolation,  # type: ignore[arg-type]
        accounting=request.accounting,  # type: ignore[arg-type]
        tokenizer=prepared.tokenizer.name,
        tokenizer_fingerprint=prepared.tokenizer.fingerprint,
        corpus_fingerprint=prepared.corpus.fingerprint,
        phase2_corpus_fingerprint=prepared.phase2_corpus.fingerprint if prepared.phase2_corpus else None,
        val_corpus_fingerprint=prepared.val_corpus.fingerprint if prepared.val_corpus else None,
        val_byte_budget=request.val_byte_budget or (None if exact else c.PRISM_V2_HELDOUT_BYTES),
        vocab_size=request.vocab_size
        or (None if exact else c.DEFAULT_VOCAB_SIZE)
        or -(-prepared.tokenizer.n_vocab // 64) * 64,
        sequence_length=request.sequence_length,
        batch_size=request.batch_size,
        token_budget=request.token_budget,
        step_budget=request.step_budget,
        flops_budget=request.flops_budget,
        budget_seconds=request.budget_seconds,
        watchdog_grace_seconds=request.watchdog_grace_seconds,
        artifacts_quota_bytes=request.artifacts_quota_bytes,
        world_size=request.nproc,
        device=request.device,  # type: ignore[arg-type]
        torch_threads=threads,
    )


# --------------------------------------------------------------------------------------------------------- directories


def _fresh_directory(run_dir: Path) -> None:
    """An empty seed directory. One of an earlier run is cleared; anything else there is not ours to touch."""
    if run_dir.exists() and not run_dir.is_dir():
        raise UsageError(f"{run_dir}: a file is in the way; expected a directory or nothing")
    if run_dir.is_dir() and any(run_dir.iterdir()) and not (run_dir / c.RUN_STATUS_FILE).is_file():
        raise UsageError(f"{run_dir}: not empty and not an earlier run's directory; choose another --out")
    run_dir.mkdir(parents=True, exist_ok=True)
    for name in SEED_FILES:
        (run_dir / name).unlink(missing_ok=True)
    for name in (c.ARTIFACTS_DIR, c.BUNDLE_DIR, c.PROGRAM_DIR, c.SNAPSHOTS_DIR):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    (run_dir / c.ARTIFACTS_DIR).mkdir()


def _write_status(run_dir: Path, status: str, spec: RunSpec, error: PrismError | None) -> None:
    exit_code = {"incomplete": None, "scored": EXIT_SCORED}.get(status, error.exit_code if error else None)
    document = m.RunStatus(
        status=status,  # type: ignore[arg-type]
        exit_code=exit_code,
        rule=error.rule if error else None,
        message=str(error) if error else None,
        run_spec_sha256=spec.hash,
    )
    write_json(run_dir / c.RUN_STATUS_FILE, document.model_dump(mode="json"))


def _finished(run_dir: Path, spec: RunSpec) -> m.SeedResult | None:
    """The result of an earlier, whole run of exactly this spec, or None."""
    try:
        status = m.RunStatus.model_validate_json((run_dir / c.RUN_STATUS_FILE).read_bytes())
        manifest = m.RunManifest.model_validate_json((run_dir / c.RUN_MANIFEST_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    if status.status != "scored" or status.run_spec_sha256 != spec.hash:
        return None
    return seed_result(spec.seed, run_dir, manifest=manifest)


def seed_result(
    seed: int, run_dir: Path, *, manifest: m.RunManifest | None = None, error: PrismError | None = None
) -> m.SeedResult:
    """A seed's line of summary.json."""
    score = manifest.score if manifest else None
    return m.SeedResult(
        seed=seed,
        status="scored" if manifest else "rejected" if isinstance(error, BundleRejected) else "failed",
        exit_code=error.exit_code if error else EXIT_SCORED,
        rule=error.rule if error else None,
        message=str(error) if error else None,
        run_dir=run_dir.name,
        final_score=score.final_score if score else None,
        prequential_bpb=score.prequential_bpb if score else None,
        heldout_delta=score.heldout_delta if score else None,
        val_bpb_trained=score.val_bpb_trained if score else None,
        flags=score.flags if score else [],
        emission_crown_eligible=bool(score and score.emission_crown_eligible),
    )


def summarise(submission_id: str, results: list[m.SeedResult], accounting: str) -> m.RunSummary:
    """What summary.json says of a run's seeds."""
    scored = [r for r in results if r.status == "scored"]

    def spread(name: str) -> m.Spread | None:
        values = [v for r in scored if (v := getattr(r, name)) is not None]
        if not values:
            return None
        return m.Spread(
            mean=statistics.fmean(values), std=statistics.stdev(values) if len(values) > 1 else None, n=len(values)
        )

    return m.RunSummary(
        submission_id=submission_id,
        accounting=accounting,
        posture="public" if len({r.seed for r in scored}) >= PUBLIC_SEEDS else "provisional",
        seeds=results,
        final_score=spread("final_score"),
        prequential_bpb=spread("prequential_bpb"),
        heldout_delta=spread("heldout_delta"),
        exit_code=next((r.exit_code for r in results if r.exit_code), 0),
    )
