"""A short run of every fuzzer; `make fuzz` is the long one."""

from __future__ import annotations

from tests.fuzz.messages import fuzz_messages, fuzz_tracers
from tests.fuzz.run import fuzz_core, fuzz_python
from tests.fuzz.zips import KINDS, fuzz_zips


def test_no_mutated_token_file_crashes_a_parser():
    counts = fuzz_core(12_000, seed=20260824)
    assert set(counts) == {"prism", "llmc", "megatron", "datatrove", "npy", "raw"}
    assert sum(counts.values()) == 12_000


def test_no_mutated_text_or_manifest_crashes_a_parser():
    assert sum(fuzz_python(1_500, seed=20260824).values()) == 1_500


def test_no_mutated_zip_is_more_than_a_bundle_or_a_sentence():
    counts = fuzz_zips(4_000, seed=20260824)
    assert sum(counts[kind] for kind in KINDS) == 4_000
    assert 0 < counts["loaded"] < 1_000


def test_nothing_a_rank_sends_makes_the_referee_raise():
    counts = fuzz_messages(1_000, seed=20261201)
    assert sum(counts.values()) == 1_000 and counts["fault named"] > 500


def test_nothing_a_tracer_leaves_makes_the_referee_raise():
    counts = fuzz_tracers(600, seed=20261201)
    assert sum(counts.values()) == 600 and counts["refused"] > 300
