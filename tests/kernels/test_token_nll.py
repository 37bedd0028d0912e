from __future__ import annotations

import pytest
import reference
import torch

from prism_fast import token_nll


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equals_float64_in_one_call(backend, dtype):
    torch.manual_seed(0)
    for vocab in (1, 7, 32, 33, 509, 5000, 50257):
        logits = (torch.randn(3, 3, vocab) * 3).to(dtype)
        target = torch.randint(0, vocab, (3, 3))
        target[1, 0] = -100
        got = token_nll(logits, target, with_lse=True, with_correct=True, with_entropy=True, with_faults=True)
        rows, ids = logits.double().view(9, vocab), target.view(-1)
        kept = target != -100
        bound = 1e-12 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(got.nll.double(), reference.loss_rows(rows, ids).view(3, 3), rtol=bound, atol=bound)
        torch.testing.assert_close(got.lse[kept].double(), rows.logsumexp(1).view(3, 3)[kept], rtol=bound, atol=bound)
        log_p = rows.log_softmax(1)
        entropy = -(log_p.exp() * log_p).sum(1).view(3, 3)
        torch.testing.assert_close(got.entropy[kept].double(), entropy[kept], rtol=bound, atol=bound)
        assert torch.equal(got.correct[kept], (logits.argmax(-1) == target)[kept])
        assert got.faults.item() == 0


def test_loss_is_never_negative_and_small_losses_survive(backend):
    logits = torch.zeros(3, 100)
    logits[0, 5] = 30.0  # nll = ln(1 + 99 e^-30)
    logits[1, 5] = 200.0
    nll = token_nll(logits, torch.tensor([5, 5, 5]))
    assert nll[0].item() == pytest.approx(99 * 9.357622968840175e-14, rel=1e-5)
    assert nll[1].item() == 0.0
    assert token_nll(torch.randn(4, 1), torch.zeros(4, dtype=torch.long)).tolist() == [0.0] * 4


def test_faulty_rows_are_nan_counted_and_alone(backend):
    torch.manual_seed(0)
    logits = torch.randn(6, 300)
    target = torch.randint(0, 300, (6,))
    clean = token_nll(logits, target)
    broken, ids = logits.clone(), target.clone()
    broken[0, 17] = torch.nan
    broken[1] = -torch.inf
    ids[2] = 300
    ids[3] = -7
    ids[4], broken[4] = -100, torch.nan  # ignored: not read
    got = token_nll(broken, ids, with_faults=True)
    assert got.nll[:4].isnan().all() and got.nll[4] == 0.0 and got.nll[5] == clean[5]
    assert got.faults.tolist() == [4]
