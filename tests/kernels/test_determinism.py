"""Same input, same bits: whatever the threads, the neighbours, the layout or the instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from prism_fast import cross_entropy, linear_cross_entropy, token_nll


def everything(logits, target):
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf, target, label_smoothing=0.1, z_loss=1e-3)
    loss.backward()
    scores = token_nll(logits, target, with_lse=True, with_correct=True, with_entropy=True)
    return loss.detach(), leaf.grad, *scores[:4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_do_not_depend_on_threads(fused, dtype):
    logits, target = torch.randn(37, 20011).to(dtype), torch.randint(0, 20011, (37,))
    one = everything(logits, target)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(one, everything(logits, target), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_do_not_depend_on_neighbours_layout_or_address(fused, dtype):
    logits, target = torch.randn(9, 5003).to(dtype), torch.randint(0, 5003, (9,))
    together = token_nll(logits, target)
    alone = torch.cat([token_nll(logits[i : i + 1], target[i : i + 1]) for i in range(9)])
    shifted = torch.zeros(9 * 5003 + 1, dtype=dtype)
    shifted[1:] = logits.view(-1)
    strided = torch.zeros(9, 2 * 5003, dtype=dtype)
    strided[:, ::2] = logits
    assert torch.equal(together, alone)
    assert torch.equal(together, token_nll(shifted[1:].view(9, 5003), target))
    assert torch.equal(together, token_nll(strided[:, ::2], target))
    assert torch.equal(together, token_nll(logits.T.contiguous().T, target))


def test_bits_of_narrow_logits_are_those_of_the_same_numbers_in_order(fused):
    logits, target = torch.randn(9, 5003).half(), torch.randint(0, 5003, (9,))
    assert torch.equal(token_nll(logits, target), token_nll(logits.float(), target))


def test_a_row_of_hidden_states_moves_little_with_its_neighbours(fused):
    hidden, head, target = torch.randn(130, 64), torch.randn(3000, 64), torch.randint(0, 3000, (130,))
    together = token_nll(hidden, target, weight=head)
    alone = torch.cat([token_nll(hidden[i : i + 1], target[i : i + 1], weight=head) for i in range(130)])
    torch.testing.assert_close(together, alone, rtol=2e-6, atol=2e-5)
    assert torch.equal(together, token_nll(hidden, target, weight=head))


def test_chunks_move_the_loss_from_hidden_states_little(fused):
    hidden, head, target = torch.randn(130, 64), torch.randn(3000, 64), torch.randint(0, 3000, (130,))
    losses, grads = [], []
    for chunk in ("auto", 1, 16, 130):
        leaf = head.clone().requires_grad_()
        loss = linear_cross_entropy(hidden, leaf, target, chunk_tokens=chunk)
        loss.backward()
        losses.append(loss.detach())
        grads.append(leaf.grad)
    for loss, grad in zip(losses[1:], grads[1:], strict=True):
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(grad, grads[0], rtol=1e-4, atol=1e-7)


SCRIPT = """
import sys, torch
import test_determinism as this
from prism_fast.kernels.backends import cpp
torch.manual_seed(0)
torch.set_num_threads(1)
results = {"isa": cpp.instruction_set()}
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    logits, target = (torch.randn(7, 5003) * 3).to(dtype), torch.randint(0, 5003, (7,))
    results[str(dtype)] = this.everything(logits, target)
hidden, head, logits = torch.rand(30, 700), torch.rand(500, 700), torch.empty(30, 500)
cpp._core.few_tokens_logits(*map(cpp._matrix, (hidden, head)), 0, cpp._matrix(logits), 1)
results["few tokens"] = (logits,)
torch.save(results, sys.argv[1])
"""


def test_instruction_sets_agree(tmp_path):
    """The portable loops have no fused multiply-add, so they differ from the others in the last bits."""
    results = {}
    for isa in ("portable", "avx2", "avx512", "avx512bf16"):
        path = tmp_path / f"{isa}.pt"
        environment = {**os.environ, "PRISM_FAST_ISA": isa, "PYTHONPATH": str(Path(__file__).parent)}
        subprocess.run([sys.executable, "-c", SCRIPT, str(path)], check=True, env=environment)
        found = torch.load(path)
        results.setdefault(found.pop("isa"), found)
    base = results.pop("portable", None) or results.pop("neon")
    for isa, found in results.items():
        for dtype, values in found.items():
            for got, want in zip(values, base[dtype], strict=True):
                bound = 1e-5 if got.dtype == torch.float32 else 1e-2
                torch.testing.assert_close(got, want, rtol=bound, atol=1e-6, msg=f"{isa} {dtype}")
    wide = [found for isa, found in results.items() if isa != "portable"]
    for found in wide[1:]:
        for dtype, values in found.items():
            assert all(torch.equal(a, b) for a, b in zip(values, wide[0][dtype], strict=True))
