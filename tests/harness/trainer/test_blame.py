"""An error is laid at the door of the package whose code raised it, or asked for what cannot be."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from prism_fast.harness.hosting.blame import PACKAGE, explain, fault_of
from prism_fast.harness.process.seeding import seeded_builder
from prism_fast.harness.trainer.process_groups import keep_process_groups
from prism_fast.protocol.errors import BundleFailed, BundleRejected, EngineFault

BUNDLE = """
import torch
from torch import nn
from prism_fast import cross_entropy

def divides():
    return 1 / 0

def torch_refuses():
    return torch.zeros(3)[torch.tensor([7])]

def calls(what):
    return what()

def hooked(hook):
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *_: hook())
    return model(torch.zeros(1, 2))

def loss_of_wrong_shapes():
    return cross_entropy(torch.zeros(2, 3), torch.zeros(5, dtype=torch.long))
"""


@pytest.fixture
def bundle(tmp_path):
    path = tmp_path / "bundle" / "training.py"
    path.parent.mkdir()
    path.write_text(BUNDLE)
    module_spec = importlib.util.spec_from_file_location("training_of_test_blame", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def raised_by(function, *arguments) -> BaseException:
    with pytest.raises(BaseException) as caught:
        function(*arguments)
    return caught.value


def kind(bundle, function, *arguments) -> tuple[str, str]:
    _, found, message = explain(raised_by(function, *arguments), str(Path(bundle.__file__).parent) + os.sep)
    return found, message


def ours(text="def f(*_):\n    return {}['of ours']\n", name="harness/trainer/made_up.py"):
    """A function whose frames are in a file of the package that was never on a list."""
    space = {}
    exec(compile(text, str(Path(PACKAGE) / name), "exec"), space)
    return space["f"]


def test_the_bundles_own_error_names_its_line(bundle):
    assert kind(bundle, bundle.divides) == ("failed", "training.py line 7: ZeroDivisionError: division by zero")


def test_what_torch_refuses_the_bundle_is_the_bundles(bundle):
    assert kind(bundle, bundle.torch_refuses)[0] == "failed"


def test_an_error_in_any_file_of_ours_is_ours(bundle):
    assert kind(bundle, bundle.calls, ours()) == ("engine", "training.py line 13: KeyError: 'of ours'")


def test_an_error_of_ours_in_a_forward_hook_is_ours(bundle):
    assert kind(bundle, bundle.hooked, ours())[0] == "engine"


def test_an_error_of_the_bundle_that_we_called_is_the_bundles(bundle):
    calls_on = ours("def f(function):\n    return function()\n")
    assert kind(bundle, calls_on, bundle.divides)[0] == "failed"


def test_a_loss_that_the_bundle_calls_wrongly_is_the_bundles_and_one_that_we_call_is_ours(bundle):
    assert kind(bundle, bundle.loss_of_wrong_shapes)[0] == "failed"
    lossy = ours("def f(*_):\n    raise ValueError('shapes')\n", "kernels/made_up.py")
    assert kind(bundle, bundle.calls, lossy)[0] == "failed"
    within = ours("def f(function):\n    return function()\n")
    assert kind(bundle, within, lossy)[0] == "engine"


def test_a_builder_given_other_arguments_than_it_takes_is_the_bundles(bundle):
    assert kind(bundle, seeded_builder(lambda ctx: None, 1))[0] == "failed"


def test_a_function_of_torchs_that_we_stand_in_for_is_still_the_bundles_call(bundle, monkeypatch):
    import torch.distributed as dist

    monkeypatch.setattr(dist, "destroy_process_group", dist.destroy_process_group)
    monkeypatch.setattr(dist.distributed_c10d, "destroy_process_group", dist.distributed_c10d.destroy_process_group)
    keep_process_groups(before=lambda: None)
    assert not dist.is_initialized()
    assert kind(bundle, bundle.calls, dist.destroy_process_group)[0] == "failed"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BundleRejected("no", rule="prism:bundle-shape"), ("prism:bundle-shape", "rejected", "no")),
        (BundleFailed("no", rule="prism:output-shape"), ("prism:output-shape", "failed", "no")),
        (EngineFault("no"), (None, "engine", "no")),
        (MemoryError(), ("prism:resource-oom", "failed", "MemoryError")),
        (torch.OutOfMemoryError("much"), ("prism:resource-oom", "failed", "OutOfMemoryError: much")),
        (SystemExit(3), ("prism:runtime-error", "failed", "the bundle called sys.exit(3)")),
    ],
)
def test_errors_that_say_whose_they_are(error, expected):
    assert explain(error, "/no/such/bundle") == expected


def test_a_fault_is_bounded_and_keeps_the_end_of_its_traceback(bundle):
    fault = fault_of(raised_by(bundle.divides), str(Path(bundle.__file__).parent), rank=1)
    assert fault.rank == 1 and fault.traceback.rstrip().endswith("ZeroDivisionError: division by zero")
