"""Corpora made to measure: record lengths of a given distribution, and shards of random tokens with these lengths.

For benchmarks and for planning at scale. The draws come from numpy's PCG64, so they are the same wherever numpy's
distributions are; nothing that ranks depends on them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from prism_fast.data.shards import ShardWriter
from prism_fast.data.tokenizers import Tokenizer

# Tokens drawn and written at a time: bounds the memory, whatever the size of the corpus.
_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class LogNormal:
    """Lengths whose logarithm is normal, rounded and clipped: `median` tokens, `sigma` of the natural logarithm."""

    median: float
    sigma: float
    shortest: int = 1
    longest: int = 2**31 - 1


# The corpus of the field notes on training throughput, as far as their figures pin it down: pairs of neighbours in
# file order are 29.9 % padding; under the cost model they fitted, FIELD_COST, a step of 8 pairs takes about the 38 s
# that 13.9 hours of 1,312 steps come to, and tight buckets save 35.5 % of it. 20,992 records fill those steps.
FIELD_LENGTHS = LogNormal(median=2040, sigma=0.798, shortest=16, longest=32768)
FIELD_RECORDS = 1312 * 8 * 2
FIELD_COST = (6.8715e-4, 8.8509e-8)  # seconds a token and a token^2 of width, for a micro-batch of 2


def draw_lengths(records: int, distribution: LogNormal | ArrayLike, seed: int) -> NDArray[np.int32]:
    """int32 [records], in tokens: from a `LogNormal`, or drawn with replacement from lengths that were observed."""
    random = np.random.default_rng(seed)
    if not isinstance(distribution, LogNormal):
        return random.choice(np.asarray(distribution, np.int32), records)
    lengths = random.standard_normal(records, np.float32)
    lengths *= np.float32(distribution.sigma)
    np.exp(lengths, out=lengths)
    lengths *= np.float32(distribution.median)
    np.rint(lengths, out=lengths)
    # 2^31 - 1 has no float32; the clip is made where it has one.
    return np.clip(lengths.astype(np.int64), distribution.shortest, distribution.longest).astype(np.int32)


def draw_sources(records: int, count: int, seed: int) -> NDArray[np.int32]:
    """int32 [records], source numbers 0..count-1 with shares as 1 : 1/2 : 1/3 ..., in random order."""
    shares = 1 / np.arange(1, count + 1)
    return np.random.default_rng(seed).choice(count, records, p=shares / shares.sum()).astype(np.int32)


def write_synthetic_shard(path: str | os.PathLike[str], lengths: ArrayLike, tokenizer: Tokenizer, seed: int) -> None:
    """Writes a shard whose record i has `lengths[i]` random text tokens (special tokens are left out)."""
    sizes = np.asarray(lengths, np.int64)
    text = np.flatnonzero(tokenizer.token_bytes > 0).astype(np.uint32)
    random = np.random.default_rng(seed)
    ends = np.cumsum(sizes)
    with ShardWriter(path, tokenizer) as writer:
        first = 0
        while first < len(sizes):
            begun = int(ends[first] - sizes[first])
            last = max(first + 1, int(np.searchsorted(ends, begun + _CHUNK_TOKENS, side="right")))
            chunk: NDArray[Any] = sizes[first:last].astype(np.uint64)
            tokens = text[random.integers(0, len(text), int(chunk.sum()), dtype=np.int32)]
            ids = np.arange(first, last, dtype=np.uint64)
            writer.add(tokens, chunk, tokenizer.table.count(tokens, chunk), ids)
            first = last
