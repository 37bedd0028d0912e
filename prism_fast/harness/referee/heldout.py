"""Held-out scoring: a fresh evaluator answers, the referee marks.

The evaluator builds the model from architecture.py alone and is measured as it was born (the random-init twin); then
it adopts the trained weights strictly by name and is measured again on the same documents. Every document stands by
itself: rows begin with end-of-text, are cut at the sequence length with one token of overlap, and are batched with
rows of like width, so neither batch size nor padding reaches a document's figure. A secret share of the batches is
probed on the shadow evaluator (probes.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from prism_fast.harness.process.shared_memory import SharedRegion
from prism_fast.harness.referee.evaluator_client import Evaluator, Prediction
from prism_fast.harness.referee.head_choice import REASONS, HeadChoice, compare_rows
from prism_fast.harness.referee.probes import ProbePlan, TokenFrequencies, broken_rule
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import EngineFault
from prism_fast.protocol.score import CodeLength, HeldOut

# Padded tokens of one forward. Part of the measurement (a matrix product's last bits depend on its row count), so
# a change here moves scores in their last digits and must say so.
MICRO_BATCH_TOKENS = 2048


class Documents:
    """A prefix of a split as flat token ids: document d is ids[offsets[d]:offsets[d + 1]], without end-of-text."""

    def __init__(self, ids: np.ndarray, offsets: np.ndarray, utf8_bytes: np.ndarray) -> None:
        self.ids, self.offsets, self.utf8_bytes = ids, offsets, utf8_bytes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def read(cls, corpus: Any, split: str, basis: str, byte_budget: int | None) -> Documents:
        """Documents in corpus order until `byte_budget` UTF-8 bytes are reached (None: all). Empty ones count 0."""
        from prism_fast.data.tokenizers import reference_tokenizer

        source = corpus.split(split)
        decode = None
        if basis == "bytes" and source.tokenizer_name != "bytes":
            decode = reference_tokenizer(source.tokenizer_name).decode_bytes
        parts: list[np.ndarray] = []
        sizes: list[int] = []
        total = 0
        for shard in source.open():
            for record in range(len(shard)):
                if byte_budget is not None and total >= byte_budget:
                    break
                tokens = shard[record]
                if decode is not None:
                    tokens = np.frombuffer(decode(tokens), np.uint8)
                parts.append(np.array(tokens))  # a copy in the stored width; the map may go
                sizes.append(int(shard.utf8_bytes[record]))
                total += sizes[-1]
        if not total:
            raise EngineFault(f"{corpus.folder}: split {split!r} has no text to score")
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(p) for p in parts], out=offsets[1:])
        return cls(np.concatenate(parts), offsets, np.asarray(sizes, np.int64))

    def rows(self, seq_len: int) -> np.ndarray:
        """int64 [rows, 3]: (document, first scored token, scored tokens) of every row, in document order."""
        lengths = np.diff(self.offsets)
        per_document = -(-lengths // (seq_len - 1))
        document = np.repeat(np.arange(len(self)), per_document)
        first_row = np.cumsum(per_document) - per_document
        start = (np.arange(len(document)) - first_row[document]) * (seq_len - 1)
        return np.stack([document, start, np.minimum(lengths[document] - start, seq_len - 1)], axis=1)

    def filler(self, plan: ProbePlan, count: int) -> np.ndarray:
        """`count` tokens of these documents, from a secret place."""
        at = plan.cut(max(2, len(self.ids)))
        return np.resize(np.concatenate([self.ids[at:], self.ids[:at]]), count)

    def batch(self, rows: np.ndarray, eot: int) -> tuple[np.ndarray, np.ndarray]:
        """-> (tokens, targets) int64 [len(rows), widest + 1]; the first row must be the widest. Padding: eot, -100."""
        width = int(rows[0, 2]) + 1
        tokens = np.full((len(rows), width), eot, np.int64)
        targets = np.full((len(rows), width), -100, np.int64)
        for i, (document, start, count) in enumerate(rows.tolist()):
            at = int(self.offsets[document]) + start
            if start:
                tokens[i, 0] = self.ids[at - 1]
            tokens[i, 1 : count + 1] = self.ids[at : at + count]
            targets[i, :count] = self.ids[at : at + count]
        return tokens, targets


def micro_batches(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Row numbers in batches of like width, at most MICRO_BATCH_TOKENS padded tokens each (one row at least)."""
    order = np.argsort(-rows[:, 2], kind="stable")
    begin = 0
    while begin < len(order):
        width = int(rows[order[begin], 2]) + 1
        count = max(1, MICRO_BATCH_TOKENS // width)
        yield order[begin : begin + count]
        begin += count


class Pass:
    """One measurement of one state on one set of documents."""

    def __init__(
        self,
        evaluator: Evaluator,
        shadow: Evaluator | None,
        documents: Documents,
        seq_len: int,
        eot: int,
        n_vocab: int,
        before_batch: Callable[[], None],
        head: HeadChoice | None = None,
    ) -> None:
        """`head`: whether answers are scored from the head's input, which can only be of a state that was adopted."""
        head = head or HeadChoice("plain")
        self.nats = np.zeros(len(documents))  # per document
        self.faults = self.tokens = 0
        self.head_width = 0
        self.probes = 0
        self.broken: set[str] = set()
        import torch

        rows = documents.rows(seq_len)
        row_nats = np.zeros(len(rows))
        batches = list(micro_batches(rows))
        plan = ProbePlan(len(batches))
        frequencies = TokenFrequencies(n_vocab)
        frequencies.add(documents.ids.astype(np.int64))
        for i, batch in enumerate(batches):
            before_batch()
            tokens, targets = documents.batch(rows[batch], eot)
            answer = evaluator.predict(tokens, fused=head.fused)
            probed = shadow is not None and plan.probes(i)
            if probed:
                answer.keep()
            nll = self._measure(answer, targets)
            row_nats[batch] = np.cumsum(nll, axis=1)[:, -1]
            if probed:
                assert shadow is not None
                self.probes += 1
                filler = documents.filler(plan, tokens.size)
                cut = plan.cut_after(frequencies.nats(targets) - nll)
                rule = broken_rule(answer, tokens, filler, cut, shadow)
                self.broken |= {rule} if rule else set()
            if answer.head is not None:
                for row in head.rows_to_audit(i, len(tokens)):
                    compare_rows(head, f"held-out batch {i}", evaluator, tokens, torch.from_numpy(targets), row)
            elif head.fused:
                head.give_up(REASONS[answer.why_plain or "processed"])
        np.add.at(self.nats, rows[:, 0], row_nats)
        self.rows = len(rows)
        self.bytes = int(documents.utf8_bytes.sum())

    def _measure(self, answer: Prediction, targets: np.ndarray) -> np.ndarray:
        """-> nats of each target, 0 where there is none. A faulty target costs 2 ln V."""
        import torch

        self.head_width = answer.head_width
        nll = answer.nll(torch.from_numpy(targets)).numpy().astype(np.float64)
        scored = targets >= 0
        bad = scored & ~np.isfinite(nll)
        self.faults += int(bad.sum())
        self.tokens += int(scored.sum())
        nll[bad] = c.FAULT_CODE_LENGTH_FACTOR * math.log(self.head_width)
        nll[~scored] = 0.0
        return nll

    @property
    def code_length(self) -> CodeLength:
        total = 0.0
        for value in self.nats.tolist():
            total += value
        return CodeLength(nats=total, bytes=self.bytes, tokens=self.tokens)

    def summary(self) -> dict[str, Any]:
        code = self.code_length
        return {
            "nats": code.nats,
            "bytes": code.bytes,
            "tokens": code.tokens,
            "documents": len(self.nats),
            "rows": self.rows,
            "faults": self.faults,
            "head_width": self.head_width,
            "probes": self.probes,
            "broken_rules": sorted(self.broken),
        }


def score_heldout(
    evaluator: Evaluator,
    shadow: Evaluator | None,
    layout: Any,
    weights: SharedRegion,
    *,
    corpus: Any,
    val_corpus: Any,
    basis: str,
    basis_tokenizer: Any,
    seq_len: int,
    val_byte_budget: int | None,
    run_dir: Path,
    before_batch: Callable[[], None],
    head: HeadChoice,
) -> tuple[HeldOut, dict[str, Any]]:
    """-> (sums, the report that heldout.json keeps). `layout`, `weights`: the trained state, in shared memory.

    `before_batch` is called before every batch and may raise to give up.
    `shadow` has adopted that state already; the twin is not probed, since looking ahead only makes it harder to beat.
    `head`: of this evaluator; the twin's state is its own, so the twin is scored from logits.

    Raises the PrismError of a bundle that cannot be scored. Writes `heldout_documents.npz`.
    """
    val = Documents.read(val_corpus, "val", basis, val_byte_budget)
    prefix = Documents.read(corpus, "train", basis, int(val.utf8_bytes.sum()))
    text = (seq_len, basis_tokenizer.eot, basis_tokenizer.n_vocab, before_batch)
    twin = Pass(evaluator, None, val, *text)
    evaluator.adopt(layout, weights, check_init=False)
    trained = Pass(evaluator, shadow, val, *text, head)
    converged = Pass(evaluator, shadow, prefix, *text, head)
    np.savez_compressed(
        run_dir / c.HELDOUT_DOCUMENTS_FILE, utf8_bytes=val.utf8_bytes, nats_trained=trained.nats, nats_twin=twin.nats
    )
    heldout = HeldOut(
        trained=trained.code_length,
        twin=twin.code_length,
        train_prefix=converged.code_length,
        n_vocab=basis_tokenizer.n_vocab,
    )
    report = {
        "schema_version": c.HELDOUT_SCHEMA,
        "documents": c.HELDOUT_DOCUMENTS_FILE,
        "twin": twin.summary(),
        "trained": trained.summary(),
        "train_prefix": converged.summary(),
        "n_vocab": basis_tokenizer.n_vocab,
    }
    return heldout, report
