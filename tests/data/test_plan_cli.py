"""`prism-fast plan` prints the report of every order and writes a manifest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from prism_fast.cli import plan_commands
from prism_fast.data import TokenLoader
from prism_fast.data.corpus import Corpus, resolve_data
from prism_fast.data.plan import bucket_plan, read_manifest
from prism_fast.data.tokenizers import reference_tokenizer
from prism_fast.protocol.errors import DataError, UsageError

app = typer.Typer()
app.callback()(lambda: None)  # with one command alone typer would take its name away
plan_commands.register(app)


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    lengths = np.clip(np.random.default_rng(0).lognormal(7, 0.8, 3_001), 1, 16384).astype(np.int32)
    np.save(tmp_path / "lengths.npy", lengths)
    return tmp_path / "lengths.npy"


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_rows_are_the_reports(lengths_file: Path) -> None:
    rows = json.loads(
        run(
            lengths_file,
            "--lengths",
            "--micro-batch",
            "2",
            "--bucket",
            "2,8,width",
            "--seed",
            "5",
            "--cost",
            "1e-3,1e-7",
            "--json",
        )
    )
    assert [row["bucket"] for row in rows] == [None, 2, 8, "width"]
    expected = bucket_plan(np.load(lengths_file), 2, 8, 5).report(8, None, (1e-3, 1e-7))
    assert rows[2] == expected


def test_the_table_shows_padding_and_savings(lengths_file: Path) -> None:
    text = run(lengths_file, "--lengths", "--cost", "6.8715e-4,8.8509e-8", "--seq-len", "4096", "--over", "split")
    assert "3,001 records" not in text  # split records make more rows than records
    for word in ("file order", "512", "zero-pad", "time saved", "over 4096 positions:", "split; lost 0 records"):
        assert word in text


def test_the_manifest_replays(lengths_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    run(lengths_file, "--lengths", "--bucket", "512,8", "--out", out, "--seq-len", "2048", "--over", "drop")
    plan, rows = read_manifest(out, np.load(lengths_file))
    assert (plan.bucket, rows.over) == (8, "drop")


def test_sources_come_from_a_file(lengths_file: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "sources.npy", np.arange(3_001) % 7)
    rows = json.loads(run(lengths_file, "--lengths", "--sources", tmp_path / "sources.npy", "--json"))
    assert all(5 < row["sources_mean"] <= 7 for row in rows)
    np.save(tmp_path / "sources.npy", np.arange(3))
    with pytest.raises(
        DataError, match=r"sources\.npy: expected the sources of 3001 records of .*, found shape \(3,\)"
    ):
        run(lengths_file, "--lengths", "--sources", tmp_path / "sources.npy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--micro-batch", "4", "--bucket", "2"], "bucket of 2 records cannot fill"),
        (["--token-budget", "8"], "more than the token budget 8"),
        (["--seq-len", "8", "--over", "cut"], "over 'cut'"),
        (["--token-budget", "100000", "--cost", "1,1"], "needs cost_rows"),
    ],
)
def test_arguments_that_do_not_fit_are_usage_errors(lengths_file: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(lengths_file, "--lengths", *arguments)


@pytest.mark.parametrize(("option", "value"), [("--bucket", "2,x"), ("--cost", "1"), ("--cost", "1,b")])
def test_unreadable_options_are_named(lengths_file: Path, option: str, value: str) -> None:
    result = CliRunner().invoke(app, ["plan", str(lengths_file), "--lengths", option, value])
    assert result.exit_code == 2
    assert option in result.output


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lengths.npy").write_text("1 2 3")
    with pytest.raises(DataError, match=r"lengths\.npy: not a \.npy array"):
        run(tmp_path / "lengths.npy", "--lengths")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return resolve_data("sample", "gpt2", cache_dir=tmp_path_factory.mktemp("cache"))


def test_a_packed_corpus_is_planned_split_by_split(sample: Corpus) -> None:
    train = sample.split("train")
    rows = json.loads(run(sample.folder, "--json", "--bucket", "2"))
    assert (rows[0]["records"], rows[0]["real_tokens"]) == (train.documents, train.tokens)
    assert rows[0]["sources_mean"] is None  # one shard: no sources to tell apart
    rows = json.loads(run(sample.folder, "--json", "--split", "all", "--bucket", "2,8"))
    assert rows[0]["records"] == 1189
    assert rows[0]["sources_mean"] < rows[2]["sources_mean"]  # file order keeps the splits apart, the plan mixes them
    assert rows[0]["waste"] > 0.05
    assert rows[1]["waste"] < 0.01
    one = json.loads(run(train.shards[0], "--json", "--bucket", "2"))
    assert one[0]["records"] == train.documents
    with pytest.raises(UsageError, match="no split 'dev'"):
        run(sample.folder, "--split", "dev")


@pytest.mark.parametrize("over", ["truncate", "drop", "split"])
def test_the_truncation_report_counts_what_is_lost(sample: Corpus, tmp_path: Path, over: str) -> None:
    out = tmp_path / "plan.json"
    run(sample.folder, "--split", "val", "--seq-len", "801", "--over", over, "--out", out)
    shards = sample.split("val").open()
    records = [record.tolist() for shard in shards for record in shard]
    long = [record for record in records if len(record) > 800]
    lost = {"truncate": [record[800:] for record in long], "drop": long, "split": []}[over]
    tokenizer = reference_tokenizer("gpt2")
    assert json.loads(out.read_bytes())["truncation"] == {
        "seq_len": 801,
        "over": over,
        "rows": {
            "truncate": len(records),
            "drop": len(records) - len(long),
            "split": sum(max(1, -(-len(record) // 800)) for record in records),
        }[over],
        "records_over": len(long),
        "records_lost": len(long) if over == "drop" else 0,
        "tokens_lost": sum(map(len, lost)),
        "bytes_lost": sum(len(tokenizer.decode_bytes(tokens)) for tokens in lost),
    }
    assert len(long) > 0


def test_a_manifest_made_by_the_command_feeds_a_loader(sample: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    run(sample.folder, "--seq-len", "1024", "--over", "split", "--out", out, "--seed", "3", "--micro-batch", "4")
    split = sample.split("train")
    loader = TokenLoader(split, out, output="numpy")
    assert sum(block.bytes for block in loader) == split.bytes


def test_token_files_of_other_tools_are_planned(tmp_path: Path) -> None:
    tokens = np.array([5, 6, 7, 256, 5, 256, 1, 2, 3, 4, 256], np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    rows = json.loads(run(tmp_path / "tokens.npy", "--tokenizer", "bytes", "--bucket", "2", "--json"))
    assert (rows[0]["records"], rows[0]["real_tokens"], rows[0]["padded_tokens"]) == (3, 8, 2 * 3 + 4)
    out = tmp_path / "plan.json"
    run(tmp_path / "tokens.npy", "--tokenizer", "bytes", "--seq-len", "4", "--out", out)
    assert json.loads(out.read_bytes())["truncation"]["bytes_lost"] == 1
