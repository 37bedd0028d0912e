"""A short run of the fault injections; `make faults` is the long one. CI runs it."""

from __future__ import annotations

import pytest

from tests.faults.run import KINDS, run


@pytest.mark.long
def test_whatever_breaks_a_run_ends_and_says_so():
    done = run(range(3), seed=20260824)
    assert {injection.kind for injection in done} == set(KINDS)
    assert [injection for injection in done if injection.broken] == []
