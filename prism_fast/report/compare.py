"""Compares two bundles over matched seeds, from their runs' files alone (`prism_compare_report.v1`).

What decides, in this order: validity; the mean held-out delta (higher is better, differences up to 5e-3 do not
decide); the mean prequential bpb (lower, 5e-3); how often a seed overfitted (lower); the variance of the held-out
delta over seeds (lower); else a tie. Wall clock, GPU count and what a miner reports are not read.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from prism_fast.protocol import constants as c
from prism_fast.protocol.canonical import canonical_json, sha256_hex
from prism_fast.protocol.errors import DataError, UsageError
from prism_fast.report.bootstrap import CONFIDENCE, RESAMPLES, SideLosses, paired_intervals
from prism_fast.report.runs import Run, SeedRun, read_run

Mode = Literal["ArchCompare", "TrainCompare", "SystemCompare"]
Winner = Literal["a", "b", "tie"]
MODES: tuple[Mode, ...] = ("ArchCompare", "TrainCompare", "SystemCompare")
MATCHED_STOPS = (c.STOP_TOKEN_BUDGET, c.STOP_STEP_BUDGET, c.STOP_FLOPS_BUDGET, c.STOP_DATA_EXHAUSTED)
TRAJECTORY_MARKS = 16
MOST = 2.0**53  # tokens, bytes or bits of a run: below it, doubles count

# What both sides must have been measured with, or their figures are on different rulers.
RULERS = (
    ("accounting", lambda r: r.spec.accounting),
    ("tokenizer", lambda r: r.spec.tokenizer_fingerprint),
    ("basis", lambda r: r.manifest.engine.basis),
    ("training corpus", lambda r: r.spec.corpus_fingerprint),
    ("second training corpus", lambda r: r.spec.phase2_corpus_fingerprint),
    ("validation corpus", lambda r: r.spec.val_corpus_fingerprint),
    ("validation byte budget", lambda r: r.spec.val_byte_budget),
)
# What a fair pair shares; a difference is reported, and the tokens that were really seen decide what it means.
PINNED = (
    ("mode", lambda r: r.spec.mode),
    ("param_ladder_stage", lambda r: r.spec.param_ladder_stage),
    ("param_cap", lambda r: r.spec.max_parameters),
    ("vocab_size", lambda r: r.spec.vocab_size),
    ("seq_len", lambda r: r.manifest.engine.seq_len),
    ("batch_size", lambda r: r.manifest.engine.batch_size),
    ("token_budget", lambda r: r.spec.token_budget),
    ("step_budget", lambda r: r.spec.step_budget),
    ("flops_budget", lambda r: r.spec.flops_budget),
    ("nproc", lambda r: r.spec.world_size),
    ("seal", lambda r: r.spec.seal),
    ("engine version", lambda r: r.spec.engine_version),
)


@dataclass(frozen=True)
class Step:
    """One criterion. `difference` is a - b; None where a side has no figure. `favours`: who is better by it."""

    criterion: str
    better: Literal["higher", "lower"]
    a: float | None
    b: float | None
    difference: float | None
    epsilon: float
    favours: Winner


def compare_runs(a_path: Path, b_path: Path, mode: Mode | None = None, *, verify: bool = False) -> dict[str, Any]:
    """The whole report, JSON-ready. `mode` None: worked out from what the two bundles share.

    Raises UsageError for runs that cannot be compared at all: no seed in common, other rulers, or a mode that the
    bundles do not fit; with `verify` DataError for a seed that does not follow from its receipts. Whatever else is
    wrong with a run is in the report, under `validity`.
    """
    a, b = read_run(a_path, verify=verify), read_run(b_path, verify=verify)
    for run in (a, b):
        for seed in sorted(run.unverified):
            raise DataError(f"{run.path}: seed {seed} {run.unscored[seed]}; --unverified takes its word")
    seeds = sorted((a.scored.keys() | a.unscored.keys()) & (b.scored.keys() | b.unscored.keys()))
    if not seeds:
        raise UsageError(
            f"{a_path} has seeds {_listed(a)} and {b_path} has {_listed(b)}: none in common; "
            "score both with the same --seeds"
        )
    pairs = [(a.scored[s], b.scored[s]) for s in seeds if s in a.scored and s in b.scored]
    _same_rulers(pairs)
    chosen = _mode(pairs, mode)
    aggregates = [_aggregate([pair[side] for pair in pairs]) for side in (0, 1)]
    side_reasons = [_side_reasons(run, seeds) for run in (a, b)]
    pair_reasons = _pair_reasons(pairs)
    steps = _steps(side_reasons, aggregates, comparable=bool(pairs) and not pair_reasons)
    winner, decided_by = _verdict(steps, side_reasons, pair_reasons)
    public = len(pairs) >= c.PUBLIC_MIN_SEEDS
    return {
        "schema": c.COMPARE_REPORT_SCHEMA,
        "protocol_id": c.PROTOCOL_ID,
        "protocol_hash": _protocol_hash(pairs, seeds),
        "mode": chosen,
        "accounting": pairs[0][0].spec.accounting if pairs else None,
        "primary_form": "heldout_delta",
        "side_a": _side(a, side_reasons[0]),
        "side_b": _side(b, side_reasons[1]),
        "seeds": seeds,
        "posture": "public" if public else "provisional",
        "min_public_seeds": c.PUBLIC_MIN_SEEDS,
        "aggregate": {"a": aggregates[0], "b": aggregates[1]},
        "ranking": {
            "winner": winner,
            "decided_by": decided_by,
            "outcome_a": _outcome("a", winner, side_reasons[0] + pair_reasons),
            "outcome_b": _outcome("b", winner, side_reasons[1] + pair_reasons),
            "rule": "validity_heldout_bpb_overfit_variance",
            "eps_heldout": c.COMPARE_EPSILON_BPB,
            "eps_bpb": c.COMPARE_EPSILON_BPB,
            "steps": [asdict(step) for step in steps],
            "provisional": not public,
            "wall_clock_never_ranks": True,
        },
        "validity": {
            "ok": not (side_reasons[0] or side_reasons[1] or pair_reasons),
            "reasons": [f"a: {r}" for r in side_reasons[0]] + [f"b: {r}" for r in side_reasons[1]] + pair_reasons,
        },
        "differences_between_runs": _unpinned(pairs),
        "intervals": _intervals(pairs),
        "trajectories": _trajectories(pairs),
    }


# ------------------------------------------------------------------------------------------------- what is compared


def _listed(run: Run) -> str:
    return ", ".join(map(str, sorted(run.scored.keys() | run.unscored.keys())))


def _same_rulers(pairs: list[tuple[SeedRun, SeedRun]]) -> None:
    for one, other in pairs:
        for name, of in RULERS:
            if of(one) != of(other):
                raise UsageError(
                    f"{one.directory} and {other.directory} were measured with another {name} "
                    f"({of(one)} and {of(other)}): their figures cannot be compared"
                )


def _mode(pairs: list[tuple[SeedRun, SeedRun]], wanted: Mode | None) -> Mode:
    if wanted is not None and wanted not in MODES:
        raise UsageError(f"unknown mode {wanted!r}; expected {', '.join(MODES[:-1])} or {MODES[-1]}")
    if not pairs:
        return wanted or "SystemCompare"
    one, other = (run.manifest.engine for run in pairs[0])
    digests = {
        "architecture": (one.architecture_sha256, other.architecture_sha256),
        "training": (one.training_sha256, other.training_sha256),
    }
    same = {script: a == b for script, (a, b) in digests.items() if a is not None and b is not None}
    needed = {"ArchCompare": "training", "TrainCompare": "architecture"}
    if wanted in needed and same.get(needed[wanted]) is False:
        raise UsageError(
            f"{wanted} compares bundles with the same {needed[wanted]}.py, and these two have different ones; "
            "use SystemCompare"
        )
    if wanted is not None:
        return wanted
    if same == {"architecture": False, "training": True}:
        return "ArchCompare"
    if same == {"architecture": True, "training": False}:
        return "TrainCompare"
    return "SystemCompare"


def _protocol_hash(pairs: list[tuple[SeedRun, SeedRun]], seeds: list[int]) -> str | None:
    """sha256 of what both sides shared; None when no seed was scored on both sides."""
    if not pairs:
        return None
    one, other = pairs[0]
    shared = {name: of(one) for name, of in (*RULERS, *PINNED) if of(one) == of(other)}
    return sha256_hex(canonical_json({"protocol_id": c.PROTOCOL_ID, "seeds": seeds, "shared": shared}))


def _side(run: Run, reasons: list[str]) -> dict[str, Any]:
    engine = next((r.manifest.engine for r in run.scored.values()), None)
    return {
        "label": run.submission_id,
        "path": str(run.path),
        "bundle_hash": engine.bundle_sha256 if engine else None,
        "seeds_scored": sorted(run.scored),
        "valid": not reasons,
    }


def _unpinned(pairs: list[tuple[SeedRun, SeedRun]]) -> dict[str, dict[str, Any]]:
    if not pairs:
        return {}
    one, other = pairs[0]
    return {name: {"a": of(one), "b": of(other)} for name, of in PINNED if of(one) != of(other)}


# ---------------------------------------------------------------------------------------------------------- validity


def _side_reasons(run: Run, seeds: list[int]) -> list[str]:
    reasons = [f"seed {seed} was not scored ({run.unscored[seed]})" for seed in seeds if seed in run.unscored]
    for seed in seeds:
        if seed not in run.scored:
            continue
        manifest = run.scored[seed].manifest
        if manifest.anti_cheat.step0_anomaly:
            reasons.append(f"seed {seed} has a step-0 anomaly")
        if manifest.score.heldout_delta is None:
            reasons.append(f"seed {seed} has no held-out figure")
        if manifest.run.stopped_reason not in MATCHED_STOPS:
            reasons.append(f"seed {seed} stopped by {manifest.run.stopped_reason}, not by its budget")
    return reasons


def _pair_reasons(pairs: list[tuple[SeedRun, SeedRun]]) -> list[str]:
    """Why no winner can be named, whoever is at fault: the two did not see equally much (or spend equal FLOPs)."""
    reasons = []
    for one, other in pairs:
        seen = one.manifest.metrics.tokens_seen, other.manifest.metrics.tokens_seen
        equal_compute = one.spec.flops_budget == other.spec.flops_budget and all(
            run.manifest.run.stopped_reason == c.STOP_FLOPS_BUDGET for run in (one, other)
        )
        if not equal_compute and abs(seen[0] - seen[1]) >= max(one.tokens_per_batch, other.tokens_per_batch):
            reasons.append(f"seed {one.seed}: a saw {seen[0]:,} tokens and b {seen[1]:,}; expected equal budgets")
        mine, theirs = one.documents(), other.documents()
        if mine and theirs and not np.array_equal(mine.utf8_bytes, theirs.utf8_bytes):
            reasons.append(f"seed {one.seed}: a and b were held out on different documents")
    return reasons


# ----------------------------------------------------------------------------------------------------------- verdict


def _aggregate(runs: list[SeedRun]) -> dict[str, Any]:
    deltas = [r.manifest.score.heldout_delta for r in runs if r.manifest.score.heldout_delta is not None]
    bpbs = [r.manifest.score.prequential_bpb for r in runs]
    vals = [r.manifest.score.val_bpb_trained for r in runs if r.manifest.score.val_bpb_trained is not None]
    return {
        "seeds": len(runs),
        "mean_heldout_delta": _mean(deltas),
        "std_heldout_delta": _std(deltas),
        "mean_val_bpb_trained": _mean(vals),
        "mean_bpb": _mean(bpbs),
        "std_bpb": _std(bpbs),
        "overfit_rate": _mean([float(r.manifest.score.memorization_flag) for r in runs]),
        "mean_tokens_seen": _mean([float(r.manifest.metrics.tokens_seen) for r in runs]),
        "model_params": max((r.manifest.metrics.model_params for r in runs), default=None),
    }


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _std(values: list[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def _steps(side_reasons: list[list[str]], aggregates: list[dict[str, Any]], *, comparable: bool) -> list[Step]:
    """Every criterion in order, also those after the one that decides."""
    valid = [float(not reasons) for reasons in side_reasons]
    steps = [_step("validity", "higher", valid[0], valid[1], 0.0)]
    if not comparable:
        return steps
    variance = [None if s is None else s * s for s in (g["std_heldout_delta"] for g in aggregates)]
    for criterion, better, values, epsilon in (
        ("heldout_delta", "higher", [g["mean_heldout_delta"] for g in aggregates], c.COMPARE_EPSILON_BPB),
        ("prequential_bpb", "lower", [g["mean_bpb"] for g in aggregates], c.COMPARE_EPSILON_BPB),
        ("overfit_rate", "lower", [g["overfit_rate"] for g in aggregates], 0.0),
        ("variance", "lower", variance, 0.0),
    ):
        steps.append(_step(criterion, better, values[0], values[1], epsilon))
    return steps


def _step(criterion: str, better: str, a: float | None, b: float | None, epsilon: float) -> Step:
    difference = a - b if a is not None and b is not None else None
    favours: Winner = "tie"
    if difference is not None and abs(difference) > epsilon:
        favours = "a" if (difference > 0) == (better == "higher") else "b"
    return Step(criterion, better, a, b, difference, epsilon, favours)  # type: ignore[arg-type]


def _verdict(steps: list[Step], side_reasons: list[list[str]], pair_reasons: list[str]) -> tuple[Winner | None, str]:
    """-> (winner, what decided). No winner where neither side is valid, or the pair is not matched."""
    if steps[0].favours != "tie":
        return steps[0].favours, "validity"
    if side_reasons[0] or pair_reasons or len(steps) == 1:
        return None, "validity"
    for step in steps[1:]:
        if step.favours != "tie":
            return step.favours, step.criterion
    return "tie", "tie"


def _outcome(side: str, winner: Winner | None, reasons: list[str]) -> str:
    """The side's outcome in the ladder's words: win, tie, loss or invalid."""
    if reasons:
        return "invalid"
    return "tie" if winner == "tie" else "win" if winner == side else "loss"


# ------------------------------------------------------------------------------------------------------- uncertainty


def _intervals(pairs: list[tuple[SeedRun, SeedRun]]) -> dict[str, Any]:
    """95 % intervals of the differences a - b; a null figure has its reason beside it."""
    found: dict[str, Any] = {
        "confidence": CONFIDENCE,
        "resamples": RESAMPLES,
        "method": "paired bootstrap, percentiles",
        "heldout_delta": None,
        "val_bpb_trained": None,
        "reason": None,
    }
    loaded = [(one.documents(), other.documents()) for one, other in pairs]
    if not pairs:
        return found | {"reason": "no seed was scored on both sides"}
    if any(d is None for pair in loaded for d in pair):
        return found | {"reason": "a seed has no per-document held-out losses"}
    first = loaded[0][0]
    assert first is not None
    if any(d is not None and not np.array_equal(d.utf8_bytes, first.utf8_bytes) for pair in loaded for d in pair):
        return found | {"reason": "the seeds were held out on different documents"}
    kept = first.utf8_bytes > 0
    sides = []
    for side in (0, 1):
        documents = [d for pair in loaded if (d := pair[side]) is not None]
        sides.append(
            SideLosses(
                np.stack([d.nats_trained[kept] for d in documents]),
                np.stack([d.nats_twin[kept] for d in documents]),
                np.array([_cap(pair[side]) for pair in pairs]),
            )
        )
    intervals = paired_intervals(sides[0], sides[1], first.utf8_bytes[kept].astype(np.float64))
    return found | {
        name: {**asdict(interval), "over": list(interval.over), "excludes_zero": interval.excludes_zero}
        for name, interval in intervals.items()
    }


def _cap(run: SeedRun) -> float:
    """The uniform code's bpb where the score's rule caps the twin at it."""
    uniform = run.manifest.score.val_bpb_uniform
    return np.inf if run.spec.accounting != "exact" or uniform is None else uniform


# ------------------------------------------------------------------------------------------------------ trajectories


def _trajectories(pairs: list[tuple[SeedRun, SeedRun]]) -> dict[str, Any] | None:
    """bpb of both sides at the same numbers of tokens: since the start, and since the mark before. Means over seeds.

    One checkpoint is not a comparison: who leads at the end may have been behind all along.
    """
    if not pairs:
        return None
    curves = [[_code_length(run) for run in pair] for pair in pairs]
    last = min(float(tokens[-1]) for pair in curves for tokens, _, _ in pair)
    first = max(float(tokens[1]) for pair in curves for tokens, _, _ in pair)
    points = curves[0][0][0]  # marks closer together than steps would repeat one step's figure
    reached = np.searchsorted(points, np.geomspace(min(first, last), last, TRAJECTORY_MARKS))
    marks = np.unique(np.minimum(points[np.minimum(reached, len(points) - 1)], last))
    sides = []
    for side in (0, 1):
        running, window = [], []
        for pair in curves:
            tokens, bits, n_bytes = pair[side]
            at_bits, at_bytes = np.interp(marks, tokens, bits), np.interp(marks, tokens, n_bytes)
            running.append(at_bits / at_bytes)
            window.append(np.diff(at_bits, prepend=0.0) / np.diff(at_bytes, prepend=0.0))
        sides.append({"running_bpb": np.mean(running, axis=0), "window_bpb": np.mean(window, axis=0)})
    lead = np.sign(sides[0]["window_bpb"] - sides[1]["window_bpb"])
    lead = lead[lead != 0]
    return {
        "tokens": [int(m) for m in marks],
        "a": {name: values.tolist() for name, values in sides[0].items()},
        "b": {name: values.tolist() for name, values in sides[1].items()},
        "lead_changes": int((lead[1:] != lead[:-1]).sum()),
    }


def _code_length(run: SeedRun) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens seen, bits, bytes covered) from nothing on, at the points of the series that cover anything."""
    columns = run.series().columns
    if not len(columns.i) == len(columns.tokens_seen) == len(columns.covered_bytes) == len(columns.running_bpb) > 0:
        raise DataError(f"{run.directory / c.TRAIN_SERIES_FILE}: columns of unequal length, or empty")
    n_bytes = np.array(columns.covered_bytes, np.float64)
    bpb = np.array([np.nan if v is None else v for v in columns.running_bpb])
    known = np.isfinite(bpb) & (n_bytes > 0)
    if not known.any():
        raise DataError(f"{run.directory / c.TRAIN_SERIES_FILE}: no point with a finite running_bpb")
    tokens = np.array(columns.tokens_seen, np.float64)[known]
    bits, n_bytes = bpb[known] * np.minimum(n_bytes[known], MOST), n_bytes[known]
    rising = (np.diff(tokens, prepend=0.0) > 0) & (np.diff(n_bytes, prepend=0.0) >= 0)
    if not rising.all() or max(tokens[-1], n_bytes[-1], np.abs(bits).max()) >= MOST:
        raise DataError(f"{run.directory / c.TRAIN_SERIES_FILE}: columns that are not those of one pass over a text")
    return np.concatenate([[0.0], tokens]), np.concatenate([[0.0], bits]), np.concatenate([[0.0], n_bytes])
