"""PRISM_* variables reach the context as they are; with none set, the short default stays."""

import pytest
from pydantic import ValidationError

from prism_fast.protocol import PrismContext
from prism_fast.protocol.scale import runtime_policy_defaults
from prism_fast.protocol.settings import PrismSettings


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith("PRISM_"):
            monkeypatch.delenv(name)


def test_with_no_knob_set_the_short_default_stays():
    context = PrismContext(**PrismSettings().prism_context_kwargs())
    assert (context.sequence_length, context.token_budget) == (128, 500_000)
    assert (context.param_ladder_stage, context.max_parameters) == ("explore", 124_000_000)
    assert PrismSettings().base_eval_train_data_dir == "/data/fineweb-edu/train"


def test_knobs_pass_through_unchanged(monkeypatch):
    monkeypatch.setenv("PRISM_SEQUENCE_LENGTH", "512")
    monkeypatch.setenv("PRISM_TOKEN_BUDGET", "2000000")
    monkeypatch.setenv("PRISM_PARAM_LADDER_STAGE", "promote")
    context = PrismContext(**PrismSettings().prism_context_kwargs())
    assert (context.sequence_length, context.token_budget) == (512, 2_000_000)
    assert (context.param_ladder_stage, context.max_parameters) == ("promote", 350_000_000)
    assert runtime_policy_defaults()["context"]["sequence_length"] == 512


def test_an_empty_variable_is_not_set(monkeypatch):
    monkeypatch.setenv("PRISM_TOKEN_BUDGET", "")
    assert PrismSettings().token_budget == 500_000


@pytest.mark.parametrize(
    ("name", "value"), [("TOKEN_BUDGET", "0"), ("SEQUENCE_LENGTH", "1"), ("PARAM_LADDER_STAGE", "tiny")]
)
def test_a_knob_that_does_not_fit_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(f"PRISM_{name}", value)
    with pytest.raises(ValidationError, match=name.lower()):
        PrismSettings()


def test_phase_two_is_the_train_mounts_sibling_unless_it_is_named(monkeypatch):
    monkeypatch.setenv("PRISM_BASE_EVAL_TRAIN_DATA_DIR", "/srv/edu/train")
    assert PrismSettings().phase2_data_dir == "/srv/edu/sample-100BT"
    monkeypatch.setenv("PRISM_BASE_EVAL_PHASE2_DATA_DIR", "/srv/big")
    assert PrismSettings().phase2_data_dir == "/srv/big"
