"""The leaderboard's total order, its ties, and what is kept off it."""

import itertools
import random

import orjson
import pytest

from prism_fast.protocol.errors import DataError
from prism_fast.report.rank import Row, rank, rank_runs

from .conftest import write_run


def ids(rows) -> list[str]:
    return [row.submission_id for row in rows]


def test_the_higher_final_score_ranks_first():
    assert ids(rank([Row("k1", "low", 101.0), Row("k2", "high", 101.1)])) == ["high", "low"]


def test_scores_within_the_grid_are_ties_and_the_earliest_commit_wins():
    rows = [Row("k1", "later", 101.0000000004, 200), Row("k2", "earlier", 101.0, 100)]
    assert ids(rank(rows)) == ["earlier", "later"]
    apart = [Row("k1", "later", 101.000000001, 200), Row("k2", "earlier", 101.0, 100)]
    assert ids(rank(apart)) == ["later", "earlier"]


def test_equal_commits_go_by_submission_id_and_an_unknown_commit_is_latest():
    rows = [Row("k1", "b", 1.0, 5), Row("k2", "a", 1.0, 5), Row("k3", "0", 1.0, None)]
    assert ids(rank(rows)) == ["a", "b", "0"]


def test_the_best_row_of_each_key_is_kept():
    rows = [
        Row("k", "old", 101.0, 1),
        Row("k", "new", 102.0, 2),
        Row("other", "x", 101.5, 3),
        Row("k", "same", 102.0, 9),
    ]
    assert ids(rank(rows)) == ["new", "x"]


def test_the_order_is_total_whatever_order_the_rows_come_in():
    scores = (100.0, 100.0 + 4e-10, 100.0 + 6e-10, 101.0)
    commits = (None, 1, 2)
    rows = [
        Row(f"k{i % 5}", f"s{i}", score, commit) for i, (score, commit) in enumerate(itertools.product(scores, commits))
    ]
    expected = rank(rows)
    shuffled = rows[:]
    for seed in range(20):
        random.Random(seed).shuffle(shuffled)
        assert rank(shuffled) == expected


def test_runs_are_ranked_by_their_mean_over_seeds(tmp_path):
    better = write_run(tmp_path / "better", bundle="better", trained_bpb=2.0)
    worse = write_run(tmp_path / "worse", bundle="worse", per_seed={1337: {"trained_bpb": 1.99}}, trained_bpb=2.1)
    board = rank_runs([worse, better])
    assert board["schema"] == "prism_leaderboard.v1"
    assert [(r["rank"], r["submission_id"]) for r in board["rows"]] == [(1, "better"), (2, "worse")]
    assert board["rows"][0]["seeds"] == [1337, 2027, 4242] and not board["rows"][0]["provisional"]
    assert board["crown"] == "better"
    orjson.dumps(board)


def test_the_crown_goes_to_the_first_row_that_may_take_it(tmp_path):
    first = write_run(tmp_path / "a", bundle="open", trained_bpb=1.9, eligible=False)
    second = write_run(tmp_path / "b", bundle="sealed", trained_bpb=2.0)
    board = rank_runs([first, second])
    assert [r["submission_id"] for r in board["rows"]] == ["open", "sealed"]
    assert board["crown"] == "sealed"
    assert rank_runs([first])["crown"] is None


def test_a_run_with_a_seed_that_was_not_scored_is_not_ranked(tmp_path):
    run = write_run(tmp_path / "a", bundle="A", per_seed={4242: {"status": "failed"}})
    board = rank_runs([run])
    assert board["rows"] == []
    assert board["unranked"] == [
        {"path": str(run), "submission_id": "A", "reason": "seed 4242 failed: rank 0 fell over"}
    ]


def test_fewer_than_three_seeds_are_provisional(tmp_path):
    assert rank_runs([write_run(tmp_path / "a", seeds=(1, 2))])["rows"][0]["provisional"]


def test_keys_and_commits_come_from_the_submissions_file(tmp_path):
    runs = [write_run(tmp_path / n, bundle=n) for n in ("one", "two", "three")]
    known = tmp_path / "submissions.json"
    known.write_bytes(
        orjson.dumps(
            {
                "one": {"key": "k1", "committed_at": 7},
                "two": {"key": "k2", "committed_at": 5},
                "three": {"key": "k1", "committed_at": 6},
            }
        )
    )
    board = rank_runs(runs, known)
    assert [(r["key"], r["submission_id"]) for r in board["rows"]] == [("k2", "two"), ("k1", "three")]
    known.write_text(
        '{"one": {"committed_at": "2026-01-01T01:00:00+01:00"}, "two": {"committed_at": "2025-12-31T23:30:00Z"}}'
    )
    assert [r["submission_id"] for r in rank_runs(runs, known)["rows"]] == ["two", "one", "three"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[]", "expected"),
        ('{"a": {"hotkey": "x"}}', "a.hotkey"),
        ('{"a": {"committed_at": 1}, "b": {"committed_at": "2026-01-01T00:00:00Z"}}', "a block number for some"),
        ('{"a": {"committed_at": "2026-01-01T00:00:00"}}', "a: committed_at has no time zone"),
    ],
)
def test_a_submissions_file_that_is_not_one_is_named(tmp_path, content, named):
    path = tmp_path / "submissions.json"
    path.write_text(content)
    with pytest.raises(DataError, match=named) as caught:
        rank_runs([write_run(tmp_path / "a")], path)
    assert str(path) in str(caught.value)
