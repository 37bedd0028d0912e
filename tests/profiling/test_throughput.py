"""The throughput profile's arithmetic, from record files alone."""

import tracemalloc

import numpy as np
import pytest

from prism_fast.profiling.throughput import QuantileSketch, StepAccumulator, build_profile
from prism_fast.protocol import constants as c
from prism_fast.protocol import ledger as layout
from prism_fast.protocol import manifest as m

MACHINE = m.MachineBlock(
    cpu="test", cpu_count=1, memory_bytes=1, gpus=[], gpu_memory_bytes=None, driver=None, os="x", python="3", torch="2",
    triton=None, backends={},
)  # fmt: skip


def write(run_dir, batches, other_s=0.0):
    records = np.zeros(batches, layout.LEDGER_DTYPE)
    records["index"] = np.arange(batches)
    records["positions"], records["bytes"] = 100, 400
    seen = np.zeros(batches, layout.OBSERVATIONS_DTYPE)
    seen["index"] = np.arange(batches)
    seen["data_wait_s"], seen["predict_s"], seen["scoring_s"], seen["ledger_s"] = 0.01, 0.2, 0.04, 0.05
    seen["step_s"] = 0.5
    seen["step_s"][: batches // 10] = 5.0  # a slow warm-up
    step = sum(seen[p].astype(float) for p in ("data_wait_s", "predict_s", "scoring_s", "ledger_s", "step_s"))
    seen["wall_s"] = np.concatenate([[0.3], 0.3 + np.cumsum(step[:-1] + other_s)])
    for name, magic, rows in (
        (c.LEDGER_FILE, layout.LEDGER_MAGIC, records),
        (c.OBSERVATIONS_FILE, layout.OBSERVATIONS_MAGIC, seen),
    ):
        (run_dir / name).write_bytes(layout.pack_header(magic, rows.dtype, 1) + rows.tobytes())


def profile(run_dir, train_s=100.0, machine=MACHINE, forward_flops=None):
    memory = m.MemoryBlock(peak_rss_bytes=1, peak_device_allocated_bytes=None, peak_device_reserved_bytes=None)
    return build_profile(
        run_dir,
        submission_id="s",
        run_id="r",
        machine=machine,
        world_size=1,
        parameters=1000,
        forward_flops=forward_flops,
        rows_times_width=100,
        on_device=bool(machine.gpus),
        train_s=train_s,
        startup_s={},
        heldout_s=None,
        memory=memory,
    )


def test_parts_add_up_to_the_step_and_the_warm_up_is_left_out(tmp_path):
    write(tmp_path, 100)
    p = profile(tmp_path)
    assert p.warmup_batches == 10
    parts = p.parts_s
    assert parts.step == pytest.approx(0.8, rel=1e-5)
    assert parts.data_wait + parts.predict_forward + parts.scoring_kernel + parts.miner_step + parts.ledger + (
        parts.other
    ) == pytest.approx(parts.step, rel=1e-9)
    assert abs(parts.other) < 1e-4
    assert p.scoring_overhead == pytest.approx(0.8 / 0.5, rel=1e-5)
    assert p.steady_state.tokens_per_s == pytest.approx(100 / 0.8, rel=1e-5)
    assert p.end_to_end.tokens_per_s == pytest.approx(100.0)
    assert p.end_to_end.bytes_per_s == pytest.approx(400.0)
    assert p.step_s.p50 == pytest.approx(0.8, rel=1e-5)


def test_time_that_no_part_explains_is_shown_as_other(tmp_path):
    write(tmp_path, 50, other_s=0.1)
    parts = profile(tmp_path).parts_s
    assert parts.other == pytest.approx(0.1, rel=1e-3) and parts.step == pytest.approx(0.9, rel=1e-3)


@pytest.mark.parametrize("batches", [1, 2])
def test_a_run_of_a_batch_or_two_has_a_profile(tmp_path, batches):
    write(tmp_path, batches)
    assert profile(tmp_path).parts_s.step > 0


def test_the_series_is_columns_of_bounded_length_that_average_to_the_parts(tmp_path):
    write(tmp_path, 5000)
    series = profile(tmp_path).series
    assert series.stride == 5 and len(series.i) == 1000 and series.i[:3] == [0, 5, 10]
    assert all(len(getattr(series, name)) == 1000 for name in type(series).model_fields if name != "stride")
    assert series.miner_step_s[0] == pytest.approx(5.0) and series.miner_step_s[-1] == pytest.approx(0.5)
    assert series.tokens_per_s[-1] == pytest.approx(100 / 0.8, rel=1e-4)
    assert series.step_max_s[-1] == pytest.approx(0.8, rel=1e-4)


def test_a_million_steps_fold_in_bounded_memory():
    steps = 1_000_000
    accumulator = StepAccumulator(warmup=10, batches=steps)
    random = np.random.default_rng(3)
    expected = random.lognormal(-3, 0.5, steps).astype(np.float32)
    tracemalloc.start()
    for start in range(0, steps, 10_000):
        seen = np.zeros(10_000, layout.OBSERVATIONS_DTYPE)
        seen["index"] = np.arange(start, start + 10_000)
        seen["step_s"] = expected[start : start + 10_000]
        seen["wall_s"] = np.arange(start, start + 10_000)
        accumulator.add(seen)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12e6, f"{peak / 1e6:.1f} MB"
    found, parts = accumulator.quantiles(), accumulator.parts()
    for q, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert value == pytest.approx(np.quantile(expected[10:], q), rel=0.002)
    assert found.max == pytest.approx(expected[10:].max())
    assert parts.miner_step == pytest.approx(expected[10:].mean(dtype=np.float64), rel=1e-6)
    # The clock says a second a step: what the steps do not explain is `other`, and the parts add up to it.
    assert parts.step == pytest.approx(1.0, rel=1e-5)
    assert len(accumulator.series(np.full(1024, 7)).i) <= 1024


@pytest.mark.parametrize("count", [1, 5, 65_536])
def test_quantiles_are_exact_up_to_65536_steps(count):
    values = np.random.default_rng(1).exponential(0.1, count)
    sketch = QuantileSketch()
    for piece in np.array_split(values, 7):
        sketch.add(piece)
    assert sketch.quantile(0.9) == np.quantile(values, 0.9) and sketch.largest == values.max()


def test_chunks_of_any_size_give_the_same_profile():
    random = np.random.default_rng(5)
    seen = np.zeros(1000, layout.OBSERVATIONS_DTYPE)
    seen["index"] = np.arange(1000)
    for name in ("data_wait_s", "predict_s", "scoring_s", "ledger_s", "step_s"):
        seen[name] = random.exponential(0.1, 1000)
    seen["wall_s"] = np.cumsum(random.exponential(0.6, 1000))
    found = []
    for size in (1, 17, 1000):
        accumulator = StepAccumulator(warmup=10, batches=1000)
        for start in range(0, 1000, size):
            accumulator.add(seen[start : start + size])
        found.append((accumulator.parts().model_dump(), accumulator.quantiles().model_dump()))
    for parts, quantiles in found[1:]:
        assert parts == pytest.approx(found[0][0], rel=1e-9) and quantiles == pytest.approx(found[0][1], rel=1e-12)


def test_mfu_needs_a_device_whose_peak_is_known(tmp_path):
    write(tmp_path, 50)
    known = MACHINE.model_copy(update={"gpus": ["NVIDIA H100 80GB HBM3"]})
    flops = profile(tmp_path, train_s=1.0, machine=known, forward_flops=4_000_000).flops
    assert flops.total == 6 * 1000 * 50 * 100 and flops.peak_flops == 989.5e12
    assert flops.mfu == pytest.approx(flops.total / 989.5e12) and "H100" in flops.peak_source
    assert flops.attention_aware_total == pytest.approx(3 * 4_000_000 * 50)
    assert flops.attention_aware_mfu == pytest.approx(flops.attention_aware_total / 989.5e12)
    unknown = profile(tmp_path, machine=MACHINE.model_copy(update={"gpus": ["Something New"]})).flops
    assert unknown.mfu is None and unknown.peak_flops is None and unknown.attention_aware_total is None
