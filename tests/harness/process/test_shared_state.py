"""A model's state in shared memory: laid out from a program's table, by nobody else."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from prism_fast.harness.process.shared_memory import ALIGNMENT, SharedRegion
from prism_fast.harness.process.shared_state import (
    bytes_at,
    first_difference,
    from_json,
    read_safetensors,
    region_bytes,
    safetensors_dtypes,
    slots_of,
    to_json,
    view,
    write_safetensors,
)
from prism_fast.program.format import StateTensor
from prism_fast.protocol.errors import BundleRejected, DataError

STATE = (
    StateTensor("head.weight", "float32", (5, 3), True),
    StateTensor("embedding.weight", "float32", (5, 3), True, "head.weight"),
    StateTensor("steps", "int64", (), False),
    StateTensor("nothing", "float32", (0, 4), False),
    StateTensor("scale", "bfloat16", (7,), True),
    StateTensor("phase", "complex64", (2,), True),
)


@pytest.fixture
def filled():
    slots = slots_of(STATE)
    region = SharedRegion.create("test", region_bytes(slots))
    with SharedRegion.writer(region) as writer:
        for seed, slot in enumerate(slots):
            if not slot.tied:
                bytes_at(slot, writer)[:] = np.random.default_rng(seed).integers(0, 255, slot.nbytes)
    return slots, region


def test_places_are_aligned_disjoint_and_shared_by_tied_tensors_alone():
    slots = {slot.name: slot for slot in slots_of(STATE)}
    assert slots["embedding.weight"].offset == slots["head.weight"].offset and slots["embedding.weight"].tied
    ends = sorted((s.offset, s.offset + s.nbytes) for s in slots.values() if not s.tied and s.nbytes)
    assert all(begin % ALIGNMENT == 0 for begin, _ in ends)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
    assert from_json(to_json(list(slots.values()))) == list(slots.values())


def test_a_complex_number_counts_as_two():
    slots = {slot.name: slot.numbers for slot in slots_of(STATE)}
    assert slots["phase"] == 4 and slots["head.weight"] == 15 and slots["steps"] == 1 and slots["nothing"] == 0


def test_a_dtype_that_no_weights_file_holds_is_rejected():
    with pytest.raises(BundleRejected, match="complex128"):
        slots_of((StateTensor("w", "complex128", (2,), True),))


def test_a_file_of_the_state_is_what_safetensors_reads_and_comes_back_the_same(filled, tmp_path):
    slots, region = filled
    write_safetensors(slots, region, tmp_path / "w.safetensors")
    loaded = load_file(tmp_path / "w.safetensors")
    assert set(loaded) == {slot.name for slot in slots}
    for slot in slots:
        assert loaded[slot.name].shape == slot.shape
        ours, theirs = view(slot, region).reshape(-1), loaded[slot.name].reshape(-1)
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), slot.name
    assert first_difference(slots, region, read_safetensors(tmp_path / "w.safetensors", slots)) is None
    assert safetensors_dtypes(tmp_path / "w.safetensors") == {slot.name: slot.dtype for slot in slots}


def test_the_first_tensor_that_differs_is_named(filled):
    slots, region = filled
    other = SharedRegion.create("test", region_bytes(slots))
    with SharedRegion.writer(other) as writer:
        writer.array()[: region_bytes(slots)] = region.array()[: region_bytes(slots)]
        bytes_at(slots[4], writer)[3] ^= 1
    assert first_difference(slots, region, other) == "scale"


@pytest.mark.parametrize("change", ["missing", "more", "shape", "dtype", "cut", "rubbish"])
def test_a_file_of_another_state_is_refused_by_name(filled, tmp_path, change):
    slots, region = filled
    path = tmp_path / "w.safetensors"
    write_safetensors(slots, region, path)
    tensors = load_file(path)
    if change == "missing":
        del tensors["scale"]
    elif change == "more":
        tensors["other"] = torch.zeros(1)
    elif change == "shape":
        tensors["scale"] = tensors["scale"][:6].clone()
    elif change == "dtype":
        tensors["scale"] = tensors["scale"].float()
    save_file(tensors, path)
    if change == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif change == "rubbish":
        path.write_bytes(b"\xff" * 100)
    with pytest.raises(DataError, match=r"w\.safetensors"):
        read_safetensors(path, slots)


def in_child(code: str, fd: int) -> int:
    program = (
        "import os, mmap, fcntl, torch\nfrom prism_fast.harness.process.shared_memory import SharedRegion\nfd = {}\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program.format(fd) + code], pass_fds=(fd,), capture_output=True
    ).returncode


def test_writing_to_weights_kills_the_writer_and_nobody_can_map_them_writable():
    region = SharedRegion.create("test", 4096)
    region.close_to_writers()
    assert in_child("SharedRegion(fd, writable=False).tensor(torch.float32, (4,), (1,), 0).sum()", region.fd) == 0
    assert in_child("SharedRegion(fd, writable=False).tensor(torch.float32, (4,), (1,), 0).zero_()", region.fd) == -11
    assert in_child("SharedRegion(fd, writable=True)", region.fd) == 1
    assert in_child("SharedRegion(os.open(f'/proc/self/fd/{fd}', os.O_RDWR), writable=True)", region.fd) == 1
    assert in_child("os.pwrite(fd, b'x', 0)", region.fd) == 1
    assert in_child("os.ftruncate(fd, 0)", region.fd) == 1
