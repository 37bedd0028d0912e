"""The throughput profile's arithmetic, from record files alone."""

import numpy as np
import pytest

from prism_fast.profiling.throughput import build_profile
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


def profile(run_dir, train_s=100.0):
    memory = m.MemoryBlock(peak_rss_bytes=1, peak_device_allocated_bytes=None, peak_device_reserved_bytes=None)
    return build_profile(
        run_dir,
        submission_id="s",
        run_id="r",
        machine=MACHINE,
        world_size=1,
        flops=6e9,
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
