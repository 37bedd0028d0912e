"""The script that a lent GPU runs, gone through without one: no line of it may be new on the day."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytest.importorskip("triton")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_dry_run_goes_through_every_check_and_every_timing(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_suite", "--dry-run", f"--out={out}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_bytes())
    assert document["environment"]["dry_run"] is True and document["left_out"] == []
    assert len(document["checks"]) >= 29 and all(row["passed"] for row in document["checks"])
    absent = ("liger_kernel", "cut_cross_entropy", "quack")
    strange = [row for row in document["times"] if "failed" in row and not any(name in str(row) for name in absent)]
    assert len(document["times"]) >= 20 and strange == []
