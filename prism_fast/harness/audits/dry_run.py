"""`prism-fast try`: a minute of scoring, to learn what official scoring would say and how long it would take.

The bundle goes through the same referee, under the pin's shapes, cap and budgets; only the graceful budget is short and
the held-out prefix small. What is found is a list, not the first fault alone, where finding one
does not hide the next.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from prism_fast.data.corpus import resolve_data
from prism_fast.harness.bundle.bundle import load_bundle
from prism_fast.harness.bundle.static_contract import check_static_contract
from prism_fast.harness.process.kept_logs import with_kept_logs
from prism_fast.harness.referee.referee import score_bundle
from prism_fast.harness.referee.request import Reporter, ScoreRequest
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import EXIT_BUNDLE_REJECTED, EXIT_SCORED, BundleRejected
from prism_fast.protocol.manifest import RunManifest, ThroughputProfile
from prism_fast.protocol.pins import ProtocolPin

Kind = Literal["reject", "warn", "ok"]
TRIAL_SECONDS = 20.0
TRIAL_VAL_BYTES = 4000
READ = "the scripts were read, for the distributed contract at 2 and 8 ranks"
HELDOUT_PASSES = ("twin", "trained", "train_prefix")
ZEROING_FLAGS = {"step0_anomaly": "the first loss is too good for a random init"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at. reject: official scoring would give no score, or a score of 0. warn: it would say so."""

    kind: Kind
    what: str
    detail: str
    rule: str | None = None


@dataclass(frozen=True)
class Estimate:
    """Official scoring of one seed on this machine, in seconds; `tokens` is what the wall-clock budget lets through."""

    start_s: float
    train_s: float
    heldout_s: float
    tokens: int
    token_budget: int

    @property
    def total_s(self) -> float:
        return self.start_s + self.train_s + self.heldout_s


@dataclass(frozen=True)
class DryRun:
    """Everything `try` found. `exit_code` is what official scoring would end with, as far as `ran` goes; `not_run` is
    what it does beyond that, of which nothing is said."""

    submission_id: str
    findings: tuple[Finding, ...]
    estimate: Estimate | None
    exit_code: int
    ran: tuple[str, ...] = ()
    not_run: tuple[str, ...] = ()

    @property
    def rejected(self) -> bool:
        return any(f.kind == "reject" for f in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": c.DRY_RUN_SCHEMA,
            "submission_id": self.submission_id,
            "ok": not self.rejected,
            "exit_code": self.exit_code,
            "findings": [asdict(f) for f in self.findings],
            "ran": list(self.ran),
            "not_run": list(self.not_run),
            "estimate": None if self.estimate is None else {**asdict(self.estimate), "total_s": self.estimate.total_s},
        }


def try_bundle(
    path: Path,
    data: str,
    pin: ProtocolPin,
    reporter: Reporter,
    *,
    seconds: float = TRIAL_SECONDS,
    seal: str = "sealed",
    isolation: str = "auto",
    cache_dir: Path | None = None,
) -> DryRun:
    """Trains `path` for `seconds` under `pin` and says what official scoring would.

    Raises PrismError for what is not the bundle's fault: usage, data, the machine.
    """
    try:
        bundle = load_bundle(path)
    except BundleRejected as error:
        found = Finding("reject", "bundle", str(error), error.rule)
        return DryRun(path.name, (found,), None, error.exit_code, ("the scripts were read",), ("the bundle itself",))
    findings = [Finding("ok", "bundle", f"two scripts, {sum(map(len, bundle.scripts.values())):,} bytes")]
    static = check_static_contract(bundle, "reject")
    findings += [
        Finding("warn", r.name, f"{r.detail}; scored on one GPU, it cannot take the crown", r.rule)
        for r in static.unmet
    ]
    if static.ok:
        findings.append(Finding("ok", "distributed contract", "training.py meets it, as read"))
    with tempfile.TemporaryDirectory(prefix="prism-try-") as out:
        request = ScoreRequest(
            bundle=path,
            data=data,
            out=Path(out),
            tokenizer=pin.tokenizer,
            vocab_size=pin.vocab_size,
            stage=pin.param_ladder_stage,
            sequence_length=pin.seq_len,
            batch_size=pin.batch_size,
            token_budget=pin.token_budget,
            step_budget=pin.step_budget,
            budget_seconds=seconds,
            val_byte_budget=TRIAL_VAL_BYTES,
            seeds=pin.seeds[:1],
            seal=seal,
            isolation=isolation,
            cache_dir=cache_dir,
            compare_state=True,
        )
        summary = score_bundle(request, reporter)
        result = summary.seeds[0]
        run_dir = Path(out) / result.run_dir
        if result.status != "scored":
            said = _traceback(run_dir / c.TRAINER_LOG_FILE)
            detail = with_kept_logs(result.message or result.status, run_dir) + (f"\n{said}" if said else "")
            findings.append(Finding("reject", "dry run", detail, result.rule))
            begun = (READ, f"seed {result.seed} under {pin.protocol_id}, {seal}, until it failed")
            return DryRun(summary.submission_id, tuple(findings), None, result.exit_code, begun, ("what comes after",))
        manifest = RunManifest.model_validate_json((run_dir / c.RUN_MANIFEST_FILE).read_bytes())
        profile = ThroughputProfile.model_validate_json((run_dir / c.THROUGHPUT_PROFILE_FILE).read_bytes())
        corpus = resolve_data(data, pin.tokenizer, cache_dir)
        val_tokens = corpus.split("val").tokens if "val" in corpus.splits else 0
        estimate = _estimate(run_dir, manifest, profile, pin, val_tokens)
        device = manifest.run.device
        findings += _of_state(run_dir)
    findings += _of_run(manifest, pin)
    findings += _of_time(manifest, estimate, pin)
    rejected = any(f.kind == "reject" for f in findings)
    code = EXIT_BUNDLE_REJECTED if rejected else EXIT_SCORED
    ran, not_run = _extent(manifest, pin, estimate, val_tokens, device)
    return DryRun(summary.submission_id, tuple(findings), estimate, code, ran, not_run)


def _extent(
    manifest: RunManifest, pin: ProtocolPin, estimate: Estimate, val_tokens: int, device: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """-> (what was run, what official scoring runs beyond it), a sentence each."""
    engine, metrics = manifest.engine, manifest.metrics
    held_out = manifest.score.val_bpb_trained is not None
    where = f"{engine.seal}, isolation {engine.isolation}, on {device}"
    ran = [
        READ,
        f"seed {manifest.run.seed}: {metrics.consumed_batches:,} batches, {metrics.tokens_seen:,} tokens, {where}",
    ]
    ran += [f"held-out: the first {TRIAL_VAL_BYTES:,} bytes of the val split"] if held_out else []
    beyond = []
    if (rest := estimate.token_budget - metrics.tokens_seen) > 0:
        beyond.append(
            f"training: the {rest:,} tokens after those, with whatever train(ctx) does later on and at its end"
        )
    if len(pin.seeds) > 1:
        beyond.append(f"seeds {', '.join(str(seed) for seed in pin.seeds[1:])}")
    beyond.append("held-out: the rest of the val split" if held_out and val_tokens else "held-out scoring")
    beyond.append("several ranks: training.py was read; `prism-fast check --functional` runs it")
    if not device.startswith("cuda"):
        beyond.append("a GPU")
    if engine.seal != "sealed":
        beyond.append("sealed scoring: the forced init, the probes, the sandbox")
    elif engine.isolation != "bwrap":
        beyond.append("the sandbox: bubblewrap cannot isolate here")
    return tuple(ran), tuple(beyond)


# ------------------------------------------------------------------------------------------------------------ findings


def _of_run(manifest: RunManifest, pin: ProtocolPin) -> list[Finding]:
    engine, compute, score = manifest.engine, manifest.compute, manifest.score
    found = []
    sealed = engine.seal == "sealed"
    share = compute.model_params / pin.param_cap
    found.append(Finding("ok", "parameters", f"{compute.model_params:,}, {share:.0%} of the cap {pin.param_cap:,}"))
    found.append(
        Finding("ok", "shapes", f"batches of {engine.batch_size} x {engine.seq_len}, logits of {engine.head_width:,}")
    )
    if engine.basis != "tokens":
        found.append(
            Finding(
                "warn", "tokenizer", "the bundle passes none and trains on bytes; pass ctx.reference_tokenizer(...)"
            )
        )
    if engine.seq_len != pin.seq_len:
        found.append(Finding("warn", "sequence length", f"asks for {engine.seq_len}; the pin's is {pin.seq_len}"))
    if engine.programs:
        widths = ", ".join(str(p.width) for p in engine.programs)
        operators = max(p.operators for p in engine.programs)
        found.append(
            Finding("ok", "program", f"{operators:,} operators, rows of {widths} tokens: see `prism-fast program`")
        )
    if sealed:
        found.append(Finding("ok", "forced init", "the first weights are build_model's own, bit for bit"))
    else:
        found.append(Finding("warn", "forced init", "not looked at in open mode; try again sealed", c.RULE_FORCED_INIT))
    flagged = set(score.flags)
    rules = sorted(flag for flag in flagged if flag in c.RULES)
    found += [Finding("reject", "probes", "the score is 0", rule) for rule in rules]
    zeroed = sorted(flagged & set(ZEROING_FLAGS))
    found += [Finding("reject", flag, f"{ZEROING_FLAGS[flag]}: the score is 0") for flag in zeroed]
    if sealed and not rules:
        found.append(Finding("ok", "probes", f"{engine.probes} rows run again with other text after a cut: causal"))
    found += [Finding("warn", "flag", flag) for flag in sorted(flagged - set(rules) - set(zeroed))]
    return found


def _of_state(run_dir: Path) -> list[Finding]:
    """What the trained model computes that its state dict does not say: no score sees it."""
    path = run_dir / c.OUTSIDE_STATE_FILE
    if not path.is_file():
        return []
    found = orjson.loads(path.read_bytes())
    if found["differs"] == 0.0:
        return [Finding("ok", "state", "the trained model is build_model's with its state dict, and nothing else")]
    named = f" ({', '.join(found['attributes'])})" if found["attributes"] else ""
    return [
        Finding(
            "warn",
            "state",
            f"the trained model's logits differ by up to {found['differs']:.3g} from those of build_model(ctx) with "
            f"its state dict{named}: what is kept in attributes is not scored; register it as a buffer",
        )
    ]


def _of_time(manifest: RunManifest, estimate: Estimate, pin: ProtocolPin) -> list[Finding]:
    if manifest.run.stopped_reason == c.STOP_BUNDLE_RETURNED:
        return [
            Finding(
                "warn",
                "budget",
                f"train(ctx) returned after {manifest.metrics.tokens_seen:,} tokens with batches left; "
                f"the pin offers {pin.token_budget:,}",
            )
        ]
    if estimate.tokens < estimate.token_budget:
        return [
            Finding(
                "warn",
                "budget",
                f"about {estimate.tokens:,} of {estimate.token_budget:,} tokens within {pin.wall_clock_seconds:,.0f} s "
                "on this machine: the partial stream would be scored",
            )
        ]
    return [Finding("ok", "budget", f"{estimate.token_budget:,} tokens fit into {pin.wall_clock_seconds:,.0f} s here")]


def _traceback(log: Path, limit: int = 4000) -> str:
    """The traceback that the bundle's log ends with, or nothing."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return ""
    at = text.find("Traceback")
    return text[at:][-limit:].strip() if at >= 0 else ""


# ------------------------------------------------------------------------------------------------------------ estimate


def _estimate(
    run_dir: Path, manifest: RunManifest, profile: ThroughputProfile, pin: ProtocolPin, val_tokens: int
) -> Estimate:
    """From the steady steps of the trial: training goes on at that rate, held-out passes cost forwards alone."""
    rate = profile.steady_state.tokens_per_s or profile.end_to_end.tokens_per_s or 0.0
    metrics = manifest.metrics
    corpus_tokens = metrics.predicted_tokens + metrics.special_tokens + manifest.data.unread_tail_tokens
    budget = min(pin.token_budget, max(corpus_tokens, metrics.tokens_seen))
    train_s = min(pin.wall_clock_seconds, budget / rate) if rate else pin.wall_clock_seconds
    heldout_s = 0.0
    if (run_dir / c.HELDOUT_FILE).is_file() and profile.heldout_s is not None and profile.parts_s is not None:
        passes = orjson.loads((run_dir / c.HELDOUT_FILE).read_bytes())
        tried = sum(passes[p]["tokens"] for p in HELDOUT_PASSES)
        batch = manifest.engine.batch_size * manifest.engine.seq_len
        forward = (profile.parts_s.predict_forward + profile.parts_s.scoring_kernel) / batch
        starting = max(0.0, profile.heldout_s - tried * forward)  # processes and imports, the same for any length
        heldout_s = starting + len(HELDOUT_PASSES) * val_tokens * forward
    covered = budget if train_s < pin.wall_clock_seconds else int(train_s * rate)
    return Estimate(sum(profile.startup_s.values()), train_s, heldout_s, covered, budget)
