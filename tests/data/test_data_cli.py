"""`prism-fast shards|pack|corpus` as a person runs them: what is printed, and the exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from prism_fast.cli import data_commands
from prism_fast.cli.progress import TerminalReporter
from prism_fast.data.corpus import open_corpus
from prism_fast.data.pack import Progress
from prism_fast.data.shards import open_shard
from prism_fast.protocol.errors import DataError, UsageError

app = typer.Typer()
data_commands.register(app)


def run(*arguments, fails=None):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if fails is not None:
        assert isinstance(result.exception, fails), result.output
        return str(result.exception)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": f"d{i}", "text": "some text " * i}) + "\n" for i in range(200)))
    return path


def test_pack_then_inspect_then_verify(text, tmp_path):
    printed = run("pack", text, "--out", tmp_path / "out", "--documents-per-shard", 150)
    assert "200 documents" in printed and "2 shards (1 empty)" in printed
    rows = json.loads(run("shards", "inspect", tmp_path / "out", "--json"))
    assert [row["records"] for row in rows] == [150, 50]
    assert rows[0]["tokenizer"] == "gpt2" and rows[0]["format"] == "prism_shard.v1"
    shown = run("shards", "inspect", tmp_path / "out/train/shard-00000.prsh", "--tokenizer", "gpt2", "--head", 2)
    assert "record 1" in shown and "b'some text '" in shown
    assert run("shards", "verify", tmp_path / "out").count("good") == 2
    assert "good, fingerprint" in run("corpus", "verify", tmp_path / "out")


def test_corpus_build_makes_three_splits_and_the_official_pins(text, tmp_path):
    run("corpus", "build", text, "--out", tmp_path / "out", "--subset", "sample-10BT", "--tokenizer", "bytes")
    manifest = open_corpus(tmp_path / "out").manifest
    assert manifest.dataset.revision == "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
    assert set(manifest.splits) == {"train", "val", "test"}
    assert "expected one of" in run("corpus", "build", text, "--out", tmp_path / "b", "--subset", "x", fails=UsageError)
    assert "name the dataset" in run("corpus", "build", text, "--out", tmp_path / "b", fails=UsageError)


def test_corpus_verify_prints_every_fault(text, tmp_path):
    run("pack", text, "--out", tmp_path / "out", "--documents-per-shard", 50)
    for number in (1, 3):
        path = tmp_path / f"out/train/shard-0000{number}.prsh"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    result = CliRunner().invoke(app, ["corpus", "verify", str(tmp_path / "out")])
    assert "shard-00001.prsh: expected sha256" in result.stderr and "shard-00003.prsh: expected sha" in result.stderr
    assert isinstance(result.exception, DataError) and "4 faults found" in str(result.exception)


def test_convert_reads_other_formats(tmp_path):
    np.array([50256, 31373, 995, 50256, 64], "<u2").tofile(tmp_path / "a.bin")
    printed = run("shards", "convert", tmp_path / "a.bin", tmp_path / "a.prsh", "--dtype", "u16")
    assert "2 records, 3 tokens, 12 UTF-8 bytes" in printed
    assert [r.tolist() for r in open_shard(tmp_path / "a.prsh")] == [[31373, 995], [64]]
    error = run("shards", "convert", tmp_path / "a.bin", tmp_path / "a.prsh", "--dtype", "u16", fails=UsageError)
    assert "exists: choose another name" in error
    error = run("shards", "inspect", tmp_path / "a.bin", "--dtype", "f16", fails=UsageError)
    assert "expected one of u8, u16" in error
    error = run("shards", "inspect", tmp_path / "none.bin", fails=UsageError)
    assert "No such file" in error
    run("shards", "verify", tmp_path / "a.bin", "--dtype", "u16", "--one-record", "--tokenizer", "gpt2")


def test_a_rank_file_is_a_tokenizer(text, tmp_path):
    from base64 import b64encode

    (tmp_path / "own.tiktoken").write_bytes(b"".join(b64encode(bytes([i])) + b" %d\n" % i for i in range(256)))
    run("pack", text, "--out", tmp_path / "out", "--tokenizer", tmp_path / "own.tiktoken")
    assert open_corpus(tmp_path / "out").tokenizer_name == "own"
    printed = run("shards", "verify", tmp_path / "out", "--tokenizer", tmp_path / "own.tiktoken")
    assert "bytes checked" in printed
    assert "bytes not checked" in run("shards", "verify", tmp_path / "out")
    assert "No such file" in run("shards", "verify", tmp_path / "out", "--tokenizer", "none.tiktoken", fails=UsageError)


def test_help_needs_no_torch_no_pyarrow_and_no_tokenizer():
    code = (
        "import sys, typer\nfrom prism_fast.cli import data_commands\napp = typer.Typer()\n"
        "data_commands.register(app)\nheavy = {'torch', 'pyarrow', 'tiktoken', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_facts_are_called_unknown_and_a_missing_choice_names_its_options(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(10, dtype=np.uint16))
    shown = run("shards", "inspect", tmp_path / "a.npy", "--one-record")
    assert "tokenizer  unknown" in shown and "None" not in shown
    error = run("shards", "inspect", tmp_path / "a.npy", fails=DataError)
    assert "--eot" in error and "--one-record" in error


def test_a_rate_is_shown_once_there_is_one():
    stream = io.StringIO()
    reporter = TerminalReporter(stream)
    reporter.packing(Progress("pack", 5, 100, 1, 1, 5))
    assert stream.getvalue() == ""
