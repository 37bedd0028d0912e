"""The trained weights behind an evaluator, for questions no score is made of. A failed forward costs a restart."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from prism_fast.harness.process.isolation import Sandbox
from prism_fast.harness.referee.evaluator_client import Evaluator
from prism_fast.harness.referee.request import Prepared
from prism_fast.harness.referee.seed_run import ASSETS, bundle_environment
from prism_fast.protocol.errors import PrismError
from prism_fast.protocol.run_spec import RunSpec

ANSWER_SECONDS = 300.0


class NotFeasible(Exception):
    """The model cannot be asked this. The message says why, in words for the document."""


class TrainedModel:
    """Answers tokens with logits from a run's trained weights. `basis`: "tokens" or "bytes", as it was trained on."""

    def __init__(self, spec: RunSpec, prepared: Prepared, weights: Path, private: Path, basis: str) -> None:
        import torch

        from prism_fast.data.tokenizers import reference_tokenizer
        from prism_fast.harness.process.state_layout import load_state
        from prism_fast.profiling.machine import usable_cpus

        torch.set_num_threads(usable_cpus())
        self.spec, self.basis = spec, basis
        self.tokenizer = reference_tokenizer(spec.tokenizer if basis == "tokens" else "bytes")
        self._prepared, self._private = prepared, private
        self._layout, self._region = load_state(weights)
        self._evaluator: Evaluator | None = None

    def predict(self, tokens: np.ndarray, *, fused: bool = False) -> Any:
        """int64 [B, L] -> `Prediction`, as of `Evaluator.predict`. Raises NotFeasible when the model fails on it."""
        try:
            if self._evaluator is None:
                self._evaluator = self._start()
            return self._evaluator.predict(np.ascontiguousarray(tokens), fused=fused)
        except PrismError as error:
            self.close()
            raise NotFeasible(f"the model fails on rows of {tokens.shape[1]} tokens: {error}") from None

    def nll(self, tokens: np.ndarray) -> np.ndarray:
        """float64 [B, L - 1]: nats of tokens[:, 1:]; not finite where the model's logits are not."""
        import torch

        from prism_fast.kernels import token_nll

        logits = self.predict(tokens).logits
        losses = token_nll(logits[:, :-1], torch.from_numpy(np.ascontiguousarray(tokens[:, 1:])))
        assert isinstance(losses, torch.Tensor)
        return losses.numpy().astype(np.float64)

    def last_logits(self, tokens: np.ndarray) -> np.ndarray:
        """float64 [B, V]: the logits after the last token."""
        return self.predict(tokens).logits[:, -1].double().numpy()

    def _start(self) -> Evaluator:
        sandbox = Sandbox(self.spec.isolation, hidden=tuple(sorted(ASSETS.glob("*.jsonl.gz"))))
        evaluator = Evaluator(
            self.spec,
            self._prepared.bundle,
            sandbox,
            bundle_environment(self._prepared, self.spec, self._private),
            self._private / "evaluator.log",
            tokenizer_dir=str(ASSETS),
            deadline=lambda: monotonic() + ANSWER_SECONDS,
        )
        evaluator.n_vocab = self.tokenizer.n_vocab
        evaluator.adopt(self._layout, self._region, check_init=False)
        return evaluator

    def close(self) -> None:
        if self._evaluator is not None:
            self._evaluator.close()
            self._evaluator = None
