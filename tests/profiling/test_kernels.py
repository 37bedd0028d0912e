"""Kernel groups and generations on names as torch.profiler shows them, and the table of a real step."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from prism_fast.profiling import kernel_groups as g
from prism_fast.profiling.bundle_process import BundleJob
from prism_fast.profiling.kernels import (
    Row,
    generation_warnings,
    kernel_table,
    measure_kernels,
    rows_on_device,
)
from prism_fast.report.probes import print_probe, probe_chart, probe_table

RECORDED = [
    line.split("\t")
    for line in (Path(__file__).parent / "kernel_names.tsv").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_a_recorded_kernel_name_has_its_group_and_generation(number):
    group, built, name = RECORDED[number]
    assert (g.group_of(name), str(g.built_for(name) or "-")) == (group, built), name


@pytest.mark.parametrize(
    ("built", "device", "older"),
    [(80, 120, True), (80, 90, True), (90, 120, True), (75, 80, True), (90, 90, False), (80, 86, False),
     (80, 89, False), (89, 90, True), (100, 120, False), (120, 90, False), (50, 90, False)],
)  # fmt: skip
def test_an_older_generation_is_told_from_the_devices_own(built, device, older):
    assert g.is_older(built, device) is older


def test_the_field_notes_kernels_are_warned_of():
    """Ampere's attention on a Blackwell card: 65.2 % of the device's time, the finding of their profile."""
    rows = [
        {"name": "fmha_cutlassB_bf16_sm80", "seconds": 22.8358, "built_for": 80},
        {"name": "nvjet_tst", "seconds": 2.774, "built_for": None},
        {"name": "the rest", "seconds": 9.4148, "built_for": None},
        {"name": "old but short sm_75", "seconds": 0.01, "built_for": 75},
    ]
    (warning,) = generation_warnings(rows, sum(r["seconds"] for r in rows), 120)
    assert warning.startswith("65.2% of device time is in kernels built for Ampere (sm_80) on an sm_120 device")
    assert generation_warnings(rows, 35.0, 86) == [] == generation_warnings(rows, 35.0, None)


def event(name, device="DeviceType.CPU", us=0.0, parent=None, kernels=()):
    return SimpleNamespace(
        name=name, device_type=device, self_device_time_total=us, self_cpu_time_total=us, cpu_parent=parent,
        kernels=[SimpleNamespace(name=n, duration=d) for n, d in kernels],
    )  # fmt: skip


def test_on_a_gpu_only_device_rows_count_and_the_optimizers_kernels_are_its_own():
    step = event("Optimizer.step#Muon.step")
    elementwise = "void at::native::vectorized_elementwise_kernel<4, MulFunctor>"
    events = [
        step,
        event("aten::mul_", parent=step, us=900.0, kernels=[(elementwise, 30.0)]),
        event("aten::mul", us=900.0, kernels=[(elementwise, 70.0)]),
        event("aten::mm", us=900.0, kernels=[("ampere_sgemm_128x64_tn", 50.0)]),
        event(elementwise, "DeviceType.CUDA", 30.0),
        event(elementwise, "DeviceType.CUDA", 70.0),
        event("ampere_sgemm_128x64_tn", "DeviceType.CUDA", 50.0),
        event("prism::step 3", "DeviceType.CUDA", 500.0),
    ]
    rows = {(r.name, r.group): r for r in rows_on_device(events)}
    assert rows[elementwise, g.OPTIMIZER].seconds == pytest.approx(30e-6)
    assert rows[elementwise, g.ELEMENTWISE].seconds == pytest.approx(70e-6)
    assert rows["ampere_sgemm_128x64_tn", g.GEMM].built_for == 80 and len(rows) == 3
    table = kernel_table(
        {
            "device": "cuda:0", "rows": [r.__dict__ for r in rows.values()], "window_s": 300e-6, "capability": 90,
            "steps": 1, "machine": {"gpus": ["NVIDIA H100 80GB HBM3"]}, "trace": None, "flops": {"step": 3e9},
        }
    )  # fmt: skip
    assert table["busy_s"] == pytest.approx(150e-6) and table["idle_share"] == pytest.approx(0.5)
    assert sum(group["share"] for group in table["groups"]) == pytest.approx(1)
    assert table["older_generation_share"] == pytest.approx(1 / 3) and "Ampere" in table["warnings"][0]
    assert table["flops"]["mfu"] == pytest.approx(3e9 / 300e-6 / 989.5e12)


def test_more_names_than_the_table_holds_are_folded_and_not_lost():
    events = [event(f"kernel_{i}", "DeviceType.CUDA", 10.0) for i in range(500)]
    rows = rows_on_device(events)
    assert len(rows) == 201 and rows[-1] == Row("300 more, other", g.OTHER, pytest.approx(3e-3), 300)


def test_the_table_of_a_real_step_covers_it_and_leaves_a_trace(write_bundle, corpus, tmp_path, capsys):
    bundle = BundleJob(write_bundle(), (64,), 0, {}, data=str(corpus), tokenizer="bytes", torch_threads=1, device="cpu")
    found = measure_kernels(bundle, active=2, warmup=1, trace_dir=tmp_path / "traces")
    (rank,) = found["ranks"]
    assert rank["covered"] >= 0.98 and rank["named"] >= 0.98
    assert sum(group["share"] for group in rank["groups"]) == pytest.approx(1)
    assert sum(r["seconds"] for r in rank["rows"]) == pytest.approx(rank["busy_s"])
    assert {g.ATTENTION, g.GEMM, g.LOSS, g.OPTIMIZER, g.ELEMENTWISE, g.HOST} <= {x["group"] for x in rank["groups"]}
    assert rank["flops"]["step"] > rank["flops"]["attention"] > 0 and rank["flops"]["mfu"] is None
    assert rank["capability"] is None and rank["warnings"] == []
    with gzip.open(rank["trace"]) as f:
        trace = json.load(f)
    steps = {e["name"] for e in trace["traceEvents"] if e.get("name", "").startswith("prism::step")}
    assert steps == {"prism::step 1", "prism::step 2"}  # the window and nothing else, however long the run
    print_probe(found)
    assert "rows cover" in capsys.readouterr().out and probe_chart(found).startswith("<svg")


@pytest.mark.slow
def test_every_rank_has_its_table_and_its_trace(write_bundle, corpus, tmp_path):
    bundle = BundleJob(
        write_bundle(), (32,), 0, {}, data=str(corpus), tokenizer="bytes", torch_threads=1, device="cpu", nproc=2
    )
    found = measure_kernels(bundle, active=1, warmup=1, trace_dir=tmp_path)
    assert [Path(rank["trace"]).name for rank in found["ranks"]] == ["trace-rank-0.json.gz", "trace-rank-1.json.gz"]
    assert all(rank["covered"] >= 0.98 and Path(rank["trace"]).stat().st_size for rank in found["ranks"])
    assert "rank 0 of 2" in probe_table(found)[0]
