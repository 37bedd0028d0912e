"""Weights shared by memory: sealed against resizing and foreign writers, adopted by name, bit for bit."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from prism_fast.harness.process.shared_memory import SharedRegion
from prism_fast.harness.process.state_layout import (
    Adopter,
    WeightShare,
    from_json,
    layout_of,
    load_state,
    region_bytes,
    to_json,
)
from prism_fast.protocol.errors import BundleRejected


class Model(nn.Module):
    def __init__(self, seed=0, width=6):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, width)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(width)
        self.gain = nn.Parameter(torch.randn(5).bfloat16())
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("empty", torch.empty(0, 4))


def share(model):
    entries = layout_of(model)
    region = SharedRegion.create("test", region_bytes(entries))
    shared = WeightShare(model, entries, SharedRegion(os.dup(region.fd), writable=True))
    region.close_to_writers()
    return entries, region, shared


def test_an_evaluator_sees_every_step_without_a_copy():
    trainer, other = Model(1), Model(2)
    entries, region, shared = share(trainer)
    adopter = Adopter(other, from_json(to_json(entries)), region)
    adopter.adopt()
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
    for step in range(3):
        loss = (trainer.embedding.weight**2).sum() + trainer.conv.weight.sum() + trainer.gain.float().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trainer.norm(torch.randn(4, 6) + step)
        shared.refresh()
        adopter.refresh()
        for name, value in trainer.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name
    assert other.embedding.weight.data_ptr() == other.head.weight.data_ptr()
    assert other.conv.weight.stride() == trainer.conv.weight.stride()


def test_a_parameter_whose_storage_was_replaced_is_shared_again():
    trainer, other = Model(1), Model(2)
    entries, region, shared = share(trainer)
    adopter = Adopter(other, entries, region)
    adopter.adopt()
    trainer.gain.data = torch.full((5,), 3.0).bfloat16()
    shared.refresh()
    assert torch.equal(other.gain, trainer.gain)
    with torch.no_grad():
        trainer.gain.add_(1)
    assert torch.equal(other.gain, torch.full((5,), 4.0).bfloat16())


def test_a_trainer_of_another_dtype_is_adopted_in_its_own():
    trainer, other = Model(1).to(torch.bfloat16), Model(1)
    entries, region, _ = share(trainer)
    adopter = Adopter(other, entries, region)
    assert adopter.differs_from_init() is None
    adopter.adopt()
    assert other.head.weight.dtype == torch.bfloat16 and torch.equal(other.head.weight, trainer.head.weight)


def test_any_changed_bit_of_the_init_is_named():
    trainer = Model(1)
    with torch.no_grad():
        trainer.gain[2] += 1
    entries, region, _ = share(trainer)
    assert Adopter(Model(1), entries, region).differs_from_init() == "gain"
    assert Adopter(Model(2), entries, region).differs_from_init() is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.add_module("extra", nn.Linear(2, 2)), "does not know extra.bias, extra.weight"),
        (lambda m: m.__delattr__("gain"), "missing gain"),
        (lambda m: setattr(m, "gain", nn.Parameter(torch.randn(4))), "another shape gain"),
    ],
)
def test_another_model_than_the_declared_one_is_rejected_by_name(change, words):
    trainer = Model(1)
    change(trainer)
    entries, region, _ = share(trainer)
    with pytest.raises(BundleRejected, match=words) as caught:
        Adopter(Model(1), entries, region)
    assert caught.value.rule == "prism:model-mismatch"


@pytest.mark.parametrize(
    "document",
    [None, 5, [[1]], [["a", "float32", [2], [1], -64, True]], [["a", "float32", [2], [1], 3, True]],
     [["a", "object", [2], [1], 0, True]], [["a", "float32", [2**60], [1], 0, True]],
     [["a", "float32", [2, 2], [1], 0, True]], [["a", "float32", ["2"], [1], 0, True]]],
)  # fmt: skip
def test_a_layout_from_another_process_is_checked(document):
    with pytest.raises(BundleRejected):
        from_json(document)


def test_saved_weights_load_into_a_region(tmp_path):
    from safetensors.torch import save_file

    trainer = Model(3)
    save_file({k: v.contiguous().clone() for k, v in trainer.state_dict().items()}, tmp_path / "w.safetensors")
    layout, region = load_state(tmp_path / "w.safetensors")
    other = Model(4)
    Adopter(other, from_json(layout), region).adopt()
    for name, value in trainer.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


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
