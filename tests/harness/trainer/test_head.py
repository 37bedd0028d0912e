"""`--head fused`: the head's input in place of the logits where that is the same, the plain forward where it is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from prism_fast.harness.referee.head_choice import HeadChoice
from prism_fast.harness.trainer.head_capture import UnmadeLogits, first_output, forward_to_head, is_compiled
from prism_fast.harness.trainer.predictor import InProcessPredictor
from prism_fast.kernels import token_nll
from tests.harness.conftest import TINY_ARCHITECTURE

VOCAB, WIDTH = 300, 16
HEADS = {
    "linear": lambda m, x: m.head(x),
    "tied": lambda m, x: F.linear(x, m.embedding.weight),
    "tied, by @": lambda m, x: x @ m.embedding.weight.T,
    "matmul": lambda m, x: torch.matmul(x, m.head.weight.t()),
}
UNCHANGED = {
    "as it is": lambda y: y,
    "in a tuple": lambda y: (y, None),
    "to the dtype it has": lambda y: y.float(),
}


def masked(y):
    y[..., 7:] = -1e9
    return y


def scaled_through_a_view(y):
    y.view(-1).mul_(3.0)
    return y


CHANGED = {
    "capped": lambda y: 15.0 * torch.tanh(y / 15.0),
    "scaled": lambda y: y * 0.5,
    "scaled in place": lambda y: y.mul_(0.5),
    "through a view": scaled_through_a_view,
    "masked": masked,
    "sliced": lambda y: y[..., : VOCAB - 8],
    "rolled": lambda y: y.roll(1, 1),
    "another dtype": lambda y: y.double(),
    "log_softmax": lambda y: y.log_softmax(-1),
    "through numpy": lambda y: torch.from_numpy(y.numpy().copy()),
    "through a list": lambda y: torch.tensor(y.tolist()),
    "written out": lambda y: torch.empty(y.shape).copy_(y),
}


class Model(nn.Module):
    def __init__(self, head=HEADS["linear"], after=UNCHANGED["as it is"]):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.make, self.after = head, after

    def forward(self, tokens):
        return self.after(self.make(self, torch.tanh(self.mix(self.embedding(tokens)))))


@pytest.fixture
def tokens():
    return torch.randint(0, VOCAB - 8, (3, 5), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("after", UNCHANGED)
@pytest.mark.parametrize("head", HEADS)
def test_an_unchanged_head_is_scored_from_its_input(tokens, head, after):
    model = Model(HEADS[head], UNCHANGED[after])
    with torch.no_grad():
        plain = token_nll(first_output(model(tokens)), tokens)
        output, found, _ = forward_to_head(model, tokens, VOCAB)
        assert output is None and found.hidden.shape == (3, 5, WIDTH)
        fused = token_nll(found.hidden, tokens, weight=found.weight, bias=found.bias)
    torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("after", CHANGED)
@pytest.mark.parametrize("head", HEADS)
def test_whatever_is_done_to_the_logits_is_done_to_the_plain_ones(tokens, head, after):
    model = Model(HEADS[head], CHANGED[after])
    with torch.no_grad():
        plain = model(tokens)
        output, found, _ = forward_to_head(model, tokens, VOCAB)
    assert found is None and type(output) is torch.Tensor and torch.equal(output, plain)


def hidden_is_overwritten(model, x):
    y = model.head(x)
    x.zero_()
    return y


def weight_is_overwritten(model, x):
    y = model.head(x)
    with torch.no_grad():
        model.head.weight.add_(0.0)
    return y


@pytest.mark.parametrize("head", [hidden_is_overwritten, weight_is_overwritten])
def test_a_recipe_that_is_written_to_is_not_used(tokens, head):
    model = Model(head)
    with torch.no_grad():
        plain = model(tokens)
        output, found, why = forward_to_head(model, tokens, VOCAB)
    assert found is None and why == "failed" and torch.equal(output, plain)


def test_autocast_reaches_a_head_that_is_left_out(tokens):
    model = Model()
    capped = Model(after=CHANGED["capped"])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        plain = model(tokens)
        _, found, _ = forward_to_head(model, tokens, VOCAB)
        output, _, _ = forward_to_head(capped, tokens, VOCAB)
        assert torch.equal(output, capped(tokens))
    assert plain.dtype == found.hidden.dtype == found.weight.dtype == torch.bfloat16
    fused = token_nll(found.hidden, tokens, weight=found.weight, bias=found.bias)
    torch.testing.assert_close(fused, token_nll(plain, tokens), rtol=1e-2, atol=1e-2)


def test_a_head_inside_a_gradient_or_of_another_width_is_left_alone(tokens):
    model = Model(after=lambda y: y)
    output, found, _ = forward_to_head(model, tokens, VOCAB)  # no torch.no_grad() around it
    assert found is None and output.requires_grad
    with torch.no_grad():
        output, found, _ = forward_to_head(model, tokens, VOCAB + 1)
    assert found is None and type(output) is torch.Tensor


def test_unmade_logits_have_a_shape_and_no_numbers(tokens):
    seen = []
    model = Model(
        after=lambda y: seen.append((type(y), y.shape, y.dtype, y.device.type, isinstance(y, torch.Tensor))) or y
    )
    with torch.no_grad():
        forward_to_head(model, tokens, VOCAB)
    assert seen == [(UnmadeLogits, (3, 5, VOCAB), torch.float32, "cpu", True)]


def predictor(model, asked="fused"):
    choice = HeadChoice(asked)
    table = torch.ones(VOCAB - 8, dtype=torch.int32)
    return InProcessPredictor(model, table, cap=10**6, stage="explore", head=choice), choice


def test_the_first_batch_is_predicted_both_ways_and_agrees(tokens):
    plain, _ = predictor(Model(), "plain")
    fused, choice = predictor(Model())
    one, other = plain.predict(tokens, tokens).sums, fused.predict(tokens, tokens).sums
    assert choice.fused and choice.audits == 1 + len(tokens)  # random text, then each row
    assert choice.disagreement < 1e-6
    assert other[0].item() == pytest.approx(one[0].item(), rel=1e-6) and torch.equal(one[1:], other[1:])


@pytest.mark.parametrize("after", ["capped", "through numpy"])
def test_a_run_whose_head_cannot_be_left_out_has_the_plain_bits(tokens, after):
    plain, _ = predictor(Model(after=CHANGED[after]), "plain")
    fused, choice = predictor(Model(after=CHANGED[after]))
    assert torch.equal(plain.predict(tokens, tokens).sums, fused.predict(tokens, tokens).sums)
    assert not choice.fused and choice.reason and choice.document()["used"] == "plain"


def test_a_compiled_model_is_scored_plainly(tokens):
    model = torch.compile(Model(), backend="eager")
    fused, choice = predictor(model)
    assert is_compiled(model) and not choice.fused and "compiled" in choice.reason
    torch.testing.assert_close(
        fused.predict(tokens, tokens).sums, predictor(Model(), "plain")[0].predict(tokens, tokens).sums
    )


def test_a_compiled_part_of_a_model_changes_nothing(tokens):
    model = Model()
    model.after = torch.compile(lambda y: 15.0 * torch.tanh(y / 15.0), backend="eager")
    fused, choice = predictor(model)
    plain, _ = predictor(Model(after=CHANGED["capped"]), "plain")
    torch.testing.assert_close(fused.predict(tokens, tokens).sums, plain.predict(tokens, tokens).sums)
    assert not choice.fused


def test_predicting_leaves_no_trace_in_the_random_state(tokens):
    fused, _ = predictor(Model())
    torch.manual_seed(5)
    before = torch.get_rng_state()
    fused.predict(tokens, tokens)
    assert torch.equal(before, torch.get_rng_state())


def test_disagreement_ends_fusion_and_says_where():
    choice = HeadChoice("fused")
    nats = torch.tensor([1.0, 2.0])
    choice.compare("batch 3", nats, nats + 1e-7)
    assert choice.fused
    choice.compare("batch 4", nats, nats * 1.001)
    assert not choice.fused and choice.reason.startswith("batch 4 costs 3.000000 nats")
    other = HeadChoice("fused")
    other.compare("batch 0", torch.tensor([1.0, float("nan")]), nats)
    assert not other.fused and other.document()["disagreement"] is None


def test_audits_are_all_rows_at_first_and_few_later():
    choice = HeadChoice("fused")
    assert list(choice.rows_to_audit(0, 4)) == [0, 1, 2, 3]
    audited = [row for index in range(1, 3201) for row in choice.rows_to_audit(index, 4)]
    assert 50 < len(audited) < 170 and set(audited) == {0, 1, 2, 3}
    assert not HeadChoice("plain").rows_to_audit(0, 4)


# ------------------------------------------------------------------------------------------------------- whole runs

CAPPED = TINY_ARCHITECTURE.replace("return self.head(", "return 9.0 * torch.tanh(1 / 9.0 * self.head(").replace(
    "steps)))\n", "steps))))\n"
)
assert CAPPED.count("tanh") == 2


def nats(run):
    assert run.code == 0, run.stderr
    return run.manifest().metrics.sum_neg_log_likelihood_nats


def test_a_sealed_run_is_scored_and_probed_from_the_heads_input(score):
    run = score(options=("--seal=sealed", "--head=fused"))
    assert run.code == 0, run.stderr
    manifest = run.manifest()
    head = manifest.engine.head
    assert (head.asked, head.used, head.heldout, head.reason) == ("fused", "fused", "fused", None)
    assert head.audits > 5 and head.disagreement < 1e-6
    assert manifest.engine.probes > 0 and manifest.score.flags == []


@pytest.mark.long
def test_sealed_and_open_score_from_the_heads_input_what_plain_scores(score):
    sealed = score(options=("--seal=sealed", "--head=fused"), out="sealed")
    opened = score(options=("--head=fused",), out="open")
    plain = score(out="plain")
    assert nats(sealed) == pytest.approx(nats(plain), rel=1e-6)
    assert nats(opened) == pytest.approx(nats(plain), rel=1e-6)
    for run in (sealed, opened):
        head = run.manifest().engine.head
        assert (head.asked, head.used, head.heldout, head.reason) == ("fused", "fused", "fused", None)
        assert head.audits > 5 and head.disagreement < 1e-6
        assert run.manifest().score.val_bpb_trained == pytest.approx(plain.manifest().score.val_bpb_trained, rel=1e-6)
        assert run.manifest().score.val_bpb_random_init == plain.manifest().score.val_bpb_random_init
    assert sealed.manifest().engine.probes > 0 and sealed.manifest().score.flags == []
    assert plain.manifest().engine.head.asked == "plain"


@pytest.mark.long
def test_a_capped_head_has_the_plain_bits_and_the_reason(score):
    fused = score(CAPPED, options=("--seal=sealed", "--head=fused"), out="fused")
    plain = score(CAPPED, out="plain")
    assert nats(fused) == nats(plain)
    assert fused.manifest().score.final_score == plain.manifest().score.final_score
    head = fused.manifest().engine.head
    assert (head.used, head.heldout) == ("plain", "plain") and "not one linear head" in head.reason


def test_combinations_that_mean_nothing_are_refused(score):
    for options in (("--capture=fused",), ("--accounting=prism-v2",)):
        run = score(options=("--head=fused", *options), out="refused")
        assert run.code == 2 and "--head fused" in run.stderr
