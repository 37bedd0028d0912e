"""Campaigns on Ray, for real: this machine alone, and a cluster of two nodes that loses a worker."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prism_fast.protocol.campaign import CAMPAIGN_FILE, read_campaign
from prism_fast.protocol.constants import RUN_MANIFEST_FILE
from prism_fast.protocol.manifest import RunManifest
from prism_fast.report.rank import rank_runs
from tests.harness.referee.test_golden_scores import GOLDEN_IN_CAMPAIGN, OPTIONS
from tests.live_processes import living

ray = pytest.importorskip("ray")

EXAMPLES = Path(__file__).parents[2] / "examples"
ZOO = ("transformer_tiny", "ssm_tiny", "gated_delta_tiny", "moe_tiny", "looped_tiny", "hybrid_tiny")
SHORT = ("--seal=open", "--seq-len=32", "--step-budget=4", "--val-byte-budget=500")


def command(submissions: Path, out: Path, cache: Path, *options: str) -> list[str]:
    program = [sys.executable, "-m", "prism_fast.cli.main", "campaign", str(submissions)]
    return [*program, "--data=sample", f"--out={out}", f"--cache-dir={cache}", *options, "--", *SHORT]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_campaign_scores_the_examples_as_score_does(tmp_path):
    submissions, out = tmp_path / "submissions", tmp_path / "out"
    for name in GOLDEN_IN_CAMPAIGN:
        shutil.copytree(EXAMPLES / name, submissions / name)
    program = command(submissions, out, tmp_path / "cache", "--seeds=1337")[: -len(SHORT)]
    done = subprocess.run([*program, *OPTIONS, "--seal=open"], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    runs = {run.submission_id.rpartition("-")[0]: run for run in read_campaign(out / CAMPAIGN_FILE)}
    assert runs.keys() == GOLDEN_IN_CAMPAIGN.keys()
    for name, (bpb, delta, parameters) in GOLDEN_IN_CAMPAIGN.items():
        run = runs[name]
        assert (run.status, run.attempts, run.exit_code, run.flags) == ("scored", 1, 0, [])
        assert run.prequential_bpb == pytest.approx(bpb, rel=2e-5)
        assert run.heldout_delta == pytest.approx(delta, abs=1e-4)
        manifest = RunManifest.model_validate_json((out / run.run_dir / RUN_MANIFEST_FILE).read_bytes())
        assert manifest.metrics.model_params == parameters
        assert manifest.score.final_score == run.final_score
        assert manifest.engine.torch_threads == 1  # the campaign's --cpus, whatever the machine has
    board = rank_runs([out])
    assert {row["submission_id"] for row in board["rows"]} == {run.submission_id for run in runs.values()}


def score_process_and_worker(out: Path) -> tuple[int, int] | None:
    """(pid of a running `score`, pid of the Ray worker above it)."""
    found = (p for p in living() if "score" in p.words and any(w.startswith(f"--out={out}") for w in p.words))
    return next(((p.pid, p.parent) for p in found), None)


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
