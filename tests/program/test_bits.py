"""A program gives the bits of the model's own eval forward."""

import pytest
import torch

from prism_fast.program.format import Program
from prism_fast.program.head import logits_of
from prism_fast.program.runnable import Runnable
from prism_fast.protocol.errors import BundleFailed
from tests.program.models import BUNDLES, EXAMPLES, built, captured, eager, ids, state_of

NO_LOGITS = {"nanogpt_lasttoken"}
HONEST = [path for path in (*EXAMPLES, *BUNDLES) if path.name not in NO_LOGITS]


@pytest.mark.parametrize("bundle", HONEST, ids=lambda path: path.name)
@pytest.mark.parametrize("width", [16, pytest.param(64, marks=pytest.mark.long)])
def test_the_program_gives_the_bits_of_eager(bundle, width):
    model = built(bundle)
    found, runnable = captured(model, width, bundle_dir=bundle)
    assert found.differs == 0.0 and found.program.batch is None
    state = state_of(model)
    before = [tensor.clone() for tensor in state]
    for rows in (1, 2, 3, 5):
        tokens = ids(rows, width)
        expected = eager(model, tokens)
        assert torch.equal(runnable.run(state, tokens), expected)
        hidden = runnable.run_hidden(state, tokens)
        assert hidden is not None, "every one of these ends in a linear layer"
        with torch.no_grad():
            assert torch.equal(logits_of(hidden), expected)
    if "kvcache_persistent" not in bundle.name:  # eager itself writes into that one's
        assert all(torch.equal(one, other) for one, other in zip(before, state, strict=True))


@pytest.mark.parametrize("bundle", HONEST, ids=lambda path: path.name)
def test_a_file_is_read_back_as_it_was_written(bundle):
    found, _ = captured(built(bundle), bundle_dir=bundle, compare=False)
    data = found.program.to_bytes()
    again = Program.from_bytes(data)
    assert again == found.program and again.to_bytes() == data and again.digest == found.program.digest
    wheres = [node.where for node in again.nodes() if node.where is not None]
    assert any(where.file == "architecture.py" for where in wheres) or bundle.name == "hf_transformers"


@pytest.mark.parametrize("bundle", [path for path in BUNDLES if "kvcache" in path.name], ids=lambda path: path.name)
def test_a_cache_is_fresh_in_every_run_and_the_callers_state_is_not_written(bundle):
    model = built(bundle)
    _, runnable = captured(model, bundle_dir=bundle)
    state = [tensor.clone() for tensor in state_of(model)]
    before = [tensor.clone() for tensor in state]
    tokens = ids(3, 16)
    first = runnable.run(state, tokens)
    runnable.run(state, ids(3, 16, seed=9))
    assert torch.equal(runnable.run(state, tokens), first)
    assert all(torch.equal(one, other) for one, other in zip(before, state, strict=True))
    assert torch.equal(tokens, ids(3, 16))


def test_an_output_that_is_no_logits_is_refused_with_both_shapes():
    (bundle,) = (path for path in BUNDLES if path.name == "nanogpt_lasttoken")
    with pytest.raises(
        BundleFailed, match=r"float32 of shape \[B, 1, 300\]; expected float logits of shape \[B, 16, V\]"
    ):
        captured(built(bundle), bundle_dir=bundle)


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_autocast_is_written_into_the_program_or_put_around_the_run(autocast):
    (bundle,) = (path for path in EXAMPLES if path.name == "transformer_tiny")
    model = built(bundle)
    _, runnable = captured(model, bundle_dir=bundle, autocast=autocast)
    tokens, state = ids(3, 16), state_of(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = eager(model, tokens)
        around, hidden = runnable.run(state, tokens), runnable.run_hidden(state, tokens)
    assert expected.dtype is torch.bfloat16 and torch.equal(around, expected)
    with torch.no_grad():
        assert torch.equal(logits_of(hidden), expected)
    if autocast is not None:
        assert torch.equal(runnable.run(state, tokens), expected)
        with torch.no_grad():
            assert torch.equal(logits_of(runnable.run_hidden(state, tokens)), expected)
    assert not torch.is_autocast_enabled("cpu")


def test_other_weights_of_the_same_state_give_their_own_bits():
    (bundle,) = (path for path in EXAMPLES if path.name == "hybrid_tiny")
    model = built(bundle)
    found, runnable = captured(model, bundle_dir=bundle)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    tokens = ids(2, 16)
    assert torch.equal(runnable.run(state_of(model), tokens), eager(model, tokens))
    names = list(model.state_dict())
    assert [tensor.name for tensor in found.program.state] == names
    tied = {tensor.name: tensor.tied_to for tensor in found.program.state if tensor.tied_to}
    assert tied == {"head.weight": "tokens.weight"}
    assert found.program.state_elements == sum(p.numel() for p in model.parameters())


def test_a_program_runs_only_for_its_own_width():
    (bundle,) = (path for path in EXAMPLES if path.name == "transformer_tiny")
    model = built(bundle)
    found, _ = captured(model, bundle_dir=bundle)
    with pytest.raises(ValueError, match="any number of rows of 16 tokens"):
        Runnable(found.program, found.constants).run(state_of(model), ids(2, 17))
