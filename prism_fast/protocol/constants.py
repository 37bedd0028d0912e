"""Numbers and identifiers of the contract, each in one place (docs/numerics.md, docs/cli.md)."""

from __future__ import annotations

import math
from typing import Final

# Schemas
RUN_MANIFEST_SCHEMA: Final = "prism_run_manifest.v2"
TRAIN_SERIES_SCHEMA: Final = "prism_train_series.v1"
THROUGHPUT_PROFILE_SCHEMA: Final = "prism_throughput_profile.v1"
COMPUTE_SCHEMA: Final = "prism_compute.v1"
SCORE_SCHEMA: Final = "prism_score.v2"
RUN_SPEC_SCHEMA: Final = "prism_run_spec.v1"
RUN_STATUS_SCHEMA: Final = "prism_run_status.v1"
SUMMARY_SCHEMA: Final = "prism_run_summary.v1"
HELDOUT_SCHEMA: Final = "prism_heldout.v1"
COMPARE_REPORT_SCHEMA: Final = "prism_compare_report.v1"
LEADERBOARD_SCHEMA: Final = "prism_leaderboard.v1"
READINESS_SCHEMA: Final = "prism_full_scale_readiness.v1"
SCALE_LADDER_SCHEMA: Final = "prism_scale_ladder.v1"
RESEARCH_ANNEX_SCHEMA: Final = "prism_research_protocol_annex.v1"
STATIC_CONTRACT_SCHEMA: Final = "prism_static_contract.v1"
DENSIFY_SCHEMA: Final = "prism_densify.v1"
FUNCTIONAL_CONTRACT_SCHEMA: Final = "prism_functional_contract.v1"
DRY_RUN_SCHEMA: Final = "prism_dry_run.v1"
CAMPAIGN_SCHEMA: Final = "prism_campaign.v1"
PROTOCOL_ID: Final = "prism_official_compare.v1"

# Files of one seed's run
RUN_MANIFEST_FILE = "prism_run_manifest.v2.json"
TRAIN_SERIES_FILE = "prism_train_series.v1.json"
THROUGHPUT_PROFILE_FILE = "prism_throughput_profile.v1.json"
RUN_SPEC_FILE = "run_spec.json"
RUN_STATUS_FILE = "status.json"
LEDGER_FILE = "ledger.bin"
OBSERVATIONS_FILE = "observations.bin"
HELDOUT_FILE = "heldout.json"
HELDOUT_DOCUMENTS_FILE = "heldout_documents.npz"
LEDGER_CHAIN_FILE = "ledger.chain"
HELDOUT_DOCUMENTS_FILE = "heldout_documents.npz"
WEIGHTS_FILE = "trained_state.safetensors"
TRAINER_LOG_FILE = "trainer.log"
TRACER_LOG_FILE = "tracer.log"
EXECUTOR_LOG_FILE = "executor.log"
OUTSIDE_STATE_FILE = "outside_state.json"  # of `try`: what the model keeps where no score looks
GENESIS_FILE = "genesis.json"
RECEIPT_FILE = "receipt.json"
INITIAL_STATE_FILE = "initial_state.safetensors"
PROGRAM_DIR = "program"
SNAPSHOTS_DIR = "snapshots"
ARTIFACTS_DIR = "artifacts"
BUNDLE_DIR = "bundle"  # the two scripts, as they were run
DENSIFY_FILE = "prism_densify.v1.json"
SUMMARY_FILE = "summary.json"
CORPUS_MANIFEST_FILE = "MANIFEST.json"

# Seeds, budgets, caps
DEFAULT_SEED = 1337
PUBLIC_SEEDS = (1337, 2027, 4242)
PUBLIC_MIN_SEEDS = 3  # distinct seeds; fewer make a claim provisional
DEFAULT_SEQUENCE_LENGTH = 128
DEFAULT_TOKEN_BUDGET = 500_000
DEFAULT_VOCAB_SIZE = 50_304  # gpt2's 50,257 rounded up to a multiple of 64
PRISM_V2_HELDOUT_BYTES = 65_536  # the original's held-out prefix
DEFAULT_BUDGET_SECONDS = 1200.0
WATCHDOG_GRACE_SECONDS = 120.0
STARTUP_ALLOWANCE_SECONDS = 300.0  # imports, model build and compile before train(ctx) is entered
ARTIFACTS_QUOTA_BYTES = 2 * 1024**3
MAX_LAYERS = 96
MAX_NPROC = 8
STAGE_PARAMETER_CAPS = {"explore": 124_000_000, "promote": 350_000_000, "full_scale": 350_000_000}
EXECUTION_MODES = ("gpu_proxy_eval", "full_scale_eval")

# Score fold
MEMORIZATION_GAP_BPB = 1.0
MEMORIZATION_MULTIPLIER = 0.5
STEP0_ANOMALY_FRACTION = 0.5
IMPLAUSIBLE_BPB = 64.0
RANK_QUANTUM = 1e-9
SECONDARY_SCALE = 1e-3
SECONDARY_CEILING = 0.5 * 5e-3
PRIMARY_BASE = 100.0
COMPARE_EPSILON_BPB = 5e-3  # of the held-out delta and of the prequential bpb: smaller differences do not decide
FAULT_CODE_LENGTH_FACTOR = 2.0  # a faulty target is charged 2 ln V nats

# Series
CLIP_EVENT_NORM = 1.0
GRAD_SPIKE_FACTOR = 10.0
SERIES_MAX_POINTS = 16_384

# Markers a wrapper may look for in the runner's output
MARKER_BUDGET_EXCEEDED = "PRISM_RUNNER_BUDGET_EXCEEDED"
MARKER_ARTIFACTS_QUOTA = "PRISM_RUNNER_ARTIFACTS_QUOTA"
MARKER_PARAM_CAP = "PRISM_RUNNER_PARAM_CAP"

# Rules
RULE_PARAM_CAP = "prism:param-cap"
RULE_BUDGET_EXCEEDED = "prism:budget-exceeded"
RULE_ARTIFACTS_QUOTA = "prism:artifacts-quota"
RULE_RESOURCE_OOM = "prism:resource-oom"
RULE_RUNTIME_ERROR = "prism:runtime-error"
RULE_SINGLE_NODE_BOUND = "prism:single-node-bound"
RULE_VOCAB_MISMATCH = "prism:vocab-mismatch"
RULE_TOKENIZER = "prism:tokenizer"
RULE_BUNDLE_SHAPE = "prism:bundle-shape"
RULE_OUTPUT_SHAPE = "prism:output-shape"
RULE_BATCH_REQUEST = "prism:batch-request"
RULE_MODEL_MISMATCH = "prism:model-mismatch"
RULE_DEGENERATE = "prism:degenerate"
RULE_FORCED_INIT = "prism:forced-init"
RULE_NONCAUSAL = "prism:noncausal"
RULE_NONDETERMINISTIC = "prism:nondeterministic"
RULE_NOT_EXPORTABLE: Final = "prism:not-exportable"
RULE_DISTRIBUTED_CONTRACT = "prism:distributed-contract"
RULE_RANK0_GUARD = "prism:distributed-rank0-guard"
RULES = frozenset(value for name, value in list(globals().items()) if name.startswith("RULE_"))

# Why the training loop stopped, in order of precedence
STOP_TOKEN_BUDGET = "token_budget"
STOP_STEP_BUDGET = "step_budget"
STOP_FLOPS_BUDGET = "flops_budget"
STOP_WALL_CLOCK = "wall_clock"
STOP_DATA_EXHAUSTED = "data_exhausted"
STOP_INTERRUPTED = "interrupted"
STOP_BUNDLE_RETURNED = "bundle_returned"

LN2 = math.log(2.0)
