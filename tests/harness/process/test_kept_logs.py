"""A sentence that names a log is read when the run's directory is gone."""

from pathlib import Path

import pytest

from prism_fast.harness.process.kept_logs import keeping_logs, with_kept_logs
from prism_fast.protocol.errors import BundleFailed, BundleRejected


def test_a_named_log_is_kept_and_named_where_it_is(tmp_path):
    (tmp_path / "trainer.log").write_text("what was said")
    text = with_kept_logs("rank 1 ended; see trainer.log", tmp_path)
    kept = Path(text.removeprefix("rank 1 ended; see "))
    assert kept.is_absolute() and kept.read_text() == "what was said" and tmp_path not in kept.parents


@pytest.mark.parametrize("content", [None, ""])
def test_a_log_with_nothing_in_it_is_not_spoken_of(tmp_path, content):
    if content is not None:
        (tmp_path / "trainer.log").write_text(content)
    assert with_kept_logs("rank 1 ended; see trainer.log", tmp_path) == "rank 1 ended"


def test_an_error_keeps_its_kind_and_rule(tmp_path):
    (tmp_path / "tracer.log").write_text("why")
    with pytest.raises(BundleRejected, match=r"^ended; see /.*/tracer\.log$") as caught, keeping_logs(tmp_path):
        raise BundleRejected("ended; see tracer.log", rule="prism:x")
    assert caught.value.rule == "prism:x"
    with pytest.raises(BundleFailed, match=r"^no log is named$"), keeping_logs(tmp_path):
        raise BundleFailed("no log is named")
