"""What is a bundle and what is not, before anything of it runs."""

import os
import zipfile
import zlib

import pytest

from prism_fast.harness.bundle import archive
from prism_fast.harness.bundle.bundle import MAX_NAME_BYTES, MAX_SCRIPT_BYTES, load_bundle
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


@pytest.mark.parametrize(
    "raised",
    [
        zlib.error("invalid distance"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), IndexError("tuple"),
        NotImplementedError("method 99"), RuntimeError("password"), EOFError(), MemoryError(), AssertionError("x\ny"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_whatever_is_raised_while_a_zip_is_handled_is_one_sentence_naming_it(tmp_path, monkeypatch, raised):
    def broken(*_, **__):
        raise raised

    path = make_zip(tmp_path / "broken.zip", [("architecture.py", ARCHITECTURE), ("training.py", TRAINING)])
    for where in ("__init__", "infolist", "open"):
        with monkeypatch.context() as patched:
            patched.setattr(zipfile.ZipFile, where, broken)
            with pytest.raises(BundleRejected, match=r"^[^\n]+$") as caught:
                load_bundle(path)
        assert str(path) in str(caught.value) and type(raised).__name__ in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04", b"PK\x05\x06" + bytes(17)])
def test_a_file_that_is_called_zip_and_is_none_is_the_bundle_s_fault(tmp_path, content):
    path = tmp_path / "cut.zip"
    path.write_bytes(content)
    with pytest.raises(BundleRejected, match=r"cut\.zip: not a readable zip archive"):
        load_bundle(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_method_without_a_bound_on_what_it_unpacks_is_not_unpacked(tmp_path, monkeypatch, method):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", method) as made:
        for name in ("architecture.py", "training.py"):
            made.writestr(name, "#" * 100)
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_: pytest.fail("unpacked"))
    with pytest.raises(BundleRejected, match=r"compressed by (bzip2|lzma); expected stored or deflated"):
        load_bundle(tmp_path / "bomb.zip")


def test_an_archive_is_measured_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "large.zip"
    with path.open("wb") as stream:
        stream.truncate(archive.MAX_ARCHIVE_BYTES + 1)
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("read"))
    with pytest.raises(BundleRejected, match="expected at most 16777216"):
        load_bundle(path)


def test_an_archive_of_many_entries_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_ENTRIES", 3)
    scripts = [("architecture.py", ARCHITECTURE), ("training.py", TRAINING)]
    load_bundle(make_zip(tmp_path / "three.zip", [*scripts, ("a", "")]))
    with pytest.raises(BundleRejected, match="4 entries; expected at most 3"):
        load_bundle(make_zip(tmp_path / "four.zip", [*scripts, ("a", ""), ("b", "")]))


def test_backslashes_in_a_zip_separate_folders(tmp_path):
    scripts = [("architecture.py", ARCHITECTURE), ("training.py", TRAINING)]
    flat = load_bundle(make_zip(tmp_path / "flat.zip", scripts))
    assert load_bundle(make_zip(tmp_path / "win.zip", [(f"mine\\{n}", t) for n, t in scripts])).digest == flat.digest
    twice = [*scripts, ("mine\\training.py", "x"), ("mine/training.py", "y")]
    assert load_bundle(make_zip(tmp_path / "deeper.zip", twice)).digest == flat.digest
    with pytest.raises(BundleRejected, match="expected one, at the archive's root"):
        load_bundle(make_zip(tmp_path / "two.zip", [scripts[0], *twice[2:]]))


def test_a_sentence_stays_one_however_many_names_an_archive_has(tmp_path):
    entries = [(f"{'long' * 60}{i}/training.py", TRAINING) for i in range(500)]
    with pytest.raises(BundleRejected) as caught:
        load_bundle(make_zip(tmp_path / "many.zip", [("architecture.py", ARCHITECTURE), *entries]))
    assert len(str(caught.value)) < 1000


def test_a_script_that_cannot_be_read_is_the_bundle_s_fault(tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    make(tmp_path)
    monkeypatch.setattr(type(tmp_path), "open", denied)
    with pytest.raises(BundleRejected, match=r"architecture\.py: cannot be read: Permission denied"):
        load_bundle(tmp_path)


def test_a_submission_s_name_is_never_a_place(tmp_path):
    scripts = [("architecture.py", ARCHITECTURE), ("training.py", TRAINING)]
    for name in (".zip", "..zip", "...zip"):
        assert load_bundle(make_zip(tmp_path / name, scripts)).name == "_"
    longest = load_bundle(make_zip(tmp_path / ("é" * 120 + ".zip"), scripts)).name
    assert longest == "é" * (MAX_NAME_BYTES // 2)


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
