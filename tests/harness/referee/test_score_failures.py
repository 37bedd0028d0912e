"""Bundles and inputs that go wrong: one sentence, the documented exit code, and nothing that looks complete."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from prism_fast.protocol import constants as c
from tests.harness.conftest import TINY_ARCHITECTURE, TINY_TRAINING, score_command, write_bundle
from tests.live_processes import living

NARROW = TINY_ARCHITECTURE.replace("Linear(width, vocab_size)", "Linear(width, 1000)")
TWO_DIMENSIONAL = TINY_ARCHITECTURE.replace("return self.head(", "return self.head.weight[:64, :5]; return self.head(")
FORWARD_RAISES = TINY_ARCHITECTURE.replace("x = self.embedding(tokens)", "raise ValueError('not today')")
HUGE = TINY_ARCHITECTURE.replace("width=8", "width=2000")
OTHER_MODEL = TINY_TRAINING.replace("model = build_model(ctx)", "model = torch.nn.Sequential(build_model(ctx))")
AFTER_TWO = """    for i, batch in enumerate(ctx.iter_train_batches(model, batch_size=4, tokenizer=tokenizer)):
        if i == 2:
            {}
"""
LOOP = "    for batch in ctx.iter_train_batches(model, batch_size=4, tokenizer=tokenizer):\n"


def at_third_batch(statement: str) -> str:
    return "import os, sys, time\n" + TINY_TRAINING.replace(LOOP, AFTER_TWO.format(statement))


CASES = {
    "head narrower than the vocabulary": (NARROW, TINY_TRAINING, 3, "prism:vocab-mismatch", "1000 wide"),
    "logits of the wrong shape": (TWO_DIMENSIONAL, TINY_TRAINING, 4, "prism:output-shape", "expected float logits"),
    "a model whose forward raises": (FORWARD_RAISES, TINY_TRAINING, 4, "prism:runtime-error", "not today"),
    "too many parameters": (HUGE, TINY_TRAINING, 3, "prism:param-cap", "PRISM_RUNNER_PARAM_CAP"),
    "a foreign tokenizer": (
        TINY_ARCHITECTURE,
        TINY_TRAINING.replace("tokenizer=tokenizer", "tokenizer=object()"),
        3,
        "prism:tokenizer",
        "given a object as tokenizer",
    ),
    "a foreign tokenizer whose rejection is swallowed": (
        TINY_ARCHITECTURE,
        "def train(ctx):\n    from architecture import build_model\n    try:\n        list(ctx.iter_train_batches("
        "build_model(ctx), batch_size=4, tokenizer=object()))\n    except BaseException:\n        pass\n",
        3,
        "prism:tokenizer",
        "given a object as tokenizer",
    ),
    "another batch size than the pinned one": (
        TINY_ARCHITECTURE,
        TINY_TRAINING.replace("batch_size=4", "batch_size=5"),
        3,
        "prism:batch-request",
        "pins it to 4",
    ),
    "a sequence longer than the run's": (
        TINY_ARCHITECTURE,
        TINY_TRAINING.replace("batch_size=4", "batch_size=4, seq_len=65"),
        3,
        "prism:batch-request",
        "expected 2 to 64",
    ),
    "train raises": (
        TINY_ARCHITECTURE,
        at_third_batch("raise KeyError('lost')"),
        4,
        "prism:runtime-error",
        "training.py line",
    ),
    "train exits": (TINY_ARCHITECTURE, at_third_batch("sys.exit(0)"), 4, "prism:runtime-error", "sys.exit"),
    "train kills its process": (TINY_ARCHITECTURE, at_third_batch("os._exit(0)"), 4, "prism:runtime-error", "killed"),
    "train takes no batch": (
        TINY_ARCHITECTURE,
        "def train(ctx):\n    pass\n",
        4,
        "prism:runtime-error",
        "without calling",
    ),
    "a trained model that build_model does not declare": (
        TINY_ARCHITECTURE,
        OTHER_MODEL,
        3,
        "prism:model-mismatch",
        "not the one build_model(ctx) declares",
    ),
    "artifacts over the quota": (
        TINY_ARCHITECTURE,
        at_third_batch("open(ctx.artifacts_dir + '/big', 'wb').truncate(10**7); time.sleep(30)"),
        8,
        "prism:artifacts-quota",
        "PRISM_RUNNER_ARTIFACTS_QUOTA",
    ),
    "many small artifacts over the quota": (
        TINY_ARCHITECTURE,
        at_third_batch(
            "[open(f'{ctx.artifacts_dir}/{n}', 'wb').write(bytes(10**5)) for n in range(20)]; time.sleep(30)"
        ),
        8,
        "prism:artifacts-quota",
        "PRISM_RUNNER_ARTIFACTS_QUOTA",
    ),
    "endless output": (
        TINY_ARCHITECTURE,
        at_third_batch("[print('x' * 9999, flush=True) for _ in range(10**6)]"),
        8,
        "prism:artifacts-quota",
        "PRISM_RUNNER_ARTIFACTS_QUOTA",
    ),
    "a loop that hangs": (
        TINY_ARCHITECTURE,
        at_third_batch("time.sleep(600)").replace("i == 2", "i == 0"),
        7,
        "prism:budget-exceeded",
        "PRISM_RUNNER_BUDGET_EXCEEDED",
    ),
}


def assert_nothing_looks_complete(seed_dir: Path):
    assert not (seed_dir / c.RUN_MANIFEST_FILE).exists()
    assert not (seed_dir / c.TRAIN_SERIES_FILE).exists()


@pytest.mark.parametrize("case", CASES)
def test_a_bundle_that_goes_wrong_ends_with_its_rule_and_exit_code(score, case):
    architecture, training, code, rule, words = CASES[case]
    options = ["--batch-size=4", "--artifacts-quota=1000000"]
    if code == 7:
        options += ["--budget-seconds=1", "--watchdog-grace=2", "--step-budget=100000"]
    run = score(architecture, training, options=tuple(options))
    assert run.code == code, run.stderr
    status = run.status()
    assert status["exit_code"] == code and status["rule"] == rule
    assert status["status"] == ("rejected" if code == 3 else "failed")
    assert words in status["message"] and "\n" not in status["message"]
    assert status["message"] in run.stderr
    assert_nothing_looks_complete(run.seed_dir())


@pytest.mark.long
def test_a_failed_run_leaves_nothing_of_an_earlier_scored_one(score, tmp_path):
    good = score(out="same")
    assert good.code == 0, good.stderr
    bad = write_bundle(tmp_path / "bad", training=at_third_batch("raise KeyError('lost')"))
    run = score(bundle=bad, out="same")
    assert run.code == 4
    assert_nothing_looks_complete(run.seed_dir())
    assert not (run.seed_dir() / c.WEIGHTS_FILE).exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--data", "no/such/place"), "no/such/place"),
        (("--seal", "open", "--isolation", "bwrap"), "use --seal sealed"),
        (("--accounting", "prism-v2", "--nproc", "2", "--policy", "off"), "use --seal open --nproc 1"),
        (("--seeds", "1,two"), "1,two"),
        (("--seeds", "7,7"), "each seed once"),
        (("--seq-len", "1"), "--seq-len 1"),
        (("--tokenizer", "llama"), "llama"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(score, options, words):
    run = score(options=options)
    assert run.code == 2
    assert words in run.stderr and "Traceback" not in run.stderr
    assert not run.out.exists() or not list(run.out.iterdir())


def test_more_than_one_node_of_processes_is_refused(score):
    run = score(options=("--nproc", "9"))
    assert run.code == 3 and "prism:single-node-bound" in run.stderr


def test_a_directory_without_text_is_named(score, tmp_path):
    (tmp_path / "empty").mkdir()
    run = score(options=("--data", str(tmp_path / "empty")))
    assert run.code == 2 and str(tmp_path / "empty") in run.stderr


def test_a_corrupt_shard_is_found_before_the_run_starts(score, sample, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(sample, copy)
    shard = sorted(copy.rglob("*.prsh"))[0]
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    run = score(options=("--data", str(copy)))
    assert run.code == 5 and shard.name in run.stderr and "Traceback" not in run.stderr
    assert not (run.out / "seed-1337").exists()


def test_an_output_directory_with_other_peoples_files_is_not_touched(score, tmp_path):
    theirs = tmp_path / "run" / "seed-1337"
    theirs.mkdir(parents=True)
    (theirs / "thesis.txt").write_text("years of work")
    run = score()
    assert run.code == 2 and "not empty" in run.stderr
    assert [p.name for p in theirs.iterdir()] == ["thesis.txt"]


SLOW = "import time\n" + TINY_TRAINING.replace("loss.backward()", "loss.backward(); time.sleep(0.05)")


def started(process: subprocess.Popen, seed_dir: Path, batches: int = 5) -> None:
    """Waits until the ledger file on disk holds some batches."""
    deadline = time.monotonic() + 120
    ledger = seed_dir / c.LEDGER_FILE
    while time.monotonic() < deadline and process.poll() is None:
        if ledger.exists() and ledger.stat().st_size >= 64 + 56 * batches:
            return
        time.sleep(0.05)
    raise AssertionError(f"the run did not start: {process.stderr.read() if process.poll() is not None else ''}")


def alive_with(text: str) -> list[str]:
    """Command lines of living processes whose environment names this run."""
    return [" ".join(p.words) for p in living() if text in p.environment()]


@pytest.fixture
def long_run(tmp_path, cache_dir, sample):
    bundle = write_bundle(tmp_path / "slow", training=SLOW)
    command = score_command(bundle, tmp_path / "run", cache_dir, "--step-budget=100000")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    started(process, tmp_path / "run" / "seed-1337")
    yield process, tmp_path / "run" / "seed-1337"
    if process.poll() is None:
        process.kill()
    process.communicate()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_scored_on_what_it_has(long_run, sent):
    import orjson

    process, seed_dir = long_run
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    manifest = orjson.loads((seed_dir / c.RUN_MANIFEST_FILE).read_bytes())
    assert manifest["run"]["stopped_reason"] == "interrupted"
    assert "the run was interrupted" in manifest["score"]["emission_ineligible_reasons"]


def test_a_killed_referee_leaves_files_that_say_incomplete_and_no_process(long_run):
    import orjson

    process, seed_dir = long_run
    process.kill()
    process.wait()
    assert orjson.loads((seed_dir / c.RUN_STATUS_FILE).read_bytes())["status"] == "incomplete"
    assert_nothing_looks_complete(seed_dir)
    deadline = time.monotonic() + 30
    while (left := alive_with(str(seed_dir))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def test_forked_children_do_not_outlive_a_run(score, tmp_path):
    training = at_third_batch("os.fork() or (os.setsid(), time.sleep(600))")
    run = score(training=training)
    assert run.code == 0, run.stderr
    assert not alive_with(str(run.seed_dir()))
    assert os.path.exists(run.seed_dir() / c.RUN_MANIFEST_FILE)
