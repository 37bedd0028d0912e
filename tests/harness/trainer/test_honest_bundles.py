"""Bundles in the styles that people write: each is scored in open mode, and sharding changes no figure.

Their scripts lie beside the architectures that programs are tested with. Sealed mode scores the same ones
(tests/harness/referee).
"""

import shutil
from pathlib import Path

import pytest

ARCHITECTURES = Path(__file__).parents[2] / "program" / "bundles"
# name -> the folder of its architecture, and its training script
BUNDLES = {
    "plain": ("plain", "plain/training.py"),
    "fsdp1_always": ("plain", "plain/fsdp1_always.py"),
    "fsdp2_always": ("plain", "plain/fsdp2_always.py"),
    "ddp_always": ("plain", "plain/ddp_always.py"),
    "autocast_whole": ("plain", "plain/autocast_whole.py"),
    "bf16_params": ("plain", "plain/bf16_params.py"),
    "compiled": ("plain", "plain/compiled.py"),
    "compiled_flex_build": ("compiled_flex_build", "plain/training.py"),
    "compiled_in_build": ("compiled_in_build", "plain/training.py"),
    "batchnorm": ("batchnorm", "plain/training.py"),
    "checkpointing": ("checkpointing", "plain/training.py"),
    "dict_output": ("dict_output", "dict_output/training.py"),
    "dtype_default": ("plain", "plain/dtype_default.py"),
    "ema_end_swa": ("plain", "plain/ema_end_swa.py"),
    "frozen_attr_temp": ("frozen_attr_temp", "frozen_attr_temp/training.py"),
    "hf_own_output": ("hf_own_output", "plain/training.py"),
    "hf_transformers": ("hf_transformers", "hf_transformers/training.py"),
    "kvcache": ("kvcache", "plain/training.py"),
    "kvcache_persistent": ("kvcache_persistent", "plain/training.py"),
    "lstm": ("lstm", "plain/training.py"),
    "moe_bf16": ("moe_bf16", "moe_topk/training.py"),
    "moe_topk": ("moe_topk", "moe_topk/training.py"),
    "muon": ("plain", "plain/muon.py"),
    "nanogpt": ("nanogpt", "nanogpt/training.py"),
    "prog_threads_log": ("plain", "plain/prog_threads_log.py"),
    "seedpair": ("seedpair", "../../harness/original_training.py.txt"),
    "window_attr": ("window_attr", "window_attr/training.py"),
    "window_buffer": ("window_buffer", "window_buffer/training.py"),
}
AT_ONCE = ("plain", "fsdp2_always")
OPTIONS = ("--step-budget=4", "--val-byte-budget=1500")


def bundle(directory: Path, architecture: str, training: str) -> Path:
    directory.mkdir()
    shutil.copy(ARCHITECTURES / architecture / "architecture.py", directory)
    shutil.copy(ARCHITECTURES / training, directory / "training.py")
    return directory


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in AT_ONCE else pytest.mark.long) for name in BUNDLES]
)
def test_an_honest_bundle_is_scored(score, tmp_path, name):
    if name.startswith("hf_transformers"):
        pytest.importorskip("transformers")
    run = score(bundle=bundle(tmp_path / "bundle", *BUNDLES[name]), options=OPTIONS)
    assert run.code == 0, run.stderr
    assert run.status()["status"] == "scored"
    found = run.manifest()
    assert found.metrics.consumed_batches == 4 and found.score.heldout_delta is not None
    assert set(found.score.flags) <= {"no_learning"}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_sharding_changes_no_figure(score, tmp_path, ranks):
    scores = {}
    for name in ("ddp_always", "fsdp1_always", "fsdp2_always"):
        options = (*OPTIONS, f"--nproc={ranks}")
        run = score(bundle=bundle(tmp_path / name, *BUNDLES[name]), options=options, out=f"run-{name}")
        assert run.code == 0, run.stderr
        found = run.manifest()
        scores[name] = (found.score.prequential_bpb, found.score.heldout_delta, found.metrics.model_params)
    assert scores["fsdp1_always"] == pytest.approx(scores["ddp_always"], abs=1e-7)
    assert scores["fsdp2_always"] == pytest.approx(scores["ddp_always"], abs=1e-7)


@pytest.mark.long
def test_a_model_that_predicts_the_last_token_alone_is_told_what_was_expected(score, tmp_path):
    folder = bundle(tmp_path / "bundle", "nanogpt_lasttoken", "nanogpt_lasttoken/training.py")
    run = score(bundle=folder, options=OPTIONS)
    assert run.code == 4 and "expected float logits of shape [4, 64, V]" in run.stderr
