"""What a scoring job is asked for, what all its seeds share, and where its progress goes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from prism_fast.harness.bundle.bundle import Bundle
from prism_fast.harness.bundle.static_contract import Policy, StaticReport
from prism_fast.harness.referee.ledger import Ledger
from prism_fast.protocol import constants as c
from prism_fast.protocol.pins import ProtocolPin
from prism_fast.protocol.run_spec import RunSpec


@dataclass(frozen=True)
class ScoreRequest:
    """What `prism-fast score` was asked for. Times in seconds, budgets in tokens, steps and FLOPs.

    `policy`: of the static distributed contract; None: the environment's, else "reject" with several processes and
    "flag" with one, where a script for one GPU does what it says. `vocab_size` None: the tokenizer's, padded to 64.
    `phase2`: the second corpus of full_scale_eval. `only_seeds`: those of `seeds` that are scored here and now; a
    campaign scores the others elsewhere. `command_s`: what the command took to come this far, for the profile alone.
    `snapshots`: batches, secretly chosen, whose weights are kept. `compare_state`: open mode looks for what the model
    keeps outside its state. `pin`, `pin_name`: what the other fields were settled under.
    """

    bundle: Path
    data: str
    out: Path
    val: str | None = None
    tokenizer: str = "gpt2"
    sequence_length: int = c.DEFAULT_SEQUENCE_LENGTH
    batch_size: int | None = None
    token_budget: int | None = c.DEFAULT_TOKEN_BUDGET
    step_budget: int | None = None
    flops_budget: float | None = None
    budget_seconds: float = c.DEFAULT_BUDGET_SECONDS
    watchdog_grace_seconds: float = c.WATCHDOG_GRACE_SECONDS
    artifacts_quota_bytes: int = c.ARTIFACTS_QUOTA_BYTES
    val_byte_budget: int | None = None
    seeds: tuple[int, ...] = (c.DEFAULT_SEED,)
    only_seeds: tuple[int, ...] | None = None
    nproc: int = 1
    accounting: str = "exact"
    seal: str = "sealed"
    isolation: str = "auto"
    device: str = "auto"
    torch_threads: int | None = None
    prefetch: int = 2
    resume: bool = False
    snapshots: int = 0
    compare_state: bool = False
    cache_dir: Path | None = None
    mode: str = "gpu_proxy_eval"
    phase2: str | None = None
    stage: str = "explore"
    vocab_size: int | None = None
    policy: Policy | None = None
    pin: ProtocolPin | None = None
    pin_name: str | None = None
    command_s: float | None = None


# What a spec calls otherwise than a request.
SPEC_NAMES = {
    "stage": "param_ladder_stage",
    "nproc": "world_size",
}


def request_again(spec: RunSpec, **given: Any) -> ScoreRequest:
    """The request that `spec` came of, but for what is `given`: every field that a spec has is taken from there.

    Raises TypeError for a field that no request has.
    """
    taken = {
        f.name: getattr(spec, SPEC_NAMES.get(f.name, f.name))
        for f in fields(ScoreRequest)
        if SPEC_NAMES.get(f.name, f.name) in RunSpec.model_fields
    }
    isolation = spec.isolation if spec.seal == "sealed" else "auto"
    return ScoreRequest(**{**taken, "seeds": (spec.seed,), "isolation": isolation, **given})


class Reporter(Protocol):
    """Where a run's progress goes: a terminal, or nowhere."""

    def stage(self, text: str) -> None: ...

    def packing(self, progress: Any) -> None: ...

    def training(self, spec: RunSpec, ledger: Ledger, elapsed_s: float) -> None: ...

    def warn(self, text: str) -> None: ...


class SilentReporter:
    """Reports nothing."""

    def stage(self, text: str) -> None: ...

    def packing(self, progress: Any) -> None: ...

    def training(self, spec: RunSpec, ledger: Ledger, elapsed_s: float) -> None: ...

    def warn(self, text: str) -> None: ...


@dataclass
class Prepared:
    """What all seeds of a request share."""

    bundle: Bundle
    corpus: Any
    val_corpus: Any
    tokenizer: Any
    byte_tokenizer: Any
    isolation: str
    contract: StaticReport | None = None
    phase2_corpus: Any = None
    hidden: tuple[Path, ...] = ()  # from every sandbox: text, and what other runs wrote
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def train(self) -> Any:
        """The split that is trained on: the corpus', and after it that of the second phase where there is one."""
        from prism_fast.data.corpus import joined_splits

        phases = (self.corpus,) if self.phase2_corpus is None else (self.corpus, self.phase2_corpus)
        return joined_splits(*(corpus.split("train") for corpus in phases))
