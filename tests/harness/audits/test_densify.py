"""The panels: figures that are known beforehand, nulls with their reason, and a run that is left as it was."""

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest

from prism_fast.harness.audits.densify import DensifyRequest, densify_run
from prism_fast.harness.audits.densify.long_context import ITEMS, LENGTHS, lags_of
from prism_fast.harness.audits.densify.sample_efficiency import sample_efficiency_panel
from prism_fast.harness.audits.verify import verify_run
from prism_fast.protocol import manifest as m
from prism_fast.protocol.constants import DENSIFY_FILE
from prism_fast.protocol.errors import DataError, UsageError
from prism_fast.report.densify_tables import print_densified
from tests.harness.conftest import TINY_TRAINING

# Recalls what followed the last time the current token stood in the row, and nothing else; fails above 300 tokens.
RECALLS = """
import torch
from torch import nn

class Recalls(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size, self.strength = vocab_size, nn.Parameter(torch.tensor(9.0))

    def forward(self, tokens):
        rows, width = tokens.shape
        if width > 300:
            raise ValueError("too long")
        at = torch.arange(width, device=tokens.device)
        before = (tokens[:, :, None] == tokens[:, None, :]) & (at[:, None] > at)
        last = torch.where(before, at, -1).amax(2)
        follower = tokens.gather(1, (last + 1).clamp(max=width - 1))
        known = nn.functional.one_hot(follower, self.vocab_size) * (last >= 0)[:, :, None]
        return known * self.strength

def build_model(ctx):
    return Recalls(ctx.vocab_size)
"""


def digests(folder: Path) -> dict[str, str]:
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != DENSIFY_FILE)
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.long
def test_a_model_that_only_recalls_is_seen_to_recall_and_its_run_is_left_as_it_was(
    score, cache_dir, tmp_path, capsys, monkeypatch
):
    training = TINY_TRAINING.replace("gpt2", "bytes")
    run = score(RECALLS, training, options=("--tokenizer=bytes", "--seq-len=96"))
    assert run.code == 0, run.stderr
    seed_dir, manifest = run.seed_dir(), run.manifest()
    before = digests(run.out)
    request = DensifyRequest(val_byte_budget=3000, cache_dir=cache_dir)
    document = densify_run(seed_dir, request)
    assert digests(run.out) == before
    assert list(verify_run(seed_dir)) == []
    assert (document["ranks"], document["research_grade"], document["emission_weight_crown"]) == (False, True, False)

    context = document["panels"]["long_context"]
    assert context["reasons"] == {}
    assert [row["accuracy"] for row in context["needle_by_depth"]] == [1.0] * 5
    assert {row["chance"] for row in context["needle_by_depth"]} == {1 / 8}
    recall = {(cell["pairs"], cell["queried"]): cell for cell in context["associative_recall"]}
    assert all(cell["accuracy"] == 1.0 and cell["chance"] == 1 / cell["pairs"] for cell in recall.values())
    assert (16, "middle") in recall and (2, "middle") not in recall
    assert context["induction"]["gain_nats"] > 1.0 and context["induction"]["chance"] == 0.0
    by_lag = context["loss_by_lag"]
    assert by_lag[0]["lag_from"] is None and {row["chance"] for row in by_lag} == {math.log(257)}
    lengths = {row["tokens"]: row for row in context["bpb_at_length"]}
    assert sorted(lengths) == sorted({96, *LENGTHS})
    assert lengths[96]["bpb"] == pytest.approx(manifest.score.val_bpb_trained, rel=1e-12)
    assert lengths[256]["bpb"] is not None and lengths[256]["chance"] == pytest.approx(math.log2(257))
    for tokens in (512, 1024):
        assert lengths[tokens]["bpb"] is None and "fails on rows of" in lengths[tokens]["reason"]
    assert document["panels"]["sample_efficiency"]["at_tokens"][-1]["running_bpb"] == pytest.approx(
        manifest.score.prequential_bpb, rel=1e-12
    )

    monkeypatch.setenv("COLUMNS", "160")
    capsys.readouterr()
    print_densified(document)
    shown = capsys.readouterr().out
    for words in ("16 pairs, the middle", "depth 90%", "512 tokens: the model fails on rows of 512", "never ranks"):
        assert words in shown, shown

    # what is not what the run was made with is refused, or null with the reason
    (tmp_path / "other").mkdir()
    for script in ("architecture.py", "training.py"):
        (tmp_path / "other" / script).write_bytes((seed_dir / "bundle" / script).read_bytes() + b"\n")
    with pytest.raises(UsageError, match="the run was made with"):
        densify_run(seed_dir, DensifyRequest(bundle=tmp_path / "other"))
    other = densify_run(seed_dir, DensifyRequest(val=str(tmp_path / "other"), cache_dir=cache_dir))
    assert other["panels"]["long_context"]["reasons"].keys() == set(ITEMS)
    assert all(other["panels"]["long_context"][item] is None for item in ITEMS)
    weights = seed_dir / "trained_state.safetensors"
    weights.write_bytes(weights.read_bytes() + b"\0")
    with pytest.raises(DataError, match=r"trained_state\.safetensors: sha256"):
        densify_run(seed_dir, request)


def test_a_directory_without_a_scored_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="expected a scored run's RUN/seed-<seed>"):
        densify_run(tmp_path, DensifyRequest())


def test_a_lag_reaches_back_to_the_last_time_the_token_stood_in_the_row():
    tokens = np.random.default_rng(0).integers(0, 6, (3, 20))
    lags = lags_of(tokens)
    for row in range(3):
        for at in range(1, 20):
            earlier = [at - i for i in range(at) if tokens[row, i] == tokens[row, at]]
            assert lags[row, at - 1] == (min(earlier) if earlier else 0)


# --------------------------------------------------------------------------------------------------- sample efficiency


def series(own_bpb: list[float], losses: list[float] | None = None, clip_events: int = 0) -> m.TrainSeries:
    """Points of 100 tokens and 400 bytes each, with these bits per byte of their own."""
    n = len(own_bpb)
    running = (np.cumsum(own_bpb) / np.arange(1, n + 1)).tolist()
    return m.TrainSeries(
        submission_id="s",
        run_id="r",
        token_budget=None,
        batches=n,
        stride=1,
        columns=m.SeriesColumns(
            i=list(range(n)),
            tokens_seen=[100 * (i + 1) for i in range(n)],
            covered_bytes=[400 * (i + 1) for i in range(n)],
            train_ce_nats=losses or own_bpb,  # type: ignore[arg-type]
            running_bpb=running,
            wall_s=[0.0] * n,
            grad_norm=[None] * n,
            clip_event=[False] * n,
            nan_inf=[False] * n,
        ),
        aggregates=m.SeriesAggregates(
            n_points=n,
            mean_step_ms=None,
            p99_step_ms=None,
            grad_spike_rate=0.25,
            nan_inf_batches=1,
            clip_events=clip_events,
        ),
    )


def test_marks_and_area_are_those_of_the_curve():
    own = [8.0, 4.0, 2.0, 2.0] + [1.0] * 12
    panel = sample_efficiency_panel(series(own))
    assert [mark["tokens"] for mark in panel["at_tokens"]] == [100, 200, 400, 800, 1600]
    assert [mark["running_bpb"] for mark in panel["at_tokens"]] == pytest.approx([8.0, 6.0, 4.0, 2.5, 1.75])
    assert [mark["window_bpb"] for mark in panel["at_tokens"]] == pytest.approx([8.0, 4.0, 2.0, 1.0, 1.0])
    assert panel["area_under_curve_bpb"] == pytest.approx(np.mean(own))


def test_a_straight_descent_is_steady_and_a_jump_is_not():
    straight = sample_efficiency_panel(series([1.0] * 40, losses=list(np.linspace(4, 2, 40)), clip_events=10))
    assert straight["stability"]["loss_std_around_trend_nats"] == pytest.approx(0.0, abs=1e-9)
    assert straight["stability"]["largest_rise_nats"] == pytest.approx(0.0, abs=1e-12)
    assert straight["stability"]["clip_rate"] == 0.25 and straight["stability"]["nan_inf_batches"] == 1
    jump = [2.0] * 30 + [5.0] * 10
    assert sample_efficiency_panel(series([1.0] * 40, losses=jump))["stability"]["largest_rise_nats"] == 3.0


def test_a_series_too_short_for_a_spread_says_so():
    panel = sample_efficiency_panel(series([2.0] * 6))
    assert panel["stability"] is None and "3 points in the second half" in panel["reasons"]["stability"]
