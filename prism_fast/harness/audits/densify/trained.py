"""The trained weights behind executors, for questions no score is made of: one for each width that is asked for."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import numpy as np

from prism_fast.harness.marking.heldout import Marks
from prism_fast.harness.process.isolation import Sandbox
from prism_fast.harness.process.shared_state import read_safetensors, safetensors_dtypes
from prism_fast.harness.referee.executing import Executor, StatePredictor
from prism_fast.harness.referee.request import Prepared
from prism_fast.harness.referee.seed_run import ASSETS, bundle_environment
from prism_fast.harness.referee.tracing import Tracer
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import PrismError
from prism_fast.protocol.run_spec import RunSpec

ANSWER_SECONDS = 600.0  # one forward, or a model built and captured


class NotFeasible(Exception):
    """The model cannot be asked this. The message says why, in words for the document."""


class TrainedModel:
    """Answers tokens from a run's trained weights. `basis`: "tokens" or "bytes", as it was trained on."""

    def __init__(self, spec: RunSpec, prepared: Prepared, weights: Path, private: Path, basis: str) -> None:
        from prism_fast.data.tokenizers import reference_tokenizer

        self.spec, self.basis = spec, basis
        self.tokenizer = reference_tokenizer(spec.tokenizer if basis == "tokens" else "bytes")
        self._prepared, self._private, self._weights = prepared, private, weights
        self._executors: dict[int, Executor] = {}

    def mark(self, tokens: np.ndarray, targets: np.ndarray) -> Marks:
        """Implements `marking.heldout.Predictor`. Raises NotFeasible when the model fails on rows of this width."""
        try:
            executor = self._executor(tokens.shape[1])
            return StatePredictor(executor, "trained", probe=False).mark(tokens, targets)
        except PrismError as error:
            raise self._not_feasible(tokens.shape[1], error) from None

    def nll(self, tokens: np.ndarray, width: int) -> np.ndarray:
        """float64 [B, L - 1]: nats of tokens[:, 1:], in rows padded to `width`; not finite where the logits are not."""
        return self._detail(tokens, width)[0][:, : tokens.shape[1] - 1]

    def last_logits(self, tokens: np.ndarray, width: int) -> np.ndarray:
        """float64 [B, V]: the logits after the last token, in rows padded to `width`."""
        return self._detail(tokens, width)[1]

    def _detail(self, tokens: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        rows, length = tokens.shape
        padded = np.full((rows, width), self.tokenizer.eot, np.int64)
        padded[:, :length] = tokens
        targets = np.full((rows, width), -100, np.int64)
        targets[:, : length - 1] = tokens[:, 1:]
        targets[:, length - 1] = self.tokenizer.eot  # where the logits are asked for
        try:
            return self._executor(width).detail(padded, targets, "trained")
        except PrismError as error:
            raise self._not_feasible(width, error) from None

    def _not_feasible(self, width: int, error: PrismError) -> NotFeasible:
        if (executor := self._executors.pop(width, None)) is not None:
            executor.close()
        return NotFeasible(f"the model fails on rows of {width} tokens: {error}")

    def _executor(self, width: int) -> Executor:
        if width in self._executors:
            return self._executors[width]
        sandbox = Sandbox(self.spec.isolation, hidden=self._prepared.hidden)
        environment = bundle_environment(self._prepared, self.spec, self._private)
        tracer = Tracer(
            self.spec,
            self._prepared.bundle,
            sandbox,
            environment,
            self._private / c.TRACER_LOG_FILE,
            tokenizer_dir=str(ASSETS),
            widths=(width,),
            dtypes=safetensors_dtypes(self._weights),
            compare=False,
        )
        try:
            traced = tracer.finish(lambda: monotonic() + ANSWER_SECONDS)
        finally:
            tracer.close()
        executor = Executor(
            self.spec,
            sandbox,
            environment,
            self._private / c.EXECUTOR_LOG_FILE,
            deadline=lambda: monotonic() + ANSWER_SECONDS,
            probe_share=0.0,
            may_tell=True,
        )
        self._executors[width] = executor
        executor.load(traced, np.array(self.tokenizer.token_bytes, np.int32))
        executor.adopt("trained", read_safetensors(self._weights, traced.slots))
        return executor

    def close(self) -> None:
        for executor in self._executors.values():
            executor.close()
        self._executors.clear()
