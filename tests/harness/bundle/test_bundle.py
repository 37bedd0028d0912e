"""What is a bundle and what is not, before anything of it runs."""

import os
import zipfile

import pytest

from prism_fast.harness.bundle.bundle import MAX_SCRIPT_BYTES, load_bundle
from prism_fast.protocol.errors import BundleRejected, UsageError

ARCHITECTURE = "def build_model(ctx):\n    return None\n"
TRAINING = "def train(ctx):\n    pass\n"


def make(tmp_path, architecture=ARCHITECTURE, training=TRAINING):
    for name, text in (("architecture.py", architecture), ("training.py", training)):
        if text is not None:
            (tmp_path / name).write_text(text)
    return tmp_path


def make_zip(path, entries):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in entries:
            archive.writestr(name, text)
    return path


def test_directory_and_zip_of_the_same_scripts_have_the_same_digest(tmp_path):
    (tmp_path / "d").mkdir()
    plain = load_bundle(make(tmp_path / "d"))
    scripts = [("architecture.py", ARCHITECTURE), ("training.py", TRAINING)]
    flat = load_bundle(make_zip(tmp_path / "flat.zip", scripts))
    folder = load_bundle(make_zip(tmp_path / "folder.zip", [(f"mine/{n}", t) for n, t in scripts]))
    assert plain.digest == flat.digest == folder.digest
    assert flat.submission_id == f"flat-{flat.digest[:12]}"


def test_any_changed_byte_changes_the_digest(tmp_path):
    before = load_bundle(make(tmp_path)).digest
    assert load_bundle(make(tmp_path, training=TRAINING + "#")).digest != before


@pytest.mark.parametrize(
    ("architecture", "training", "named"),
    [
        (None, TRAINING, "architecture.py"),
        (ARCHITECTURE, None, "training.py"),
        (ARCHITECTURE, "def training(ctx): pass\n", "train(ctx)"),
        (ARCHITECTURE, "class Trainer:\n    def train(ctx): pass\n", "train(ctx)"),
        ("x = 1\n", TRAINING, "build_model(ctx)"),
        (ARCHITECTURE, "def train(ctx:\n", "training.py line 1"),
        (ARCHITECTURE, "def train(ctx): pass\n\0", "training.py"),
        (ARCHITECTURE, "(" * 5000 + ")" * 5000, "training.py"),
    ],
)
def test_a_bundle_of_the_wrong_shape_is_rejected_by_name(tmp_path, architecture, training, named):
    with pytest.raises(BundleRejected, match=r"^[^\n]+$") as caught:
        load_bundle(make(tmp_path, architecture, training))
    assert named in str(caught.value)
    assert caught.value.rule == "prism:bundle-shape"
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    "text", ["from other import train\n", "train = lambda ctx: None\n", "if True:\n    train = 1\n"]
)
def test_an_entry_point_may_be_imported_or_assigned(tmp_path, text):
    load_bundle(make(tmp_path, training=text))


def test_what_is_no_bundle_at_all_is_a_usage_error(tmp_path):
    (tmp_path / "file.txt").write_text("hello")
    for path in (tmp_path / "nowhere", tmp_path / "file.txt"):
        with pytest.raises(UsageError, match=r"expected a directory or a \.zip"):
            load_bundle(path)


def test_zip_tricks_are_rejected(tmp_path):
    scripts = [("architecture.py", ARCHITECTURE), ("training.py", TRAINING)]
    two = make_zip(tmp_path / "two.zip", [(f"a/{n}", t) for n, t in scripts] + [("b/training.py", "x")])
    bomb = make_zip(tmp_path / "bomb.zip", [scripts[0], ("training.py", " " * (MAX_SCRIPT_BYTES + 1))])
    empty = make_zip(tmp_path / "empty.zip", [])
    cut = make_zip(tmp_path / "cut.zip", scripts)
    raw = bytearray(cut.read_bytes())
    raw[40:44] = b"\xff\xff\xff\xff"  # inside the first entry's compressed bytes
    cut.write_bytes(raw)
    for path in (two, bomb, empty, cut):
        with pytest.raises(BundleRejected):
            load_bundle(path)


def test_nothing_outside_the_two_scripts_is_read_from_a_zip(tmp_path):
    scripts = [("architecture.py", ARCHITECTURE), ("training.py", TRAINING), ("../../evil.py", "x = 1")]
    bundle = load_bundle(make_zip(tmp_path / "slip.zip", scripts))
    bundle.write_to(tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["architecture.py", "training.py"]


def test_no_name_of_a_submission_reaches_a_terminal_or_a_file_as_more_than_text(tmp_path):
    folder = tmp_path / os.fsdecode(b"a\x1b[2J\xff\nb")
    folder.mkdir()
    assert load_bundle(make(folder)).name == "a_[2J__b"
    inside = [("x\x1b[2J/architecture.py", ARCHITECTURE), ("y\n/architecture.py", ARCHITECTURE)]
    with pytest.raises(BundleRejected) as caught:
        load_bundle(make_zip(tmp_path / "z.zip", [*inside, ("training.py", TRAINING)]))
    assert str(caught.value).isprintable() and "architecture.py stands at x [2J/architecture.py, y" in str(caught.value)
