"""Metrics of a scoring job in Prometheus' text format, for node_exporter's textfile collector.

The file is replaced as a whole, so that a collector never reads half of one. What is in it is observation: none of it
ranks, the score included, which is read from the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prism_fast.protocol import constants as c
from prism_fast.protocol.canonical import write_atomically
from prism_fast.protocol.errors import UsageError
from prism_fast.protocol.manifest import RunManifest, RunSummary, ThroughputProfile

HELP = {
    "prism_score_running": "1 while a seed is being scored, 0 at the end of the job.",
    "prism_score_exit_code": "Exit code of the job (docs/cli.md); absent while it runs.",
    "prism_score_updated_timestamp_seconds": "When this file was written.",
    "prism_seed_tokens": "Tokens fed to the model so far.",
    "prism_seed_token_budget": "Tokens the run may feed the model.",
    "prism_seed_bits_per_byte": "Prequential bits per byte so far.",
    "prism_seed_elapsed_seconds": "Seconds of training so far.",
    "prism_seed_exit_code": "Exit code of the seed.",
    "prism_seed_final_score": "final_score of the manifest.",
    "prism_seed_heldout_delta_bits_per_byte": "heldout_delta of the manifest.",
    "prism_seed_flags": "How many flags the score carries.",
    "prism_seed_crown_eligible": "1 when the run may take the crown.",
    "prism_seed_wall_clock_seconds": "Seconds of the whole run.",
    "prism_seed_peak_resident_bytes": "Peak resident memory of the bundle's processes.",
    "prism_seed_tokens_per_second": "Tokens a second, end to end.",
}


@dataclass(frozen=True)
class Sample:
    """One value of a metric named in HELP."""

    name: str
    value: float
    labels: Mapping[str, str]


def render(samples: Iterable[Sample]) -> str:
    """The text format: every metric's samples together under its HELP and TYPE."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    lines = []
    for name, group in by_name.items():
        lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} gauge"]
        for sample in group:
            labels = ",".join(f'{key}="{_escape(value)}"' for key, value in sample.labels.items())
            lines.append(f"{name}{{{labels}}} {sample.value!r}" if labels else f"{name} {sample.value!r}")
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def write_metrics(path: Path, samples: Iterable[Sample]) -> None:
    """Replaces `path`. Raises UsageError when its folder is not there."""
    if not path.parent.is_dir():
        raise UsageError(f"--metrics {path}: no such folder; expected the textfile collector's")
    write_atomically(path, render(samples).encode())


def samples_of(run: Path, summary: RunSummary) -> list[Sample]:
    """What a finished job has to say of each seed, from its files."""
    found = []
    for seed in summary.seeds:
        labels = {"submission": summary.submission_id, "seed": str(seed.seed)}
        values: dict[str, float | None] = {"exit_code": seed.exit_code}
        if seed.status == "scored":
            directory = run / seed.run_dir
            manifest = RunManifest.model_validate_json((directory / c.RUN_MANIFEST_FILE).read_bytes())
            profile = ThroughputProfile.model_validate_json((directory / c.THROUGHPUT_PROFILE_FILE).read_bytes())
            values |= {
                "final_score": manifest.score.final_score,
                "bits_per_byte": manifest.score.prequential_bpb,
                "heldout_delta_bits_per_byte": manifest.score.heldout_delta,
                "flags": len(manifest.score.flags),
                "crown_eligible": int(manifest.score.emission_crown_eligible),
                "tokens": manifest.metrics.tokens_seen,
                "wall_clock_seconds": manifest.compute.wall_clock_seconds,
                "peak_resident_bytes": manifest.compute.peak_rss_bytes,
                "tokens_per_second": profile.end_to_end.tokens_per_s,
            }
        found += [Sample(f"prism_seed_{k}", v, labels) for k, v in values.items() if v is not None]
    return found
