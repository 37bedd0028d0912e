"""Kernels compiled for GPUs that are not here: nothing spills, shared memory fits, loads are wide.

The full set is `python -m benchmarks.triton_registers`; here every kernel on every architecture in its plain form,
and on sm_90 each dtype and the heaviest options: about 70 compilations, so in `make test-long`.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton

from benchmarks import triton_registers
from prism_fast.kernels.backends.triton.launch import KNOWN_DEVICES

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

EVERYWHERE = [
    "score bf16 8192x50257",
    "backward plain bf16 8192x50257",
    "fused plain bf16 8192x50257",
    "linear forward plain bf16",
    "linear backward plain bf16",
]
# A kernel may drift by a few registers with the compiler; this many would cost it a program a multiprocessor.
DRIFT = 8


@pytest.fixture(scope="module")
def compiled() -> dict[str, triton_registers.Compiled]:
    jobs = [(target, name, False) for target in KNOWN_DEVICES for name in EVERYWHERE]
    jobs += [("sm_90", name, False) for name, _ in triton_registers.cases(False) if name not in EVERYWHERE]
    return triton_registers.compile_jobs(jobs)


def test_every_kernel_compiles_for_every_architecture(compiled):
    kernels = {"rows_forward", "rows_backward", "rows_fused", "linear_forward", "linear_gradient", "rows_finish"}
    everywhere = {(key.split(" / ")[0], kernel.kernel) for key, kernel in compiled.items()}
    assert everywhere >= {(target, kernel) for target in KNOWN_DEVICES for kernel in kernels}
    more = {"rows_finish_shard", "sum_rows", "code_length_rows", "code_length_finish", "rows_scale"}
    assert everywhere >= {("sm_90", kernel) for kernel in more}


def test_nothing_spills(compiled):
    assert [key for key, kernel in compiled.items() if kernel.stack] == []


def test_shared_memory_fits(compiled):
    limits = {name: device.shared_bytes for name, device in KNOWN_DEVICES.items()}
    assert [key for key, kernel in compiled.items() if kernel.shared > limits[key.split(" / ")[0]]] == []


def test_logits_are_read_and_written_16_bytes_at_a_time(compiled):
    """Also where rows start between 16-byte boundaries (V = 50,257); of a row only its target is read by itself."""
    wanted = {"rows_forward": (4, 0), "rows_fused": (5, 1), "rows_backward": (2, 2), "linear_gradient": (0, 1)}
    heavy = {key for key in compiled if "all" in key.split(" / ")[1].split()}
    checked = 0
    for key, kernel in compiled.items():
        if kernel.kernel not in wanted or key in heavy or "transposed" in key or "padded" in key:
            continue
        loads, stores = wanted[kernel.kernel]
        if kernel.kernel == "linear_gradient" and key.startswith("gfx"):
            stores = 0  # the matrix units' layout there leaves 4 neighbours a thread: 8 bytes
        assert kernel.widest_load >= 16 and kernel.wide_loads >= loads and kernel.wide_stores >= stores, key
        assert kernel.narrow_loads <= 1, key
        checked += 1
    assert checked >= 30


def test_the_record_of_the_full_set_holds_the_limits_too():
    record = json.loads(triton_registers.RESULT.read_text())["kernels"]
    limits = {name: device.shared_bytes for name, device in KNOWN_DEVICES.items()}
    over = [key for key, kernel in record.items() if kernel["shared"] > limits[key.split(" / ")[0]]]
    spilled = [key for key, kernel in record.items() if kernel["stack"] and not triton_registers.may_spill(key)]
    assert over == [] and spilled == [] and len(record) > 500


def test_registers_have_not_grown(compiled):
    record = json.loads(triton_registers.RESULT.read_text())
    if record["versions"]["triton"] != triton.__version__:
        pytest.skip(f"recorded with triton {record['versions']['triton']}, this is {triton.__version__}")
    again = "run python -m benchmarks.triton_registers and look at what changed"
    unknown = [key for key in compiled if key not in record["kernels"]]
    assert not unknown, f"not in benchmarks/results/triton_registers.json: {unknown[:3]}; {again}"
    grown = {
        key: (record["kernels"][key]["registers"], kernel.registers)
        for key, kernel in compiled.items()
        if kernel.registers > record["kernels"][key]["registers"] + DRIFT
    }
    assert not grown, f"registers a thread, recorded and now: {grown}; {again}"
