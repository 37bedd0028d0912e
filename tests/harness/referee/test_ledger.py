"""The ledger: order, sums, constant memory, and a refusal of what does not belong."""

import hashlib
import math

import numpy as np
import pytest

from prism_fast.harness.referee.ledger import LEDGER_RECORD, Ledger
from prism_fast.harness.trainer.instrument import OBSERVATION_RECORD
from prism_fast.protocol import constants as c
from prism_fast.protocol import ledger as layout
from prism_fast.protocol.errors import DataError, EngineFault

GENESIS = hashlib.sha256(b"genesis").digest()


def record(index, rank=0, nats=1.0, n_bytes=10, scored=4, faults=0):
    return LEDGER_RECORD.pack(index, nats, 0.5, n_bytes, scored, 1, 8, faults, 1, rank, 2)


def bound(directory, world_size) -> Ledger:
    ledger = Ledger(directory, world_size)
    ledger.bind(GENESIS)
    return ledger


def test_the_packed_records_are_the_documented_dtypes():
    row = np.frombuffer(record(7, rank=3, nats=2.5, n_bytes=11, scored=5, faults=6), layout.LEDGER_DTYPE)[0]
    assert (row["index"], row["rank"], row["nats"], row["bytes"], row["scored_tokens"], row["faults"]) == (
        7,
        3,
        2.5,
        11,
        5,
        6,
    )
    assert (row["special_nats"], row["special_tokens"], row["positions"], row["documents"], row["rows"]) == (
        0.5,
        1,
        8,
        1,
        2,
    )
    seen = np.frombuffer(OBSERVATION_RECORD.pack(9, 1.5, 1, 2, 3, 4, 5, 6, 2, 0), layout.OBSERVATIONS_DTYPE)[0]
    assert seen.tolist() == (9, 1.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 2, 0)


def test_sums_have_the_same_bits_whichever_rank_reports_first(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.normal(1000, 300, size=(50, 4))
    totals = []
    for trial in range(3):
        directory = tmp_path / str(trial)
        directory.mkdir()
        ledger = bound(directory, 4)
        arrivals = [(i, r) for r in range(4) for i in range(50)]
        if trial:
            # any interleaving that keeps each rank's own order
            keys = {r: sorted(np.random.default_rng(trial * 10 + r).random(50)) for r in range(4)}
            arrivals.sort(key=lambda a, keys=keys: keys[a[1]][a[0]])
        for i, r in arrivals:
            ledger.add(r, record(i, r, nats=float(values[i, r])))
        ledger.close()
        totals.append((ledger.nats, ledger.bytes, ledger.batches, (directory / c.LEDGER_FILE).read_bytes()))
    assert totals[0] == totals[1] == totals[2]
    expected = 0.0
    for i in range(50):
        for r in range(4):
            expected += float(values[i, r])
    assert totals[0][0] == expected


def test_ledger_file_holds_every_record_in_order(tmp_path):
    ledger = bound(tmp_path, 2)
    for i in range(3000):
        for r in (1, 0):
            ledger.add(r, record(i, r, nats=float(i)))
    ledger.close()
    records = layout.read_records(tmp_path / c.LEDGER_FILE, layout.LEDGER_MAGIC, layout.LEDGER_DTYPE)
    assert records["index"].tolist() == [i for i in range(3000) for _ in (0, 1)]
    assert records["rank"].tolist() == [0, 1] * 3000


@pytest.mark.parametrize("body", [record(1), record(0, rank=1), b"short", record(0) + b"x"])
def test_a_record_out_of_turn_is_refused(tmp_path, body):
    ledger = bound(tmp_path, 1)
    with pytest.raises(EngineFault):
        ledger.add(0, body)


def test_a_repeated_record_is_refused(tmp_path):
    ledger = bound(tmp_path, 1)
    ledger.add(0, record(0))
    with pytest.raises(EngineFault, match="batch 0"):
        ledger.add(0, record(0))


def test_step0_loss_is_the_first_batch_over_all_ranks(tmp_path):
    ledger = bound(tmp_path, 2)
    assert math.isnan(ledger.step0_loss)
    ledger.add(0, record(0, 0, nats=30.0, scored=10))
    ledger.add(1, record(0, 1, nats=10.0, scored=6))
    ledger.add(0, record(1, 0, nats=1.0))
    assert ledger.step0_loss == 40.0 / 16
    assert ledger.incomplete_indices == 1


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:10], lambda b: b"X" + b[1:]])
def test_a_damaged_record_file_is_named(tmp_path, damage):
    ledger = bound(tmp_path, 1)
    ledger.add(0, record(0))
    ledger.close()
    path = tmp_path / c.LEDGER_FILE
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"ledger\.bin"):
        layout.read_records(path, layout.LEDGER_MAGIC, layout.LEDGER_DTYPE)


def test_no_record_is_taken_before_the_ledger_is_bound_and_it_is_bound_once(tmp_path):
    ledger = Ledger(tmp_path, 1)
    with pytest.raises(EngineFault, match="bound"):
        ledger.add(0, record(0))
    ledger.bind(GENESIS)
    with pytest.raises(EngineFault, match="twice"):
        ledger.bind(GENESIS)


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 3000])
def test_the_chain_is_that_of_genesis_records_and_receipt_whatever_was_flushed_when(tmp_path, count):
    ledger = bound(tmp_path, 1)
    for index in range(count):
        ledger.add(0, record(index))
        if index % 700 == 0:
            ledger.flush()
    ledger.close()
    ledger.seal(b"r" * 32)
    assert layout.genesis_of(tmp_path / c.LEDGER_FILE) == GENESIS
    links = layout.chain_of(tmp_path / c.LEDGER_FILE, GENESIS)
    assert len(links) == 1 + -(-count // layout.CHAIN_RECORDS)
    links.append(hashlib.sha256(links[-1] + b"r" * 32).digest())
    assert (tmp_path / c.LEDGER_CHAIN_FILE).read_bytes() == b"".join(links) and ledger.chain == links[-1]
