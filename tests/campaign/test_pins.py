"""A campaign's run under a pin: one seed is scored, and the pin is the public one with all its seeds."""

import subprocess

import pytest

from prism_fast.campaign.job import Job, score_command
from prism_fast.harness.bundle.bundle import load_bundle
from prism_fast.protocol.manifest import RunManifest, RunSummary
from prism_fast.protocol.pins import protocol_pin
from tests.cli.test_main import run
from tests.harness.conftest import write_bundle

PINNED = ("--data=sample", "--pin=p0", "--seeds=1337,2027,4242")


def job_of(tmp_path, options):
    return Job(load_bundle(write_bundle(tmp_path / "tiny")), 2027, 1, str(tmp_path), "id", "0", options)


def test_a_pinned_run_is_given_all_seeds_and_scores_one(tmp_path):
    words = score_command(job_of(tmp_path, PINNED), tmp_path / "tiny")
    assert "--only-seeds=2027" in words and "--seeds=1337,2027,4242" in words
    words = score_command(job_of(tmp_path, ("--data=sample",)), tmp_path / "tiny")
    assert "--seeds=2027" in words and not any("only" in word for word in words)


def test_a_seed_that_is_not_among_the_seeds_is_a_usage_error(tmp_path):
    bundle = write_bundle(tmp_path / "tiny")
    done = run("score", str(bundle), "--data=sample", f"--out={tmp_path}", "--seeds=1,2", "--only-seeds=3")
    assert done.returncode == 2 and "--only-seeds 3: not one of --seeds 1,2" in done.stderr


@pytest.mark.slow
def test_the_manifest_of_a_campaigns_run_names_the_public_pin(tmp_path):
    job = job_of(tmp_path, (*PINNED, "--budget-seconds=5", f"--cache-dir={tmp_path / 'cache'}"))
    done = subprocess.run(score_command(job, tmp_path / "tiny"), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    summary = RunSummary.model_validate_json((job.work / "summary.json").read_bytes())
    assert [seed.seed for seed in summary.seeds] == [2027]
    manifest = RunManifest.model_validate_json((job.work / "seed-2027" / "prism_run_manifest.v2.json").read_bytes())
    pin = manifest.engine.pin
    assert pin.name == "p0" and pin.public_ok
    assert tuple(protocol_pin("p0").seeds) == (1337, 2027, 4242) and "provisional" not in done.stderr
