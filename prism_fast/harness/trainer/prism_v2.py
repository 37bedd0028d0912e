"""Accounting prism-v2: the original engine's rules, so that its leaderboards can be compared with. Never for a crown.

Rows are contiguous (`data.contiguous`), ids are folded by `ctx.vocab_size` and targets by the head's width, a batch's
loss is the mean cross entropy times its predictions, taken in whatever mode the model is in and from the bundle's own
random state; a loss that is not finite costs 2 ln vocab_size. Held-out text is a byte prefix of the val split whatever
the bundle trains on, eight rows at a time, none wider than the sequence length, and the random-init twin is not capped
at the uniform code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prism_fast.data.contiguous import ContiguousStream, WholeBytes
from prism_fast.harness.marking.heldout import Documents
from prism_fast.harness.marking.sums import logits_of
from prism_fast.harness.process import wire
from prism_fast.harness.referee.ledger import pack_record
from prism_fast.harness.trainer.instrument import Handed, Request
from prism_fast.harness.trainer.open_heldout import FreshModel
from prism_fast.harness.trainer.open_source import OpenSource
from prism_fast.harness.trainer.predictor import blame_for_forward, check_parameter_cap
from prism_fast.protocol import constants as c
from prism_fast.protocol.run_spec import RunSpec

HELDOUT_ROWS = 8
cross_entropy = torch.nn.functional.cross_entropy  # as it was before the bundle was imported


def mean_loss(logits: Tensor, tokens: Tensor) -> float:
    """Mean nats of tokens[:, 1:] under logits[:, :-1]; targets are folded by the head's width. [B, L, V], [B, L]."""
    vocabulary = logits.shape[-1]
    targets = tokens[:, 1:].reshape(-1) % vocabulary
    return float(cross_entropy(logits[:, :-1].reshape(-1, vocabulary), targets))


def finite_or_worst(loss: float, vocab_size: int) -> float:
    return loss if math.isfinite(loss) else c.FAULT_CODE_LENGTH_FACTOR * math.log(vocab_size)


class _Predictor:
    """What `OpenSource` asks of a predictor, and a forward in the model's current mode."""

    def __init__(self, model: nn.Module, cap: int, stage: str) -> None:
        self._model, self._cap, self._stage = model, cap, stage
        self.head_width: int | None = None
        self.model_params = check_parameter_cap(model, cap, stage)

    def loss(self, tokens: Tensor) -> float:
        with torch.no_grad(), blame_for_forward(tokens):
            output = self._model(tokens)
        logits = logits_of(output, tokens.shape[0], tokens.shape[1], 1)
        if self.head_width is None:
            self.head_width = logits.shape[2]
            self.model_params = check_parameter_cap(self._model, self._cap, self._stage)
        with torch.no_grad():
            return mean_loss(logits, tokens)


class PrismV2Source(OpenSource):
    """Implements `instrument.BatchSource` for one open rank, by the original's rules."""

    def start(self, request: Request) -> None:
        self._request = request
        self._device = next((p.device for p in request.model.parameters()), torch.device("cpu"))
        self._predictor = _Predictor(  # type: ignore[assignment]
            request.model, self.spec.max_parameters, self.spec.param_ladder_stage
        )
        self._stream: ContiguousStream = self._make_stream(request.seq_len, request.batch_size, request.basis)
        self._whole_bytes = WholeBytes()

    def take(self, index: int) -> Handed | str:
        if (reason := self._budget_reached(index)) is not None:
            return reason
        t0 = perf_counter()
        block = next(self._stream, None)
        if block is None:
            return self._stream.stopped or c.STOP_DATA_EXHAUSTED
        tokens = self._to_device(block.tokens).remainder(self.spec.vocab_size)
        t1 = perf_counter()
        found = self._predictor.loss(tokens)  # type: ignore[attr-defined]
        t2 = perf_counter()
        rows, width = block.tokens.shape
        predicted = rows * (width - 1)
        loss = finite_or_worst(found, self.spec.vocab_size)
        faults = 0 if math.isfinite(found) else predicted
        sums = (loss * predicted, 0.0, self._whole_bytes(block.utf8_bytes), predicted, 0, faults)
        if index == 0:
            self._describe()
        self.channel.send(wire.PREDICTED, pack_record(index, sums, rows * width, block.documents, self.rank, rows))
        self._tokens_seen += rows * width
        return Handed(tokens, t1 - t0, t2 - t1, 0.0, perf_counter() - t2)

    def _describe(self) -> None:
        request, stream = self._request, self._stream
        self.channel.send_json(
            wire.MODEL,
            {
                "rank": self.rank,
                "model_params": self._predictor.model_params,
                "head_width": self._predictor.head_width,
                "batch_size": request.batch_size,
                "seq_len": request.seq_len,
                "basis": request.basis,
                "plan": {"corpus_bytes": stream.corpus_bytes, "corpus_tokens": stream.corpus_tokens},
                "backends": {"token_nll": "torch.nn.functional.cross_entropy"},
            },
        )


def measure_v2(
    fresh: FreshModel,
    trained: Callable[[], Mapping[str, Tensor]],
    *,
    corpus: Any,
    val_corpus: Any,
    spec: RunSpec,
    byte_budget: int | None,
) -> dict[str, Any]:
    """The report that heldout.json keeps: twin and trained state on a byte prefix of val, the trained one on as much of
    train. Documents have no figures here. Raises BundleFailed where the model fails.
    """

    def measured(documents: Documents) -> dict[str, Any]:
        ids = documents.ids[:byte_budget].astype(np.int64) % spec.vocab_size
        nats, n_bytes, predicted, faults = 0.0, 0, 0, 0
        for rows in cut_in_rows(ids, spec.sequence_length):
            tokens = torch.from_numpy(rows).to(fresh.device)
            with torch.no_grad():
                found = mean_loss(logits_of(fresh.output(tokens), rows.shape[0], rows.shape[1], 1), tokens)
            count = rows.shape[0] * (rows.shape[1] - 1)
            nats += finite_or_worst(found, spec.vocab_size) * count
            n_bytes += rows.size
            predicted += count
            faults += 0 if math.isfinite(found) else count
        return {"nats": nats, "bytes": n_bytes, "tokens": predicted, "documents": len(documents), "faults": faults}

    val = Documents.read(val_corpus, "val", "bytes", byte_budget)
    prefix = Documents.read(corpus, "train", "bytes", byte_budget)
    twin = measured(val)
    fresh.load(trained())
    return {
        "schema_version": c.HELDOUT_SCHEMA,
        "accounting": "prism-v2",
        "documents": None,
        "twin": twin,
        "trained": measured(val),
        "train_prefix": measured(prefix),
        "n_vocab": spec.vocab_size,
    }


def cut_in_rows(ids: np.ndarray, seq_len: int) -> Iterator[np.ndarray]:
    """int64 [rows, width] each: HELDOUT_ROWS rows of `seq_len` ids, then the rows that are left, then what is left of a
    row. None is wider than `seq_len`, which is all that a model with a table of positions can take; an id that is left
    alone predicts nothing and is dropped."""
    whole = len(ids) // seq_len * seq_len
    rows = ids[:whole].reshape(-1, seq_len)
    for begin in range(0, len(rows), HELDOUT_ROWS):
        yield rows[begin : begin + HELDOUT_ROWS]
    if len(ids) - whole >= 2:
        yield ids[whole:].reshape(1, -1)
