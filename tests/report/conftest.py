"""Run directories as `prism-fast score` leaves them, with figures of the test's choosing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from prism_fast.protocol import constants as c
from prism_fast.protocol import manifest as m
from prism_fast.protocol.canonical import write_json
from prism_fast.protocol.run_spec import RunSpec
from prism_fast.protocol.score import CodeLength, HeldOut, compute_score

N_VOCAB = 50257
BYTES_PER_TOKEN = 4.0
BATCH, SEQ = 4, 64


def write_seed(
    directory: Path,
    *,
    seed: int = 1337,
    bundle: str = "bundle",
    trained_bpb: float | np.ndarray = 2.0,
    twin_bpb: float = 3.6,
    train_bpb: float = 1.9,
    prequential_bpb: float = 3.0,
    batches: int = 20,
    utf8_bytes: np.ndarray | None = None,
    stopped_reason: str = c.STOP_TOKEN_BUDGET,
    step0_loss: float = 10.8,
    status: str = "scored",
    heldout: bool = True,
    architecture: str | None = "arch",
    training: str | None = "train",
    eligible: bool = True,
    wall_s: float = 1.0,
    spec: dict | None = None,
) -> None:
    """One seed. `trained_bpb` may differ by document; bpb falls over training from 4 to end at `prequential_bpb`."""
    directory.mkdir(parents=True)
    spec_model = RunSpec(
        **{
            "engine_version": "0.1.0",
            "bundle_digest": bundle,
            "seed": seed,
            "seal": "sealed",
            "isolation": "bwrap",
            "tokenizer": "gpt2",
            "tokenizer_fingerprint": "t" * 8,
            "corpus_fingerprint": "c" * 8,
            "val_corpus_fingerprint": "v" * 8,
            "vocab_size": 50304,
            "torch_threads": 1,
            **(spec or {}),
        }
    )
    write_json(directory / c.RUN_SPEC_FILE, spec_model.model_dump(mode="json"))
    run_status = m.RunStatus(
        status=status,
        exit_code=0 if status == "scored" else 4,
        rule=None,
        message=None if status == "scored" else "rank 0 fell over",
        run_spec_sha256=spec_model.hash,
    )
    write_json(directory / c.RUN_STATUS_FILE, run_status.model_dump(mode="json"))
    if status != "scored":
        return

    n_bytes = np.array([400, 800, 1200, 1600], np.int64) if utf8_bytes is None else utf8_bytes
    nats_trained = np.broadcast_to(trained_bpb, n_bytes.shape) * c.LN2 * n_bytes
    nats_twin = np.full(n_bytes.shape, twin_bpb) * c.LN2 * n_bytes

    def code(nats: float, total: int) -> CodeLength:
        return CodeLength(float(nats), int(total), int(total / BYTES_PER_TOKEN))

    total, covered = int(n_bytes.sum()), int(batches * BATCH * (SEQ - 1) * BYTES_PER_TOKEN)
    online = code(prequential_bpb * c.LN2 * covered, covered)
    held = HeldOut(
        code(nats_trained.sum(), total), code(nats_twin.sum(), total), code(train_bpb * c.LN2 * total, total), N_VOCAB
    )
    score = compute_score(online, step0_loss=step0_loss, head_width=50304, faults=0, heldout=held if heldout else None)
    if heldout:
        np.savez_compressed(
            directory / c.HELDOUT_DOCUMENTS_FILE, utf8_bytes=n_bytes, nats_trained=nats_trained, nats_twin=nats_twin
        )
    ends = np.arange(1, batches + 1)
    share = ends / batches
    series = m.TrainSeries(
        submission_id=bundle,
        run_id=bundle,
        token_budget=spec_model.token_budget,
        batches=batches,
        stride=1,
        columns=m.SeriesColumns(
            i=(ends - 1).tolist(),
            tokens_seen=(ends * BATCH * SEQ).tolist(),
            covered_bytes=[round(covered * s) for s in share],
            train_ce_nats=np.linspace(10.8, 6.0, batches).tolist(),
            running_bpb=(4.0 + (prequential_bpb - 4.0) * share).tolist(),
            wall_s=(wall_s * share).tolist(),
            grad_norm=[None, *np.geomspace(3.0, 0.3, batches - 1).tolist()],
            clip_event=[False] * batches,
            nan_inf=[False] * batches,
        ),
        aggregates=m.SeriesAggregates(
            n_points=batches, mean_step_ms=1.0, p99_step_ms=1.0, grad_spike_rate=None, nan_inf_batches=0, clip_events=0
        ),
    )
    write_json(directory / c.TRAIN_SERIES_FILE, series.model_dump(mode="json"))
    manifest = m.RunManifest(
        submission_id=bundle,
        run_id=f"{bundle}-{seed}",
        mode=spec_model.mode,
        run=m.RunBlock(
            seed=seed,
            deterministic_algorithms=True,
            world_size=spec_model.world_size,
            device="cpu",
            nproc_per_node=spec_model.world_size,
            stopped_reason=stopped_reason,
        ),
        compute=m.ComputeBlock(
            gpu_count=0,
            world_size=spec_model.world_size,
            nproc_per_node=spec_model.world_size,
            device="cpu",
            model_params=1000,
            param_ladder_stage="explore",
            param_ladder_cap=124_000_000,
            peak_vram_bytes=None,
            peak_rss_bytes=1,
            wall_clock_seconds=wall_s,
            estimated_flops=1.0,
        ),
        data=m.DataBlock(
            data_dir="sample",
            shard_count=1,
            available_bytes=covered,
            source="sample",
            covered_bytes=covered,
            covered_bytes_cumulative=covered,
            unread_tail_bytes=0,
            unread_tail_tokens=0,
            consumed_documents=1,
            consumed_batches=batches,
            stopped_reason=stopped_reason,
        ),
        metrics=m.MetricsBlock(
            online_loss=1.0,
            step0_loss=step0_loss,
            random_init_baseline_nats=10.8,
            consumed_batches=batches,
            covered_bytes=covered,
            total_bytes_covered=covered,
            predicted_tokens=online.tokens,
            tokens_seen=batches * BATCH * SEQ,
            special_tokens=0,
            special_nll_nats=0.0,
            sum_neg_log_likelihood_nats=online.nats,
            sum_neg_log2_likelihood_bits=online.bits,
            cumulative_codelength_bits=online.bits,
            prequential_bpb=score.prequential_bpb,
            bits_per_byte=score.prequential_bpb,
            nan_inf_batches=0,
            train_bpb_basis="converged_train_prefix",
            model_params=1000,
            train_series=m.TrainSeriesRef(path=c.TRAIN_SERIES_FILE, sha256="0", points=batches),
            clip_events=0,
        ),
        score=m.ScoreBlock(
            emission_crown_eligible=eligible,
            emission_ineligible_reasons=[] if eligible else ["seal is open"],
            final_score=score.final_score,
            emission_rank_score=score.final_score,
            prequential_bpb=score.prequential_bpb,
            heldout_delta=score.heldout_delta,
            val_bpb_trained=score.val_bpb_trained,
            val_bpb_random_init=score.val_bpb_random_init,
            val_bpb_uniform=score.val_bpb_uniform,
            train_bpb_converged=score.train_bpb_converged,
            tokens_consumed=batches * BATCH * SEQ,
            anti_cheat_multiplier=score.anti_cheat_multiplier,
            anomaly=score.step0_anomaly,
            flags=score.flags,
            memorization_flag=score.memorization_flag,
            memorization_penalty=score.memorization_penalty,
        ),
        anti_cheat=m.AntiCheatBlock(
            step0_anomaly=score.step0_anomaly,
            step0_anomaly_threshold_nats=score.step0_anomaly_threshold_nats,
            nan_inf_detected=False,
            nan_inf_batches=0,
            no_learning=score.no_learning,
            zero_forward=False,
            memorization_flag=score.memorization_flag,
            train_heldout_gap=score.train_heldout_gap,
            budget_exceeded=False,
            artifacts_quota_exceeded=False,
        ),
        engine=m.EngineBlock(
            version="0.1.0",
            accounting=spec_model.accounting,
            seal="sealed",
            isolation="bwrap",
            backends={"token_nll": "torch"},
            tokenizer="gpt2",
            tokenizer_fingerprint=spec_model.tokenizer_fingerprint,
            basis="tokens",
            corpus_fingerprint=spec_model.corpus_fingerprint,
            val_corpus_fingerprint=spec_model.val_corpus_fingerprint,
            head_width=50304,
            head="logits",
            torch_version="2",
            torch_threads=1,
            batch_size=BATCH,
            seq_len=SEQ,
            run_spec_sha256=spec_model.hash,
            bundle_sha256=bundle,
            architecture_sha256=architecture,
            training_sha256=training,
            programs=[],
            initial_state_sha256=None,
            weights_sha256="0",
            ledger_sha256="0",
            ledger_chain="0",
            heldout_sha256=None,
            heldout_documents_sha256=None,
            probes=0,
            probe_mode="none",
            snapshots=[],
        ),
        artifacts=[],
        miner_reported_ignored={},
    )
    write_json(directory / c.RUN_MANIFEST_FILE, manifest.model_dump(mode="json"))
    write_json(directory / c.THROUGHPUT_PROFILE_FILE, throughput(bundle, batches).model_dump(mode="json"))


def throughput(bundle: str, batches: int) -> m.ThroughputProfile:
    """A profile of steps of 0.1 s, of which the miner's own is 0.08."""
    tokens = BATCH * SEQ
    rate = m.RateBlock(tokens_per_s=10.0 * tokens, bytes_per_s=40.0 * tokens, seconds=0.1 * batches, batches=batches)
    parts = {"data_wait": 0.001, "predict_forward": 0.015, "scoring_kernel": 0.003, "miner_step": 0.08, "ledger": 5e-4}
    return m.ThroughputProfile(
        submission_id=bundle,
        run_id=bundle,
        machine=m.MachineBlock(
            cpu="a CPU", cpu_count=2, memory_bytes=2**34, gpus=["NVIDIA H100 80GB HBM3"], gpu_memory_bytes=2**36,
            driver=None, os="x", python="3", torch="2", triton=None, backends={},
        ),
        end_to_end=rate,
        steady_state=rate,
        warmup_batches=2,
        per_rank=[rate],
        step_s=m.Quantiles(p50=0.1, p90=0.11, p99=0.12, max=0.2),
        parts_s=m.StepParts(**parts, other=0.0005, step=0.1),
        scoring_overhead=1.25,
        flops=m.FlopsBlock(
            total=6e12, per_second=6e11, mfu=0.31, attention_aware_total=8e12, attention_aware_per_second=8e11,
            attention_aware_mfu=0.42, peak_flops=989.5e12, peak_source="a data sheet",
        ),
        padding=m.PaddingBlock(real_tokens=tokens * batches, padded_tokens=tokens * batches),
        memory=m.MemoryBlock(peak_rss_bytes=2**30, peak_device_allocated_bytes=2**31, peak_device_reserved_bytes=2**32),
        startup_s={"launch": 2.0, "imports": 1.5},
        heldout_s=4.0,
        series=m.ProfileSeries(
            stride=1,
            i=list(range(batches)),
            step_max_s=[0.1] * batches,
            tokens_per_s=[10.0 * tokens] * batches,
            **{f"{name}_s": [value] * batches for name, value in parts.items()},
        ),
    )  # fmt: skip


def write_run(path: Path, seeds=(1337, 2027, 4242), per_seed: dict | None = None, **figures) -> Path:
    """A run of several seeds; `per_seed` {seed: figures} goes before what all seeds share."""
    for seed in seeds:
        write_seed(path / f"seed-{seed}", seed=seed, **{**figures, **(per_seed or {}).get(seed, {})})
    return path
