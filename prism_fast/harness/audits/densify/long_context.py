"""What a trained model does with its context, each against what chance would give.

- `bpb_at_length`: the same validation text in rows of T tokens; longer rows start fewer cold. Chance: a uniform code.
- `needle_by_depth`: one (key, value) pair of tokens at a depth of real text, the key again at its end; the value is to
  be told from seven others. Chance: 1/8.
- `associative_recall`: n pairs and one of their keys again, by age; the value is to be told from the other pairs'.
  Chance: 1/n.
- `induction`: random tokens, then the same tokens again; nats of the second copy below those of the first. Chance: 0.
- `loss_by_lag`: nats of validation tokens by how long ago the same token stood in the row. Chance: a uniform code.

Draws are pinned, so equal weights give equal figures. What cannot be asked is null, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from prism_fast.harness.audits.densify.trained import NotFeasible, TrainedModel
from prism_fast.harness.marking.heldout import MICRO_BATCH_TOKENS, Documents, Pass
from prism_fast.protocol import manifest as m
from prism_fast.protocol.score import uniform_bpb

LENGTHS = (128, 256, 512, 1024)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
CANDIDATES = 8
NEEDLE_TRIALS = 32  # of each depth
PAIRS = (2, 4, 8, 16)
AGES = ("first", "middle", "last")
RECALL_TRIALS = 32  # of each cell
INDUCTION_TRIALS = 16
LAG_EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # a bucket is [edge, next edge)
SYMBOLS = 256  # the most frequent tokens of the text, whose embeddings a short run has trained
DRAW_SEED = 1337
ITEMS = ("bpb_at_length", "needle_by_depth", "associative_recall", "induction", "loss_by_lag")


def no_long_context(reason: str) -> dict[str, Any]:
    """The panel when nothing was run."""
    return {**dict.fromkeys(ITEMS), "reasons": dict.fromkeys(ITEMS, reason)}


def long_context_panel(model: TrainedModel, corpus: Any, manifest: m.RunManifest, byte_budget: int) -> dict[str, Any]:
    """The whole panel on the first `byte_budget` bytes of the val split."""
    length = manifest.engine.seq_len
    documents = Documents.read(corpus, "val", model.basis, byte_budget)
    probes = _Probes(model, documents, length)
    panel: dict[str, Any] = {"context_tokens": length, "text_bytes": int(documents.utf8_bytes.sum())}
    reasons: dict[str, str] = {}
    questions: dict[str, Callable[[], Any]] = {
        "needle_by_depth": probes.needle_by_depth,
        "associative_recall": probes.associative_recall,
        "induction": probes.induction,
        "loss_by_lag": probes.loss_by_lag,
        # Last, since it captures the model again for each length.
        "bpb_at_length": lambda: bpb_at_length(model, documents, length),
    }
    for name, ask in questions.items():
        try:
            panel[name] = ask()
        except NotFeasible as why:
            panel[name], reasons[name] = None, str(why)
    return {name: panel[name] for name in ("context_tokens", "text_bytes", *ITEMS)} | {"reasons": reasons}


def bpb_at_length(model: TrainedModel, documents: Documents, trained_length: int) -> list[dict[str, Any]]:
    """One row for each T of LENGTHS and the trained length; a T the model fails at is null, and so are longer ones."""
    tokenizer, longest = model.tokenizer, int(np.diff(documents.offsets).max())
    rows: list[dict[str, Any]] = []
    failed: str | None = None
    for length in sorted({*LENGTHS, trained_length}):
        row: dict[str, Any] = {"tokens": length, "bpb": None, "chance": None, "reason": None}
        if failed is not None:
            row["reason"] = failed
        elif length > trained_length and longest < (last := rows[-1]["tokens"]):
            row["reason"] = f"no document of the text is longer than the {last} tokens of the row before"
        else:
            try:
                whole = Pass(model, documents, (length,), tokenizer.eot, lambda: None)
                row["bpb"] = whole.code_length.bpb
                row["chance"] = uniform_bpb(tokenizer.n_vocab, whole.tokens, whole.bytes)
            except NotFeasible as why:
                failed = row["reason"] = str(why)
        rows.append(row)
    return rows


class _Probes:
    """Questions in rows of `length` tokens, end-of-text first, as the model was trained on."""

    def __init__(self, model: TrainedModel, documents: Documents, length: int) -> None:
        self.model, self.length, self.eot = model, length, model.tokenizer.eot
        self.text = documents.ids.astype(np.int64)
        self.documents = documents
        counts = np.bincount(self.text, minlength=model.tokenizer.n_vocab)
        frequent = np.argsort(-counts, kind="stable")[:SYMBOLS]
        self.symbols = frequent[counts[frequent] > 0]

    def needle_by_depth(self) -> list[dict[str, Any]]:
        hay = self.length - 4  # end-of-text, key, value, and the key again
        if hay < 2 or len(self.text) < hay or len(self.symbols) < CANDIDATES:
            raise NotFeasible(f"rows of {self.length} tokens leave no text to hide a pair in")
        found = []
        for depth in DEPTHS:
            random = np.random.default_rng([DRAW_SEED, 1, round(100 * depth)])
            rows, choices = [], []
            for _ in range(NEEDLE_TRIALS):
                at = int(random.integers(len(self.text) - hay + 1))
                window = self.text[at : at + hay]
                absent = np.setdiff1d(np.arange(self.model.tokenizer.n_vocab), [*window.tolist(), self.eot])
                if not len(absent):
                    raise NotFeasible("every id of the vocabulary stands in the text that a key would be hidden in")
                key = int(random.choice(absent))
                choices.append(random.choice(self.symbols, CANDIDATES, replace=False))
                cut = round(depth * hay)
                rows.append([self.eot, *window[:cut], key, choices[-1][0], *window[cut:], key])
            found.append({"depth": depth, **self._told_apart(rows, choices)})
        return found

    def associative_recall(self) -> list[dict[str, Any]]:
        cells = []
        for pairs in PAIRS:
            for age in AGES if pairs > 2 else ("first", "last"):
                cell: dict[str, Any] = {"pairs": pairs, "queried": age}
                if 2 * pairs + 2 > self.length or len(self.symbols) < 2 * pairs:
                    why = f"{pairs} pairs do not fit in rows of {self.length} tokens of {len(self.symbols)} symbols"
                    cells.append(cell | {"accuracy": None, "chance": 1 / pairs, "trials": 0, "reason": why})
                    continue
                random = np.random.default_rng([DRAW_SEED, 2, pairs, AGES.index(age)])
                rows, choices = [], []
                for _ in range(RECALL_TRIALS):
                    drawn = random.choice(self.symbols, 2 * pairs, replace=False)
                    keys, values = drawn[:pairs], drawn[pairs:]
                    asked = {"first": 0, "middle": pairs // 2, "last": pairs - 1}[age]
                    rows.append([self.eot, *np.stack([keys, values], 1).reshape(-1), keys[asked]])
                    choices.append(np.roll(values, -asked))
                cells.append(cell | self._told_apart(rows, choices) | {"reason": None})
        return cells

    def induction(self) -> dict[str, Any]:
        half = (self.length - 1) // 2
        if half < 2 or len(self.symbols) < 2:
            raise NotFeasible(f"rows of {self.length} tokens hold no two copies of anything")
        random = np.random.default_rng([DRAW_SEED, 3])
        copies = random.choice(self.symbols, (INDUCTION_TRIALS, half))
        eot = np.full((INDUCTION_TRIALS, 1), self.eot)
        nll = self._nll(np.concatenate([eot, copies, copies], 1).astype(np.int64))
        # The first token of a copy follows from nothing.
        first, second = float(nll[:, 1:half].mean()), float(nll[:, half + 1 :].mean())
        return {
            "first_copy_nats": first,
            "second_copy_nats": second,
            "gain_nats": first - second,
            "chance": 0.0,
            "tokens_a_copy": half,
            "trials": INDUCTION_TRIALS,
        }

    def loss_by_lag(self) -> list[dict[str, Any]]:
        """Rows of the text that are full, as the held-out figure cuts them; `lag` None: not seen in the row before."""
        rows = self.documents.rows(self.length)
        full = rows[rows[:, 2] == self.length - 1]
        if not len(full):
            raise NotFeasible(f"no document of the text fills a row of {self.length} tokens")
        tokens = self.documents.batch(full, self.length, self.eot)[0]
        nll, lags = self._nll(tokens), lags_of(tokens)
        chance = math.log(self.model.tokenizer.n_vocab)
        buckets = [(None, None, lags == 0)]
        for low, high in zip(LAG_EDGES, (*LAG_EDGES[1:], 1 << 30), strict=True):
            buckets.append((low, high, (lags >= low) & (lags < high)))  # type: ignore[arg-type]
        return [
            {
                "lag_from": low,
                "lag_below": high,
                "nats": float(nll[where].mean()),
                "chance": chance,
                "tokens": int(where.sum()),
            }
            for low, high, where in buckets
            if where.any()
        ]

    # ------------------------------------------------------------------------------------------------------- helpers

    def _told_apart(self, rows: list[list[int]], choices: list[np.ndarray]) -> dict[str, Any]:
        """How often the first of each row's choices has the largest logit among them; an even share of a tie counts."""
        tokens, right = np.array(rows, np.int64), 0.0
        for part in self._parts(tokens):
            logits = self.model.last_logits(tokens[part], self.length)
            for own, choice in zip(logits, [choices[i] for i in part], strict=True):
                scores = own[choice]
                best = scores == scores.max()
                right += float(best[0]) / max(1, int(best.sum()))
        return {"accuracy": right / len(rows), "chance": 1 / len(choices[0]), "trials": len(rows)}

    def _nll(self, tokens: np.ndarray) -> np.ndarray:
        found = np.concatenate([self.model.nll(tokens[part], self.length) for part in self._parts(tokens)])
        if not np.isfinite(found).all():
            raise NotFeasible("the model's losses are not finite")
        return found

    def _parts(self, tokens: np.ndarray) -> list[range]:
        count = max(1, MICRO_BATCH_TOKENS // self.length)
        return [range(i, min(i + count, len(tokens))) for i in range(0, len(tokens), count)]


def lags_of(tokens: np.ndarray) -> np.ndarray:
    """int64 [B, L - 1]: how many positions before each of tokens[:, 1:] the same token last stood; 0: not before."""
    lags = np.zeros((tokens.shape[0], tokens.shape[1] - 1), np.int64)
    for row, line in enumerate(tokens.tolist()):
        last: dict[int, int] = {}
        for at, token in enumerate(line):
            if at and token in last:
                lags[row, at - 1] = at - last[token]
            last[token] = at
    return lags
