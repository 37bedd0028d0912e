"""Corpora made to measure have the distribution asked for, and re-derive the figures of the field notes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prism_fast.data import open_shard
from prism_fast.data.plan import compare_buckets
from prism_fast.data.synthetic import (
    FIELD_COST,
    FIELD_LENGTHS,
    FIELD_RECORDS,
    LogNormal,
    draw_lengths,
    draw_sources,
    write_synthetic_shard,
)
from prism_fast.data.tokenizers import reference_tokenizer


@pytest.mark.parametrize("records", [FIELD_RECORDS, 1_000_000])
def test_the_field_notes_figures_come_out_again(records: int) -> None:
    lengths = draw_lengths(records, FIELD_LENGTHS, seed=1)
    sources = draw_sources(records, 12, seed=2)
    best, rows = compare_buckets(lengths, 2, [2, 8, 32, 128, 512], 20260824, sources=sources, cost=FIELD_COST)
    by_bucket = {row["bucket"]: row for row in rows}
    assert by_bucket[None]["waste"] == pytest.approx(0.299, abs=0.004)
    assert by_bucket[2]["waste"] < 0.0005  # "0.0 %"
    assert by_bucket[2]["saved_time"] >= 0.355
    assert by_bucket[None]["predicted_step_s"] == pytest.approx(13.9 * 3600 / 1312, rel=0.1)
    # Bucket size is no diversity knob: the sources in a window are the same within 2 %.
    means = [by_bucket[bucket]["sources_mean"] for bucket in (None, 2, 8, 32, 128, 512)]
    assert max(means) / min(means) < 1.02
    assert best.bucket == 2  # so it should be tight


def test_lengths_have_the_median_spread_and_bounds_asked_for() -> None:
    lengths = draw_lengths(200_000, LogNormal(500, 0.6, 100, 4000), seed=0)
    assert lengths.dtype == np.int32
    assert (lengths.min(), lengths.max()) == (100, 4000)
    assert np.median(lengths) == pytest.approx(500, rel=0.01)
    inner = np.log(draw_lengths(200_000, LogNormal(500, 0.6), seed=0))
    assert inner.std() == pytest.approx(0.6, rel=0.01)
    assert np.array_equal(draw_lengths(10, LogNormal(500, 0.6), seed=3), draw_lengths(10, LogNormal(500, 0.6), seed=3))


def test_observed_lengths_are_drawn_again_in_their_shares() -> None:
    lengths = draw_lengths(100_000, [10, 10, 10, 70], seed=0)
    assert set(lengths.tolist()) == {10, 70}
    assert (lengths == 70).mean() == pytest.approx(0.25, abs=0.01)


def test_a_synthetic_shard_has_exactly_the_lengths_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prism_fast.data.synthetic._CHUNK_TOKENS", 1000)  # several chunks, and records above one
    tokenizer = reference_tokenizer("gpt2")
    lengths = np.array([0, 5, 700, 600, 0, 2500, 3, 999, 1000, 0])
    write_synthetic_shard(tmp_path / "a.prsh", lengths, tokenizer, seed=0)
    shard = open_shard(tmp_path / "a.prsh")
    assert shard.lengths.tolist() == lengths.tolist()
    shard.verify(tokenizer)
    assert tokenizer.eot not in shard.tokens
    write_synthetic_shard(tmp_path / "b.prsh", lengths, tokenizer, seed=0)
    assert (tmp_path / "a.prsh").read_bytes() == (tmp_path / "b.prsh").read_bytes()
