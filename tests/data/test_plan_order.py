"""The order of micro-batches equals its plain-Python reference and keeps its promises."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_fast.data.plan import BucketPlan, bucket_plan

from .reference_plan import fixed_plan, variable_plan

SEEDS = st.integers(0, 2**64 - 1)
LENGTHS = st.lists(st.one_of(st.integers(0, 6), st.integers(0, 5000), st.integers(0, 2**62)), max_size=120)


def as_lists(plan: BucketPlan) -> list[list[int]]:
    return [plan[k].tolist() for k in range(len(plan))]


def lognormal_lengths(records: int, seed: int = 3) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(7, 0.8, records)
    return np.clip(lengths, 1, 16384).astype(np.int32)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(0, 30), SEEDS)
def test_the_fixed_order_equals_the_plain_reference(lengths: list[int], m: int, extra: int, seed: int) -> None:
    plan = bucket_plan(np.array(lengths, np.int64), m, m + extra, seed)
    assert as_lists(plan) == fixed_plan(lengths, m, m + extra, seed)


@settings(deadline=None)
@given(
    LENGTHS,
    st.one_of(st.none(), st.integers(1, 6)),
    st.one_of(st.none(), st.integers(1, 300)),
    st.integers(0, 3),
    st.one_of(st.none(), st.just("width"), st.integers(1, 30)),
    SEEDS,
)
def test_the_varying_order_equals_the_plain_reference(
    lengths: list[int], max_rows: int | None, budget: int | None, overhead: int, bucket: int | str | None, seed: int
) -> None:
    if budget is None and (max_rows is None or bucket != "width"):
        budget = 300
    if budget is not None:
        lengths = [length % max(1, budget - overhead) for length in lengths]
        overhead = min(overhead, budget - 1)
    plan = bucket_plan(lengths, max_rows, bucket, seed, token_budget=budget, row_overhead=overhead)
    expected = variable_plan(
        lengths, max_rows=max_rows, token_budget=budget, row_overhead=overhead, bucket=bucket, seed=seed
    )
    assert as_lists(plan) == [micro_batch for micro_batch in expected if micro_batch]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, ">i4"])
def test_the_order_does_not_depend_on_the_integer_type_of_the_lengths(dtype: object) -> None:
    lengths = [5, 3, 9, 3, 7, 1, 8, 3, 2, 6, 4]
    plan = bucket_plan(np.array(lengths, dtype), 2, 4, 20260824)
    assert as_lists(plan) == [[8, 1], [3, 5], [0, 10], [7, 9], [4, 2], [6]]


def test_d21_golden_orders_of_the_specification() -> None:
    lengths = [5, 3, 9, 3, 7, 1, 8, 3, 2, 6, 4]
    assert bucket_plan(lengths, 2, 4, 20260824).micro_batches.tolist() == [
        [8, 1],
        [3, 5],
        [0, 10],
        [7, 9],
        [4, 2],
        [6, -1],
    ]
    assert as_lists(bucket_plan(lengths, 3, 4, 20260824)) == [[8, 1, 3], [7, 9, 0], [4, 2, 6], [5, 10]]
    assert as_lists(bucket_plan(lengths, bucket=4, seed=20260824, token_budget=16)) == [
        [8, 1, 3, 5, 7],
        [9, 0],
        [2],
        [10, 4],
        [6],
    ]
    assert as_lists(bucket_plan(lengths, 2, "width", 20260824)) == [
        [5],
        [2],
        [8],
        [9],
        [4],
        [6],
        [10],
        [0],
        [1],
        [3, 7],
    ]


def test_large_orders_equal_the_plain_reference() -> None:
    # Larger than the groups in which the shuffle draws ahead, and lengths that need two sorting passes.
    lengths = (lognormal_lengths(5_001).astype(np.int64) * 97).tolist()
    assert as_lists(bucket_plan(lengths, 2, 512, 11)) == fixed_plan(lengths, 2, 512, 11)
    assert as_lists(bucket_plan(lengths, 4, 10_000, 11)) == fixed_plan(lengths, 4, 10_000, 11)


@pytest.mark.parametrize("bucket", [2, 8, 32, 128, 512])
def test_d20_adjacent_micro_batches_are_uncorrelated_and_each_record_comes_once(bucket: int) -> None:
    lengths = lognormal_lengths(20_001)
    plan = bucket_plan(lengths, 2, bucket, 20260824)
    assert np.sort(plan.records).tolist() == list(range(20_001))
    assert len(plan) == 10_001
    assert (plan.micro_batches == -1).sum() == 1
    # A sorted order would give nearly 1; 10,000 independent pairs give 0 within 4 standard deviations.
    assert abs(plan.report()["adjacent_correlation"]) < 4 / np.sqrt(10_000)


def test_leftovers_are_paired_in_length_order_at_the_end() -> None:
    lengths = lognormal_lengths(1_000)
    plan = bucket_plan(lengths, 4, 10, 5)  # every bucket leaves 2 of 10
    tail = plan.records[800:]
    keys = [(int(lengths[record]), int(record)) for record in tail]
    assert keys == sorted(keys)
    assert len(plan) == 250
    assert (plan.micro_batches >= 0).all()


@pytest.mark.parametrize("length", [0, 1024])
def test_d23_equal_lengths_are_still_mixed(length: int) -> None:
    plan = bucket_plan(np.full(10_000, length), 2, 8, 1)
    assert np.sort(plan.records).tolist() == list(range(10_000))
    in_order = (np.diff(plan.micro_batches[:, 0]) > 0).mean()
    assert 0.45 < in_order < 0.55  # the micro-batches do not come in file order
    assert (plan.micro_batches[:, 0] > plan.micro_batches[:, 1]).mean() > 0.3  # nor do the records inside them
    report = plan.report()
    assert report["waste"] == 0
    assert report["adjacent_correlation"] == 0


def test_seeds_give_different_orders_and_the_same_seed_the_same() -> None:
    lengths = lognormal_lengths(2_000)
    orders = {bucket_plan(lengths, 2, 8, seed).digest for seed in (0, 1, 2, 2**64 - 1)}
    assert len(orders) == 4
    assert bucket_plan(lengths, 2, 8, 1).digest == bucket_plan(lengths.astype(np.int64), 2, 8, 1).digest


def test_file_order_pairs_neighbours() -> None:
    plan = bucket_plan([4, 1, 3, 9, 2], 2)
    assert plan.micro_batches.tolist() == [[0, 1], [2, 3], [4, -1]]


def test_token_budgets_hold_and_are_filled() -> None:
    lengths = lognormal_lengths(5_000)
    plan = bucket_plan(lengths, bucket=64, seed=1, token_budget=32768, row_overhead=1)
    padded = [(lengths[plan[k]].max() + 1) * len(plan[k]) for k in range(len(plan))]
    assert max(padded) <= 32768
    assert np.mean(padded) > 0.8 * 32768
    assert np.sort(plan.records).tolist() == list(range(5_000))


def test_exact_widths_have_no_padding() -> None:
    lengths = lognormal_lengths(5_000)
    plan = bucket_plan(lengths, 4, "width", 1)
    report = plan.report()
    assert report["waste"] == 0
    assert report["zero_pad_micro_batches"] == report["micro_batches"]
    assert np.sort(plan.records).tolist() == list(range(5_000))
    counts = np.bincount(lengths)
    assert len(plan) == int(-(-counts // 4).sum())


@pytest.mark.parametrize(("m", "world"), [(2, 1), (2, 3), (3, 4), (2, 700)])
def test_ranks_get_equal_steps_and_the_remainder_is_counted(m: int, world: int) -> None:
    lengths = lognormal_lengths(1_189)
    plan = bucket_plan(lengths, m, 8, 1)
    shares = [plan.for_rank(rank, world) for rank in range(world)]
    assert {share.shape for share in shares} == {(len(plan) // world, m)}
    interleaved = np.stack(shares, axis=1).reshape(-1, m)
    kept = len(plan) // world * world
    assert np.array_equal(interleaved, plan.micro_batches[:kept])
    dropped = plan.dropped(world)
    unread = plan.micro_batches[kept:]
    unread = unread[unread >= 0]
    assert dropped.micro_batches == len(plan) - kept
    assert dropped.records == len(unread)
    assert dropped.tokens == lengths[unread].sum()


def test_exact_widths_keep_empty_records_apart() -> None:
    # A row of no tokens counts as one in the budget, and still must not meet rows of one token.
    plan = bucket_plan([1, 0, 1, 0], 4, "width", 0)
    assert sorted(sorted(rows) for rows in as_lists(plan)) == [[0, 2], [1, 3]]


def test_ranks_of_a_varying_plan_get_padded_rows() -> None:
    plan = bucket_plan([5, 3, 9, 3, 7, 1, 8, 3, 2, 6, 4], bucket=4, seed=20260824, token_budget=16)
    assert plan.for_rank(0, 2).tolist() == [[8, 1, 3, 5, 7], [2, -1, -1, -1, -1]]
    assert plan.for_rank(1, 2).tolist() == [[9, 0], [10, 4]]
    assert plan.micro_batches.shape == (5, 5)


def test_a_remainder_can_be_refused() -> None:
    plan = bucket_plan(range(10), 2, 2, 0)
    assert plan.for_rank(0, 5, remainder="refuse").shape == (1, 2)
    with pytest.raises(ValueError, match="5 micro-batches do not divide over 2 ranks: 1 would be unread"):
        plan.for_rank(0, 2, remainder="refuse")


def test_a_corpus_without_records_has_an_empty_plan() -> None:
    for plan in (bucket_plan([], 2, 8, 0), bucket_plan([], 2), bucket_plan([], token_budget=8, bucket=2)):
        assert len(plan) == 0
        assert plan.report()["records"] == 0
        assert plan.for_rank(0, 2).shape[0] == 0


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "record 1 has length -3", {"lengths": [1, -3], "micro_batch": 1, "bucket": 2}),
        (ValueError, "record 1 has length -3", {"lengths": [1, -3], "micro_batch": 1}),
        (ValueError, "record 1 has length -3", {"lengths": [1, -3], "token_budget": 9}),
        (TypeError, "float64: expected integers", {"lengths": [1.0], "micro_batch": 1}),
        (TypeError, "bool: expected integers", {"lengths": [True], "micro_batch": 1}),
        (ValueError, r"shape \(1, 1\)", {"lengths": [[1]], "micro_batch": 1}),
        (ValueError, "needs micro_batch", {"lengths": [1]}),
        (ValueError, "micro_batch is 0: expected 1", {"lengths": [1], "micro_batch": 0}),
        (TypeError, "micro_batch is 2.0", {"lengths": [1], "micro_batch": 2.0}),
        (ValueError, "bucket of 2 records cannot fill", {"lengths": [1, 2], "micro_batch": 3, "bucket": 2}),
        (ValueError, "bucket 'exact'", {"lengths": [1], "micro_batch": 1, "bucket": "exact"}),
        (ValueError, "seed is -1", {"lengths": [1], "micro_batch": 1, "seed": -1}),
        (ValueError, "seed is 18446744073709551616", {"lengths": [1], "micro_batch": 1, "seed": 2**64}),
        (ValueError, "record 2 takes 10 tokens alone", {"lengths": [1, 2, 9], "token_budget": 9, "row_overhead": 1}),
        (ValueError, r"more than 2\^63 - 1", {"lengths": np.array([2**63], np.uint64), "micro_batch": 1}),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(error: type[Exception], message: str, arguments: dict) -> None:
    with pytest.raises(error, match=message):
        bucket_plan(**arguments)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_ranks_outside_the_world_are_refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        bucket_plan([1, 2], 1).for_rank(rank, world)


def test_planning_takes_at_most_sixteen_bytes_a_record() -> None:
    # Peak resident memory of a fresh process, over what it holds before the call, lengths included, less the plan.
    # VmHWM, not getrusage: ru_maxrss begins at what the parent held when it forked, which hides any growth here.
    script = """
import numpy as np
from prism_fast.data.plan import bucket_plan

def peak_bytes():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024

records = 4_000_000
lengths = np.random.default_rng(0).integers(1, 100_000, records, dtype=np.int32)
bucket_plan(lengths[:1000], 2, 8, 0)
before = peak_bytes()
plan = bucket_plan(lengths, 2, 8, 0)
print((peak_bytes() - before - plan.records.nbytes) / records)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # The index arrays are 4 bytes a record each; less than one of them would mean that nothing was measured.
    assert 4 <= float(out.stdout) <= 16
