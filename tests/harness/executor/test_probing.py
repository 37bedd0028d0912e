"""What probes find, and what they leave alone: models of plain numpy, a batch read as one line of text."""

import numpy as np
import pytest

from prism_fast.harness.executor.probing import FALSE_ALARMS, FIRST_PROBE_WITHIN, TOLERANCE, Prober
from prism_fast.protocol import constants as c

VOCAB, ROWS, WIDTH, SHARE = 97, 4, 32, 0.06


def batch(random: np.random.Generator, rows: int = ROWS, width: int = WIDTH) -> tuple[np.ndarray, np.ndarray]:
    text = random.integers(0, VOCAB, rows * width + 1)
    return text[:-1].reshape(rows, width), text[1:].reshape(rows, width).copy()


def causal(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    past = np.cumsum(np.sqrt(tokens + 1.0), axis=1)
    return (4.0 + np.sin(past) + 0.01 * targets).astype(np.float32)


def rows_before(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    past = np.cumsum(np.sqrt(tokens + 1.0).reshape(-1)).reshape(tokens.shape)
    return (4.0 + np.sin(past) + 0.01 * targets).astype(np.float32)


def rounding_by_shape(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return (causal(tokens, targets) * (1 + 1e-3 * len(tokens))).astype(np.float32)


def looking(gain: float, at: object = slice(None)):
    """Adds the next token's weight in front of every position of `at`: of a row, or a mask of the tokens."""

    def nats(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        found = causal(tokens, targets)
        ahead = np.zeros_like(found)
        ahead[:, :-1] = gain * (np.cos(tokens[:, 1:]) - 1)
        if callable(at):
            return found + np.where(at(tokens), ahead, 0).astype(np.float32)
        kept = np.zeros_like(found)
        kept[:, at] = ahead[:, at]
        return found + kept

    return nats


def next_row(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return causal(tokens, targets) + np.roll(tokens, -1, axis=0)[:, :1].astype(np.float32)


def nondeterministic():
    calls = iter(range(10**9))
    return lambda tokens, targets: causal(tokens, targets) + np.float32(0.01 * next(calls))


def run(nats, batches: int, *, rows: int = ROWS, first_within: int = FIRST_PROBE_WITHIN, **options) -> Prober:
    """A stream of `batches`, until something is found."""
    random = np.random.default_rng(0)
    prober = Prober(nats, VOCAB, SHARE, first_within=first_within, **options)
    for _ in range(batches):
        tokens, targets = batch(random, rows)
        prober.after(tokens, targets, nats(tokens, targets))
        if prober.rule is not None:
            break
    return prober


@pytest.mark.parametrize("nats", [causal, rows_before, rounding_by_shape, looking(TOLERANCE / 8)])
@pytest.mark.parametrize("rows_alone", [True, False])
def test_what_looks_back_is_never_flagged(nats, rows_alone):
    assert run(nats, 2000, rows_alone=rows_alone).rule is None


@pytest.mark.parametrize(
    "nats",
    [
        looking(1.0),
        looking(1.0, slice(None, None, 5)),
        looking(1.0, lambda tokens: tokens % 5 == 0),
        next_row,
        lambda tokens, targets: causal(tokens, targets) + np.float32(tokens.mean()),
        lambda tokens, targets: causal(tokens[:, ::-1], targets)[:, ::-1],
    ],
    ids=["every position", "one in five", "where a token says so", "the next row", "a mean", "backwards"],
)
@pytest.mark.parametrize("rows_alone", [True, False])
def test_looking_ahead_is_found(nats, rows_alone):
    assert run(nats, 2000, rows_alone=rows_alone).rule == c.RULE_NONCAUSAL


def test_a_peek_at_one_position_in_fifty_is_found():
    assert run(looking(3.0, lambda tokens: tokens % 50 == 7), 4000).rule == c.RULE_NONCAUSAL


def test_a_look_ahead_that_stops_where_a_row_is_run_alone_is_found():
    def nats(tokens, targets):
        return (causal if len(tokens) == 1 else looking(1.0))(tokens, targets)

    assert run(nats, 1000).rule == c.RULE_NONCAUSAL


def test_answers_that_change_are_found():
    assert run(nondeterministic(), 100).rule == c.RULE_NONDETERMINISTIC


def test_rounding_by_shape_ends_the_probes_of_single_rows_and_not_the_probes():
    prober = run(rounding_by_shape, 2000)
    assert prober.mode == "batches" and prober.rule is None
    # The suspicions were each looked into with a whole batch; from then on one batch in 1 / SHARE.
    assert prober.rows > FALSE_ALARMS * ROWS + 2000 * SHARE * ROWS / 2


@pytest.mark.parametrize(("rows", "rows_alone"), [(1, True), (4, True), (32, True), (4, False)])
def test_probes_take_their_share_of_the_rows(rows, rows_alone):
    batches = 4000
    prober = run(causal, batches, rows=rows, rows_alone=rows_alone)
    deviation = 5 * np.sqrt(SHARE * batches / rows) * (1 if rows_alone else rows)
    assert abs(prober.rows - SHARE * batches * rows) < max(deviation, 5 * np.sqrt(SHARE * batches * rows))


@pytest.mark.parametrize("rows_alone", [True, False])
def test_every_run_is_probed_within_its_first_batches(rows_alone):
    for _ in range(50):
        prober = run(causal, FIRST_PROBE_WITHIN, rows=1, rows_alone=rows_alone)
        assert prober.rows >= 1
        assert run(causal, 1, rows=1, rows_alone=rows_alone, first_within=1).rows >= 1


def test_each_width_has_a_program_of_its_own_and_is_probed():
    random = np.random.default_rng(0)

    def nats(tokens, targets):
        return (looking(1.0) if tokens.shape[1] == 16 else causal)(tokens, targets)

    found = 0
    for _ in range(20):
        prober = Prober(nats, VOCAB, 0.0, first_within=1)
        for width in (32, 16):
            tokens, targets = batch(random, 1, width)
            prober.after(tokens, targets, nats(tokens, targets))
        found += prober.rule == c.RULE_NONCAUSAL
    assert found >= 16  # a cut behind a row's last position leaves nothing to look at


@pytest.mark.parametrize("kept", [1, 2, 5])
def test_padding_is_not_where_a_probe_is_spent(kept):
    """Rows of held-out text are mostly padding: one with two tokens must be cut between them."""
    found = 0
    for seed in range(40):
        tokens, targets = batch(np.random.default_rng(seed))
        targets[:, kept:] = -100
        prober = Prober(looking(1.0), VOCAB, 0.0, first_within=1)
        nats = np.where(targets >= 0, looking(1.0)(tokens, targets), 0.0).astype(np.float32)
        prober._nats = lambda a, b, targets=targets: np.where(b >= 0, looking(1.0)(a, b), 0.0).astype(np.float32)
        prober.after(tokens, targets, nats)
        found += prober.rule == c.RULE_NONCAUSAL
    assert found >= 35  # now and then the other text has the same token there


def test_a_row_of_one_token_and_a_batch_without_targets_are_no_trouble():
    for tokens in (np.zeros((1, 1), np.int64), np.zeros((2, 1), np.int64)):
        for targets in (np.full_like(tokens, 3), np.full_like(tokens, -100)):
            prober = Prober(causal, VOCAB, 1.0, first_within=1)
            prober.after(tokens, targets, causal(tokens, targets))
            assert prober.rule is None
