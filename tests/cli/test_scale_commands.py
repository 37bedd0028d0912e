"""What `check`, `compare`, `rank`, `readiness`, `ladder` and `annex` print and how they exit."""

from __future__ import annotations

import orjson
import pytest
import typer
from typer.testing import CliRunner

from prism_fast.cli import check_command, compare_commands, densify_command
from prism_fast.protocol.errors import DataError, UsageError
from prism_fast.protocol.scale import research_protocol_annex, scale_ladder_document

from ..harness.conftest import ROOT, TINY_TRAINING, write_bundle
from ..report.conftest import write_run


@pytest.fixture
def command(monkeypatch):
    """command(*arguments) -> click's result; errors of ours are raised, as main() gets them"""
    monkeypatch.setenv("COLUMNS", "200")
    app = typer.Typer()
    check_command.register(app)
    compare_commands.register(app)
    densify_command.register(app)

    def run(*arguments: object):
        result = CliRunner().invoke(app, list(map(str, arguments)))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


# -------------------------------------------------------------------------------------------------------------- check


def test_check_of_an_example_is_met(command):
    result = command("check", ROOT / "examples" / "transformer_tiny")
    assert result.exit_code == 0
    assert "contract: met" in result.stdout and "ddp_or_fsdp" in result.stdout


def test_check_names_what_is_missing_and_exits_3(command, tmp_path):
    result = command("check", write_bundle(tmp_path / "bundle"))
    assert result.exit_code == 3
    assert "not reached by train(ctx)" in result.stdout and "contract: not met" in result.stdout


@pytest.mark.parametrize(("policy", "ok"), [("flag", False), ("off", True)])
def test_check_does_not_reject_when_told_so(command, tmp_path, policy, ok):
    result = command("check", write_bundle(tmp_path / "bundle"), "--policy", policy, "--json")
    assert result.exit_code == 0
    document = orjson.loads(result.stdout)
    assert (document["ok"], document["static"]["policy"]) == (ok, policy)
    assert document["functional"] is None and document["nccl_advisory"] is None


def test_check_refuses_world_sizes_that_are_none(command, tmp_path):
    with pytest.raises(UsageError, match="--worlds two: expected whole numbers"):
        command("check", write_bundle(tmp_path / "bundle"), "--functional", "--worlds", "two")


def test_functional_check_quotes_the_rank_that_failed_and_exits_3(command, tmp_path):
    training = TINY_TRAINING.replace("model = build_model", "assert ctx.rank == 0, 'alone'\n    model = build_model", 1)
    # on the run's own tokenizer: with another one rank 0 fails as well, and either may be the first to say so
    bundle = write_bundle(tmp_path / "bundle", training=training.replace("gpt2", "bytes"))
    options = ("--functional", "--worlds", 2, "--tokenizer", "bytes", "--cache-dir", tmp_path / "cache", "--json")
    result = command("check", bundle, *options)
    assert result.exit_code == 3
    (run,) = orjson.loads(result.stdout)["functional"]["runs"]
    first, *rest = run["checks"]
    assert (run["world_size"], first["name"], first["met"]) == (2, "completes", False)
    assert first["detail"].startswith("rank 1: training.py line") and "AssertionError: alone" in first["detail"]
    assert all(check["met"] is None for check in rest)


# ------------------------------------------------------------------------------------------------------------ compare


def test_compare_prints_the_verdict_and_writes_the_report(command, tmp_path):
    a, b = write_run(tmp_path / "a", bundle="A"), write_run(tmp_path / "b", bundle="B", trained_bpb=2.1)
    result = command("compare", "--unverified", a, b, "--out", tmp_path / "report.json")
    assert result.exit_code == 0
    assert "winner: a (A), decided by heldout_delta" in result.stdout
    assert "provisional" not in result.stdout
    report = orjson.loads((tmp_path / "report.json").read_bytes())
    assert report == orjson.loads(command("compare", "--unverified", a, b, "--json").stdout)
    assert report["schema"] == "prism_compare_report.v1"


def test_compare_says_what_makes_it_provisional_or_invalid(command, tmp_path):
    a = write_run(tmp_path / "a", seeds=(1,), stopped_reason="wall_clock", spec={"token_budget": 9})
    b = write_run(tmp_path / "b", seeds=(1,))
    out = command("compare", "--unverified", a, b).stdout
    assert "not valid: a: seed 1 stopped by wall_clock" in out
    assert "not matched: token_budget is 9 for a and 500000 for b" in out
    assert "provisional: a public claim needs 3 seeds" in out


def test_compare_shows_every_kind_of_verdict(command, tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    assert "tie" in command("compare", "--unverified", a, b).stdout.splitlines()[-1]
    more = write_run(tmp_path / "more", batches=30)
    assert "no winner: the pair is not valid" in command("compare", "--unverified", a, more).stdout


def test_figures_are_whole_on_a_narrow_terminal(command, tmp_path, monkeypatch):
    a, b = write_run(tmp_path / "a", bundle="A"), write_run(tmp_path / "b", bundle="B", trained_bpb=2.1)
    monkeypatch.setenv("COLUMNS", "80")
    report, board = command("compare", "--unverified", a, b).stdout, command("rank", "--unverified", a, b).stdout
    assert all(name in report for name in ("heldout_delta", "prequential_bpb", "overfit_rate", "0.10000"))
    assert (
        f"{orjson.loads(command('rank', '--unverified', a, b, '--json').stdout)['rows'][0]['final_score']:.9f}" in board
    )
    assert "\u2026" not in report + board


# --------------------------------------------------------------------------------------------------------------- rank


def test_rank_prints_the_board(command, tmp_path):
    a = write_run(tmp_path / "a", bundle="A", trained_bpb=2.0)
    b = write_run(tmp_path / "b", bundle="B", trained_bpb=1.9, eligible=False)
    broken = write_run(tmp_path / "c", bundle="C", per_seed={2027: {"status": "failed"}})
    out = command("rank", "--unverified", a, b, broken).stdout
    assert out.index("B") < out.index("A")
    assert "not crown eligible" in out and "crown" in out
    assert "not ranked" in out and "seed 2027 failed" in out
    assert [
        r["submission_id"] for r in orjson.loads(command("rank", "--unverified", a, b, "--json").stdout)["rows"]
    ] == ["B", "A"]


def test_rank_names_a_file_that_is_not_there(command, tmp_path):
    with pytest.raises(DataError, match=r"submissions\.json: No such file"):
        command("rank", "--unverified", write_run(tmp_path / "a"), "--submissions", tmp_path / "submissions.json")


# ------------------------------------------------------------------------------------------- readiness, ladder, annex


def test_readiness_exits_5_when_blocked_and_0_when_ready(command, tmp_path):
    mounts = {}
    for name in ("train", "val", "phase2"):
        mounts[name] = tmp_path / name
        mounts[name].mkdir()
        (mounts[name] / "MANIFEST.json").write_text("{}")
        (mounts[name] / "data").write_text("x")
    options = [part for name, path in mounts.items() for part in (f"--{name}", path)]
    ready = command("readiness", *options)
    assert ready.exit_code == 0 and "READY" in ready.stdout
    (mounts["val"] / "MANIFEST.json").unlink()
    blocked = command("readiness", *options)
    assert blocked.exit_code == 5
    assert "BLOCKED_with_reason" in blocked.stdout and "BLOCKED_missing_manifest" in blocked.stdout
    document = orjson.loads(command("readiness", *options, "--json").stdout)
    assert document["reasons"] == [f"BLOCKED_missing_manifest:val:{mounts['val']}"]


def test_ladder_and_annex_print_their_documents(command):
    assert orjson.loads(command("ladder", "--json").stdout) == scale_ladder_document()
    assert "124,000,000" in command("ladder").stdout
    assert orjson.loads(command("annex").stdout) == research_protocol_annex()


# ------------------------------------------------------------------------------------------------------------ densify


def test_densify_refuses_what_is_no_run(command, tmp_path):
    with pytest.raises(UsageError, match="no seed-<seed> directory"):
        command("densify", tmp_path)
    with pytest.raises(UsageError, match="expected a scored run"):
        command("densify", tmp_path / "seed-1")
