"""Terminal tables of a run's files."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from prism_fast.protocol import constants as c
from prism_fast.protocol import manifest as m
from prism_fast.report.console import styled, terminal


def print_summary(run: Path, summary: m.RunSummary) -> None:
    """One column a seed: the score, what it is made of, and how fast it went (which never ranks)."""
    console = terminal()
    scored = [s for s in summary.seeds if s.status == "scored"]
    for seed in summary.seeds:
        if seed.status != "scored":
            console.print(styled(f"seed {seed.seed}: ", (seed.status, "bold red"), f" (exit code {seed.exit_code})"))
    if not scored:
        return
    table = Table(title=f"{summary.submission_id} ({summary.posture})", title_justify="left")
    table.add_column("")
    for seed in scored:
        table.add_column(f"seed {seed.seed}", justify="right")
    manifests = [_manifest(run / s.run_dir) for s in scored]
    profiles = [_profile(run / s.run_dir) for s in scored]
    rows: list[tuple[str, list[str]]] = [
        ("final score", [f"{x.score.final_score:.9f}" for x in manifests]),
        ("held-out delta (bpb)", [_bpb(x.score.heldout_delta) for x in manifests]),
        ("  val, trained", [_bpb(x.score.val_bpb_trained) for x in manifests]),
        ("  val, random init", [_bpb(x.score.val_bpb_random_init) for x in manifests]),
        ("  val, uniform code", [_bpb(x.score.val_bpb_uniform) for x in manifests]),
        ("  train prefix, trained", [_bpb(x.score.train_bpb_converged) for x in manifests]),
        ("prequential bpb", [_bpb(x.score.prequential_bpb) for x in manifests]),
        ("flags", [", ".join(x.score.flags) or "none" for x in manifests]),
        ("bytes predicted", [f"{x.metrics.covered_bytes:,}" for x in manifests]),
        ("tokens seen", [f"{x.metrics.tokens_seen:,}" for x in manifests]),
        ("parameters", [f"{x.metrics.model_params:,}" for x in manifests]),
        ("stopped by", [x.run.stopped_reason for x in manifests]),
        ("crown eligible", ["yes" if x.score.emission_crown_eligible else "no" for x in manifests]),
    ]
    if any(x.engine.pin for x in manifests):
        rows.append(("pin", [x.engine.pin.name if x.engine.pin else "-" for x in manifests]))
    if summary.accounting != "exact":
        console.print(styled((f"accounting {summary.accounting}:", "yellow"), " the original engine's rules"))
    for label, values in rows:
        table.add_row(label, *values)
    table.add_section()
    table.add_row("tokens/s (never ranks)", *[_rate(x.end_to_end.tokens_per_s) for x in profiles])
    table.add_row(
        "step / miner's own step", *[f"{x.scoring_overhead:.2f}" if x.scoring_overhead else "-" for x in profiles]
    )
    table.add_row("wall clock (s)", *[f"{x.compute.wall_clock_seconds:.1f}" for x in manifests])
    console.print(table)
    if summary.final_score is not None and summary.final_score.n > 1:
        console.print(f"final score over {summary.final_score.n} seeds: {_spread(summary.final_score)}")
        if summary.heldout_delta is not None:
            console.print(f"held-out delta: {_spread(summary.heldout_delta)} bpb")
    reasons = sorted({r for x in manifests for r in x.score.emission_ineligible_reasons})
    if reasons:
        console.print("not crown eligible: " + "; ".join(reasons))
    for seed in scored:
        console.print(f"files: {run / seed.run_dir / c.RUN_MANIFEST_FILE}", soft_wrap=True)


def print_findings(findings: list[tuple[str, str, str, str]]) -> None:
    """`prism-fast doctor`: (area, name, state, detail) rows."""
    console = terminal()
    table = Table()
    for column in ("area", "what", "state", "detail"):
        table.add_column(column, overflow="fold")
    colours = {"ok": "green", "missing": "yellow", "broken": "bold red"}
    for area, name, state, detail in findings:
        table.add_row(area, name, styled((state, colours[state])), detail)
    console.print(table)


def _manifest(run_dir: Path) -> m.RunManifest:
    return m.RunManifest.model_validate_json((run_dir / c.RUN_MANIFEST_FILE).read_bytes())


def _profile(run_dir: Path) -> m.ThroughputProfile:
    return m.ThroughputProfile.model_validate_json((run_dir / c.THROUGHPUT_PROFILE_FILE).read_bytes())


def _bpb(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _spread(spread: m.Spread) -> str:
    return f"{spread.mean:.6f} ± {spread.std:.6f}" if spread.std is not None else f"{spread.mean:.6f}"
