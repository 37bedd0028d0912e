"""From logits to sums: what a batch and a held-out row cost, and who is charged for what is no number."""

import math

import numpy as np
import pytest
import torch

from prism_fast.harness.marking.heldout import choose_widths, micro_batches
from prism_fast.harness.marking.sums import batch_sums, fault_nats, logits_of, nll_of, row_marks
from prism_fast.protocol.errors import BundleFailed, BundleRejected

VOCAB = 11


def drawn(rows: int = 3, width: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, VOCAB, (rows, width), generator=generator)
    targets[0, 2] = -100
    return torch.randn(rows, width, VOCAB, generator=generator), targets


def test_a_batch_and_its_rows_cost_what_the_definition_says():
    logits, targets = drawn()
    expected = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none")
    expected = expected.view(targets.shape)
    sizes = torch.arange(VOCAB, dtype=torch.int32)  # token 0 is special: of no bytes
    sums = batch_sums(nll_of(logits, targets), targets, sizes, VOCAB)
    special = targets == 0
    assert float(sums[0]) == pytest.approx(float(expected[~special].sum()), rel=1e-6)
    assert float(sums[1]) == pytest.approx(float(expected[special].sum()), rel=1e-6)
    scored = targets[(targets > 0)]
    assert sums[2:].tolist() == [float(scored.sum()), scored.numel(), float(special.sum()), 0.0]
    marks = row_marks(nll_of(logits, targets), targets.numpy(), VOCAB)
    assert marks.nats == pytest.approx(expected.sum(1).numpy(), rel=1e-6)
    assert (marks.tokens, marks.faults, marks.head_width) == (20, 0, VOCAB)


def test_a_loss_that_is_no_number_is_charged_twice_the_uniform_code():
    logits, targets = drawn()
    logits[1, 3] = math.nan
    logits[0, 2] = math.nan  # nothing is asked there
    marks = row_marks(nll_of(logits, targets), targets.numpy(), VOCAB)
    rest = np.delete(nll_of(logits, targets)[1].numpy().astype(np.float64), 3).sum()
    assert marks.faults == 1 and fault_nats(VOCAB) == 2 * math.log(VOCAB)
    assert marks.nats[1] == pytest.approx(rest + 2 * math.log(VOCAB))


@pytest.mark.parametrize("output", [7, torch.zeros(3, 7), torch.zeros(3, 6, VOCAB), torch.zeros(3, 7, VOCAB).long()])
def test_what_is_no_logits_is_refused(output):
    with pytest.raises(BundleFailed, match="expected float logits"):
        logits_of(output, 3, 7, VOCAB)


def test_a_head_narrower_than_the_vocabulary_is_rejected():
    with pytest.raises(BundleRejected, match="10 wide"):
        logits_of(torch.zeros(3, 7, VOCAB - 1), 3, 7, VOCAB)


def test_held_out_rows_are_padded_to_few_widths_and_each_is_marked_once():
    lengths = np.array([64] * 10 + [9] * 200 + [30] * 5)
    widths = choose_widths(lengths, 64)
    assert widths == tuple(sorted(widths)) and widths[-1] == 64 and widths[0] < 64
    rows = np.stack([np.arange(len(lengths)), np.zeros(len(lengths), int), lengths - 1], axis=1)
    seen = np.concatenate([numbers for _, numbers in micro_batches(rows, widths)])
    assert sorted(seen.tolist()) == list(range(len(lengths)))
    assert choose_widths(np.full(50, 64), 64) == (64,)
