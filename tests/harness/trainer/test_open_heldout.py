"""Open mode's held-out figures come from a model that was never trained, given the saved state by name."""

import numpy as np
import pytest
import torch
from torch import nn

from prism_fast.harness.trainer.full_state import FullState
from prism_fast.harness.trainer.open_heldout import FreshModel, Marker, as_before_training
from prism_fast.protocol.errors import BundleFailed, BundleRejected
from prism_fast.protocol.run_spec import RunSpec

V = 30


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, V, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(self.dropout(self.norm(x.flatten(0, 1)).view_as(x)))


def spec(**other) -> RunSpec:
    values = {
        "engine_version": "0", "bundle_digest": "0", "seal": "open", "isolation": "none", "tokenizer": "gpt2",
        "tokenizer_fingerprint": "0", "corpus_fingerprint": "0", "val_corpus_fingerprint": None, "vocab_size": V,
        "torch_threads": 1,
    }  # fmt: skip
    return RunSpec(**{**values, **other})


def fresh(build=Model, **other) -> FreshModel:
    return FreshModel(spec(**other), build, torch.device("cpu"))


def state_of(model) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in FullState(model).tensors()}


def test_a_row_costs_what_the_eval_forward_says():
    model = fresh()
    tokens = np.random.default_rng(0).integers(0, V, (3, 6))
    targets = np.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    with torch.autocast("cpu", dtype=torch.bfloat16):  # what encloses the measurement does not reach it
        marks = Marker(model, V).mark(tokens, targets)
    logits = Model().eval()(torch.from_numpy(tokens)).double()
    nll = -torch.log_softmax(logits[:, :-1], -1).gather(-1, torch.from_numpy(tokens)[:, 1:, None])[..., 0]
    assert marks.nats == pytest.approx(nll.sum(1).detach().numpy(), rel=1e-6)
    assert (marks.tokens, marks.faults, marks.head_width) == (15, 0, V)


def test_the_saved_state_is_taken_over_with_its_dtypes_and_ties():
    trained = Model().bfloat16()
    with torch.no_grad():
        trained.embedding.weight.add_(1)
        trained.norm.running_mean.add_(2)
    model = fresh()
    model.load(state_of(trained))
    assert model.model.embedding.weight is model.model.head.weight
    assert model.model.embedding.weight.dtype == torch.bfloat16
    for name, tensor in trained.state_dict().items():
        assert torch.equal(model.model.state_dict()[name], tensor), name


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_build_model_may_return_a_wrapped_model(wrap):
    model = fresh(lambda: wrap(Model()))
    model.load(state_of(Model()))


def test_a_state_that_is_not_the_declared_ones_is_rejected():
    with pytest.raises(BundleRejected, match=r"is missing norm\.bias, norm\.num_batches_tracked") as caught:
        state = state_of(Model())
        fresh().load({name: tensor for name, tensor in state.items() if not name.startswith("norm")})
    assert caught.value.rule == "prism:model-mismatch"


@pytest.mark.parametrize(
    ("build", "words", "other"),
    [(dict, "returned a dict", {}), (Model, "PRISM_RUNNER_PARAM_CAP", {"max_parameters": 100})],
)
def test_what_is_no_model_or_over_the_cap_is_rejected(build, words, other):
    with pytest.raises(BundleRejected, match=words):
        fresh(build, **other)


def test_a_forward_that_fails_is_the_bundles_failure():
    with pytest.raises(BundleFailed, match=r"the model's forward failed on tokens of shape \[1, 2\]: IndexError"):
        Marker(fresh(), V).mark(np.full((1, 2), V), np.zeros((1, 2), np.int64))


def test_what_training_set_for_the_whole_process_is_undone():
    threads = torch.get_num_threads()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(threads + 1)
        with torch.no_grad(), as_before_training(spec(torch_threads=threads), torch.float32):
            assert torch.get_default_dtype() == torch.float32 and torch.get_num_threads() == threads
            assert torch.is_grad_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode("default")
