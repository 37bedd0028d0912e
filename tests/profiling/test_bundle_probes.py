"""The probes that run a bundle: each in a real process of its own, on a corpus and a bundle made for it."""

import pytest

from prism_fast.profiling.bundle_process import BundleJob
from prism_fast.profiling.overhead import measure_overhead
from prism_fast.profiling.scaling import WARMUP_ROUNDS, measure_scaling, steps_by_width
from prism_fast.protocol.errors import BundleFailed, BundleRejected, UsageError
from prism_fast.report.probes import write_probe


def job(bundle, corpus, widths=(8, 16, 32), **options):
    defaults = {"data": str(corpus), "tokenizer": "bytes", "torch_threads": 1, "device": "cpu"}
    return BundleJob(bundle, widths, 0, {}, **(defaults | options))


def test_scaling_times_every_width_and_keeps_the_raw_steps(write_bundle, corpus, tmp_path):
    found = measure_scaling(job(write_bundle(), corpus), repeats=3)
    assert [p["width"] for p in found["points"]] == [8, 16, 32]
    assert {len(times) for times in found["step_s"].values()} == {3}
    assert all(t > 0 for times in found["step_s"].values() for t in times)
    assert found["batch_size"] == 2 and found["model_params"] > 320 * 32 and found["verdict"]
    json_path, svg_path = write_probe(found, tmp_path / "out")
    assert json_path.name == "scaling.json" and svg_path.read_text().startswith("<svg")


def test_the_steps_of_widths_that_take_turns_are_told_apart():
    rounds = [[w + r / 10 for w in (1, 2, 3)] for r in range(WARMUP_ROUNDS + 2)]
    found = steps_by_width([s for row in rounds for s in row], [1, 2, 3], WARMUP_ROUNDS)
    assert found == {1: [1.2, 1.3], 2: [2.2, 2.3], 3: [3.2, 3.3]}


def test_counters_cost_less_than_one_percent_of_a_step(write_bundle, corpus):
    found = measure_overhead(
        write_bundle(), seq_len=64, steps=4, repeats=1, modes=("bare",), data=str(corpus), tokenizer="bytes",
        device="cpu", torch_threads=1,
    )  # fmt: skip
    (row,) = found["rows"]
    assert row["mode"] == "bare" and row["ratio"] == 1 and row["tokens_per_s"] > 0 and row["seq"] == 64
    # Microseconds beside milliseconds: two orders of magnitude of room even on a loaded machine.
    assert 0 < found["counters"]["observe_share"] < 0.01


@pytest.mark.slow
def test_overhead_compares_the_bare_loop_with_both_ways_of_scoring(write_bundle, corpus):
    found = measure_overhead(
        write_bundle(), seq_len=64, steps=6, repeats=1, data=str(corpus), tokenizer="bytes", device="cpu",
        torch_threads=1,
    )  # fmt: skip
    assert [r["mode"] for r in found["rows"]] == ["bare", "open", "sealed"]
    assert {r["params"] for r in found["rows"]} == {found["rows"][0]["params"]}
    bare, open_, sealed = (r["ratio"] for r in found["rows"])
    assert bare == 1 < open_ < sealed


@pytest.mark.parametrize(
    ("training", "error", "says"),
    [
        ("def train(ctx):\n    raise RuntimeError('fell over')\n", BundleFailed, "training.py line 2: .*fell over"),
        pytest.param(
            "def train(ctx):\n    pass\n",
            BundleFailed,
            r"without calling ctx\.iter_train_batches",
            marks=pytest.mark.slow,
        ),
        (
            "import os\ndef train(ctx):\n    print('last words', flush=True)\n    os._exit(9)\n",
            BundleFailed,
            "last words",
        ),
    ],
    ids=["raises", "takes-nothing", "dies"],
)
def test_a_bundle_that_fails_says_so_in_one_sentence(write_bundle, corpus, training, error, says):
    with pytest.raises(error, match=says):
        measure_scaling(job(write_bundle(training=training), corpus), repeats=1)


@pytest.mark.slow
def test_a_width_that_the_corpus_cannot_fill_is_a_usage_error(write_bundle, corpus):
    with pytest.raises(UsageError, match="no full batch of 2 rows of 900000 tokens"):
        measure_scaling(job(write_bundle(), corpus, (16, 900000)), repeats=1)


@pytest.mark.slow
def test_a_width_that_the_bundle_refuses_is_a_usage_error(write_bundle, corpus):
    bundle = write_bundle()
    training = bundle / "training.py"
    training.write_text(training.read_text().replace("batch_size=2", "batch_size=2, seq_len=20"))
    with pytest.raises(UsageError, match="seq_len=20, and a width of 32"):
        measure_scaling(job(bundle, corpus), repeats=1)


@pytest.mark.parametrize(
    ("change", "says"),
    [({"widths": (16,)}, "two at least"), ({"widths": (16, 16)}, "each once"), ({"nproc": 9}, "expected 1 to 8"),
     ({"split": "nowhere"}, "no nowhere split")],
    ids=["one-width", "twice", "nproc", "split"],
)  # fmt: skip
def test_what_does_not_fit_together_is_a_usage_error(write_bundle, corpus, change, says):
    with pytest.raises(UsageError, match=says):
        measure_scaling(job(write_bundle(), corpus, **change), repeats=1)


@pytest.mark.slow
def test_a_folder_that_is_no_bundle_is_rejected_with_the_bundles_rule(corpus, tmp_path):
    with pytest.raises(BundleRejected, match=r"no architecture\.py"):
        measure_scaling(job(tmp_path, corpus), repeats=1)
