"""The full-scale probe: what blocks a mount is named, READY is said only of what is there, nothing is spent."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from prism_fast.protocol.scale import probe_full_scale_readiness
from prism_fast.protocol.settings import PrismSettings

LABELS = {"train": "train", "val": "val", "phase2": "phase_2_sample_100BT"}


def mount(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "MANIFEST.json").write_text('{"schema_version": "prism_locked_data.v1"}')
    (path / "train-00000.prsh").write_bytes(b"\0")
    return path


@pytest.fixture
def mounts(tmp_path):
    return {
        "train_data_dir": mount(tmp_path / "edu" / "train"),
        "val_data_dir": mount(tmp_path / "edu" / "val"),
        "phase2_data_dir": mount(tmp_path / "edu" / "sample-100BT"),
    }


def test_mounts_that_are_there_are_ready_and_nothing_was_trained(mounts):
    document = probe_full_scale_readiness(**mounts, dry_run=True).as_dict()
    assert document["schema"] == "prism_full_scale_readiness.v1"
    assert (document["status"], document["status_label"], document["reasons"]) == ("READY", "READY", [])
    assert document["checks"] == {"train_mount": True, "val_mount": True, "phase_2_mount": True}
    assert document["paths"] == {k: str(v) for k, v in mounts.items()}
    assert document["execution_mode"] == "full_scale_eval"
    assert (document["phase_1_dataset_subset"], document["phase_1_token_target"]) == ("sample-10BT", 10_000_000_000)
    assert (document["phase_2_dataset_subset"], document["phase_2_token_target"]) == ("sample-100BT", 100_000_000_000)
    for never in ("requires_100bt_spend", "full_scale_train_executed", "emission_changed"):
        assert document[never] is False
    assert document["dry_run"] is True


@pytest.mark.parametrize("which", ["train", "val", "phase2"])
@pytest.mark.parametrize(
    ("blocked", "spoil"),
    [
        ("missing_mount", lambda p: shutil.rmtree(p)),
        ("not_directory", lambda p: (shutil.rmtree(p), p.write_text("a file"))),
        ("missing_manifest", lambda p: (p / "MANIFEST.json").unlink()),
        ("empty_mount", lambda p: (p / "train-00000.prsh").unlink()),
        ("unreadable_mount", lambda p: (p / "MANIFEST.json").write_text("{")),
    ],
)
def test_what_blocks_a_mount_is_named_with_its_label_and_path(mounts, which, blocked, spoil):
    path = mounts[f"{which}_data_dir"]
    spoil(path)
    document = probe_full_scale_readiness(**mounts).as_dict()
    assert (document["status"], document["status_label"]) == ("BLOCKED", "BLOCKED_with_reason")
    assert document["reasons"] == [f"BLOCKED_{blocked}:{LABELS[which]}:{path}"]
    assert sum(document["checks"].values()) == 2


def test_a_directory_that_may_not_be_read_blocks():
    base = Path(tempfile.mkdtemp())
    base.chmod(0o755)
    closed = mount(base / "closed")
    closed.chmod(0)
    try:
        reasons = as_a_user_without_rights(lambda: probe_full_scale_readiness(train_data_dir=closed).reasons[0])
        assert reasons == f"BLOCKED_unreadable_mount:train:{closed}"
        below = as_a_user_without_rights(lambda: probe_full_scale_readiness(train_data_dir=closed / "x").reasons[0])
        assert below == f"BLOCKED_unreadable_mount:train:{closed}/x"
    finally:
        closed.chmod(0o755)
        shutil.rmtree(base)


def as_a_user_without_rights(ask):
    """`ask()` in a child process that is not root, who may read everything."""
    PrismSettings()  # imports what it needs while that can be read
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            os.write(write_end, ask().encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(child, 0)
    return text


def test_a_manifest_beside_the_split_counts(mounts, tmp_path):
    (mounts["train_data_dir"] / "MANIFEST.json").rename(tmp_path / "edu" / "MANIFEST.json")
    assert probe_full_scale_readiness(**mounts).ok


def test_phase_two_defaults_to_the_train_mounts_sibling(mounts):
    mounts.pop("phase2_data_dir")
    assert probe_full_scale_readiness(**mounts).ok


def test_the_official_paths_are_the_defaults(monkeypatch):
    for name in ("TRAIN", "VAL", "PHASE2"):
        monkeypatch.delenv(f"PRISM_BASE_EVAL_{name}_DATA_DIR", raising=False)
    paths = probe_full_scale_readiness().as_dict()["paths"]
    assert paths["train_data_dir"] == "/data/fineweb-edu/train"
    assert paths["phase2_data_dir"] == "/data/fineweb-edu/sample-100BT"


def test_the_environment_names_the_mounts(monkeypatch, mounts):
    monkeypatch.setenv("PRISM_BASE_EVAL_TRAIN_DATA_DIR", str(mounts["train_data_dir"]))
    monkeypatch.setenv("PRISM_BASE_EVAL_VAL_DATA_DIR", str(mounts["val_data_dir"]))
    assert probe_full_scale_readiness().ok
