"""The files a run writes, typed: manifest, train series, throughput profile, status, summary (docs/reference/files.md).

Field names are the contract's; `engine` is ours. JSON Schemas of these models are kept in docs/schemas/ and a test
holds them equal. A manifest stays small: whatever grows with the run lives in side files and is named by digest.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from prism_fast.protocol import constants as c


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RunBlock(_Block):
    seed: int
    forced_init: Literal[True] = True
    deterministic_algorithms: bool
    world_size: int
    rank: int = 0
    local_rank: int = 0
    device: str
    master_addr: str = "127.0.0.1"
    nproc_per_node: int
    stopped_reason: str


class ComputeBlock(_Block):
    """Observability only: nothing here ever reaches the score."""

    schema_version: Literal["prism_compute.v1"] = c.COMPUTE_SCHEMA
    gpu_count: int
    world_size: int
    nproc_per_node: int
    device: str
    max_gpu_count: int = c.MAX_NPROC
    model_params: int
    param_ladder_stage: str
    param_ladder_cap: int
    peak_vram_bytes: int | None
    peak_rss_bytes: int
    wall_clock_seconds: float
    estimated_flops: float = Field(description="6 x parameters x tokens_seen")


class DataBlock(_Block):
    data_dir: str
    shard_count: int
    available_bytes: int
    source: str
    random_token_fallback: Literal[False] = False
    single_pass: Literal[True] = True
    covered_bytes: int
    covered_bytes_cumulative: int
    unread_tail_bytes: int
    unread_tail_tokens: int
    consumed_documents: int
    consumed_batches: int
    stopped_reason: str


class TrainSeriesRef(_Block):
    schema_version: Literal["prism_train_series.v1"] = Field(default=c.TRAIN_SERIES_SCHEMA, alias="schema")
    path: str
    sha256: str
    points: int

    model_config = ConfigDict(extra="forbid", populate_by_name=True, serialize_by_alias=True)


class MetricsBlock(_Block):
    online_loss: float = Field(description="mean nats per scored token over the run")
    step0_loss: float = Field(description="mean nats per scored token of the first batch")
    random_init_baseline_nats: float = Field(description="ln of the head's width")
    consumed_batches: int
    covered_bytes: int
    total_bytes_covered: int
    predicted_tokens: int = Field(description="scored targets")
    tokens_seen: int = Field(description="positions fed to the model: rows x width; what the token budget counts")
    special_tokens: int
    special_nll_nats: float
    sum_neg_log_likelihood_nats: float
    sum_neg_log2_likelihood_bits: float
    cumulative_codelength_bits: float
    prequential_bpb: float
    bits_per_byte: float
    nan_inf_batches: int
    train_bpb_basis: str
    model_params: int
    train_series: TrainSeriesRef
    clip_events: int


class ScoreBlock(_Block):
    schema_version: Literal["prism_score.v2"] = c.SCORE_SCHEMA
    primary_metric: Literal["heldout_delta"] = "heldout_delta"
    secondary_metric: Literal["prequential_bpb"] = "prequential_bpb"
    emission_ranking: Literal["heldout_primary_bpb_secondary"] = "heldout_primary_bpb_secondary"
    emission_crown_eligible: bool
    emission_ineligible_reasons: list[str]
    final_score: float
    emission_rank_score: float
    prequential_bpb: float
    heldout_delta: float | None
    val_bpb_trained: float | None
    val_bpb_random_init: float | None
    val_bpb_uniform: float | None
    train_bpb_converged: float | None
    tokens_consumed: int
    compute_normalization: Literal["tokens_bytes"] = "tokens_bytes"
    wall_clock_term: Literal[False] = False
    anti_cheat_multiplier: float
    anomaly: bool
    flags: list[str]
    tie_breaker: Literal["earliest_commit_then_submission_id"] = "earliest_commit_then_submission_id"
    memorization_flag: bool
    memorization_penalty: float


class AntiCheatBlock(_Block):
    step0_anomaly: bool
    step0_anomaly_threshold_nats: float
    nan_inf_detected: bool
    nan_inf_batches: int
    no_learning: bool
    zero_forward: bool
    memorization_flag: bool
    train_heldout_gap: float | None
    budget_exceeded: bool
    artifacts_quota_exceeded: bool


class PinBlock(_Block):
    """The protocol pin that a run was scored under."""

    name: str
    protocol_id: Literal["prism_official_compare.v1"] = c.PROTOCOL_ID
    sha256: str = Field(description="of the pin's canonical JSON, the seeds asked for included")
    public_ok: bool = Field(description="whether the pin may carry a public claim: at least three distinct seeds")
    reasons: list[str]


class ContractBlock(_Block):
    """What the static distributed contract of training.py came to; `unmet` holds "rule:requirement"."""

    policy: Literal["reject", "flag", "off"]
    ok: bool | None = Field(description="null when the policy is off: nothing was looked at")
    unmet: list[str]


class ProgramRef(_Block):
    """A program of the model (docs/programs.md): `program/width-<width>.json` and `.safetensors`."""

    width: int = Field(description="tokens a row")
    batch: int | None = Field(description="rows; null: any number")
    operators: int
    sha256: str
    constants_bytes: int
    constants_sha256: str


class SnapshotRef(_Block):
    """The weights that a secretly chosen batch was predicted from."""

    index: int
    path: str
    sha256: str
    autocast: Literal["off", "bfloat16", "float16"] = Field(description="in force around the bundle's loop then")


class EngineBlock(_Block):
    """Ours: what a score was made with, so that two scores can be told apart or proven alike."""

    version: str
    accounting: str
    seal: str
    isolation: str
    backends: dict[str, str] = Field(description="kernel -> backend that ran it")
    tokenizer: str
    tokenizer_fingerprint: str
    basis: Literal["tokens", "bytes"]
    corpus_fingerprint: str
    val_corpus_fingerprint: str | None
    head_width: int
    head: Literal["logits", "hidden"] = Field(description="hidden: memory was short, and logits were never made whole")
    torch_version: str
    torch_threads: int
    batch_size: int
    seq_len: int
    run_spec_sha256: str
    bundle_sha256: str
    architecture_sha256: str | None = Field(default=None, description="of architecture.py")
    training_sha256: str | None = Field(default=None, description="of training.py")
    programs: list[ProgramRef] = Field(description="none in open mode")
    initial_state_sha256: str | None
    weights_sha256: str
    ledger_sha256: str
    ledger_chain: str = Field(description="the last link of ledger.chain")
    heldout_sha256: str | None
    heldout_documents_sha256: str | None
    pin: PinBlock | None = None
    distributed_contract: ContractBlock | None = None
    probes: int = Field(description="rows, online and held-out, that were run again for probes; 0 in open mode")
    probe_mode: Literal["none", "rows", "batches"]
    snapshots: list[SnapshotRef]


class ArtifactRef(_Block):
    path: str  # as `harness.process.artifacts.escaped` writes names that are not printable text
    bytes: int
    sha256: str


class RunManifest(_Block):
    schema_version: Literal["prism_run_manifest.v2"] = c.RUN_MANIFEST_SCHEMA
    submission_id: str
    run_id: str
    mode: str
    run: RunBlock
    compute: ComputeBlock
    data: DataBlock
    metrics: MetricsBlock
    score: ScoreBlock
    anti_cheat: AntiCheatBlock
    engine: EngineBlock
    artifacts: list[ArtifactRef]
    miner_reported_ignored: dict[str, Any] = Field(
        description="what train(ctx) returned, as text, if anything; never read"
    )


class SeriesColumns(_Block):
    """One entry per point. A point stands for `stride` batches: means weighted by tokens, the last wall_s."""

    i: list[int]
    tokens_seen: list[int]
    covered_bytes: list[int]
    train_ce_nats: list[float | None]
    running_bpb: list[float | None]
    wall_s: list[float]
    grad_norm: list[float | None]
    clip_event: list[bool]
    nan_inf: list[bool]


class SeriesAggregates(_Block):
    n_points: int
    mean_step_ms: float | None
    p99_step_ms: float | None
    grad_spike_rate: float | None
    nan_inf_batches: int
    clip_events: int


class TrainSeries(_Block):
    model_config = ConfigDict(extra="forbid", populate_by_name=True, serialize_by_alias=True)

    schema_version: Literal["prism_train_series.v1"] = Field(default=c.TRAIN_SERIES_SCHEMA, alias="schema")
    submission_id: str
    run_id: str
    authority: Literal["challenge"] = "challenge"
    x_axis: Literal["batch_index"] = "batch_index"
    token_budget: int | None
    batches: int
    stride: int = Field(description="batches per point; 1 up to 16,384 batches")
    columns: SeriesColumns
    aggregates: SeriesAggregates


class MachineBlock(_Block):
    cpu: str
    cpu_count: int
    memory_bytes: int
    gpus: list[str]
    gpu_memory_bytes: int | None
    driver: str | None
    os: str
    python: str
    torch: str
    triton: str | None
    backends: dict[str, str]


class RateBlock(_Block):
    """Tokens are positions fed to the model; bytes are covered UTF-8 bytes."""

    tokens_per_s: float | None
    bytes_per_s: float | None
    seconds: float
    batches: int


class StepParts(_Block):
    """Mean seconds of each part of a step, and what is left unexplained."""

    data_wait: float
    predict_forward: float
    scoring_kernel: float
    miner_step: float
    ledger: float
    other: float
    step: float


class Quantiles(_Block):
    p50: float
    p90: float
    p99: float
    max: float


class FlopsBlock(_Block):
    """Of the whole run, forward and backward. MFU counts the model's own step only, not the scoring forward."""

    convention: Literal["6ND"] = "6ND"
    total: float = Field(description="6 x parameters x tokens_seen")
    per_second: float | None
    mfu: float | None = Field(description="null where the device's peak is not known")
    attention_aware_total: float | None = Field(
        default=None,
        description="three times the products of the model's own forward, attention's pairs included; null where the "
        "model could not be counted",
    )
    attention_aware_per_second: float | None = None
    attention_aware_mfu: float | None = None
    peak_flops: float | None = Field(description="dense bf16 of all ranks' devices")
    peak_source: str | None = None


class PaddingBlock(_Block):
    real_tokens: int
    padded_tokens: int


class MemoryBlock(_Block):
    peak_rss_bytes: int
    peak_device_allocated_bytes: int | None
    peak_device_reserved_bytes: int | None


class ProfileSeries(_Block):
    """One entry per point, which stands for `stride` steps of rank 0 from step `i` on: means, and the longest step."""

    stride: int
    i: list[int]
    data_wait_s: list[float]
    predict_forward_s: list[float]
    scoring_kernel_s: list[float]
    miner_step_s: list[float]
    ledger_s: list[float]
    step_max_s: list[float]
    tokens_per_s: list[float] = Field(description="all ranks, over the steps' own time")


class ThroughputProfile(_Block):
    model_config = ConfigDict(extra="forbid", populate_by_name=True, serialize_by_alias=True)

    schema_version: Literal["prism_throughput_profile.v1"] = Field(default=c.THROUGHPUT_PROFILE_SCHEMA, alias="schema")
    submission_id: str
    run_id: str
    machine: MachineBlock
    end_to_end: RateBlock
    steady_state: RateBlock
    warmup_batches: int
    per_rank: list[RateBlock]
    step_s: Quantiles | None
    parts_s: StepParts | None
    scoring_overhead: float | None = Field(description="whole step over the miner's own step")
    flops: FlopsBlock
    padding: PaddingBlock
    memory: MemoryBlock
    startup_s: dict[str, float]
    heldout_s: float | None
    series: ProfileSeries | None = None


class RunStatus(_Block):
    """Kept in the seed's directory from the first moment: what state the files beside it are in."""

    schema_version: Literal["prism_run_status.v1"] = c.RUN_STATUS_SCHEMA
    status: Literal["incomplete", "scored", "rejected", "failed"]
    exit_code: int | None
    rule: str | None
    message: str | None
    run_spec_sha256: str | None


class SeedResult(_Block):
    seed: int
    status: Literal["scored", "rejected", "failed"]
    exit_code: int
    rule: str | None
    message: str | None
    run_dir: str
    final_score: float | None
    prequential_bpb: float | None
    heldout_delta: float | None
    val_bpb_trained: float | None
    flags: list[str]
    emission_crown_eligible: bool


class Spread(_Block):
    mean: float
    std: float | None = Field(description="sample standard deviation; null below two seeds")
    n: int


class RunSummary(_Block):
    schema_version: Literal["prism_run_summary.v1"] = c.SUMMARY_SCHEMA
    submission_id: str
    accounting: str = "exact"
    posture: Literal["public", "provisional"] = Field(description="public needs at least three distinct scored seeds")
    seeds: list[SeedResult]
    final_score: Spread | None
    prequential_bpb: Spread | None
    heldout_delta: Spread | None
    exit_code: int


FILE_MODELS: dict[str, type[BaseModel]] = {
    "prism_run_manifest.v2": RunManifest,
    "prism_train_series.v1": TrainSeries,
    "prism_throughput_profile.v1": ThroughputProfile,
    "prism_run_status.v1": RunStatus,
    "prism_run_summary.v1": RunSummary,
}
