"""The page: what it says, that it stands alone, and how a real browser shows it on a desk and on a phone."""

import csv
import re
import xml.etree.ElementTree as ET

import pytest

from prism_fast.protocol.errors import DataError, UsageError
from prism_fast.report.exports import CSV_COLUMNS, scalars, write_csv, write_tensorboard
from prism_fast.report.page import read_sources, render, write_report
from prism_fast.report.probes import write_probe
from prism_fast.report.svg import MAX_POINTS, Bars, Dots, Series, bar_chart, dot_chart, line_chart
from tests.report.browser import find_browser
from tests.report.conftest import write_run

CHARTS = {
    "Online loss", "Running bits per byte", "Gradient norm", "Held-out delta by seed",
    "Validation bits per byte by seed", "Step time in its parts", "Throughput", "Longest step",
}  # fmt: skip


def overhead_document():
    rows = [
        {"mode": mode, "vocab": 50304, "seq": 128, "batch": 4, "params": 3_000_000, "tokens_per_s": rate,
         "ratio": 100 / rate, "tokens_per_s_all": [rate]}
        for mode, rate in (("bare", 100.0), ("open", 80.0), ("sealed", 60.0))
    ]  # fmt: skip
    return {
        "schema": "prism_profile_overhead.v1", "submission_id": "decoder", "device": "cpu", "steps": 8, "repeats": 1,
        "rows": rows, "machine": {},
        "counters": {"observe_s": 7e-6, "observe_share": 1e-5, "step_s": 0.5, "grad_norm_s": 1e-3,
                     "grad_norm_share": 2e-3},
    }  # fmt: skip


@pytest.fixture
def page(tmp_path):
    """Two runs, five seeds and a probe in one page."""
    one = write_run(tmp_path / "one", bundle="decoder-000000000001", trained_bpb=2.0)
    two = write_run(
        tmp_path / "two",
        seeds=(1337, 2027, 9),
        per_seed={9: {"status": "failed"}},
        bundle="state_space-000000000002",
        trained_bpb=2.2,
        eligible=False,
    )
    probe, _ = write_probe(overhead_document(), tmp_path / "probes")
    write_report([one, two, probe], tmp_path / "report.html")
    return tmp_path / "report.html"


def test_the_page_holds_every_run_seed_flag_and_probe(page):
    text = page.read_text()
    assert "<title>2 runs: decoder, state_space</title>" in text
    for expected in (
        "decoder, 1337", "decoder, 4242", "state_space, 2027",
        "state_space, seed 9 was not scored: failed: rank 0 fell",
        "state_space, seeds 1337, 2027: not crown eligible: seal is open", "42.0%", "Step time by mode",
    ):  # fmt: skip
        assert expected in text, expected
    assert set(re.findall(r"<svg[^>]*><title>([^<]*)</title>", text)) >= CHARTS


def test_the_page_stands_alone(page):
    text = page.read_text()
    assert "<script" not in text and '<link rel="stylesheet"' not in text and "@import" not in text
    assert not re.findall(r'(?:src|href)="(?!data:)', text) and "default-src 'none'" in text
    assert not re.findall(r"url\((?!data:)", text) and len(text) < 200_000


def test_what_a_run_is_called_cannot_write_the_page(tmp_path):
    run = write_run(tmp_path / "run", seeds=(1,), bundle='<script>alert("x")</script>-000000000001')
    text = render(read_sources([run]))
    assert "<script" not in text and "&lt;script&gt;" in text


def test_runs_of_one_bundle_are_told_apart_by_their_directories(tmp_path):
    runs = [write_run(tmp_path / name, seeds=(1,), bundle="same-000000000001") for name in ("first", "second")]
    assert [name for name, _ in read_sources(runs).runs] == ["same-000000000001 (first)", "same-000000000001 (second)"]


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [("{", DataError, "not JSON"), ('{"schema": "other"}', UsageError, "no probe's document"),
     ('{"schema": "prism_profile_unknown.v1"}', DataError, "expected one of")],
    ids=["broken", "other", "unknown"],
)  # fmt: skip
def test_a_file_that_is_no_probe_is_named(tmp_path, text, error, says):
    path = tmp_path / "probe.json"
    path.write_text(text)
    with pytest.raises(error, match=says):
        write_report([path], tmp_path / "out.html")


# ----------------------------------------------------------------------------------------------------- in a browser


def test_a_browser_shows_the_page_without_a_word_on_its_console(page, tmp_path):
    browser = find_browser()
    assert browser.console(page) == []
    # The check can fail: a page that breaks its own policy is heard.
    bad = tmp_path / "bad.html"
    bad.write_text(page.read_text().replace("</body>", "<script>1</script><img src='http://127.0.0.1:9/x.png'></body>"))
    assert len(browser.console(bad)) >= 2


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (360, False), (390, True)], ids=["desk", "phone", "dark"])
def test_charts_are_there_and_can_be_read(page, width, dark):
    found = find_browser().measure(page, width, dark=dark)
    assert found["width"] == width and found["requests"] == 0
    # Nothing sticks out sideways: wide tables scroll in their own box.
    assert found["scroll"] <= found["width"]
    charts = {chart["title"]: chart for chart in found["charts"]}
    assert charts.keys() == CHARTS | {"Step time by mode"}
    for title, chart in charts.items():
        assert chart["width"] > 250 and chart["height"] > 80 and chart["right"] <= found["width"], title
        assert chart["smallest"] >= 10, f"{title}: text of {chart['smallest']:.1f} px"
        assert not chart["outside"], f"{title}: {chart['outside']}"
        assert chart["marks"] >= 2 and "no data" not in chart["labels"], title
        assert len(chart["spoken"]) > 30, title
    light = [int(v) for v in re.findall(r"\d+", charts["Throughput"]["colour"])[:3]]
    assert (min(light) > 180) if dark else (max(light) < 80)
    assert 6 in found["tables"] and min(found["tables"]) > 1


def test_every_axis_of_a_curve_names_its_unit(page):
    for svg in re.findall(r"<svg.*?</svg>", page.read_text(), re.DOTALL):
        texts = [t.text or "" for t in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
        units = (
            r"\((bits per byte.*|UTF-8 bytes|nats per token|ms.*|log scale.*)\)|bits per byte|per second|^step$|\(ms\)"
        )
        assert any(re.search(units, text) for text in texts), texts


# ------------------------------------------------------------------------------------------------------------ charts


def test_a_chart_of_nothing_says_so():
    assert "no data" in line_chart("t", "x", "y", [Series("s", [1.0], [None])])
    assert "no data" in bar_chart("t", "x", Bars([], {})) and "no data" in dot_chart("t", "x", [Dots("a", [], [])])


def test_one_point_equal_values_and_huge_ranges_can_be_drawn():
    for x, y in (([1], [2.0]), ([1, 2], [3.0, 3.0]), ([0, 1e9], [1e-9, 1e12]), ([0, 0], [0.0, 0.0])):
        ET.fromstring(line_chart("t", "x", "y", [Series("s", x, y, marks=True)]))
        ET.fromstring(line_chart("t", "x", "y", [Series("s", x, y)], log_y=True))


def test_a_long_series_is_thinned_and_keeps_its_spike():
    values = [1.0] * 100_000
    values[54_321] = 99.0
    svg = line_chart("t", "x", "y", [Series("s", range(100_000), values)])
    path = re.search(r'class="line"[^>]* d="([^"]*)"', svg)[1]
    points = re.findall(r"[ML]([\d.]+) ([\d.]+)", path)
    assert len(points) <= MAX_POINTS
    heights = [float(y) for _, y in points]
    assert min(heights) < 60 < 200 < max(heights)


def test_a_gap_breaks_the_line():
    svg = line_chart("t", "x", "y", [Series("s", range(5), [1.0, 2.0, None, 2.0, 1.0])])
    path = re.search(r'class="line"[^>]* d="([^"]*)"', svg)[1]
    assert path.count("M") == 2 and path.count("L") == 2


# ----------------------------------------------------------------------------------------------------------- exports


def test_the_csv_holds_every_point_of_every_seed(tmp_path):
    run = write_run(tmp_path / "run", seeds=(1, 2), bundle="decoder-000000000001", batches=7)
    write_csv(read_sources([run]), tmp_path / "series.csv")
    with (tmp_path / "series.csv").open(newline="") as f:
        rows = list(csv.DictReader(f))
    assert tuple(rows[0]) == CSV_COLUMNS and len(rows) == 14
    assert rows[0]["grad_norm"] == "" and rows[7]["seed"] == "2" and rows[6]["i"] == "6"
    assert float(rows[-1]["running_bpb"]) == pytest.approx(3.0)


def test_tensorboard_reads_back_what_was_written(tmp_path):
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = write_run(tmp_path / "run", seeds=(1,), bundle="decoder-000000000001", batches=5)
    sources = read_sources([run])
    for _ in range(2):  # written again, it replaces
        (folder,) = write_tensorboard(sources, tmp_path / "events")
    assert folder == tmp_path / "events" / "decoder" / "seed-1" and len(list(folder.iterdir())) == 1
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"throughput(tps)", "mfu(%)", "tflops", "memory/max_active(GiB)", "time_metrics/end_to_end(s)",
            "loss_metrics/global_avg_loss", "grad_norm"} <= tags  # fmt: skip
    assert [(e.step, e.value) for e in events.Scalars("throughput(tps)")] == [(i, 2560.0) for i in range(5)]
    assert events.Scalars("loss_metrics/running_bpb")[-1].value == pytest.approx(3.0)
    assert len(events.Scalars("grad_norm")) == 4  # the first step has none
    assert events.Scalars("memory/max_active(GiB)")[0].value == 2.0


def test_mfu_is_left_out_where_the_peak_is_not_known(tmp_path):
    run = write_run(tmp_path / "run", seeds=(1,), bundle="decoder-000000000001", batches=3)
    (seed,) = read_sources([run]).seeds
    known = {tag for *_, tag, _ in scalars(seed)}
    seed.profile.flops.peak_flops = None
    assert known - {tag for *_, tag, _ in scalars(seed)} == {"mfu(%)"}
