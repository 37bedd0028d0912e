"""Predicting leaves no trace on the miner's model."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from prism_fast.harness.trainer.predictor import (
    EvalMode,
    InProcessPredictor,
    check_parameter_cap,
    parameter_count,
)
from prism_fast.protocol.errors import BundleFailed, BundleRejected

V = 50


class Model(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, V)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return self.head(self.dropout(x))


def tokens_and_targets():
    tokens = torch.randint(0, V, (3, 7), generator=torch.Generator().manual_seed(1))
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    return tokens, targets


def predictor(model, cap=10**9):
    token_bytes = torch.arange(V, dtype=torch.int32) % 4  # ids 0, 4, 8 ... are special
    return InProcessPredictor(model, token_bytes, cap=cap, stage="explore"), token_bytes


def test_sums_are_those_of_a_plain_float64_loss():
    model = Model().eval()
    tokens, targets = tokens_and_targets()
    p, token_bytes = predictor(model)
    nats, special, n_bytes, scored, specials, faults = p.predict(tokens, targets).sums.tolist()
    logits = model(tokens).double()
    losses = -torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])[..., 0]
    sizes = token_bytes[tokens[:, 1:]]
    assert nats == pytest.approx(losses[sizes > 0].sum().item(), rel=1e-6)
    assert special == pytest.approx(losses[sizes == 0].sum().item(), rel=1e-6)
    assert (n_bytes, scored, specials, faults) == (sizes.sum(), (sizes > 0).sum(), (sizes == 0).sum(), 0)


def test_dropout_and_batch_statistics_do_not_reach_the_prediction():
    tokens, targets = tokens_and_targets()
    plain, dropped = Model(0.0).train(), Model(0.3).train()
    before = {k: v.clone() for k, v in dropped.state_dict().items()}
    first = predictor(dropped)[0].predict(tokens, targets).sums
    assert torch.equal(first, predictor(plain)[0].predict(tokens, targets).sums)
    assert all(torch.equal(before[k], v) for k, v in dropped.state_dict().items())


def test_prediction_restores_random_state_flags_and_gradients():
    model = Model(0.5).train()
    model.norm.eval()  # a miner may freeze a part
    flags = {name: m.training for name, m in model.named_modules()}
    tokens, targets = tokens_and_targets()
    state = torch.get_rng_state()
    predictor(model)[0].predict(tokens, targets)
    assert torch.equal(torch.get_rng_state(), state)
    assert flags == {name: m.training for name, m in model.named_modules()}
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_a_model_that_draws_in_eval_mode_draws_nothing_from_the_miner():
    class Noisy(Model):
        def forward(self, tokens):
            return super().forward(tokens) + torch.randn(V)

    tokens, targets = tokens_and_targets()
    p, _ = predictor(Noisy())
    state = torch.get_rng_state()
    first = p.predict(tokens, targets).sums
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, p.predict(tokens, targets).sums)


def test_under_autocast_the_training_forward_keeps_its_gradient():
    model = Model().train()
    tokens, targets = tokens_and_targets()
    p, _ = predictor(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p.predict(tokens, targets)
        model(tokens).float().sum().backward()
    assert model.head.weight.grad is not None and model.head.weight.grad.abs().sum() > 0


def test_an_edited_batch_does_not_edit_its_targets():
    class Zeroing(Model):
        def forward(self, tokens):
            logits = super().forward(tokens)
            tokens.zero_()
            return logits

    tokens, targets = tokens_and_targets()
    honest = predictor(Model())[0].predict(tokens.clone(), targets).sums
    assert torch.equal(honest, predictor(Zeroing())[0].predict(tokens.clone(), targets).sums)


def test_a_row_that_is_not_finite_is_charged_twice_the_uniform_code():
    class Broken(Model):
        def forward(self, tokens):
            logits = super().forward(tokens).clone()
            logits[1, 2] = math.nan
            return logits

    tokens, targets = tokens_and_targets()
    tokens[1, 3] = targets[1, 2] = 5  # a scored target
    honest = predictor(Model())[0].predict(tokens, targets).sums
    broken = predictor(Broken())[0].predict(tokens, targets).sums
    logits = Model().eval()(tokens).double()
    lost = -torch.log_softmax(logits[1, 2], -1)[5].item()
    assert broken[5] == 1
    assert broken[0].item() == pytest.approx(honest[0].item() - lost + 2 * math.log(V), rel=1e-6)


class HostReads(TorchDispatchMode):
    """Counts the operations by which a device's value reaches Python."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


def test_a_prediction_reads_no_device_value():
    model = Model()
    tokens, targets = tokens_and_targets()
    p, _ = predictor(model)
    p.predict(tokens, targets)
    with HostReads() as seen:
        p.predict(tokens, targets)
    assert seen.reads == 0
    with HostReads() as seen:
        torch.ones(1).item()
    assert seen.reads == 1


def test_tied_parameters_count_once_and_the_cap_binds():
    model = Model()
    tied = nn.ModuleList([model.head, nn.Linear(16, V)])
    tied[1].weight = model.head.weight
    assert parameter_count(tied) == 16 * V + 2 * V
    with pytest.raises(BundleRejected, match="PRISM_RUNNER_PARAM_CAP") as caught:
        check_parameter_cap(model, 100, "explore")
    assert caught.value.rule == "prism:param-cap"


def test_lazy_parameters_are_counted_once_they_exist():
    model = nn.Sequential(nn.Embedding(V, 8), nn.LazyLinear(V))
    p, _ = predictor(model, cap=8 * V + 100)
    tokens, targets = tokens_and_targets()
    with pytest.raises(BundleRejected, match="parameters"):
        p.predict(tokens, targets)


def test_a_head_that_changes_its_width_is_an_error():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.width = V

        def forward(self, tokens):
            self.width += 1
            return torch.zeros(*tokens.shape, self.width)

    p, _ = predictor(Growing())
    tokens, targets = tokens_and_targets()
    p.predict(tokens, targets)
    with pytest.raises(BundleFailed, match="were 51 wide and are now 52"):
        p.predict(tokens, targets)


def test_eval_mode_calls_an_overridden_train():
    calls = []

    class Merging(Model):
        def train(self, mode=True):
            calls.append(mode)
            return super().train(mode)

    model = Merging().train()
    calls.clear()
    EvalMode(model)(tokens_and_targets()[0])
    assert calls == [False, True]
