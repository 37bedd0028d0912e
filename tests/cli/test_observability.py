"""What a validator's tools read of a scoring job: JSON lines on stderr, and the Prometheus text file."""

import io
import re

import orjson
import pytest

from prism_fast.cli.json_log import JsonReporter
from prism_fast.protocol.errors import BundleRejected, UsageError
from prism_fast.report.prometheus import HELP, Sample, render, write_metrics
from tests.cli.test_main import run

LINE = re.compile(r'(?P<name>[a-z_]+)\{(?P<labels>(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*)\} (?P<value>[-+0-9.einfa]+)')


def parsed(text: str) -> dict[str, float]:
    """Metric name -> value, and the format is Prometheus': one HELP and TYPE before each metric's samples."""
    found, described = {}, set()
    for line in text.splitlines():
        if line.startswith("# "):
            described.add(line.split(" ")[2])
            continue
        match = LINE.fullmatch(line)
        assert match, line
        assert match["name"] in described
        found[match["name"]] = float(match["value"])
    return found


def lines(text: str) -> list[dict]:
    return [orjson.loads(line) for line in text.splitlines()]


def test_an_error_is_a_json_line_and_a_metric_with_its_exit_code(tmp_path):
    prom = tmp_path / "score.prom"
    done = run(
        "score", str(tmp_path / "nothing"), "--data=sample", f"--out={tmp_path / 'out'}", "--log-format=json",
        f"--metrics={prom}",
    )  # fmt: skip
    assert done.returncode == 2
    (said,) = lines(done.stderr)
    assert (said["level"], said["event"], said["exit_code"], said["rule"]) == ("error", "error", 2, None)
    assert "no such bundle" in said["message"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", said["time"])
    values = parsed(prom.read_text())
    assert values["prism_score_running"] == 0 and values["prism_score_exit_code"] == 2
    assert values["prism_score_updated_timestamp_seconds"] > 1e9


def test_every_event_is_one_line_of_json():
    stream = io.StringIO()
    reporter = JsonReporter(stream)
    reporter.stage("reading\nsample")
    reporter.warn("isolation: none")
    reporter.error(BundleRejected("no", rule="prism:param-cap"))
    said = lines(stream.getvalue())
    assert [(line["event"], line["level"]) for line in said] == [
        ("stage", "info"),
        ("warning", "warning"),
        ("error", "error"),
    ]
    assert said[2]["rule"] == "prism:param-cap" and said[2]["exit_code"] == 3


def test_labels_are_escaped_and_samples_of_a_metric_stand_together():
    samples = [
        Sample("prism_seed_tokens", 1, {"submission": 'a"b\\c\nd', "seed": "1"}),
        Sample("prism_seed_exit_code", 0, {"submission": "a", "seed": "1"}),
        Sample("prism_seed_tokens", 2.5, {"submission": "a", "seed": "2"}),
    ]
    text = render(samples)
    assert text.count("# TYPE prism_seed_tokens gauge\n") == 1
    assert r'prism_seed_tokens{submission="a\"b\\c\nd",seed="1"} 1' in text
    assert parsed(text) == {"prism_seed_tokens": 2.5, "prism_seed_exit_code": 0}


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"--metrics .*: no such folder"):
        write_metrics(tmp_path / "nowhere" / "x.prom", [])


@pytest.mark.slow
def test_a_scored_run_is_told_in_json_and_metrics(tmp_path):
    from tests.harness.conftest import write_bundle

    bundle, prom = write_bundle(tmp_path / "bundle"), tmp_path / "score.prom"
    done = run(
        "score", str(bundle), "--data=sample", f"--out={tmp_path / 'out'}", f"--cache-dir={tmp_path}", "--seq-len=64",
        "--step-budget=8", "--val-byte-budget=3000", "--seal=open", "--log-format=json", f"--metrics={prom}", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    events = lines(done.stderr)
    assert {"stage", "training", "result"} <= {line["event"] for line in events}
    result = next(line for line in events if line["event"] == "result")
    summary = orjson.loads(done.stdout)
    values = parsed(prom.read_text())
    assert values["prism_seed_final_score"] == result["final_score"] == summary["seeds"][0]["final_score"]
    assert values["prism_seed_tokens"] == 8 * 4 * 64 and values["prism_score_exit_code"] == 0
    assert set(values) <= set(HELP)
