"""What a run is held to: what was given, then the pin, then the environment, then the default."""

import os
from dataclasses import fields

import pytest

from prism_fast.protocol.errors import UsageError
from prism_fast.protocol.knobs import Given, Knobs, settle_knobs
from prism_fast.protocol.pins import protocol_pin, scale_pin_public_ok
from prism_fast.protocol.readiness import probe_full_scale_readiness
from prism_fast.protocol.settings import read_settings


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith("PRISM_"):
            monkeypatch.delenv(name)


def settle(pin: str | None = None, **given) -> Knobs:
    return settle_knobs(Given(**{"data": "sample", **given}), pin)


def test_with_nothing_given_the_short_default_stays():
    knobs = settle()
    assert (knobs.sequence_length, knobs.token_budget, knobs.seeds) == (128, 500_000, (1337,))
    assert (knobs.mode, knobs.stage, knobs.nproc, knobs.tokenizer) == ("gpu_proxy_eval", "explore", 1, "gpt2")
    assert (knobs.vocab_size, knobs.batch_size, knobs.pin) == (None, None, None)


def test_the_environment_stands_in_for_what_is_not_given(monkeypatch):
    for name, value in (("SEQUENCE_LENGTH", 512), ("TOKEN_BUDGET", 7), ("SEED", 9), ("PARAM_LADDER_STAGE", "promote")):
        monkeypatch.setenv(f"PRISM_{name}", str(value))
    knobs = settle(token_budget=8)
    assert (knobs.sequence_length, knobs.token_budget, knobs.seeds, knobs.stage) == (512, 8, (9,), "promote")


def test_a_token_budget_of_0_is_no_limit():
    assert settle(token_budget=0).token_budget is None


@pytest.mark.parametrize("name", ["p0", "p1", "p2", "p3"])
def test_a_pin_decides_whatever_is_not_given_and_the_environment_cannot_bend_it(monkeypatch, name):
    monkeypatch.setenv("PRISM_SEQUENCE_LENGTH", "64")
    monkeypatch.setenv("PRISM_TOKEN_BUDGET", "100")
    pin = protocol_pin(name)
    knobs = settle(name)
    assert knobs.pin == pin and knobs.pin_name == name
    context = pin.prism_context_kwargs()
    assert (knobs.sequence_length, knobs.token_budget) == (context["sequence_length"], context["token_budget"])
    assert (knobs.stage, knobs.mode, knobs.seeds) == (pin.param_ladder_stage, pin.mode, (1337, 2027, 4242))
    assert (knobs.batch_size, knobs.tokenizer, knobs.vocab_size, knobs.nproc) == (4, "gpt2", 50304, 1)


def test_what_a_pin_leaves_open_may_be_chosen_and_is_part_of_its_digest():
    knobs = settle("p1", sequence_length=512, token_budget=2_000_000, seeds=(1, 2, 3), batch_size=4)
    assert knobs.pin is not None
    assert (knobs.pin.seq_len, knobs.pin.token_budget, knobs.pin.seeds) == (512, 2_000_000, (1, 2, 3))
    assert (knobs.sequence_length, knobs.token_budget) == (512, 2_000_000)
    assert knobs.pin.digest != protocol_pin("p1").digest


def test_one_seed_under_a_pin_is_provisional_with_its_reason():
    pin = settle("p1", seeds=(1337,)).pin
    assert pin is not None
    assert scale_pin_public_ok(pin).reasons == ("seed_count_below_public_min:K=1<3",)


@pytest.mark.parametrize(
    ("pin", "given", "words"),
    [
        ("p0", {"sequence_length": 64}, "--seq-len 64 (the pin: 128)"),
        ("p1", {"sequence_length": 128}, "--seq-len 128 (the pin: 256 to 512)"),
        ("p1", {"token_budget": 0}, "--token-budget 0 (the pin: 1000000 to 2000000)"),
        ("p2", {"stage": "explore"}, "--stage explore (the pin: promote)"),
        ("p3", {"mode": "gpu_proxy_eval"}, "--mode gpu_proxy_eval (the pin: full_scale_eval)"),
        ("p1", {"step_budget": 8}, "--step-budget 8 (the pin: none)"),
        ("p1", {"nproc": 2, "tokenizer": "bytes"}, "--tokenizer bytes (the pin: gpt2); --nproc 2 (the pin: 1)"),
        ("p1", {"flops_budget": 1e9}, "--flops-budget 1000000000.0 (the pin: none)"),
        ("p9", {}, "--pin p9: expected p0, p1, p2 or p3"),
    ],
)
def test_what_contradicts_a_pin_is_refused_in_one_sentence(pin, given, words):
    with pytest.raises(UsageError) as refused:
        settle(pin, **given)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_variable_that_does_not_fit_is_a_usage_error_naming_it_everywhere(monkeypatch):
    monkeypatch.setenv("PRISM_TOKEN_BUDGET", "lots")
    for ask in (read_settings, settle, lambda: probe_full_scale_readiness(train_data_dir="/nowhere")):
        with pytest.raises(UsageError, match="PRISM_TOKEN_BUDGET=lots"):
            ask()


def test_data_comes_from_the_mounts_only_where_they_are(monkeypatch, tmp_path):
    with pytest.raises(UsageError, match="--data is missing and /data/fineweb-edu/train"):
        settle(data=None)
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        monkeypatch.setenv(f"PRISM_BASE_EVAL_{split.upper()}_DATA_DIR", str(tmp_path / split))
    mounted = settle(data=None)
    assert (mounted.data, mounted.val) == (str(tmp_path / "train"), str(tmp_path / "val"))
    assert settle().val is None  # given data is held out on its own val split


def test_only_full_scale_has_a_second_phase():
    with pytest.raises(UsageError, match="--phase2 x: only full_scale_eval"):
        settle(phase2="x")
    full = settle(mode="full_scale_eval", data="/srv/edu/train")
    assert (full.phase2, full.val) == ("/srv/edu/sample-100BT", "/data/fineweb-edu/val")


def test_every_knob_is_a_field_of_the_request():
    from prism_fast.harness.referee.request import ScoreRequest

    assert {f.name for f in fields(Knobs)} <= {f.name for f in fields(ScoreRequest)}
