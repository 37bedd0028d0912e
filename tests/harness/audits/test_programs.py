"""`prism-fast program`: what a run kept, or what a bundle is traced to, as text."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from prism_fast.harness.audits.programs import kept_programs, listings
from prism_fast.harness.process.commands import child_command, child_environment
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleRejected, DataError, UsageError
from tests.harness.conftest import write_bundle


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A seed's directory as a sealed run leaves it, as far as its programs go: of widths 16 and 32."""
    bundle = write_bundle(tmp_path_factory.mktemp("traced") / "tiny")
    run = bundle.parent / "run"
    (run / "seed-1" / c.PROGRAM_DIR).mkdir(parents=True)
    kept = {}
    for width in (16, 32):
        (source, text), *more = listings(bundle, width=width, tokenizer="bytes")
        assert not more and f"rows of {width} tokens" in source
        kept[width] = text
    return bundle, run, kept


def test_a_bundle_is_traced_and_listed(traced):
    _, _, kept = traced
    for width, text in kept.items():
        assert f"def logits(tokens):  # i64[B, {width}]" in text and "embedding(state['embedding.weight']" in text


def write_program(bundle, run, width):
    from prism_fast.harness.referee import tracing

    written = []
    finish = tracing.Tracer.finish

    def keep(self, deadline):
        found = finish(self, deadline)
        found.write(run / "seed-1" / c.PROGRAM_DIR)
        written.append(found)
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tracing.Tracer, "finish", keep)
        list(listings(bundle, width=width, tokenizer="bytes"))
    assert written


def test_what_a_run_kept_is_listed_as_it_was_traced(traced):
    bundle, run, kept = traced
    for width in (16, 32):
        write_program(bundle, run, width)
    for place in (run, run / "seed-1"):
        assert [text for _, text in listings(place)] == [kept[16], kept[32]]
    ((source, text),) = listings(run, width=32)
    assert text == kept[32] and source == str(run / "seed-1" / c.PROGRAM_DIR / "width-32.json")
    with pytest.raises(UsageError, match=r"^--width 64: .* has programs of width 16, 32$"):
        list(listings(run, width=64))


def test_the_programs_of_a_second_seed_are_shown_where_they_differ(traced, tmp_path):
    bundle, run, kept = traced
    write_program(bundle, run, 16)
    for seed in ("seed-1", "seed-2"):
        shutil.copytree(run / "seed-1", tmp_path / seed)
    assert [text for _, text in listings(tmp_path, width=16)] == [kept[16]]
    assert len([path for path in kept_programs(tmp_path) if path.stem == "width-16"]) == 2


def test_a_damaged_program_is_named(tmp_path):
    folder = tmp_path / c.PROGRAM_DIR
    folder.mkdir()
    for content in (b"", b"{}", b"\xff" * 100):
        (folder / "width-8.json").write_bytes(content)
        with pytest.raises(DataError, match=r"width-8\.json: not a program: "):
            list(listings(tmp_path))


def test_a_place_with_no_program_says_what_it_is(tmp_path):
    (tmp_path / "seed-1").mkdir()
    (tmp_path / "seed-1" / c.RUN_STATUS_FILE).write_text("{}")
    for place in (tmp_path, tmp_path / "seed-1"):
        with pytest.raises(UsageError, match="only sealed runs do"):
            list(listings(place))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(BundleRejected, match=r"no architecture\.py"):
        list(listings(tmp_path / "nothing"))


def test_the_command_prints_and_writes(traced, tmp_path):
    bundle, _, kept = traced
    command = child_command("prism_fast.cli.main", "program", str(bundle), "--width=16", "--tokenizer=bytes")
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.partition("\n")[2].rstrip() == kept[16].rstrip(), done.stderr
    wrote = subprocess.run([*command, "--out=code.txt"], capture_output=True, env=child_environment(), cwd=tmp_path)
    assert wrote.returncode == 0 and (tmp_path / "code.txt").read_text() == done.stdout
