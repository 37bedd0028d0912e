"""`prism-fast report`: one HTML file from the files of any number of runs and probes.

Self-contained: styles and charts (inline SVG) are in the page, there is no script, no font and no network, and a
content security policy says so. Every name that came from a run is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

import prism_fast
from prism_fast.protocol import manifest as m
from prism_fast.protocol.canonical import write_atomically
from prism_fast.protocol.errors import DataError, UsageError
from prism_fast.report.probes import kernel_cells, kernels_chart, probe_chart, probe_table
from prism_fast.report.runs import Run, SeedRun, read_run
from prism_fast.report.svg import COLOURS, STYLE, Bars, Dots, Series, bar_chart, dot_chart, line_chart

SCORE_COLUMNS = (
    "run, seed",
    "final score",
    "held-out delta (bpb)",
    "val bpb",
    "prequential bpb",
    "bytes predicted",
    "parameters",
    "tokens/s",
    "step / own step",
    "MFU",
    "flags",
)
PARTS = (
    ("miner's step", "miner_step"),
    ("predict forward", "predict_forward"),
    ("scoring kernel", "scoring_kernel"),
    ("data wait", "data_wait"),
    ("ledger", "ledger"),
    ("other", "other"),
)


@dataclass(frozen=True)
class Seed:
    """One scored seed with everything the page shows of it. `colour` is its run's, `dash` its own among the seeds."""

    name: str
    run: int
    dash: int
    source: SeedRun
    series: m.TrainSeries
    profile: m.ThroughputProfile


@dataclass
class Sources:
    """What was named on the command line, read."""

    runs: list[tuple[str, Run]] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)
    seeds: list[Seed] = field(default_factory=list)


def read_sources(paths: Sequence[Path]) -> Sources:
    """Runs (directories as `prism-fast score` writes them) and probes (JSON as `prism-fast profile` writes it).

    Raises UsageError for a path that is neither, DataError for a file that is not what it should be.
    """
    if not paths:
        raise UsageError("nothing to report on: name a run's directory or a probe's JSON file")
    found = Sources()
    for path in paths:
        if path.is_file():
            found.probes.append(_read_probe(path))
        else:
            found.runs.append(("", read_run(path)))
    names = _names([run for _, run in found.runs])
    found.runs = list(zip(names, (run for _, run in found.runs), strict=True))
    for number, (name, run) in enumerate(found.runs):
        for dash, (seed, source) in enumerate(sorted(run.scored.items())):
            label = f"{name}, {seed}"
            found.seeds.append(Seed(label, number, dash, source, source.series(), source.profile()))
    return found


def _read_probe(path: Path) -> dict[str, Any]:
    try:
        document = orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not JSON: {error}; expected what `prism-fast profile --out` writes") from error
    if not isinstance(document, dict) or not str(document.get("schema", "")).startswith("prism_profile_"):
        raise UsageError(f"{path}: no probe's document; expected what `prism-fast profile --out` writes, or a run")
    return document


def _names(runs: list[Run]) -> list[str]:
    """The shortest names that tell the runs apart: the bundle's, with its digest, with the run's directory."""
    bundles = [re.sub(r"-[0-9a-f]{12}$", "", run.submission_id) for run in runs]
    ids = [run.submission_id for run in runs]
    folders = [f"{run.submission_id} ({run.path.resolve().name})" for run in runs]
    for names in (bundles, ids, folders):
        if len(set(names)) == len(names):
            return names
    return [f"{name} #{place + 1}" for place, name in enumerate(folders)]


def write_report(paths: Sequence[Path], out: Path) -> None:
    """Writes the page. Raises UsageError, DataError."""
    write_atomically(out, render(read_sources(paths)).encode())


def render(sources: Sources) -> str:
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, trim_blocks=True
    )
    seeds, probes = sources.seeds, sources.probes
    names = [name for name, _ in sources.runs] or sorted(
        {str(p.get("submission_id") or p.get("corpus") or "probe") for p in probes}
    )
    return environment.get_template("report.html.j2").render(
        title=names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names[:4])}{' …' * (len(names) > 4)}",
        version=prism_fast.__version__,
        chart_style=STYLE,
        runs=sources.runs,
        notices=_notices(sources),
        score_columns=SCORE_COLUMNS,
        score_rows=[_score_row(seed) for seed in seeds],
        sections=[
            {"title": "Learning", "text": _learning_text(seeds), "charts": _learning(sources)},
            {
                "title": "Speed",
                "text": "A step of rank 0, in its parts; the first steps are left out of the bars.",
                "charts": _speed(seeds),
            },
            {"title": "Probes", "text": "", "charts": _probe_charts(probes)},
        ],
        tables=[*_throughput_tables(seeds), *_probe_tables(probes)],
    )


# ------------------------------------------------------------------------------------------------------------- scores


def _notices(sources: Sources) -> list[str]:
    said = []
    for name, run in sources.runs:
        said += [f"{name}, seed {seed} was not scored: {why}" for seed, why in sorted(run.unscored.items())]
    for number, (name, _) in enumerate(sources.runs):
        texts: dict[str, list[str]] = {}
        for seed in (s for s in sources.seeds if s.run == number):
            score = seed.source.manifest.score
            for flag in score.flags:
                texts.setdefault(flag, []).append(str(seed.source.seed))
            if not score.emission_crown_eligible:
                why = f"not crown eligible: {'; '.join(score.emission_ineligible_reasons)}"
                texts.setdefault(why, []).append(str(seed.source.seed))
        said += [f"{name}, seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}: {text}" for text, seeds in texts.items()]
    return said


def _score_row(seed: Seed) -> dict[str, Any]:
    manifest, profile = seed.source.manifest, seed.profile
    score = manifest.score
    share = profile.flops.attention_aware_mfu if profile.flops.attention_aware_mfu is not None else profile.flops.mfu
    return {
        "name": seed.name,
        "colour": COLOURS[seed.run % len(COLOURS)],
        "cells": [
            f"{score.final_score:.6f}",
            _number(score.heldout_delta, ".4f"),
            _number(score.val_bpb_trained, ".4f"),
            f"{score.prequential_bpb:.4f}",
            f"{manifest.metrics.covered_bytes:,}",
            f"{manifest.metrics.model_params:,}",
            _number(profile.steady_state.tokens_per_s, ",.0f"),
            _number(profile.scoring_overhead, ".2f"),
            _number(share, ".1%"),
            ", ".join(score.flags) or "none",
        ],
    }


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


# ----------------------------------------------------------------------------------------------------------- learning


def _learning_text(seeds: list[Seed]) -> str:
    strides = {seed.series.stride for seed in seeds}
    text = "Every batch is predicted before it is trained on. Colours are runs, dashes are seeds."
    return text + (f" A point stands for up to {max(strides)} batches." if strides and max(strides) > 1 else "")


def _learning(sources: Sources) -> list[str]:
    seeds = sources.seeds
    if not seeds:
        return []

    def curve(column: str) -> list[Series]:
        return [
            Series(s.name, s.series.columns.covered_bytes, getattr(s.series.columns, column), colour=s.run, dash=s.dash)
            for s in seeds
        ]

    text = "text predicted so far (UTF-8 bytes)"
    charts = [
        line_chart("Online loss", text, "loss (nats per token)", curve("train_ce_nats")),
        line_chart("Running bits per byte", text, "bits per byte so far", curve("running_bpb")),
        line_chart("Gradient norm", text, "norm (log scale)", curve("grad_norm"), log_y=True),
    ]
    for title, label, of in (
        ("Held-out delta by seed", "held-out delta (bits per byte, higher is better)", "heldout_delta"),
        ("Validation bits per byte by seed", "trained weights on unseen text (bits per byte)", "val_bpb_trained"),
    ):
        rows = [
            Dots(
                name,
                [v for s in run.scored.values() if (v := getattr(s.manifest.score, of)) is not None],
                [f"seed {s.seed}" for s in run.scored.values() if getattr(s.manifest.score, of) is not None],
                number,
            )
            for number, (name, run) in enumerate(sources.runs)
        ]
        charts.append(dot_chart(title, label, rows))
    return charts


# -------------------------------------------------------------------------------------------------------------- speed


def _speed(seeds: list[Seed]) -> list[str]:
    if not seeds:
        return []
    timed = [s for s in seeds if s.profile.parts_s is not None]
    parts = {label: [1e3 * max(0.0, getattr(s.profile.parts_s, key)) for s in timed] for label, key in PARTS}
    notes = [_number(s.profile.scoring_overhead, ".2f") + "x" * (s.profile.scoring_overhead is not None) for s in timed]
    charts = [
        bar_chart("Step time in its parts", "mean step (ms); note: step over the miner's own", Bars(
            [s.name for s in timed], parts, notes
        ))
    ]  # fmt: skip
    kept = [s for s in seeds if s.profile.series is not None]

    def curve(column: str, factor: float) -> list[Series]:
        return [
            Series(
                s.name,
                s.profile.series.i,
                [factor * v for v in getattr(s.profile.series, column)],
                colour=s.run,
                dash=s.dash,
            )
            for s in kept
            if s.profile.series is not None
        ]

    charts.append(line_chart("Throughput", "step", "tokens per second", curve("tokens_per_s", 1), from_zero=True))
    charts.append(line_chart("Longest step", "step", "longest step (ms)", curve("step_max_s", 1e3), from_zero=True))
    if len({s.run for s in seeds}) == 1 and kept:
        charts.append(_parts_over_steps(kept[0]))
    return charts


def _parts_over_steps(seed: Seed) -> str:
    series = seed.profile.series
    assert series is not None
    columns = (
        ("miner's step", "miner_step_s"),
        ("predict forward", "predict_forward_s"),
        ("scoring kernel", "scoring_kernel_s"),
        ("data wait", "data_wait_s"),
        ("ledger", "ledger_s"),
    )
    lines = [Series(name, series.i, [1e3 * v for v in getattr(series, key)]) for name, key in columns]
    return line_chart(f"Parts of a step, {seed.name}", "step", "time (ms, log scale)", lines, log_y=True)


def _throughput_tables(seeds: list[Seed]) -> list[dict[str, Any]]:
    if not seeds:
        return []
    rows, machines = [], []
    for s in seeds:
        p, q = s.profile, s.profile.step_s
        rows.append(
            [
                s.name,
                _number(p.end_to_end.tokens_per_s, ",.0f"),
                _number(p.end_to_end.bytes_per_s, ",.0f"),
                *([f"{1e3 * v:,.1f}" for v in (q.p50, q.p90, q.p99, q.max)] if q else ["-"] * 4),
                f"{p.flops.total:.3g}",
                _number(p.flops.attention_aware_total, ".3g"),
                _number(p.flops.peak_flops, ".3g"),
                f"{p.memory.peak_rss_bytes / 2**30:.2f}",
                _number(_gib(p.memory.peak_device_allocated_bytes), ".2f"),
                f"{sum(p.startup_s.values()):.1f}",
                _number(p.heldout_s, ".1f"),
            ]
        )
        k = p.machine
        machines.append(
            [
                s.name,
                f"{', '.join(k.gpus) or 'no GPU'}",
                f"{k.cpu}, {k.cpu_count} CPUs",
                f"{k.memory_bytes / 2**30:.0f} GiB",
                k.torch,
                k.triton or "-",
                k.python,
                ", ".join(f"{name}: {backend}" for name, backend in s.source.manifest.engine.backends.items()),
            ]
        )
    return [
        {
            "title": "Throughput",
            "columns": [
                "run, seed", "tokens/s, whole run", "bytes/s", "step p50 (ms)", "p90 (ms)", "p99 (ms)", "max (ms)",
                "FLOPs, 6ND", "attention-aware", "peak FLOP/s", "peak RSS (GiB)", "peak device (GiB)", "start-up (s)",
                "held-out (s)",
            ],
            "rows": rows,
            "notes": sorted({s.profile.flops.peak_source for s in seeds if s.profile.flops.peak_source}),
        },
        {
            "title": "Machines",
            "columns": ["run, seed", "GPU", "CPU", "memory", "torch", "triton", "python", "backends"],
            "rows": machines,
            "notes": [],
        },
    ]  # fmt: skip


def _gib(value: int | None) -> float | None:
    return None if value is None else value / 2**30


# ------------------------------------------------------------------------------------------------------------- probes


def _probe_charts(probes: list[dict[str, Any]]) -> list[str]:
    charts = []
    for document in probes:
        if document["schema"].startswith("prism_profile_kernels"):
            charts += [kernels_chart(rank, document["steps"]) for rank in document["ranks"]]
        else:
            charts.append(probe_chart(document, alone=False))
    return charts


def _probe_tables(probes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tables = []
    for document in probes:
        title, columns, rows, notes = probe_table(document)
        if document["schema"].startswith("prism_profile_kernels"):
            rows = kernel_cells(document["ranks"][0], document["steps"])[1]
            columns = ["kernel", *columns[1:]]
        tables.append({"title": title, "columns": columns, "rows": rows, "notes": notes})
    return tables
