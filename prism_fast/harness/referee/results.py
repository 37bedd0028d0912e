"""Turns a finished run's ledger, observations and reports into its three official documents."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prism_fast.harness.referee.ledger import Ledger
from prism_fast.harness.referee.train_series import build_series
from prism_fast.profiling.throughput import build_profile
from prism_fast.protocol import constants as c
from prism_fast.protocol import manifest as m
from prism_fast.protocol.budgets import training_flops
from prism_fast.protocol.canonical import canonical_json, file_sha256, sha256_hex
from prism_fast.protocol.run_spec import RunSpec
from prism_fast.protocol.score import CodeLength, Score


@dataclass(frozen=True)
class RunFacts:
    """Everything known at the end of a run that is not in the ledger."""

    spec: RunSpec
    submission_id: str
    run_id: str
    run_dir: Path
    data_dir: str
    data_source: str
    shard_count: int
    available_bytes: int
    hello: dict[int, dict[str, Any]]
    started: dict[int, dict[str, Any]]
    model: dict[str, Any]
    done: dict[int, dict[str, Any]]
    stopped_reason: str
    startup_s: dict[str, float]
    train_s: float
    wall_s: float
    heldout_s: float | None
    ineligible_reasons: list[str]
    probes: int
    script_sha256: dict[str, str]
    head: m.HeadBlock = field(default_factory=m.HeadBlock)
    pin: m.PinBlock | None = None
    distributed_contract: m.ContractBlock | None = None


def build_documents(
    facts: RunFacts, ledger: Ledger, score: Score
) -> tuple[m.RunManifest, m.TrainSeries, m.ThroughputProfile]:
    """-> (manifest, series, profile). The manifest names the series' digest, so it is made last and written last."""
    spec, model = facts.spec, facts.model
    online: CodeLength = ledger.code_length
    series = build_series(
        facts.run_dir,
        submission_id=facts.submission_id,
        run_id=facts.run_id,
        token_budget=spec.token_budget,
        world_size=spec.world_size,
    )
    series_digest = sha256_hex(canonical_json(series.model_dump(mode="json")))
    hello, plan = facts.hello[0], model["plan"]
    peak_rss = max(d["peak_rss_bytes"] for d in facts.done.values())
    peak_vram = [d["peak_vram_bytes"] for d in facts.done.values() if d["peak_vram_bytes"] is not None]
    flops = training_flops(model["model_params"], ledger.positions)
    machine = m.MachineBlock.model_validate(hello["machine"])
    profile = build_profile(
        facts.run_dir,
        submission_id=facts.submission_id,
        run_id=facts.run_id,
        machine=machine,
        world_size=spec.world_size,
        parameters=model["model_params"],
        forward_flops=facts.done[0]["forward_flops"],
        rows_times_width=model["batch_size"] * model["seq_len"],
        on_device=hello["device"].startswith("cuda"),
        train_s=facts.train_s,
        startup_s=facts.startup_s,
        heldout_s=facts.heldout_s,
        memory=m.MemoryBlock(
            peak_rss_bytes=peak_rss,
            peak_device_allocated_bytes=max(peak_vram) if peak_vram else None,
            peak_device_reserved_bytes=max(
                (d["peak_vram_reserved_bytes"] for d in facts.done.values() if d["peak_vram_reserved_bytes"]),
                default=None,
            ),
        ),
    )
    gpu_count = spec.world_size if hello["device"].startswith("cuda") else 0
    covered_tokens = ledger.scored_tokens if spec.exact else ledger.positions  # there, row-first tokens count
    tail_bytes, tail_tokens = (plan["corpus_bytes"] - ledger.bytes, plan["corpus_tokens"] - covered_tokens)
    manifest = m.RunManifest(
        submission_id=facts.submission_id,
        run_id=facts.run_id,
        mode=spec.mode,
        run=m.RunBlock(
            seed=spec.seed,
            deterministic_algorithms=spec.deterministic_algorithms,
            world_size=spec.world_size,
            device=hello["device"],
            nproc_per_node=spec.world_size,
            stopped_reason=facts.stopped_reason,
        ),
        compute=m.ComputeBlock(
            gpu_count=gpu_count,
            world_size=spec.world_size,
            nproc_per_node=spec.world_size,
            device=hello["device"],
            model_params=model["model_params"],
            param_ladder_stage=spec.param_ladder_stage,
            param_ladder_cap=spec.max_parameters,
            peak_vram_bytes=max(peak_vram) if peak_vram else None,
            peak_rss_bytes=peak_rss,
            wall_clock_seconds=facts.wall_s,
            estimated_flops=flops,
        ),
        data=m.DataBlock(
            data_dir=facts.data_dir,
            shard_count=facts.shard_count,
            available_bytes=facts.available_bytes,
            source=facts.data_source,
            covered_bytes=ledger.bytes,
            covered_bytes_cumulative=ledger.bytes,
            unread_tail_bytes=tail_bytes,
            unread_tail_tokens=tail_tokens,
            consumed_documents=ledger.documents,
            consumed_batches=ledger.batches,
            stopped_reason=facts.stopped_reason,
        ),
        metrics=m.MetricsBlock(
            online_loss=online.nats / online.tokens,
            step0_loss=ledger.step0_loss,
            random_init_baseline_nats=float(np.log(spec.baseline_width(model["head_width"]))),
            consumed_batches=ledger.batches,
            covered_bytes=online.bytes,
            total_bytes_covered=online.bytes,
            predicted_tokens=online.tokens,
            tokens_seen=ledger.positions,
            special_tokens=ledger.special_tokens,
            special_nll_nats=ledger.special_nats,
            sum_neg_log_likelihood_nats=online.nats,
            sum_neg_log2_likelihood_bits=online.bits,
            cumulative_codelength_bits=online.bits,
            prequential_bpb=score.prequential_bpb,
            bits_per_byte=score.prequential_bpb,
            nan_inf_batches=ledger.nan_inf_batches,
            train_bpb_basis="converged_train_prefix" if score.train_bpb_converged is not None else "prequential",
            model_params=model["model_params"],
            train_series=m.TrainSeriesRef(
                path=c.TRAIN_SERIES_FILE, sha256=series_digest, points=series.aggregates.n_points
            ),
            clip_events=series.aggregates.clip_events,
        ),
        score=m.ScoreBlock(
            emission_crown_eligible=not facts.ineligible_reasons,
            emission_ineligible_reasons=facts.ineligible_reasons,
            final_score=score.final_score,
            emission_rank_score=score.final_score,
            prequential_bpb=score.prequential_bpb,
            heldout_delta=score.heldout_delta,
            val_bpb_trained=score.val_bpb_trained,
            val_bpb_random_init=score.val_bpb_random_init,
            val_bpb_uniform=score.val_bpb_uniform,
            train_bpb_converged=score.train_bpb_converged,
            tokens_consumed=ledger.positions,
            anti_cheat_multiplier=score.anti_cheat_multiplier,
            anomaly=score.step0_anomaly,
            flags=score.flags,
            memorization_flag=score.memorization_flag,
            memorization_penalty=score.memorization_penalty,
        ),
        anti_cheat=m.AntiCheatBlock(
            step0_anomaly=score.step0_anomaly,
            step0_anomaly_threshold_nats=score.step0_anomaly_threshold_nats,
            nan_inf_detected=ledger.nan_inf_batches > 0,
            nan_inf_batches=ledger.nan_inf_batches,
            no_learning=score.no_learning,
            zero_forward=False,
            memorization_flag=score.memorization_flag,
            train_heldout_gap=score.train_heldout_gap,
            budget_exceeded=False,
            artifacts_quota_exceeded=False,
        ),
        engine=m.EngineBlock(
            version=spec.engine_version,
            accounting=spec.accounting,
            capture=spec.capture,
            head=facts.head,
            seal=spec.seal,
            isolation=spec.isolation,
            backends=model["backends"],
            tokenizer=spec.tokenizer,
            tokenizer_fingerprint=spec.tokenizer_fingerprint,
            basis=model["basis"],
            corpus_fingerprint=spec.corpus_fingerprint,
            val_corpus_fingerprint=spec.val_corpus_fingerprint,
            head_width=model["head_width"],
            torch_version=machine.torch,
            torch_threads=spec.torch_threads,
            batch_size=model["batch_size"],
            seq_len=model["seq_len"],
            run_spec_sha256=spec.hash,
            bundle_sha256=spec.bundle_digest,
            architecture_sha256=facts.script_sha256["architecture.py"],
            training_sha256=facts.script_sha256["training.py"],
            weights_sha256=file_sha256(facts.run_dir / c.WEIGHTS_FILE),
            ledger_sha256=file_sha256(facts.run_dir / c.LEDGER_FILE),
            ledger_chain=ledger.chain.hex(),
            heldout_sha256=_digest_of(facts.run_dir / c.HELDOUT_FILE),
            heldout_documents_sha256=_digest_of(facts.run_dir / c.HELDOUT_DOCUMENTS_FILE),
            pin=facts.pin,
            distributed_contract=facts.distributed_contract,
            probes=facts.probes,
        ),
        artifacts=_artifacts(facts.run_dir),
        miner_reported_ignored=_returned(facts.done),
    )
    return manifest, series, profile


def _digest_of(path: Path) -> str | None:
    return file_sha256(path) if path.exists() else None


def _returned(done: dict[int, dict[str, Any]]) -> dict[str, Any]:
    return {f"rank{r}": d["returned"] for r, d in sorted(done.items()) if d["returned"] is not None}


def _artifacts(run_dir: Path, limit: int = 100) -> list[m.ArtifactRef]:
    """The bundle's own regular files by digest, the first `limit` in name order."""
    directory = run_dir / c.ARTIFACTS_DIR
    files = sorted(p for p in directory.rglob("*") if p.is_file() and not p.is_symlink())
    return [
        m.ArtifactRef(path=str(p.relative_to(run_dir)), bytes=p.stat().st_size, sha256=file_sha256(p))
        for p in files[:limit]
    ]
