"""The bundle zoo: every example is short, meets the static contract, and computes what its first lines say."""

import importlib.util
from pathlib import Path

import pytest
import torch

from prism_fast.harness.bundle.bundle import load_bundle
from prism_fast.harness.bundle.static_contract import check_static_contract
from prism_fast.protocol import PrismContext

EXAMPLES = sorted(p.parent for p in (Path(__file__).parent.parent / "examples").glob("*/architecture.py"))


def architecture(name: str):
    """An example's architecture.py as a module of its own."""
    path = Path(__file__).parent.parent / "examples" / name / "architecture.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_meets_the_static_contract(example):
    bundle = load_bundle(example)
    assert all(script.count(b"\n") < 200 for script in bundle.scripts.values())
    report = check_static_contract(bundle, "reject")
    assert report.ok, report.as_dict()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_looks_at_no_later_token_and_not_across_rows(example):
    torch.manual_seed(0)
    model = architecture(example.name).build_model(PrismContext(vocab_size=97, sequence_length=70)).double()
    tokens = torch.randint(97, (3, 70))
    changed = tokens.clone()
    changed[1, 41:] = (changed[1, 41:] + 1) % 97
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert before.shape == (3, 70, 97)
    same = torch.ones(3, 70, dtype=torch.bool)
    same[1, 41:] = False
    assert torch.allclose(before[same], after[same], rtol=0, atol=1e-12)
    assert not torch.allclose(before[1, 41], after[1, 41], rtol=0, atol=1e-6)


def test_the_gated_delta_rule_in_chunks_is_the_recurrence():
    module = architecture("gated_delta_tiny")
    torch.manual_seed(0)
    shape = (2, 4, 75, module.HEAD_WIDTH)  # three chunks, the last one not whole
    q, k, v = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    log_a = torch.nn.functional.logsigmoid(torch.randn(shape[:3], dtype=torch.float64) + 2)
    b = torch.rand(shape[:3], dtype=torch.float64)
    state = torch.zeros(2, 4, shape[-1], shape[-1], dtype=torch.float64)
    expected = []
    for t in range(shape[2]):
        key, value = k[:, :, t, :, None], v[:, :, t, None, :]
        strength = b[:, :, t, None, None]
        state = log_a[:, :, t, None, None].exp() * (state - strength * key @ (key.mT @ state)) + strength * key @ value
        expected.append((q[:, :, t, None, :] @ state)[:, :, 0])
    assert torch.allclose(module.gated_delta(q, k, v, log_a, b), torch.stack(expected, dim=2), rtol=1e-10, atol=1e-12)


def test_the_hybrids_memory_is_the_recurrence():
    module = architecture("hybrid_tiny")
    torch.manual_seed(0)
    memory = module.Memory().double()
    x = torch.randn(2, 40, module.WIDTH, dtype=torch.float64)
    with torch.no_grad():
        y = memory.norm(x)
        values, gate = memory.inputs(y).chunk(2, dim=-1)
        kept = torch.sigmoid(memory.forget(y) + memory.decay).repeat_interleave(module.WIDTH // module.GROUPS, dim=-1)
        state, states = torch.zeros(2, module.WIDTH, dtype=torch.float64), []
        for t in range(40):
            state = kept[:, t] * state + (1 - kept[:, t]) * values[:, t]
            states.append(state)
        expected = x + memory.out(torch.stack(states, dim=1) * torch.nn.functional.silu(gate))
        assert torch.allclose(memory(x), expected, rtol=1e-10, atol=1e-12)


def test_a_mixture_sends_each_token_to_its_experts_and_balance_is_one_when_even():
    module = architecture("moe_tiny")
    torch.manual_seed(0)
    layer = module.Experts().double()
    x = torch.randn(50, module.WIDTH, dtype=torch.float64)
    with torch.no_grad():
        share, chosen = layer.router(x).softmax(-1).topk(module.CHOSEN)
        share = share / share.sum(-1, keepdim=True)
        expected = torch.stack(
            [
                sum(w * layer.experts[e](row) for w, e in zip(weights, experts.tolist(), strict=True))
                for row, weights, experts in zip(x, share, chosen, strict=True)
            ]
        )
        assert torch.allclose(layer(x), expected, rtol=1e-10, atol=1e-12)
        layer.router.weight.zero_()  # no preference: whoever is chosen, the loss is at its least
        layer(x)
        assert layer.balance.item() == pytest.approx(1.0)
