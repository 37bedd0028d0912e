"""FLOP counts against formulas worked out by hand, and the table of peaks."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from prism_fast import cross_entropy, linear_cross_entropy
from prism_fast.profiling.flops import PEAKS, StepCounter, forward_flops, mfu, peak_flops, six_nd

ROWS, WIDTH, VOCAB = 2, 64, 512


@pytest.fixture(scope="module")
def decoder():
    path = Path(__file__).parents[2] / "examples" / "transformer_tiny" / "architecture.py"
    spec = importlib.util.spec_from_file_location("transformer_tiny_architecture", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build_model(SimpleNamespace(vocab_size=VOCAB, sequence_length=WIDTH)), module


def products(module):
    """Multiply-adds of a token: the head and, a layer, 12 w^2."""
    return VOCAB * module.WIDTH + module.LAYERS * 12 * module.WIDTH**2


def test_the_example_decoders_forward_is_the_formula_to_the_last_operation(decoder):
    model, module = decoder
    pairs = 4 * ROWS * WIDTH * WIDTH * module.WIDTH * module.LAYERS  # QK and PV, all heads together
    assert forward_flops(model, ROWS, WIDTH) == 2 * ROWS * WIDTH * products(module) + pairs


def test_a_step_without_attention_is_6nd(decoder):
    model, module = decoder
    tokens = torch.randint(VOCAB, (ROWS, WIDTH))
    with StepCounter() as counter:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    found = counter.result()
    assert found["step"] - found["attention"] == six_nd(products(module), ROWS * WIDTH)
    # With N = all parameters, 6ND counts norms and positions too, and no attention.
    parameters = sum(p.numel() for p in model.parameters())
    assert found["step"] / six_nd(parameters, ROWS * WIDTH) == pytest.approx(1, abs=0.15)
    assert found["unknown"] == []


def test_a_loss_from_hidden_states_counts_as_the_products_it_stands_for(decoder):
    model, _ = decoder
    tokens = torch.randint(VOCAB, (ROWS, WIDTH))
    with StepCounter() as plain:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    with StepCounter() as fused:
        linear_cross_entropy(model.hidden(tokens).flatten(0, 1), model.head.weight, tokens.flatten()).backward()
    with StepCounter() as ours:
        cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert ours.result()["step"] == plain.result()["step"] and ours.result()["unknown"] == []
    assert fused.result()["step"] == plain.result()["step"] and fused.result()["unknown"] == []


def test_an_operator_that_nobody_knows_is_named():
    @torch.library.custom_op("prism_test_flops::mystery", mutates_args=())
    def mystery(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    with StepCounter() as counter:
        mystery(torch.eye(4))
    assert counter.result() == {"step": 0, "attention": 0, "by_operator": {}, "unknown": ["prism_test_flops::mystery"]}


def test_counting_leaves_the_model_as_it_was():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 8)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, tokens):
            self.calls += 1
            return self.head(F.one_hot(tokens % 4, 4).float())

    model = Counts()
    assert forward_flops(model, 1, 3) == 2 * 3 * 4 * 8 and model.calls == 0


def test_a_model_that_cannot_be_counted_has_no_count():
    class Refuses(nn.Module):
        def forward(self, tokens):
            raise RuntimeError("not today")

    assert forward_flops(Refuses(), 1, 3) is None


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5), ("NVIDIA H20", 148.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA A10G", 70.0),
        ("NVIDIA B200", 2250.0), ("NVIDIA GB200", 2500.0), ("NVIDIA L40S", 362.05), ("NVIDIA L4", 121.0),
        ("AMD Instinct MI300X", 1307.4), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA T4", None), ("Some Other Card", None), ("NVIDIA A1000", None),
    ],
)  # fmt: skip
def test_a_device_has_its_own_peak_or_none(name, tera):
    peak, source = peak_flops(name)
    assert (peak, source is None) == (None if tera is None else tera * 1e12, tera is None)


def test_every_peak_has_a_source_and_several_devices_add_up():
    assert all(source for _, _, source in PEAKS)
    share, peak, _ = mfu(989.5e12, 1.0, ["NVIDIA H200", "NVIDIA H200"])
    assert share == pytest.approx(0.5) and peak == 2 * 989.5e12
    assert mfu(1e12, 1.0, ["NVIDIA H200", "Unknown"]) == (None, None, None) == mfu(1e12, 1.0, [])
