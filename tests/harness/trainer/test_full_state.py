"""A model's whole state by its own names, however it is wrapped, shared or sharded."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from prism_fast.harness.trainer.full_state import FullState, plain_model, require_declared
from prism_fast.protocol.errors import BundleRejected

RANKS = Path(__file__).with_name("sharded_ranks.py")


class Model(nn.Module):
    """Tied, buffered, with a child whose name is a wrapper's."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 4)
        self.module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(self.module(x.flatten(0, 1)).view_as(x))


WRAPPERS = {
    "none": lambda m: m,
    "compiled": torch.compile,
    "data parallel": nn.DataParallel,
    "compiled data parallel": lambda m: torch.compile(nn.DataParallel(m)),
    "checkpointed": checkpoint_wrapper,
}


def checkpointed_inside(model):
    model.module[0] = checkpoint_wrapper(model.module[0])
    return model


@pytest.mark.parametrize("wrap", [*WRAPPERS.values(), checkpointed_inside], ids=[*WRAPPERS, "checkpointed inside"])
def test_names_and_order_are_those_of_the_bare_model(wrap):
    model = Model()
    names = list(model.state_dict())
    wrapped = wrap(model)
    state = FullState(wrapped)
    assert [name for name, _ in state.tensors()] == names
    assert not state.sharded and plain_model(wrapped) is model
    assert state.parameter_count() == 20 * 4 + 4 * 4 + 4 + 4 + 4


def test_a_plain_models_tensors_are_the_live_ones():
    model = Model()
    state = FullState(model)
    held = dict(state.tensors())
    assert held["head.weight"] is model.embedding.weight
    model.module[0].weight = nn.Parameter(torch.ones(4, 4))
    assert torch.equal(dict(state.tensors())["module.0.weight"], torch.ones(4, 4))


def views_of(model):
    """A place for each tensor, tied ones in one."""
    places, views = {}, {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        places.setdefault(id(tensor), torch.full_like(tensor, 7, requires_grad=False))
        views[name] = places[id(tensor)]
    return views


def test_shared_parameters_are_stepped_in_place_and_buffers_are_copied():
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    views, state = views_of(model), FullState(model)
    state.share(views)
    assert all(torch.equal(views[name], before[name]) for name in before)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(20).view(4, 5)).square().mean().backward()
    optimizer.step()
    assert model.head.weight.data_ptr() == views["head.weight"].data_ptr() == views["embedding.weight"].data_ptr()
    assert not torch.equal(views["embedding.weight"], before["embedding.weight"])
    assert not views["module.1.running_mean"].any()
    state.refresh()
    assert all(torch.equal(views[name], tensor) for name, tensor in model.state_dict().items())


def test_a_parameter_that_was_replaced_is_shared_again():
    model = Model()
    views, state = views_of(model), FullState(model)
    state.share(views)
    model.module[0].bias = nn.Parameter(torch.ones(4))
    model.module[0].weight.data = torch.ones(4, 4)
    state.refresh()
    assert torch.equal(views["module.0.bias"], torch.ones(4)) and torch.equal(
        views["module.0.weight"], torch.ones(4, 4)
    )
    assert model.module[0].weight.data_ptr() == views["module.0.weight"].data_ptr()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda views: views.pop("head.weight"), "does not know head.weight"),
        (lambda views: views.update(other=torch.ones(1)), "is missing other"),
        (lambda views: views.update({"module.0.bias": torch.ones(5)}), "has in another shape module.0.bias"),
    ],
)
def test_another_state_than_the_declared_one_is_rejected_by_name(change, words):
    model = Model()
    views = views_of(model)
    change(views)
    with pytest.raises(BundleRejected, match=words) as caught:
        FullState(model).share(views)
    assert caught.value.rule == "prism:model-mismatch"


def test_many_missing_names_are_shown_three_at_a_time():
    with pytest.raises(BundleRejected, match=r"is missing a, b, c \.\.\.$"):
        require_declared({}, dict.fromkeys("abcde", (1,)))


def test_a_lazy_tensor_is_no_state_yet():
    with pytest.raises(BundleRejected, match=r"1\.weight is lazy"):
        FullState(nn.Sequential(nn.Embedding(4, 4), nn.LazyLinear(4))).tensors()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_sharded_states_are_whole_and_train_as_the_plain_one(ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(RANKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("as DDP") == 6
