"""Campaigns on Ray, for real: this machine alone, and a cluster of two nodes that loses a worker."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prism_fast.protocol.campaign import CAMPAIGN_FILE, read_campaign
from prism_fast.report.rank import rank_runs
from tests.harness.conftest import write_bundle

ray = pytest.importorskip("ray")

EXAMPLES = Path(__file__).parents[2] / "examples"
ZOO = ("transformer_tiny", "ssm_tiny", "gated_delta_tiny", "moe_tiny", "looped_tiny", "hybrid_tiny")
SHORT = ("--seal=open", "--seq-len=32", "--step-budget=4", "--val-byte-budget=500")


def command(submissions: Path, out: Path, cache: Path, *options: str) -> list[str]:
    program = [sys.executable, "-m", "prism_fast.cli.main", "campaign", str(submissions)]
    return [*program, "--data=sample", f"--out={out}", f"--cache-dir={cache}", *options, "--", *SHORT]


def test_two_bundles_are_scored_on_this_machine(tmp_path):
    write_bundle(tmp_path / "submissions" / "tiny")
    write_bundle(tmp_path / "submissions" / "failing", training="def train(ctx): raise ValueError('on purpose')\n")
    done = subprocess.run(
        command(tmp_path / "submissions", tmp_path / "out", tmp_path / "cache", "--seeds=1337"),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    failing, tiny = read_campaign(tmp_path / "out" / CAMPAIGN_FILE)
    assert (tiny.status, tiny.attempts, tiny.exit_code) == ("scored", 1, 0)
    assert tiny.final_score > 100
    assert (failing.status, failing.attempts, failing.exit_code) == ("failed", 1, 4)
    assert "on purpose" in failing.message
    board = rank_runs([tmp_path / "out"])
    assert [row["submission_id"] for row in board["rows"]] == [tiny.submission_id]


def score_process_and_worker(out: Path) -> tuple[int, int] | None:
    """(pid of a running `score`, pid of the Ray worker above it)."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"score" in words and any(w.startswith(f"--out={out}".encode()) for w in words):
                return int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return None


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_six_bundles_over_three_seeds_on_two_nodes_survive_a_killed_worker(tmp_path):
    from ray.cluster_utils import Cluster

    submissions = tmp_path / "submissions"
    for name in ZOO:
        shutil.copytree(EXAMPLES / name, submissions / name)
    node = {"num_cpus": 1, "object_store_memory": 80 * 1024**2}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(submissions, out, tmp_path / "cache", f"--address={cluster.address}"),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        ended = 0
        for line in process.stderr:  # one line for every run that ends, or goes again
            ended += "scored" in line
            if ended == 3 and (found := score_process_and_worker(out)) is not None:
                score, worker = found
                os.kill(worker, signal.SIGKILL)
                break
        rest = process.stderr.read()
        assert process.wait() == 0, rest
    finally:
        process.kill()
        cluster.shutdown()
    assert "again, its worker died" in rest
    assert not Path(f"/proc/{score}").exists()  # what the worker ran went with it
    runs = read_campaign(out / CAMPAIGN_FILE)
    assert len(runs) == 18 and all(run.status == "scored" for run in runs)
    assert sorted(run.attempts for run in runs) == [1] * 17 + [2]
    board = rank_runs([out])
    assert len(board["rows"]) == 6 and not any(row["provisional"] for row in board["rows"])
