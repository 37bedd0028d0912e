"""The frozen description of one run: everything that may move a score, and nothing that may not.

Paths, progress, report options and the scorer's own threads are not here: two runs with equal hashes on equal
hardware must give equal bits.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from prism_fast.protocol import constants as c
from prism_fast.protocol.canonical import canonical_json, sha256_hex


class RunSpec(BaseModel):
    """One seed's run. Sizes in tokens, times in seconds, digests sha256 hex."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal["prism_run_spec.v1"] = c.RUN_SPEC_SCHEMA
    engine_version: str
    bundle_digest: str
    mode: Literal["gpu_proxy_eval", "full_scale_eval"] = "gpu_proxy_eval"
    param_ladder_stage: Literal["explore", "promote", "full_scale"] = "explore"
    max_parameters: int = Field(default=c.STAGE_PARAMETER_CAPS["explore"], gt=0)
    max_layers: int = c.MAX_LAYERS
    seed: int = Field(default=c.DEFAULT_SEED, ge=0)
    seal: Literal["sealed", "open"]
    isolation: Literal["bwrap", "none"]
    accounting: Literal["exact", "prism-v2"] = "exact"
    tokenizer: str
    tokenizer_fingerprint: str
    corpus_fingerprint: str
    phase2_corpus_fingerprint: str | None = None
    val_corpus_fingerprint: str | None
    val_byte_budget: int | None = Field(default=None, gt=0)
    vocab_size: int = Field(gt=1)
    sequence_length: int = Field(default=c.DEFAULT_SEQUENCE_LENGTH, ge=2)
    batch_size: int | None = Field(default=None, gt=0)
    token_budget: int | None = Field(default=c.DEFAULT_TOKEN_BUDGET, gt=0)
    step_budget: int | None = Field(default=None, gt=0)
    flops_budget: float | None = Field(default=None, gt=0)
    budget_seconds: float = Field(default=c.DEFAULT_BUDGET_SECONDS, gt=0)
    watchdog_grace_seconds: float = Field(default=c.WATCHDOG_GRACE_SECONDS, ge=0)
    artifacts_quota_bytes: int = Field(default=c.ARTIFACTS_QUOTA_BYTES, ge=0)
    world_size: int = Field(default=1, ge=1, le=c.MAX_NPROC)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    torch_threads: int = Field(ge=1)
    deterministic_algorithms: bool = True

    @property
    def exact(self) -> bool:
        """Whether figures follow the exact accounting; if not, the original engine's (prism-v2)."""
        return self.accounting == "exact"

    def baseline_width(self, head_width: int) -> int:
        """Symbols of the random-init baseline that the step-0 threshold is half of: the head's own, or the original's
        `ctx.vocab_size`."""
        return head_width if self.exact else self.vocab_size

    @property
    def hash(self) -> str:
        """sha256 of the canonical JSON of the spec."""
        return sha256_hex(canonical_json(self.model_dump(mode="json")))
