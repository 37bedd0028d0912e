"""full_scale_eval: phase 1 and then phase 2 in one single pass, and BLOCKED with every reason where a mount is not."""

import os
import shutil
import subprocess
from pathlib import Path

import orjson
import pytest

from prism_fast.data.corpus import build_corpus, resolve_data
from prism_fast.data.manifest import Dataset
from prism_fast.data.stream import TokenStream
from prism_fast.data.tokenizers import reference_tokenizer
from prism_fast.harness.audits.verify import verify_run
from prism_fast.harness.referee import referee
from prism_fast.harness.referee.request import ScoreRequest, SilentReporter
from prism_fast.protocol.errors import DataError
from tests.harness.conftest import Run, score_command, write_bundle

DOCUMENTS = 60


def build(folder: Path, name: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    text = folder.parent / f"{name}.jsonl"
    lines = [
        {"id": f"{name}-{i}", "text": f"{name} tells of number {i}, again and again. " * 3} for i in range(DOCUMENTS)
    ]
    text.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    build_corpus([text], folder, reference_tokenizer("gpt2"), dataset=Dataset(name=name))
    text.unlink()


@pytest.fixture
def mounts(tmp_path) -> Path:
    """/edu: a locked corpus whose val split is mounted elsewhere, and sample-100BT beside its train mount."""
    edu = tmp_path / "edu"
    build(edu, "phase-1")
    build(edu / "sample-100BT", "phase-2")
    (tmp_path / "secret").mkdir()
    shutil.move(edu / "val", tmp_path / "secret" / "val")
    shutil.copy(edu / "MANIFEST.json", tmp_path / "secret" / "val")
    return edu


@pytest.mark.slow
def test_both_phases_are_walked_in_order_and_verified(mounts, tmp_path, cache_dir):
    bundle = write_bundle(tmp_path / "bundle")
    command = [
        part
        for part in score_command(bundle, tmp_path / "run", cache_dir, "--mode=full_scale_eval", "--token-budget=0")
        if not part.startswith(("--data", "--step-budget"))
    ]
    environment = {
        **os.environ,
        "PRISM_BASE_EVAL_TRAIN_DATA_DIR": str(mounts / "train"),
        "PRISM_BASE_EVAL_VAL_DATA_DIR": str(tmp_path / "secret" / "val"),
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    run = Run(done.returncode, tmp_path / "run", done.stdout, done.stderr)
    assert run.code == 0, run.stderr
    manifest = run.manifest()
    splits = [resolve_data(folder, "gpt2").split("train") for folder in (mounts, mounts / "sample-100BT")]
    assert manifest.mode == "full_scale_eval" and manifest.run.stopped_reason == "data_exhausted"
    assert manifest.data.source == "phase-1 then phase-2"
    assert manifest.data.available_bytes == sum(split.bytes for split in splits)
    assert manifest.data.covered_bytes + manifest.data.unread_tail_bytes == manifest.data.available_bytes
    assert splits[0].documents < manifest.data.consumed_documents <= sum(split.documents for split in splits)
    assert manifest.score.heldout_delta is not None
    assert list(verify_run(run.seed_dir(), data=str(mounts / "train"))) == []
    other = verify_run(run.seed_dir(), data=str(mounts / "train"), phase2=str(mounts / "train"))
    assert "the run was scored on" in next(other)


def test_the_stream_reads_phase_1_to_its_end_and_then_phase_2(mounts, tmp_path):
    request = ScoreRequest(
        write_bundle(tmp_path / "bundle"),
        str(mounts / "train"),
        tmp_path / "run",
        val=str(tmp_path / "secret" / "val"),
        phase2=str(mounts / "sample-100BT"),
        mode="full_scale_eval",
        isolation="none",
    )
    prepared = referee._prepare(request, SilentReporter())
    first, second = (resolve_data(folder, "gpt2").split("train") for folder in (mounts, mounts / "sample-100BT"))
    assert prepared.train.shards == (*first.shards, *second.shards)
    decode = reference_tokenizer("gpt2").decode_bytes
    with TokenStream(prepared.train, 64, 4) as stream:
        text = b"".join(decode(row[1:]) for batch in stream for row in batch.tokens)
        plan = stream.plan_summary()
    assert text.index(b"phase-2") > text.rindex(b"phase-1")
    assert plan.corpus_bytes == first.bytes + second.bytes
    spec = referee._freeze_spec(request, prepared, 1337)
    assert spec.corpus_fingerprint != spec.phase2_corpus_fingerprint is not None
    assert spec.val_corpus_fingerprint == spec.corpus_fingerprint  # one manifest, its splits mounted apart


def test_missing_mounts_are_blocked_with_every_reason_and_exit_5(score, tmp_path):
    run = score(options=("--mode", "full_scale_eval", "--data", str(tmp_path / "edu" / "train"), "--val", "/no/val"))
    assert run.code == 5 and not run.out.exists()
    for reason in (
        f"BLOCKED_missing_mount:train:{tmp_path}/edu/train",
        "BLOCKED_missing_mount:val:/no/val",
        f"BLOCKED_missing_mount:phase_2_sample_100BT:{tmp_path}/edu/sample-100BT",
    ):
        assert reason in run.stderr


def test_a_split_mounted_alone_is_opened_by_the_manifest_in_it_or_beside_it(mounts, tmp_path):
    secret = tmp_path / "secret" / "val"
    val = resolve_data(secret, "gpt2", mount_of="val").split("val")
    assert all(path.parent == secret for path in val.shards) and val.documents > 0
    train = resolve_data(mounts / "train", "gpt2", mount_of="train")
    assert train.splits == ("train", "test") and train.split("train").documents > 0
    shutil.copy(train.split("train").shards[0], secret / val.shards[0].name)
    with pytest.raises(DataError, match=r"expected a file of \d+ bytes"):
        resolve_data(secret, "gpt2", mount_of="val")


def test_the_text_under_an_original_manifest_is_read(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir()
    (folder / "train-00000.jsonl").write_text('{"id": "a", "text": "one"}\n')
    (folder / "MANIFEST.json").write_text('{"schema": "prism_locked_data.v1", "pin": "x"}')
    corpus = resolve_data(folder, "bytes", tmp_path / "cache")
    assert corpus.splits == ("train",) and corpus.split("train").bytes == 3
