"""The train series, folded in chunks, is the fold of everything at once, whatever ranks claim to have seen."""

import tracemalloc

import numpy as np
import pytest

from prism_fast.harness.referee.train_series import build_series
from prism_fast.protocol import constants as c
from prism_fast.protocol import ledger as layout


def write(run_dir, batches, world=1, observed=None, seed=0):
    """-> (records, observations) of a run that is on disk."""
    drawn = np.random.default_rng(seed)
    records = np.zeros(batches * world, layout.LEDGER_DTYPE)
    records["index"] = np.repeat(np.arange(batches), world)
    records["rank"] = np.tile(np.arange(world), batches)
    records["nats"], records["scored_tokens"] = drawn.random(len(records)) * 300, drawn.integers(0, 100, len(records))
    records["bytes"], records["positions"] = drawn.integers(1, 400, len(records)), 100
    records["faults"] = drawn.random(len(records)) < 0.01
    observed = batches if observed is None else observed
    seen = np.zeros(observed * world, layout.OBSERVATIONS_DTYPE)
    seen["index"] = np.repeat(np.arange(observed), world)
    seen["rank"] = np.tile(np.arange(world), observed)
    seen["step_s"], seen["predict_s"] = drawn.random(len(seen)) * 0.1, 0.01
    seen["wall_s"] = np.arange(len(seen)) * 0.2
    seen["grad_norm"] = np.where(drawn.random(len(seen)) < 0.1, np.nan, drawn.lognormal(0, 1.5, len(seen)))
    for name, magic, rows in (
        (c.LEDGER_FILE, layout.LEDGER_MAGIC, records),
        (c.OBSERVATIONS_FILE, layout.OBSERVATIONS_MAGIC, seen),
    ):
        (run_dir / name).write_bytes(layout.pack_header(magic, rows.dtype, world) + rows.tobytes())
    return records, seen


def series_of(run_dir, world=1):
    return build_series(run_dir, submission_id="s", run_id="r", token_budget=None, world_size=world)


@pytest.mark.parametrize(("batches", "world"), [(1, 1), (50, 3), (40_000, 3)])
def test_points_and_aggregates_are_those_of_everything_at_once(tmp_path, batches, world):
    records, seen = write(tmp_path, batches, world)
    series = series_of(tmp_path, world)
    stride = -(-batches // c.SERIES_MAX_POINTS)
    assert (series.stride, series.batches) == (stride, batches)
    starts, columns, rank0 = np.arange(0, batches, stride), series.columns, seen[seen["rank"] == 0]

    def per_point(name):
        return np.add.reduceat(records[name].astype(float).reshape(batches, world).sum(axis=1), starts)

    assert columns.i == starts.tolist()
    assert columns.tokens_seen[-1] == 100 * batches * world
    np.testing.assert_array_equal(columns.covered_bytes, np.cumsum(per_point("bytes")))
    loss = np.array(columns.train_ce_nats, float)
    with np.errstate(invalid="ignore", divide="ignore"):
        np.testing.assert_allclose(loss, per_point("nats") / per_point("scored_tokens"), rtol=1e-12)
    running = np.cumsum(per_point("nats")) / np.log(2) / np.cumsum(per_point("bytes"))
    np.testing.assert_allclose(columns.running_bpb, running, rtol=1e-12)
    ends = np.minimum(starts + stride, batches) - 1
    np.testing.assert_array_equal(columns.wall_s, rank0["wall_s"][ends])
    norms = rank0["grad_norm"].astype(float)
    np.testing.assert_array_equal(np.array(columns.grad_norm, float), np.fmax.reduceat(norms, starts))
    np.testing.assert_array_equal(columns.clip_event, np.logical_or.reduceat(norms > 1, starts))
    np.testing.assert_array_equal(columns.nan_inf, per_point("faults") > 0)
    finite, found = norms[np.isfinite(norms)], series.aggregates
    assert found.nan_inf_batches == int(records["faults"].reshape(batches, world).any(axis=1).sum())
    assert found.clip_events == int((norms > 1).sum())
    assert found.grad_spike_rate == pytest.approx((finite > 10 * np.median(finite)).mean() if len(finite) else 0)
    steps = rank0["step_s"].astype(float) + rank0["predict_s"].astype(float)
    assert found.mean_step_ms == pytest.approx(1e3 * steps.mean())
    assert found.p99_step_ms == pytest.approx(1e3 * np.quantile(steps, 0.99))


def test_quantiles_of_a_long_run_are_within_a_fifth_of_a_percent(tmp_path):
    _, seen = write(tmp_path, 100_000)
    found, norms = series_of(tmp_path).aggregates, seen["grad_norm"][np.isfinite(seen["grad_norm"])]
    assert found.p99_step_ms == pytest.approx(1e3 * np.quantile(seen["step_s"] + seen["predict_s"], 0.99), rel=2e-3)
    assert found.grad_spike_rate == pytest.approx((norms > 10 * np.median(norms)).mean(), rel=0.02)


@pytest.mark.parametrize("observed", [0, 3, 4000])
def test_a_rank_that_claims_to_have_seen_more_or_less_than_was_scored_breaks_nothing(tmp_path, observed):
    write(tmp_path, 20, observed=observed)
    series = series_of(tmp_path)
    assert series.aggregates.n_points == len(series.columns.wall_s) == 20
    assert (series.aggregates.mean_step_ms is None) == (observed == 0)


def test_memory_does_not_grow_with_the_run(tmp_path):
    peaks = []
    for batches in (200_000, 800_000):
        write(tmp_path, batches)
        tracemalloc.start()
        series_of(tmp_path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
