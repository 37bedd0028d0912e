"""Held-out scoring in the bundle's own process (`open` mode): after `train(ctx)`, on a model that was never trained.

A fresh model of `build_model(ctx)` under the forced seed is the twin; the weights that were saved are then loaded into
it, strictly by name. So no wrapper of the training script and nothing outside the state dict reaches the figures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prism_fast.data.corpus import open_corpus
from prism_fast.harness.marking.heldout import Marks, measure
from prism_fast.harness.marking.sums import logits_of, nll_of, row_marks
from prism_fast.harness.process.seeding import set_deterministic
from prism_fast.harness.trainer.full_state import holders, refuse_lazy, require_declared
from prism_fast.harness.trainer.predictor import ForwardOrBlame, check_parameter_cap
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleFailed, BundleRejected
from prism_fast.protocol.run_spec import RunSpec


class FreshModel:
    """`build_model(ctx)` again: its init, and later whatever state it is given."""

    def __init__(self, spec: RunSpec, build: Callable[[], Any], device: torch.device) -> None:
        """`build()` builds under the forced seed. Raises BundleRejected for what is no model, or one over the cap."""
        model = build()
        if not isinstance(model, nn.Module):
            raise BundleRejected(
                f"build_model(ctx) returned a {type(model).__name__}; expected a torch.nn.Module",
                rule=c.RULE_BUNDLE_SHAPE,
            )
        self.model, self.device = model.to(device), device
        check_parameter_cap(self.model, spec.max_parameters, spec.param_ladder_stage)
        self._forward = ForwardOrBlame(self.model)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes over `state`, which must have exactly this model's names and shapes; its dtypes are adopted."""
        own = list(holders(self.model))
        for name, place, leaf in own:
            refuse_lazy(name, place[leaf])
        require_declared(
            {name: tensor.shape for name, tensor in state.items()},
            {name: place[leaf].shape for name, place, leaf in own},
        )
        cast: dict[int, Tensor] = {}  # tied tensors stay tied
        for name, place, leaf in own:
            tensor, wanted = place[leaf], state[name]
            if tensor.dtype != wanted.dtype:
                if id(tensor) not in cast:
                    other = tensor.detach().to(wanted.dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    cast[id(tensor)] = nn.Parameter(other, requires_grad=False) if is_parameter else other
                place[leaf] = cast[id(tensor)]
        with torch.no_grad():
            for name, place, leaf in own:
                place[leaf].copy_(state[name])

    def output(self, tokens: Tensor) -> Any:
        """The eval forward's output, under no autocast."""
        with torch.autocast(self.device.type, enabled=False):
            return self._forward(tokens)


class Marker:
    """Implements `heldout.Predictor`."""

    def __init__(self, fresh: FreshModel, n_vocab: int) -> None:
        self._fresh, self._n_vocab = fresh, n_vocab

    def mark(self, tokens: np.ndarray, targets: np.ndarray) -> Marks:
        rows, width = tokens.shape
        logits = logits_of(self._fresh.output(self._on_device(tokens)), rows, width, self._n_vocab)
        return row_marks(nll_of(logits, self._on_device(targets)), targets, logits.shape[2])

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._fresh.device)


def measure_open(
    spec: RunSpec,
    job: Mapping[str, Any],
    fresh: FreshModel,
    trained: Callable[[], Mapping[str, Tensor]],
    *,
    basis: str,
    basis_tokenizer: Any,
) -> dict[str, Any]:
    """-> {"report"}, and where there is no figure "reason". Raises the PrismError of a bundle that cannot be scored.

    `job`: val_folder, train_folder (packed corpora), val_mounts, train_mounts (their splits that lie elsewhere, or
    None), widths (of the rows, ascending; the last is the sequence length), val_byte_budget, documents_path.
    `trained()` reads the saved weights.
    """
    corpus = open_corpus(job["train_folder"], mounts=job.get("train_mounts"))
    val_corpus = open_corpus(job["val_folder"], mounts=job.get("val_mounts"))
    if spec.exact:
        found = measure(
            Marker(fresh, basis_tokenizer.n_vocab),
            lambda: _with_state(fresh, trained(), basis_tokenizer.n_vocab),
            corpus=corpus,
            val_corpus=val_corpus,
            basis=basis,
            basis_tokenizer=basis_tokenizer,
            widths=job["widths"],
            val_byte_budget=job["val_byte_budget"],
            documents_path=Path(job["documents_path"]),
        )
        return {"report": found.report}
    from prism_fast.harness.trainer.prism_v2 import measure_v2

    try:
        report = measure_v2(
            fresh, trained, corpus=corpus, val_corpus=val_corpus, spec=spec, byte_budget=job["val_byte_budget"]
        )
    except BundleFailed as error:  # the original took a model that fails here for one without held-out figure
        return {"report": None, "reason": str(error)}
    return {"report": report}


def _with_state(fresh: FreshModel, state: Mapping[str, Tensor], n_vocab: int) -> Marker:
    fresh.load(state)
    return Marker(fresh, n_vocab)


@contextlib.contextmanager
def as_before_training(spec: RunSpec, default_dtype: torch.dtype) -> Iterator[None]:
    """Undoes what a training script may have set for the whole process: threads, default dtype, grad mode."""
    set_deterministic(spec.torch_threads, spec.deterministic_algorithms)
    torch.set_default_dtype(default_dtype)
    with torch.enable_grad():
        yield
