"""Who wins, by which criterion, how sure that is, and what never decides."""

import math

import numpy as np
import orjson
import pytest

from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import DataError, UsageError
from prism_fast.report.compare import compare_runs

from .conftest import BATCH, N_VOCAB, SEQ, write_run, write_seed

NPY = (
    b"\x93NUMPY\x01\x00v\x00"
    + b"{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }".ljust(117)
    + b"\n"
    + b"\0" * 8
)
CRITERIA = ["validity", "heldout_delta", "prequential_bpb", "overfit_rate", "variance"]


@pytest.fixture
def compare(tmp_path):
    """compare(figures of a, figures of b, mode=None) -> report"""

    def run(a: dict, b: dict, mode=None) -> dict:
        return compare_runs(
            write_run(tmp_path / "a", **{"bundle": "A", **a}), write_run(tmp_path / "b", **{"bundle": "B", **b}), mode
        )

    return run


def decided(report: dict) -> tuple:
    return report["ranking"]["winner"], report["ranking"]["decided_by"]


# -------------------------------------------------------------------------------------------------- what decides


def test_the_larger_mean_heldout_delta_wins_whatever_the_bpb(compare):
    report = compare({"trained_bpb": 2.0, "prequential_bpb": 3.5}, {"trained_bpb": 2.01, "prequential_bpb": 2.5})
    assert decided(report) == ("a", "heldout_delta")
    assert [s["criterion"] for s in report["ranking"]["steps"]] == CRITERIA
    step = report["ranking"]["steps"][1]
    assert step["difference"] == pytest.approx(0.01) and step["favours"] == "a" and step["epsilon"] == 5e-3
    assert (report["ranking"]["outcome_a"], report["ranking"]["outcome_b"]) == ("win", "loss")


def test_within_epsilon_of_each_other_the_lower_mean_bpb_wins(compare):
    report = compare({"trained_bpb": 2.0, "prequential_bpb": 3.0}, {"trained_bpb": 2.004, "prequential_bpb": 2.99})
    assert decided(report) == ("b", "prequential_bpb")


def test_within_both_epsilons_the_lower_overfit_rate_wins(compare):
    overfits = {4242: {"train_bpb": 0.9}}
    report = compare({"per_seed": overfits, "prequential_bpb": 3.0}, {"prequential_bpb": 3.004})
    assert decided(report) == ("b", "overfit_rate")
    assert report["aggregate"]["a"]["overfit_rate"] == pytest.approx(1 / 3)


def test_then_the_lower_variance_over_seeds_wins(compare):
    spread = {1337: {"trained_bpb": 1.9}, 4242: {"trained_bpb": 2.1}}
    report = compare({"per_seed": spread}, {})
    assert decided(report) == ("b", "variance")
    assert report["aggregate"]["a"]["std_heldout_delta"] == pytest.approx(0.1)


def test_equal_runs_are_a_tie(compare):
    report = compare({}, {})
    assert decided(report) == ("tie", "tie")
    assert (report["ranking"]["outcome_a"], report["ranking"]["outcome_b"]) == ("tie", "tie")
    assert report["ranking"]["steps"][-1]["difference"] == 0.0


def test_swapping_the_sides_swaps_the_winner(tmp_path):
    a, b = write_run(tmp_path / "a", trained_bpb=2.0), write_run(tmp_path / "b", trained_bpb=2.2)
    assert compare_runs(a, b)["ranking"]["winner"] == "a"
    assert compare_runs(b, a)["ranking"]["winner"] == "b"


def test_wall_clock_changes_nothing(tmp_path):
    other = write_run(tmp_path / "other", trained_bpb=2.1)
    fast, slow = (compare_runs(write_run(tmp_path / n, wall_s=w), other) for n, w in (("fast", 1.0), ("slow", 1e6)))
    for report in (fast, slow):
        report["side_a"]["path"] = ""
    assert fast == slow


# -------------------------------------------------------------------------------------------------------- validity


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"per_seed": {2027: {"status": "failed"}}}, "seed 2027 was not scored (failed: rank 0 fell over)"),
        ({"per_seed": {2027: {"status": "incomplete"}}}, "seed 2027 was not scored"),
        ({"per_seed": {2027: {"step0_loss": 0.1}}}, "seed 2027 has a step-0 anomaly"),
        ({"per_seed": {2027: {"heldout": False}}}, "seed 2027 has no held-out figure"),
        ({"per_seed": {2027: {"stopped_reason": "wall_clock"}}}, "seed 2027 stopped by wall_clock"),
        ({"per_seed": {2027: {"stopped_reason": "interrupted"}}}, "seed 2027 stopped by interrupted"),
    ],
)
def test_a_valid_run_beats_an_invalid_one_whatever_the_figures(compare, broken, why):
    report = compare({"trained_bpb": 1.0, **broken}, {"trained_bpb": 3.0})
    assert decided(report) == ("b", "validity")
    assert (report["ranking"]["outcome_a"], report["ranking"]["outcome_b"]) == ("invalid", "win")
    assert not report["validity"]["ok"]
    assert any(r.startswith("a: " + why) for r in report["validity"]["reasons"])


def test_two_invalid_runs_have_no_winner(compare):
    report = compare({"stopped_reason": "wall_clock"}, {"step0_loss": 0.1, "trained_bpb": 1.0})
    assert decided(report) == (None, "validity")
    assert (report["ranking"]["outcome_a"], report["ranking"]["outcome_b"]) == ("invalid", "invalid")


def test_unequal_tokens_are_no_fair_pair(compare):
    report = compare({"batches": 20}, {"batches": 21})
    assert decided(report) == (None, "validity")
    assert "a saw 5,120 tokens and b 5,376" in report["validity"]["reasons"][0]
    assert [s["criterion"] for s in report["ranking"]["steps"]] == ["validity"]


def test_equal_flops_are_a_fair_pair_whatever_tokens_they_bought(compare):
    spent = {"stopped_reason": "flops_budget", "spec": {"flops_budget": 1e12}}
    report = compare({"batches": 20, "trained_bpb": 1.9, **spent}, {"batches": 30, **spent})
    assert decided(report) == ("a", "heldout_delta") and report["validity"]["ok"]


def test_unequal_flops_are_not(compare):
    spent = {"stopped_reason": "flops_budget"}
    report = compare(
        {"batches": 20, "spec": {"flops_budget": 1e12}, **spent},
        {"batches": 30, "spec": {"flops_budget": 2e12}, **spent},
    )
    assert decided(report) == (None, "validity")
    assert report["differences_between_runs"]["flops_budget"] == {"a": 1e12, "b": 2e12}


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"phase2_corpus_fingerprint": "other"}, "second training corpus"),
        ({"accounting": "prism-v2"}, "accounting"),
        ({"tokenizer_fingerprint": "other"}, "tokenizer"),
        ({"corpus_fingerprint": "other"}, "training corpus"),
        ({"val_corpus_fingerprint": "other"}, "validation corpus"),
        ({"val_byte_budget": 1000}, "validation byte budget"),
    ],
)
def test_figures_on_different_rulers_are_not_compared(compare, spec, named):
    with pytest.raises(UsageError, match=f"another {named} .*cannot be compared"):
        compare({"spec": spec}, {})


def test_other_documents_are_no_fair_pair_and_give_no_interval(compare):
    report = compare({}, {"utf8_bytes": np.array([400, 800, 1200, 1601])})
    assert decided(report) == (None, "validity")
    assert report["intervals"]["heldout_delta"] is None
    assert "different documents" in report["intervals"]["reason"]


def test_what_is_not_matched_is_reported(compare):
    report = compare({"spec": {"token_budget": 6000}}, {})
    assert report["differences_between_runs"] == {"token_budget": {"a": 6000, "b": 500_000}}
    assert report["ranking"]["winner"] == "tie"


def test_runs_without_a_seed_in_common_are_not_compared(tmp_path):
    a, b = write_run(tmp_path / "a", seeds=(1, 2)), write_run(tmp_path / "b", seeds=(3,))
    with pytest.raises(UsageError, match=r"has seeds 1, 2 and .* has 3: none in common"):
        compare_runs(a, b)


def test_only_matched_seeds_count(tmp_path):
    a = write_run(tmp_path / "a", seeds=(1, 2, 3), per_seed={3: {"trained_bpb": 0.5, "train_bpb": 0.5}})
    report = compare_runs(a, write_run(tmp_path / "b", seeds=(1, 2)))
    assert report["seeds"] == [1, 2] and report["ranking"]["winner"] == "tie"


# ---------------------------------------------------------------------------------------------- posture and mode


@pytest.mark.parametrize(("seeds", "posture"), [((1,), "provisional"), ((1, 2), "provisional"), ((1, 2, 3), "public")])
def test_below_three_seeds_a_comparison_is_provisional(tmp_path, seeds, posture):
    report = compare_runs(write_run(tmp_path / "a", seeds=seeds), write_run(tmp_path / "b", seeds=seeds))
    assert report["posture"] == posture and report["ranking"]["provisional"] == (posture == "provisional")
    assert report["ranking"]["steps"][-1]["a"] == (None if len(seeds) == 1 else 0.0)


@pytest.mark.parametrize(
    ("b", "mode"),
    [
        ({"architecture": "other"}, "ArchCompare"),
        ({"training": "other"}, "TrainCompare"),
        ({"architecture": "other", "training": "other"}, "SystemCompare"),
        ({}, "SystemCompare"),
        ({"architecture": None, "training": None}, "SystemCompare"),
    ],
)
def test_the_mode_follows_from_what_the_bundles_share(compare, b, mode):
    assert compare({}, b)["mode"] == mode


def test_a_mode_that_the_bundles_do_not_fit_is_refused(compare):
    with pytest.raises(UsageError, match=r"ArchCompare compares bundles with the same training\.py"):
        compare({}, {"training": "other"}, "ArchCompare")


def test_any_pair_may_be_compared_as_systems(compare):
    assert compare({}, {"training": "other"}, "SystemCompare")["mode"] == "SystemCompare"


def test_an_unknown_mode_is_refused(compare):
    with pytest.raises(UsageError, match="unknown mode 'BothCompare'"):
        compare({}, {}, "BothCompare")


# ------------------------------------------------------------------------------------------------------ uncertainty


def test_the_interval_is_that_of_a_plain_paired_bootstrap(tmp_path):
    """Against a loop over resamples, each computed from the definition of the score."""
    rng = np.random.default_rng(0)
    n_bytes = rng.integers(100, 4000, 60)
    seeds = (1, 2, 3)
    bpb = {side: {s: rng.normal(2.0 + offset, 0.2, 60) for s in seeds} for side, offset in (("a", 0.0), ("b", 0.05))}
    runs = [
        write_run(
            tmp_path / side,
            seeds=seeds,
            utf8_bytes=n_bytes,
            per_seed={s: {"trained_bpb": bpb[side][s], "train_bpb": 1.8} for s in seeds},
        )
        for side in "ab"
    ]
    interval = compare_runs(*runs)["intervals"]["heldout_delta"]
    uniform = math.log2(N_VOCAB) / 4.0

    def delta(side: str, seed: int, documents: np.ndarray) -> float:
        total = n_bytes[documents].sum()
        return min(3.6, uniform) - (bpb[side][seed][documents] * n_bytes[documents]).sum() / total

    drawn = []
    for _ in range(2000):
        documents = rng.integers(0, 60, 60)
        drawn.append(np.mean([delta("a", s, documents) - delta("b", s, documents) for s in rng.choice(seeds, 3)]))
    low, high = np.percentile(drawn, [2.5, 97.5])
    assert interval["difference"] == pytest.approx(
        np.mean([delta("a", s, np.arange(60)) - delta("b", s, np.arange(60)) for s in seeds])
    )
    width = high - low
    assert abs(interval["low"] - low) < 0.1 * width and abs(interval["high"] - high) < 0.1 * width
    assert interval["over"] == ["documents", "seeds"]


def test_what_a_hard_document_does_to_both_sides_cancels(compare):
    n_bytes = np.arange(100, 2100, 50)
    hard = np.where(np.arange(len(n_bytes)) % 2, 1.0, 3.0)
    report = compare({"trained_bpb": hard, "utf8_bytes": n_bytes}, {"trained_bpb": hard + 0.02, "utf8_bytes": n_bytes})
    interval = report["intervals"]["heldout_delta"]
    assert interval["low"] == pytest.approx(0.02) and interval["high"] == pytest.approx(0.02)
    assert interval["excludes_zero"]
    assert report["intervals"]["val_bpb_trained"]["difference"] == pytest.approx(-0.02)


def test_with_one_seed_only_documents_are_resampled(tmp_path):
    report = compare_runs(write_run(tmp_path / "a", seeds=(1,)), write_run(tmp_path / "b", seeds=(1,)))
    assert report["intervals"]["heldout_delta"]["over"] == ["documents"]
    assert not report["intervals"]["heldout_delta"]["excludes_zero"]


def test_the_twin_is_capped_at_the_uniform_code_in_every_resample(compare):
    report = compare({"twin_bpb": 9.0}, {"twin_bpb": 30.0})
    assert report["intervals"]["heldout_delta"]["low"] == report["intervals"]["heldout_delta"]["high"] == 0.0


def test_a_run_without_heldout_documents_gives_no_interval_and_says_why(compare, tmp_path):
    write_run(tmp_path / "c", bundle="C")
    (tmp_path / "c" / "seed-2027" / c.HELDOUT_DOCUMENTS_FILE).unlink()
    report = compare_runs(tmp_path / "c", write_run(tmp_path / "d"))
    assert report["intervals"]["heldout_delta"] is None
    assert report["intervals"]["reason"] == "a seed has no per-document held-out losses"


# ----------------------------------------------------------------------------------------------------- trajectories


def test_trajectories_are_read_at_the_same_tokens(compare):
    report = compare({"prequential_bpb": 2.0}, {"prequential_bpb": 3.0})
    curve = report["trajectories"]
    assert curve["tokens"][0] == BATCH * SEQ and curve["tokens"][-1] == 20 * BATCH * SEQ
    assert curve["tokens"] == sorted(set(curve["tokens"]))
    for side, end in (("a", 2.0), ("b", 3.0)):
        assert curve[side]["running_bpb"][-1] == pytest.approx(end)
        # bits are additive: the windows, weighted by their bytes, make up the whole
        windows = np.diff(curve["tokens"], prepend=0.0)
        assert np.average(curve[side]["window_bpb"], weights=windows) == pytest.approx(end, rel=1e-3)
    assert curve["lead_changes"] == 0


def test_a_side_that_starts_behind_and_ends_ahead_shows(tmp_path):
    a = write_run(tmp_path / "a", prequential_bpb=3.0)
    b = write_run(tmp_path / "b", prequential_bpb=3.0)
    for seed in (1337, 2027, 4242):
        path = b / f"seed-{seed}" / c.TRAIN_SERIES_FILE
        series = orjson.loads(path.read_bytes())
        series["columns"]["running_bpb"] = np.linspace(6.0, 3.0, 20).tolist()
        path.write_bytes(orjson.dumps(series))
    curve = compare_runs(a, b)["trajectories"]
    assert curve["lead_changes"] == 1
    assert curve["b"]["window_bpb"][0] > curve["a"]["window_bpb"][0]
    assert curve["b"]["window_bpb"][-1] < curve["a"]["window_bpb"][-1]


# ------------------------------------------------------------------------------------------------------------ files


def test_the_report_is_json_and_repeats_bit_for_bit(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", trained_bpb=2.1)
    assert orjson.dumps(compare_runs(a, b)) == orjson.dumps(compare_runs(a, b))
    report = compare_runs(a, b)
    assert report["schema"] == "prism_compare_report.v1" and report["protocol_id"] == "prism_official_compare.v1"
    assert report["protocol_hash"] == compare_runs(b, a)["protocol_hash"]


def test_one_seeds_directory_is_a_run_of_one_seed(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", trained_bpb=2.1)
    assert compare_runs(a / "seed-2027", b)["seeds"] == [2027]


def test_what_is_no_run_is_refused_with_what_was_expected(tmp_path):
    write_run(tmp_path / "a")
    with pytest.raises(UsageError, match="no such directory"):
        compare_runs(tmp_path / "a", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no run in it; expected seed-\*/status\.json"):
        compare_runs(tmp_path / "a", tmp_path / "empty")


@pytest.mark.parametrize("name", [c.RUN_MANIFEST_FILE, c.TRAIN_SERIES_FILE, c.RUN_SPEC_FILE, c.RUN_STATUS_FILE])
@pytest.mark.parametrize("spoil", [b"", b"{", b"[]", b'{"schema_version": 1}'])
def test_a_spoiled_file_is_named(tmp_path, name, spoil):
    a, b = write_run(tmp_path / "a", seeds=(1,)), write_run(tmp_path / "b", seeds=(1,))
    (a / "seed-1" / name).write_bytes(spoil)
    with pytest.raises(DataError, match=name):
        compare_runs(a, b)


def test_a_missing_file_of_a_scored_seed_is_named(tmp_path):
    a, b = write_run(tmp_path / "a", seeds=(1,)), write_run(tmp_path / "b", seeds=(1,))
    (a / "seed-1" / c.TRAIN_SERIES_FILE).unlink()
    with pytest.raises(DataError, match=r"prism_train_series\.v1\.json: No such file"):
        compare_runs(a, b)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not an archive", NPY])
def test_spoiled_heldout_documents_are_named(tmp_path, content):
    a, b = write_run(tmp_path / "a", seeds=(1,)), write_run(tmp_path / "b", seeds=(1,))
    (a / "seed-1" / c.HELDOUT_DOCUMENTS_FILE).write_bytes(content)
    with pytest.raises(DataError, match=r"heldout_documents\.npz: not held-out documents"):
        compare_runs(a, b)


def test_heldout_arrays_of_unequal_length_are_named(tmp_path):
    a, b = write_run(tmp_path / "a", seeds=(1,)), write_run(tmp_path / "b", seeds=(1,))
    np.savez(
        a / "seed-1" / c.HELDOUT_DOCUMENTS_FILE, utf8_bytes=np.ones(3), nats_trained=np.ones(4), nats_twin=np.ones(3)
    )
    with pytest.raises(DataError, match="expected three of one length"):
        compare_runs(a, b)


def test_seeds_of_two_bundles_in_one_directory_are_refused(tmp_path):
    write_seed(tmp_path / "a" / "seed-1", seed=1, bundle="one")
    write_seed(tmp_path / "a" / "seed-2", seed=2, bundle="two")
    with pytest.raises(DataError, match="seeds of 2 different bundles"):
        compare_runs(tmp_path / "a", tmp_path / "a")
