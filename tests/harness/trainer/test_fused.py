"""`--capture fused`: the strict score for one forward less, or no score."""

from __future__ import annotations

import pytest
import torch

from prism_fast.harness.trainer.fused_source import fingerprint
from tests.harness.conftest import TINY_ARCHITECTURE, TINY_TRAINING

FUSED = ("--capture=fused",)
LOGITS = "        logits = model(batch.tokens)\n"
assert LOGITS in TINY_TRAINING


def before_the_forward(statements: str) -> str:
    lines = "".join(f"        {line}\n" for line in statements.splitlines())
    return TINY_TRAINING.replace(LOGITS, lines + LOGITS)


TRAIN_FIRST = """\
loss = F.cross_entropy(model(batch.tokens.clone()[:, :40])[:, :-1].flatten(0, 1), batch.tokens[:, 1:40].flatten())
loss.backward()
optimizer.step()"""
DISHONEST = {
    "trains on the batch, then shows it": (TRAIN_FIRST, "weights changed between batch 0"),
    "edits weights past autograd": (
        "if batch.index == 3:\n    next(model.parameters()).data[7] += 1.0",
        "weights changed between batch 3",
    ),
    "runs the model on something else": (
        "batch = type(batch)(tokens=batch.tokens.roll(1, 1), index=batch.index)",
        "was not called on the whole of batch 0",
    ),
    "writes to the tokens": ("batch.tokens[:, 5:] = 11", "was not called on the whole of batch 0"),
    "swallows the failure": (
        "next(model.parameters()).data[7] += 1.0\ntry:\n    model(batch.tokens)\nexcept BaseException:\n    continue",
        "weights changed between batch 0",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (8,), (5, 8), (4, 16)])
def test_every_changed_element_changes_the_fingerprint(dtype, shape):
    for lay_out in (lambda t: t, lambda t: t.t() if t.dim() == 2 else t, lambda t: torch.cat([t.reshape(-1)] * 2)[1:]):
        model = torch.nn.Module()
        model.register_buffer("state", lay_out(torch.ones(shape, dtype=dtype)))
        before = fingerprint(model)
        for index in range(model.state.numel()):
            element = model.state[tuple(int(i) for i in torch.unravel_index(torch.tensor(index), model.state.shape))]
            element += 1
            assert not torch.equal(fingerprint(model), before), index
            element -= 1
        assert torch.equal(fingerprint(model), before)


@pytest.mark.long
def test_fused_is_the_strict_score_of_an_honest_bundle(score):
    strict, fused = score(out="strict"), score(out="fused", options=FUSED)
    assert strict.code == fused.code == 0, fused.stderr
    one, two = strict.manifest(), fused.manifest()
    assert (one.engine.capture, two.engine.capture) == ("strict", "fused")
    assert two.metrics.covered_bytes == one.metrics.covered_bytes
    assert two.metrics.sum_neg_log_likelihood_nats == pytest.approx(one.metrics.sum_neg_log_likelihood_nats, rel=1e-6)
    assert two.score.final_score == pytest.approx(one.score.final_score, abs=1e-6)
    assert two.score.flags == []


def assert_fails(run, words: str) -> None:
    assert run.code == 4, run.stderr
    assert run.status()["rule"] == "prism:capture" and words in run.status()["message"]


def test_weights_changed_before_the_forward_fail_the_run(score):
    statements, words = DISHONEST["edits weights past autograd"]
    assert_fails(score(training=before_the_forward(statements), options=FUSED), words)


@pytest.mark.long
@pytest.mark.parametrize("case", DISHONEST)
def test_dishonest_uses_fail_the_run(score, case):
    statements, words = DISHONEST[case]
    assert_fails(score(training=before_the_forward(statements), options=FUSED), words)


@pytest.mark.long
def test_a_model_that_trains_in_another_mode_fails_the_first_audit(score):
    dropout = TINY_ARCHITECTURE.replace(
        "return self.head(x", "return self.head(nn.functional.dropout(x, 0.2, self.training)"
    )
    assert dropout != TINY_ARCHITECTURE
    assert_fails(score(architecture=dropout, options=FUSED), "by a strict prediction")
