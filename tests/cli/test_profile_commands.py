"""`prism-fast profile` and `prism-fast report` as a person meets them."""

import json

import pytest

from tests.cli.test_main import run
from tests.report.conftest import write_run


def test_profile_padding_prints_a_table_or_the_raw_document_and_keeps_both(tmp_path):
    import numpy as np

    from prism_fast.data.synthetic import write_synthetic_shard
    from prism_fast.data.tokenizers import reference_tokenizer

    shard = tmp_path / "lengths.prsh"
    write_synthetic_shard(shard, np.random.default_rng(1).integers(5, 200, 400), reference_tokenizer("bytes"), 1)
    options = ("profile", "padding", str(shard), "--tokenizer", "bytes", "--bucket", "2,64", "--cost", "1e-4,1e-7")
    done = run(*options, "--out", str(tmp_path / "probes"))
    assert done.returncode == 0, done.stderr
    assert "file order" in done.stdout and "less predicted time" in done.stdout
    raw = json.loads(run(*options, "--json").stdout)
    assert raw == json.loads((tmp_path / "probes" / "padding.json").read_bytes())
    assert [row["bucket"] for row in raw["rows"]] == [None, 2, 64] and raw["rows"][1]["waste"] < 0.05
    assert (tmp_path / "probes" / "padding.svg").read_text().startswith("<svg")


def test_report_writes_what_is_asked_for(tmp_path):
    out = write_run(tmp_path / "run", seeds=(1, 2), bundle="decoder-000000000001", batches=4)
    done = run("report", str(out), "--out", str(tmp_path / "page.html"), "--csv", str(tmp_path / "series.csv"))
    assert done.returncode == 0 and done.stdout == "", done.stderr
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert len((tmp_path / "series.csv").read_text().splitlines()) == 9


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("report", "nowhere", "--out", "x.html"), "nowhere: no such directory"),
        (("report", "nowhere"), "nothing asked for"),
        (("profile", "scaling", "x", "--widths", "64,wide"), "--widths 64,wide: expected whole numbers"),
        (("profile", "scaling", "x", "--clock", "sand"), "--clock sand: expected wall or processor"),
        (("profile", "padding", "sample", "--cost", "cheap"), "--cost cheap: expected two numbers A,B"),
    ],
    ids=["no-run", "nothing", "widths", "clock", "cost"],
)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(arguments, says):
    done = run(*arguments)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
