"""What a bundle sees: `PrismContext` and `PrismBatch` (docs/start/miner.md).

The context is data; what it can *do* (build the model under the forced seed, give the reference tokenizer, iterate
the instrumented training batches) belongs to the harness that made it, reached through `engine`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PrismBatch:
    """One batch, already predicted. `tokens`: int64 [B, L] on the model's device; row k+1 begins with row k's last."""

    tokens: Tensor
    index: int = 0


class ContextEngine(Protocol):
    """The harness behind a context."""

    def build_model(self, context: PrismContext, *args: Any, **kwargs: Any) -> Any: ...

    def reference_tokenizer(self, context: PrismContext, name: str) -> Any: ...

    def iter_train_batches(
        self, context: PrismContext, model: Any, *, batch_size: int, seq_len: int | None, tokenizer: Any
    ) -> Iterator[PrismBatch]: ...


@dataclass(frozen=True)
class PrismContext:
    """The run as a bundle sees it. All sizes in tokens unless named otherwise; `budget_seconds` in seconds."""

    vocab_size: int
    sequence_length: int
    max_layers: int = 96
    max_parameters: int = 124_000_000
    param_ladder_stage: str = "explore"
    seed: int = 1337
    data_dir: str = ""
    artifacts_dir: str = ""
    reference_tokenizer_dir: str = ""
    token_budget: int | None = None
    step_budget: int | None = None
    budget_seconds: float | None = None
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    distributed_backend: str = "gloo"
    device: str = "cpu"
    resume_checkpoint_dir: str | None = None
    is_resume: bool = False
    attempt: int = 1
    engine: ContextEngine | None = field(default=None, repr=False, compare=False)

    @property
    def max_seq_len(self) -> int:
        """`sequence_length` under the name older bundles use."""
        return self.sequence_length

    @property
    def max_params(self) -> int:
        """`max_parameters` under the name older bundles use."""
        return self.max_parameters

    @property
    def ladder_stage(self) -> str:
        """`param_ladder_stage` under the name older bundles use."""
        return self.param_ladder_stage

    def _engine(self, wanted: str) -> ContextEngine:
        if self.engine is None:
            raise RuntimeError(
                f"PrismContext.{wanted} works only inside a run: this context was made by hand. "
                "Start the bundle with `prism-fast score`."
            )
        return self.engine

    def build_model(self, *args: Any, **kwargs: Any) -> Any:
        """`architecture.build_model(ctx, ...)` under the run's forced seed."""
        return self._engine("build_model").build_model(self, *args, **kwargs)

    def reference_tokenizer(self, name: str = "gpt2") -> Any:
        """The run's locked tokenizer; the only object `iter_train_batches(tokenizer=...)` accepts."""
        return self._engine("reference_tokenizer").reference_tokenizer(self, name)

    def iter_train_batches(
        self, model: Any, *, batch_size: int = 8, seq_len: int | None = None, tokenizer: Any = None
    ) -> Iterator[PrismBatch]:
        """Yields each training batch once, after `model` has predicted it without gradient.

        One pass per process: a second call yields nothing. `tokenizer=None` is the byte basis (ids 0..255, end of
        text 256). `seq_len` defaults to `sequence_length` and may not exceed it.
        """
        return self._engine("iter_train_batches").iter_train_batches(
            self, model, batch_size=batch_size, seq_len=seq_len, tokenizer=tokenizer
        )
