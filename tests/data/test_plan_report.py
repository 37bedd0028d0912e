"""The report's numbers equal a plain recount of the micro-batches, and its keys are the promised ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_fast.data.plan import BucketPlan, bucket_plan, compare_buckets, fit_rows

KEYS = [
    "bucket",
    "records",
    "micro_batches",
    "real_tokens",
    "padded_tokens",
    "waste",
    "mean_width",
    "mean_square_width",
    "width_p50",
    "width_p90",
    "width_p99",
    "zero_pad_micro_batches",
    "sources_mean",
    "sources_min",
    "adjacent_correlation",
    "predicted_micro_batch_s",
    "predicted_step_s",
    "quadratic_share",
    "saved_padded_tokens",
    "saved_time",
]
COST = (6.8715e-4, 8.8509e-8)  # fitted by the authors of the field notes


def recount(plan: BucketPlan, accumulate: int, sources: list[int]) -> dict[str, object]:
    lengths = plan.lengths.tolist()
    micro = [[lengths[record] for record in plan[k]] for k in range(len(plan))]
    widths = [max(rows) for rows in micro]
    windows = [
        len({sources[record] for k in range(start, start + accumulate) for record in plan[k]})
        for start in range(0, len(plan) - len(plan) % accumulate, accumulate)
    ]
    padded = sum(len(rows) * width for rows, width in zip(micro, widths, strict=True))
    linear, quadratic = COST[0] * np.mean(widths), COST[1] * np.mean([width**2 for width in widths])
    return {
        "bucket": plan.bucket,
        "records": len(lengths),
        "micro_batches": len(micro),
        "real_tokens": sum(lengths),
        "padded_tokens": padded,
        "waste": pytest.approx(1 - sum(lengths) / padded if padded else 0.0),
        "mean_width": pytest.approx(np.mean(widths)),
        "mean_square_width": pytest.approx(np.mean([width**2 for width in widths])),
        "width_p50": sorted(widths)[len(widths) // 2],
        "width_p90": sorted(widths)[len(widths) * 9 // 10],
        "width_p99": sorted(widths)[len(widths) * 99 // 100],
        "zero_pad_micro_batches": sum(len(set(rows)) == 1 for rows in micro),
        "sources_mean": pytest.approx(np.mean(windows)) if windows else None,
        "sources_min": min(windows) if windows else None,
        "predicted_micro_batch_s": pytest.approx(linear + quadratic),
        "predicted_step_s": pytest.approx((linear + quadratic) * accumulate),
        "quadratic_share": pytest.approx(quadratic / (linear + quadratic) if linear + quadratic else 0.0),
    }


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 5)), min_size=1, max_size=100),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(4, 20)),
    st.integers(1, 6),
)
def test_the_report_equals_a_plain_recount(
    records: list[tuple[int, int]], m: int, bucket: int | None, accumulate: int
) -> None:
    lengths, sources = [list(column) for column in zip(*records, strict=True)]
    plan = bucket_plan(lengths, m, bucket, 9)
    report = plan.report(accumulate, sources, COST)
    assert list(report) == KEYS
    expected = recount(plan, accumulate, sources)
    assert {key: report[key] for key in expected} == expected
    baseline = recount(bucket_plan(lengths, m), accumulate, sources)
    assert report["saved_padded_tokens"] == pytest.approx(
        1 - report["padded_tokens"] / baseline["padded_tokens"] if baseline["padded_tokens"] else 0.0
    )


def test_adjacent_correlation_is_pearsons_of_neighbouring_widths() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 501)
    plan = bucket_plan(lengths, 1)
    expected = np.corrcoef(lengths[:-1], lengths[1:])[0, 1]
    assert plan.report()["adjacent_correlation"] == pytest.approx(expected)
    assert bucket_plan(np.arange(100), 1).report()["adjacent_correlation"] == pytest.approx(1)


def test_without_cost_and_sources_their_keys_are_null() -> None:
    report = bucket_plan([3, 1, 2], 2, 2).report()
    assert list(report) == KEYS
    empty = {key for key, value in report.items() if value is None}
    assert empty == {
        "sources_mean",
        "sources_min",
        "predicted_micro_batch_s",
        "predicted_step_s",
        "quadratic_share",
        "saved_time",
    }


def test_sums_beyond_sixty_four_bits_do_not_wrap() -> None:
    report = bucket_plan(np.full(8, 2**40), 2, 2).report()
    assert report["mean_square_width"] == 2.0**80
    assert report["real_tokens"] == 2**43


def test_sources_can_be_named_by_strings() -> None:
    report = bucket_plan([1, 1, 1, 1], 2).report(1, ["a", "b", "c", "c"])
    assert (report["sources_mean"], report["sources_min"]) == (1.5, 1)


def test_a_varying_plan_costs_in_proportion_to_its_rows() -> None:
    lengths = [10, 10, 10, 20]
    plan = bucket_plan(lengths, bucket="width", micro_batch=2, seed=0)
    report = plan.report(1, None, (1.0, 0.5))
    # Widths 10 (2 rows), 10 (1 row), 20 (1 row): a single row costs half of what a pair does.
    assert report["predicted_micro_batch_s"] == pytest.approx((60 + (60 + 220) / 2) / 3)
    # File order: pairs (10, 10) and (10, 20).
    assert report["saved_time"] == pytest.approx(1 - (60 + 30 + 110) / (60 + 220))
    with pytest.raises(ValueError, match="needs cost_rows"):
        bucket_plan(lengths, token_budget=40).report(cost=(1, 1))
    assert bucket_plan(lengths, token_budget=40).report(cost=(1, 1), cost_rows=2)["saved_time"] == 0


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("accumulate is 0", {"accumulate": 0}),
        ("cost has 3 numbers", {"cost": (1, 2, 3)}),
        ("sources have shape", {"sources": [1]}),
    ],
)
def test_bad_report_arguments_are_refused(message: str, arguments: dict) -> None:
    with pytest.raises(ValueError, match=message):
        bucket_plan([1, 2, 3], 2).report(**arguments)


def test_the_plan_that_saves_most_is_kept() -> None:
    lengths = np.random.default_rng(1).integers(1, 4000, 2_000)
    best, reports = compare_buckets(lengths, 2, [512, 2, 8], 3, cost=COST)
    assert [report["bucket"] for report in reports] == [None, 512, 2, 8]
    assert best.bucket == 2
    assert best.digest == bucket_plan(lengths, 2, 2, 3).digest
    # Equal lengths: nothing to save, and a bucketed order is still chosen over file order, which does not mix.
    best, _ = compare_buckets(np.full(100, 7), 2, [8, 2], 3)
    assert best.bucket == 8


def test_records_over_the_sequence_length_are_truncated_split_or_dropped() -> None:
    lengths = [0, 7, 8, 16, 3]  # a row of 8 positions has room for 7 tokens after its context
    cut = fit_rows(lengths, 8, "truncate")
    assert (cut.record.tolist(), cut.length.tolist()) == ([0, 1, 2, 3, 4], [0, 7, 7, 7, 3])
    assert (cut.records_over, cut.records_lost, cut.tokens_lost, cut.cut.tolist()) == (2, 0, 10, [2, 3])
    dropped = fit_rows(lengths, 8, "drop")
    assert (dropped.record.tolist(), dropped.length.tolist()) == ([0, 1, 4], [0, 7, 3])
    assert (dropped.records_over, dropped.records_lost, dropped.tokens_lost) == (2, 2, 24)
    split = fit_rows(lengths, 8, "split")
    assert split.record.tolist() == [0, 1, 2, 2, 3, 3, 3, 4]
    assert split.start.tolist() == [0, 0, 0, 7, 0, 7, 14, 0]
    assert split.length.tolist() == [0, 7, 7, 1, 7, 7, 2, 3]
    assert (split.records_over, split.records_lost, split.tokens_lost) == (2, 0, 0)
    with pytest.raises(ValueError, match="over 'cut'"):
        fit_rows(lengths, 8, "cut")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seq_len is 1"):
        fit_rows(lengths, 1)
