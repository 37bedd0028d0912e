"""How soon is a look-ahead found? Shares of simulated runs that the executor's own prober has flagged by then.

    python -m benchmarks.probe_power [--quick] [--json]

Batches of 4 rows of 128 tokens, whose ids are distributed as words are. At one position in 1, 5, 50 or 500, where the
tokens before it say so, the model reads the next token: "open" predicts it then for next to nothing, "hidden" takes off
only as much as keeps it out of the positions that look suspiciously good. Every batch looks ahead; of a trainer that
switches that on in a share of its batches, count those batches alone.
"""

from __future__ import annotations

import numpy as np

from benchmarks.measure import Table, parser_for
from prism_fast.harness.executor.probing import Prober
from prism_fast.harness.referee.executing import PROBE_SHARE

VOCAB, ROWS, WIDTH = 5000, 4, 128
BATCHES = (8, 32, 128, 512, 2048)
ONE_IN = (1, 5, 50, 500)
PROBABILITY = 1.0 / (np.arange(VOCAB) + 2.7)
PROBABILITY /= PROBABILITY.sum()
COST = -np.log(PROBABILITY)
COLUMNS = {
    "peeks_one_in": "12", "kind": "6", "probed": "7", "runs": "5",
    **{f"found_by_{n}": ".2f" for n in BATCHES}, "gain_share": ".3f",
}  # fmt: skip


def uniform(*ids: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each tuple of ids, the same every time."""
    mixed = np.zeros(np.broadcast_shapes(*(i.shape for i in ids)), np.uint64)
    for each in ids:
        mixed = (mixed ^ each.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53


class Peeking:
    """Nats of a model that reads the next token at one position in `one_in`."""

    def __init__(self, one_in: int, hidden: bool) -> None:
        self._one_in, self._hidden = one_in, hidden
        self.honest_nats = self.nats = 0.0

    def __call__(self, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        before = np.roll(tokens, 1, axis=1)
        before[:, 0] = 0
        # From well predicted to badly: a model's cost of a token is its frequency's, times 0.1 to 1.3.
        honest = COST[targets] * (0.1 + 1.2 * uniform(tokens, before, targets))
        peeks = uniform(before, tokens) < 1.0 / self._one_in
        seen = np.zeros(tokens.shape, bool)
        seen[:, :-1] = peeks[:, :-1]
        right = np.zeros(tokens.shape, bool)
        right[:, :-1] = tokens[:, 1:] == targets[:, :-1]
        good, bad = (0.6 * honest, 1.4 * honest) if self._hidden else (np.full_like(honest, 0.02), honest + 4.0)
        nats = np.where(seen, np.where(right, good, bad), honest)
        self.honest_nats, self.nats = float(honest.sum()), float(nats.sum())
        return nats.astype(np.float32)


def first_found(model: Peeking, random: np.random.Generator, rows_alone: bool) -> tuple[float, float]:
    """-> (batches until it was found, share of the nats that was gained until then)."""
    prober = Prober(model, VOCAB, PROBE_SHARE, rows_alone=rows_alone)
    gained = 0.0
    for index in range(max(BATCHES)):
        text = random.choice(VOCAB, ROWS * WIDTH + 1, p=PROBABILITY)
        tokens, targets = text[:-1].reshape(ROWS, WIDTH), text[1:].reshape(ROWS, WIDTH)
        nats = model(tokens, targets)
        gained += 1 - model.nats / model.honest_nats
        prober.after(tokens, targets, nats)
        if prober.rule is not None:
            return index + 1, gained / (index + 1)
    return float("inf"), gained / max(BATCHES)


def main() -> None:
    arguments = parser_for(__doc__, quick="fewer runs").parse_args()
    runs = 10 if arguments.quick else 100
    table = Table("probe_power", {"numpy": np.__version__}, COLUMNS, arguments)
    for rows_alone in (True, False):
        for hidden in (False, True):
            for one_in in ONE_IN:
                random = np.random.default_rng(one_in)
                found = [first_found(Peeking(one_in, hidden), random, rows_alone) for _ in range(runs)]
                at = np.array([batches for batches, _ in found])
                table.add(
                    {
                        "peeks_one_in": one_in,
                        "kind": "hidden" if hidden else "open",
                        "probed": "rows" if rows_alone else "batches",
                        "runs": runs,
                        **{f"found_by_{n}": float((at <= n).mean()) for n in BATCHES},
                        "gain_share": float(np.mean([gain for _, gain in found])),
                    }
                )
    table.finish()


if __name__ == "__main__":
    main()
