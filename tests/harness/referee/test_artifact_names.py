"""A bundle calls its artifacts what it likes: the run is scored, the manifest names them, `verify` finds them."""

from __future__ import annotations

import os

import orjson
import pytest

from prism_fast.harness.audits.verify import verify_run
from prism_fast.protocol.file_names import unescaped
from tests.harness.conftest import TINY_TRAINING

NAMES = [b"plain.pt", b"\xff\xfe.pt", b"two\nlines", b"\x1b[2J", b"back\\slash", "ünï".encode()]
WRITES = f"""
    import os
    folder = os.fsencode(ctx.artifacts_dir)
    for name in {NAMES!r}:
        open(folder + b"/" + name, "wb").write(name)
    os.mkdir(folder + b"/\\xf0dir")
    open(folder + b"/\\xf0dir/inner", "wb").write(b"inner")
    open(folder + b"/closed", "wb").write(b"closed")
    os.chmod(folder + b"/closed", 0)
"""


@pytest.mark.parametrize("seal", ["open", "sealed"])
def test_artifacts_of_any_name_are_in_the_manifest(score, seal):
    run = score(training=TINY_TRAINING + WRITES, options=(f"--seal={seal}",))
    assert run.code == 0, run.stderr
    found = {os.fsencode(unescaped(ref.path)): ref for ref in run.manifest().artifacts}
    expected = {b"artifacts/" + name for name in [*NAMES, b"\xf0dir/inner", b"closed"]}
    assert set(found) == expected
    assert all(ref.path.isprintable() for ref in found.values())
    assert orjson.loads((run.seed_dir() / "status.json").read_bytes())["status"] == "scored"
    assert list(verify_run(run.seed_dir())) == []
    (run.seed_dir() / os.fsdecode(b"artifacts/\xff\xfe.pt")).write_bytes(b"other")
    assert any("\\xff\\xfe.pt" in fault or "�" in fault or "\udcff" in fault for fault in verify_run(run.seed_dir()))


def test_a_failure_that_quotes_such_a_name_is_the_bundles_and_one_sentence(score):
    fails = TINY_TRAINING + "    open(b'/nowhere/\\xff\\n.pt', 'rb')\n"
    run = score(training=fails)
    assert run.code == 4 and "Traceback" not in run.stderr
    assert "training.py line" in run.status()["message"] and run.status()["message"].isprintable()
