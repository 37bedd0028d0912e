"""A short run of every fuzzer; `make fuzz` is the long one."""

from __future__ import annotations

from tests.fuzz.run import fuzz_core, fuzz_python


def test_no_mutated_token_file_crashes_a_parser():
    counts = fuzz_core(12_000, seed=20260824)
    assert set(counts) == {"prism", "llmc", "megatron", "datatrove", "npy", "raw"}
    assert sum(counts.values()) == 12_000


def test_no_mutated_text_or_manifest_crashes_a_parser():
    assert sum(fuzz_python(1_500, seed=20260824).values()) == 1_500
