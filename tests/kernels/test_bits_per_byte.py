from __future__ import annotations

import math

import pytest
import torch

from prism_fast import BitsPerByte
from prism_fast.kernels import batch_code_length

TOKEN_BYTES = torch.tensor([1, 3, 2, 0, 5])


def by_hand(nll, target, fault_nats):
    """The definition, in plain Python."""
    nats = special = 0.0
    counted = [0, 0, 0, 0]
    for losses, ids in zip(nll.tolist(), target.tolist(), strict=True):
        row_nats = row_special = 0.0
        for loss, token in zip(losses, ids, strict=True):
            if token == -100:
                continue
            if not 0 <= token < len(TOKEN_BYTES):
                counted[3] += 1
                continue
            if not math.isfinite(loss):
                loss, counted[3] = fault_nats, counted[3] + 1
            if TOKEN_BYTES[token] > 0:
                row_nats += loss
                counted[0] += int(TOKEN_BYTES[token])
                counted[1] += 1
            else:
                row_special += loss
                counted[2] += 1
        nats += row_nats
        special += row_special
    return [nats, special, *map(float, counted)]


def a_batch():
    torch.manual_seed(0)
    nll = torch.rand(5, 37) * 12
    target = torch.randint(0, 5, (5, 37))
    target[:, -4:] = -100
    target[2, 3] = 99
    nll[0, 0], nll[1, 5], nll[3, -1] = torch.nan, torch.inf, torch.nan
    return nll, target


def test_sums_are_the_definition_bit_for_bit(backend):
    nll, target = a_batch()
    assert batch_code_length(nll, target, TOKEN_BYTES, 7.5).tolist() == by_hand(nll, target, 7.5)
    assert batch_code_length(nll, target.int(), TOKEN_BYTES, 7.5).tolist() == by_hand(nll, target, 7.5)


def test_meter_is_bits_over_bytes_by_segment(backend):
    nll, target = a_batch()
    meter = BitsPerByte(TOKEN_BYTES)
    meter.update(nll, target, segment="law")
    meter.update(nll[:2], target[:2])
    whole, part = by_hand(nll, target, 2 * math.log(5)), by_hand(nll[:2], target[:2], 2 * math.log(5))
    total = meter.compute()
    assert (total.bytes, total.tokens) == (whole[2] + part[2], whole[3] + part[3])
    assert total.bpb == pytest.approx((whole[0] + part[0]) / math.log(2) / total.bytes, rel=1e-15)
    assert total.segments["law"].nats == whole[0]
    assert total.segments["law"].faults == 3


def test_state_and_merge_carry_every_total():
    nll, target = a_batch()
    meter, other = BitsPerByte(TOKEN_BYTES), BitsPerByte(TOKEN_BYTES)
    meter.update(nll, target, segment="law")
    other.load_state_dict(meter.state_dict())
    assert other.compute() == meter.compute()
    other.merge(meter)
    assert other.compute().bytes == 2 * meter.compute().bytes
    assert other.compute().segments["law"].tokens == 2 * meter.compute().segments["law"].tokens


def test_nothing_scored_is_nan():
    assert math.isnan(BitsPerByte(TOKEN_BYTES).compute().bpb)
