"""Real runs under a pin, a FLOPs budget and the static contract."""

import os
import subprocess

import pytest

from tests.harness.conftest import TINY_TRAINING, Run, score_command, write_bundle

WRITES_ITS_CONTEXT = TINY_TRAINING.replace(
    "    model = build_model(ctx)",
    """    with open(ctx.artifacts_dir + "/context", "w") as f:
        f.write(f"{ctx.sequence_length} {ctx.token_budget} {ctx.vocab_size} {ctx.ladder_stage} {ctx.max_parameters}")
    model = build_model(ctx)""",
)
PARAMETERS = 50304 * 8 + 8 * 8 + 8 + 50304 * 8 + 50304  # of the tiny model
FLOPS_OF_THREE_STEPS = 6 * PARAMETERS * 4 * 64 * 3


def test_a_pin_reaches_the_bundle_unchanged_and_the_manifest_names_it(tmp_path, cache_dir):
    bundle = write_bundle(tmp_path / "bundle", training=WRITES_ITS_CONTEXT)
    options = ("--pin=p2", "--seeds=1337", "--budget-seconds=1")
    command = [
        part
        for part in score_command(bundle, tmp_path / "run", cache_dir, *options)
        if not part.startswith(("--seq-len", "--step-budget"))  # what contradicts a pin
    ]
    environment = {**os.environ, "PRISM_SEQUENCE_LENGTH": "32"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    run = Run(done.returncode, tmp_path / "run", done.stdout, done.stderr)
    assert run.code == 0, run.stderr
    assert "provisional" in run.stderr and "seed_count_below_public_min:K=1<3" in run.stderr
    manifest = run.manifest()
    assert (run.seed_dir() / "artifacts" / "context").read_text() == "256 1000000 50304 promote 350000000"
    assert manifest.engine.pin is not None
    assert (manifest.engine.pin.name, manifest.engine.pin.public_ok) == ("p2", False)
    assert manifest.compute.param_ladder_stage == "promote" and manifest.compute.param_ladder_cap == 350_000_000
    assert (manifest.engine.seq_len, manifest.engine.batch_size) == (256, 4)
    assert manifest.run.stopped_reason == "wall_clock"

    # a script for one GPU does what it says on one: flagged, and no broken rule of the score
    contract = manifest.engine.distributed_contract
    assert contract is not None and (contract.policy, contract.ok) == ("flag", False)
    assert "prism:distributed-contract:init_process_group" in contract.unmet
    assert not any(flag.startswith("prism:") for flag in manifest.score.flags)
    assert manifest.score.anti_cheat_multiplier == 1.0
    assert any("distributed contract is not met" in r for r in manifest.score.emission_ineligible_reasons)
    assert "does not meet the distributed contract (init_process_group" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seal", ["open", "sealed"])
def test_a_flops_budget_stops_after_the_step_that_reaches_it(score, seal):
    run = score(options=(f"--seal={seal}", f"--flops-budget={FLOPS_OF_THREE_STEPS - 1}"))
    assert run.code == 0, run.stderr
    manifest = run.manifest()
    assert manifest.run.stopped_reason == "flops_budget"
    assert manifest.metrics.model_params == PARAMETERS and manifest.metrics.consumed_batches == 3
    assert manifest.compute.estimated_flops == FLOPS_OF_THREE_STEPS


@pytest.mark.parametrize("options", [("--policy", "reject"), ("--nproc", "2"), ()])
def test_an_unmet_contract_is_rejected_before_anything_runs(score, monkeypatch, options):
    if not options:
        monkeypatch.setenv("PRISM_DISTRIBUTED_CONTRACT_POLICY", "reject")
    run = score(options=options)
    assert run.code == 3 and "prism:distributed-contract" in run.stderr and "init_process_group" in run.stderr
    assert not run.out.exists()
