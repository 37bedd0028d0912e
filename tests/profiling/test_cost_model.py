"""The fit of t(w) = A w + B w^2 (+ constant): the field notes' figures, the constant-term test, and its verdicts."""

import numpy as np
import pytest

from prism_fast.profiling.cost_model import fit_cost

A, B = 6.87e-4, 8.85e-8  # the field notes' fit: quadratic share 20.9 % at 2,048 and 67.8 % at 16,384


def steps(of, widths, noise=0.002, count=9):
    random = np.random.default_rng(7)
    return {w: (of(w) * (1 + noise * random.standard_normal(count))).tolist() for w in widths}


def test_the_field_notes_fit_is_found_again():
    fit = fit_cost(steps(lambda w: A * w + B * w * w, (2048, 4096, 8192, 16384), noise=0.0005))
    assert fit["A"] == pytest.approx(A, rel=0.005) and fit["B"] == pytest.approx(B, rel=0.01)
    assert fit["constant"] == 0 and fit["constant_needed"] is False and fit["launch_bound"] == "refuted"
    assert fit["residual_max"] < 0.01
    assert fit["quadratic_share"]["2048"] == pytest.approx(0.209, abs=0.003)
    assert fit["quadratic_share"]["16384"] == pytest.approx(0.678, abs=0.003)
    assert "refutes launch-bound" in fit["verdict"]


def test_a_constant_that_is_there_is_kept():
    fit = fit_cost(steps(lambda w: 0.05 + 1e-4 * w + 1e-8 * w * w, (128, 256, 512, 1024, 2048)))
    assert fit["constant_needed"] is True and fit["constant"] == pytest.approx(0.05, rel=0.05)
    assert fit["residual_max"] < 0.02 < fit["residual_max_without_constant"]
    assert fit["constant_share"]["128"] == pytest.approx(0.05 / (0.05 + 0.0128), abs=0.05)
    assert "a constant is needed" in fit["verdict"]


def test_steps_that_cost_the_same_at_every_width_are_launch_bound():
    fit = fit_cost(steps(lambda w: 0.03 + 1e-7 * w, (64, 128, 256, 512)))
    assert fit["launch_bound"] == "confirmed" and "launch-bound is confirmed" in fit["verdict"]


def test_shares_of_every_width_add_up_to_one():
    fit = fit_cost(steps(lambda w: 0.01 + 1e-4 * w + 3e-7 * w * w, (100, 200, 400, 800)))
    for width in ("100", "200", "400", "800"):
        total = fit["linear_share"][width] + fit["quadratic_share"][width] + fit["constant_share"][width]
        assert total == pytest.approx(1.0)


def test_no_term_is_negative_when_the_curve_bends_down():
    fit = fit_cost(steps(lambda w: w**0.8 * 1e-3, (64, 128, 256, 512)))
    assert min(fit["A"], fit["B"], fit["constant"]) >= 0


def test_two_widths_leave_the_constant_undecided():
    fit = fit_cost({128: [0.1], 256: [0.2]})
    assert fit["constant_needed"] is None and fit["launch_bound"] == "undecided"
    assert "takes a third width" in fit["verdict"]


def test_neighbours_that_only_add_time_do_not_move_the_fastest_step():
    clean = {w: [A * w + B * w * w] * 5 for w in (256, 512, 1024)}
    loaded = {w: [t, *(t * k for k in (1.5, 3, 1.1, 9))] for w, (t, *_) in clean.items()}
    assert fit_cost(loaded, statistic="min")["residual_max"] < 1e-9


@pytest.mark.parametrize("seconds", [{128: [0.1]}, {128: [0.1], 256: []}, {128: [0.1], 256: [0.0]}])
def test_what_cannot_be_fitted_is_refused(seconds):
    with pytest.raises(ValueError, match=r"expected|needs"):
        fit_cost(seconds)
