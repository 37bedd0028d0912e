"""What a model depends on outside its state dict is found by comparing it with a fresh one that holds the same."""

import pytest
import torch
from torch import nn

from prism_fast.harness.trainer.full_state import FullState
from prism_fast.harness.trainer.open_heldout import FreshModel
from prism_fast.harness.trainer.outside_state import compare_with_fresh, different_attributes
from tests.program.models import BUNDLES, VOCAB, built

from .test_open_heldout import spec

BUNDLE = {bundle.name: bundle for bundle in BUNDLES}
WIDTH = 16


def compared(name: str, change, wrap=lambda model: model) -> dict:
    live = built(BUNDLE[name], WIDTH)
    change(live)
    fresh = FreshModel(spec(), lambda: built(BUNDLE[name], WIDTH), torch.device("cpu"))
    state = {key: tensor.detach().clone() for key, tensor in FullState(live).tensors()}
    fresh.load(state)
    return compare_with_fresh(wrap(live), fresh, WIDTH, VOCAB)


def train_a_little(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def widen(model):
    for block in model.h:
        block.attn.window = 12


@pytest.mark.parametrize(
    ("bundle", "change", "attributes"),
    [
        ("frozen_attr_temp", lambda m: setattr(m, "temp", 1.5), ["temp"]),
        ("window_attr", widen, ["h.0.attn.window", "h.1.attn.window"]),
    ],
)
def test_a_schedule_kept_in_an_attribute_is_named(bundle, change, attributes):
    found = compared(bundle, lambda m: (train_a_little(m), change(m)))
    assert found["differs"] > 1e-4 and found["attributes"] == attributes


def test_the_same_schedule_in_a_buffer_is_part_of_the_state():
    found = compared("window_buffer", lambda m: [h.attn.window.fill_(12) for h in m.h])
    assert found == {"differs": 0.0, "attributes": []}


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel], ids=["bare", "wrapped"])
def test_a_trained_model_that_keeps_its_state_to_itself_does_not_differ(wrap):
    assert compared("plain", train_a_little, wrap) == {"differs": 0.0, "attributes": []}


def test_an_attribute_that_moves_nothing_is_not_named():
    assert compared("plain", lambda m: setattr(m, "calls", 3)) == {"differs": 0.0, "attributes": []}


def test_numbers_tensors_lists_and_missing_modules_are_compared_and_other_objects_are_not():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for module, scale in ((one, 1.0), (other, 2.0)):
        module.same, module.nan, module.object = 1, float("nan"), object()
        module.list, module.table = [1, (2, scale)], torch.full((2,), scale)
        module.register_buffer("scratch", torch.full((1,), scale), persistent=False)
    other.child = nn.ReLU()
    assert list(different_attributes(one, other)) == ["list", "table", "scratch", "child"]
