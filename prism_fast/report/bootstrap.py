"""How sure a held-out difference is: a paired bootstrap over validation documents and seeds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prism_fast.protocol.constants import LN2

RESAMPLES = 2000
CONFIDENCE = 0.95
SEED = 1337
CHUNK_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class SideLosses:
    """float64 [seeds, documents] nats of the trained weights and of the random-init twin, on the same documents.

    `uniform_bpb` [seeds] caps the twin (the score's rule); infinity where it does not.
    """

    nats_trained: np.ndarray
    nats_twin: np.ndarray
    uniform_bpb: np.ndarray


@dataclass(frozen=True)
class Interval:
    """A difference A - B with its interval. `over`: what was resampled."""

    difference: float
    low: float
    high: float
    over: tuple[str, ...]

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0.0 or self.high < 0.0


def paired_intervals(a: SideLosses, b: SideLosses, utf8_bytes: np.ndarray) -> dict[str, Interval]:
    """-> the intervals of A - B for `heldout_delta` and `val_bpb_trained`, each the mean over seeds.

    Every resample draws documents with replacement, the same for both sides and all seeds, and seeds with
    replacement, the same for both sides: whatever a hard document or an odd seed does to both cancels. With one seed
    only documents are drawn. The generator is pinned, so equal files give equal intervals.
    """
    seeds, documents = a.nats_trained.shape
    names = ("heldout_delta", "val_bpb_trained")
    point = _differences(a, b, np.ones((1, documents)), utf8_bytes, np.ones((1, seeds)) / seeds)
    drawn = [[], []]  # type: list[list[np.ndarray]]
    random = np.random.default_rng(SEED)
    chunk = max(1, min(RESAMPLES, CHUNK_BYTES // (8 * documents)))
    for begin in range(0, RESAMPLES, chunk):
        count = min(chunk, RESAMPLES - begin)
        weights = random.multinomial(documents, np.full(documents, 1.0 / documents), size=count).astype(np.float64)
        of_seeds = random.multinomial(seeds, np.full(seeds, 1.0 / seeds), size=count) / seeds
        for kept, values in zip(drawn, _differences(a, b, weights, utf8_bytes, of_seeds), strict=True):
            kept.append(values)
    over = ("documents", "seeds") if seeds > 1 else ("documents",)
    tail = 50.0 * (1.0 - CONFIDENCE)
    intervals = {}
    for name, centre, kept in zip(names, point, drawn, strict=True):
        low, high = np.percentile(np.concatenate(kept), [tail, 100.0 - tail])
        intervals[name] = Interval(float(centre[0]), float(low), float(high), over)
    return intervals


def _differences(
    a: SideLosses, b: SideLosses, weights: np.ndarray, utf8_bytes: np.ndarray, of_seeds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[R] differences of the held-out delta and of the trained bpb. weights [R, D], of_seeds [R, S], rows sum to 1."""
    n_bytes = (weights @ utf8_bytes)[:, None]
    deltas, trained = [], []
    for side in (a, b):
        bpb = weights @ side.nats_trained.T / LN2 / n_bytes
        twin = weights @ side.nats_twin.T / LN2 / n_bytes
        trained.append(bpb)
        deltas.append(np.minimum(twin, side.uniform_bpb) - bpb)
    return ((deltas[0] - deltas[1]) * of_seeds).sum(1), ((trained[0] - trained[1]) * of_seeds).sum(1)
