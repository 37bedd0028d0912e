"""A run's documents stay small whatever its length; its record files grow by a fixed number of bytes a batch."""

import pytest

from benchmarks.growth import simulate
from prism_fast.protocol import constants as c
from prism_fast.protocol import ledger as layout

RECORD = layout.LEDGER_DTYPE.itemsize + layout.OBSERVATIONS_DTYPE.itemsize


def test_documents_of_a_run_do_not_grow_with_it(tmp_path):
    found = {}
    for batches in (2 * c.SERIES_MAX_POINTS, 4 * c.SERIES_MAX_POINTS):
        (tmp_path / str(batches)).mkdir()
        found[batches] = simulate(tmp_path / str(batches), batches)
    short, long = found.values()
    assert long["manifest_bytes"] < 20_000 and long["manifest_bytes"] - short["manifest_bytes"] < 200
    assert long["series_bytes"] < 1.2 * short["series_bytes"] < 4_000_000
    for row in found.values():
        assert row["bytes_a_batch"] == pytest.approx(RECORD, rel=0.01)
    assert RECORD * (10**10 // 8192) + long["series_bytes"] < 200_000_000
