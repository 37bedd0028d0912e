"""Turns a finished run into its official documents: the receipts, and what is made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prism_fast.harness.process import jobs
from prism_fast.harness.process.artifacts import artifact_digests
from prism_fast.harness.referee.ledger import Ledger
from prism_fast.harness.referee.train_series import build_series
from prism_fast.profiling.throughput import build_profile
from prism_fast.protocol import constants as c
from prism_fast.protocol import ledger as layout
from prism_fast.protocol import manifest as m
from prism_fast.protocol import receipts
from prism_fast.protocol.canonical import canonical_json, file_sha256, sha256_hex, write_atomically, write_json
from prism_fast.protocol.run_spec import RunSpec
from prism_fast.protocol.score import HeldOut

MAX_ARTIFACTS = 100  # named in a manifest, in name order


@dataclass(frozen=True)
class RunFacts:
    """Everything known at the end of a run that is neither in the ledger nor in its genesis. Seconds."""

    spec: RunSpec
    genesis: receipts.Genesis
    run_dir: Path
    hello: jobs.Hello
    done: dict[int, jobs.Done]
    model: dict[str, Any]
    stopped_reason: str
    heldout: HeldOut | None
    startup_s: dict[str, float]
    train_s: float
    wall_s: float
    heldout_s: float | None
    violations: list[str] = field(default_factory=list)
    probed_rows: int = 0
    probe_mode: str = "none"
    head: str = "logits"
    snapshots: tuple[m.SnapshotRef, ...] = ()


def write_documents(facts: RunFacts, ledger: Ledger) -> m.RunManifest:
    """Writes series, profile, receipt and, last, the manifest. Raises BundleFailed where nothing may be ranked."""
    spec, model, run_dir = facts.spec, facts.model, facts.run_dir
    names = {"submission_id": facts.genesis.submission_id, "run_id": facts.genesis.run_id}
    series = build_series(run_dir, **names, token_budget=spec.token_budget, world_size=spec.world_size)
    series_bytes = canonical_json(series.model_dump(mode="json"))
    peak_rss = max(d.peak_rss_bytes for d in facts.done.values())
    peak_vram = max((d.peak_vram_bytes for d in facts.done.values() if d.peak_vram_bytes is not None), default=None)
    reserved = [d.peak_vram_reserved_bytes for d in facts.done.values() if d.peak_vram_reserved_bytes]
    profile = build_profile(
        run_dir,
        **names,
        machine=facts.hello.machine,
        world_size=spec.world_size,
        parameters=model["model_params"],
        forward_flops=facts.done[0].forward_flops,
        rows_times_width=model["batch_size"] * model["seq_len"],
        on_device=facts.hello.device.startswith("cuda"),
        train_s=facts.train_s,
        startup_s=facts.startup_s,
        heldout_s=facts.heldout_s,
        memory=m.MemoryBlock(
            peak_rss_bytes=peak_rss,
            peak_device_allocated_bytes=peak_vram,
            peak_device_reserved_bytes=max(reserved, default=None),
        ),
    )
    write_atomically(run_dir / c.TRAIN_SERIES_FILE, series_bytes)
    write_json(run_dir / c.THROUGHPUT_PROFILE_FILE, profile.model_dump(mode="json"))
    plan = model["plan"]
    receipt = receipts.Receipt(
        stopped_reason=facts.stopped_reason,
        model=receipts.ModelFacts(
            **{k: model[k] for k in ("batch_size", "seq_len", "basis", "head_width", "model_params")},
            corpus_bytes=plan["corpus_bytes"],
            corpus_tokens=plan["corpus_tokens"],
            matmul_precision=model.get("matmul_precision"),
        ),
        violations=facts.violations,
        probed_rows=facts.probed_rows,
        probe_mode=facts.probe_mode,  # type: ignore[arg-type]
        head=facts.head,  # type: ignore[arg-type]
        snapshots=list(facts.snapshots),
        sha256={
            c.TRAIN_SERIES_FILE: sha256_hex(series_bytes),
            **{name: file_sha256(run_dir / name) for name in _NAMED if (run_dir / name).is_file()},
        },
        series_points=series.aggregates.n_points,
        clip_events=series.aggregates.clip_events,
        artifacts=_artifacts(run_dir),
        miner_reported={f"rank{r}": d.returned for r, d in sorted(facts.done.items()) if d.returned is not None},
        observed=receipts.Observed(
            device=facts.hello.device,
            torch_version=facts.hello.machine.torch,
            backends=model["backends"],
            peak_vram_bytes=peak_vram,
            peak_rss_bytes=peak_rss,
            wall_clock_seconds=facts.wall_s,
        ),
    )
    records = layout.read_records(run_dir / c.LEDGER_FILE, layout.LEDGER_MAGIC, layout.LEDGER_DTYPE)
    totals = receipts.Totals.of(records, spec.world_size)
    data = receipts.document_bytes(receipt)
    receipts.score_of(totals, spec, receipt, facts.heldout)  # raises before anything looks complete
    write_atomically(run_dir / c.RECEIPT_FILE, data)
    ledger.seal(bytes.fromhex(sha256_hex(data)))
    manifest = receipts.build_manifest(
        spec,
        facts.genesis,
        receipt,
        totals,
        facts.heldout,
        ledger_sha256=file_sha256(run_dir / c.LEDGER_FILE),
        ledger_chain=ledger.chain.hex(),
    )
    write_json(run_dir / c.RUN_MANIFEST_FILE, manifest.model_dump(mode="json"))
    return manifest


_NAMED = (
    c.WEIGHTS_FILE,
    c.OBSERVATIONS_FILE,
    c.THROUGHPUT_PROFILE_FILE,
    c.HELDOUT_FILE,
    c.HELDOUT_DOCUMENTS_FILE,
    c.OUTSIDE_STATE_FILE,
)


def _artifacts(run_dir: Path) -> list[m.ArtifactRef]:
    """The bundle's own regular files by digest, the first MAX_ARTIFACTS in name order."""
    found = artifact_digests(run_dir, run_dir / c.ARTIFACTS_DIR, MAX_ARTIFACTS)
    return [m.ArtifactRef(path=path, bytes=size, sha256=digest) for path, size, digest in found]
