"""The whole road, as a validator walks it: a bundle in, official files out."""

import math
import os

import numpy as np
import orjson
import pytest

from prism_fast.protocol import constants as c
from prism_fast.protocol import ledger as layout
from prism_fast.protocol.canonical import canonical_json, file_sha256, sha256_hex
from prism_fast.protocol.ledger import HEADER_BYTES
from prism_fast.protocol.manifest import RunSummary, ThroughputProfile, TrainSeries
from prism_fast.protocol.run_spec import RunSpec
from tests.harness.conftest import TINY_TRAINING, UNIFORM_ARCHITECTURE, seed_training, write_bundle

SCORE_FIELDS = ("metrics", "score", "anti_cheat")


def test_the_original_engines_training_script_is_scored_unmodified(score):
    run = score(training=seed_training())
    assert run.code == 0, run.stderr
    manifest = run.manifest()
    assert manifest.run.stopped_reason == "step_budget"
    assert manifest.metrics.consumed_batches == 8
    assert manifest.metrics.tokens_seen == 8 * 4 * 64
    assert manifest.score.flags == []
    assert manifest.score.heldout_delta > 0
    assert [a.path for a in manifest.artifacts] == ["artifacts/trained_state.pt"]
    assert "final score" in run.stdout and "prism_run_manifest.v2.json" in run.stdout

    # every file is what the manifest says it is
    series = TrainSeries.model_validate(run.json(c.TRAIN_SERIES_FILE))
    assert sha256_hex(canonical_json(series.model_dump(mode="json"))) == manifest.metrics.train_series.sha256
    assert file_sha256(run.seed_dir() / c.TRAIN_SERIES_FILE) == manifest.metrics.train_series.sha256
    assert manifest.engine.ledger_sha256 == file_sha256(run.seed_dir() / c.LEDGER_FILE)
    assert manifest.engine.weights_sha256 == file_sha256(run.seed_dir() / c.WEIGHTS_FILE)
    assert RunSpec.model_validate(run.json(c.RUN_SPEC_FILE)).hash == manifest.engine.run_spec_sha256
    assert run.status()["status"] == "scored"
    assert RunSummary.model_validate_json((run.out / c.SUMMARY_FILE).read_bytes()).posture == "provisional"

    # the figures are the ledger's
    records = layout.read_records(run.seed_dir() / c.LEDGER_FILE, layout.LEDGER_MAGIC, layout.LEDGER_DTYPE)
    nats = 0.0
    for value in records["nats"].tolist():
        nats += value
    assert manifest.metrics.sum_neg_log_likelihood_nats == nats
    assert manifest.score.prequential_bpb == nats / math.log(2) / int(records["bytes"].sum())
    assert series.columns.running_bpb[-1] == pytest.approx(manifest.score.prequential_bpb, rel=1e-12)
    assert series.columns.train_ce_nats[0] == pytest.approx(manifest.metrics.step0_loss, rel=1e-12)
    assert all(norm is not None for norm in series.columns.grad_norm)

    # the held-out sums are those of its documents, and the step's parts add up
    documents = np.load(run.seed_dir() / "heldout_documents.npz")
    assert documents["nats_trained"].sum() / math.log(2) / documents["utf8_bytes"].sum() == pytest.approx(
        manifest.score.val_bpb_trained, rel=1e-12
    )
    profile = ThroughputProfile.model_validate(run.json(c.THROUGHPUT_PROFILE_FILE))
    assert abs(profile.parts_s.other) <= 0.02 * profile.parts_s.step


def test_two_runs_give_the_same_bits_whatever_the_prefetch_depth(score):
    runs = [score(options=("--prefetch", depth), out=f"run{depth}") for depth in ("1", "7")]
    for run in runs:
        assert run.code == 0, run.stderr
    first, second = (r.manifest().model_dump() for r in runs)
    for dump in (first, second):
        del dump["metrics"]["train_series"]["sha256"]  # the series holds wall-clock times
    for block in SCORE_FIELDS:
        assert first[block] == second[block]
    for dump in (first, second):  # they name the submission, and what was merely seen
        del dump["engine"]["ledger_sha256"], dump["engine"]["ledger_chain"]
    assert first["engine"] == second["engine"]
    records = [(run.seed_dir() / c.LEDGER_FILE).read_bytes()[HEADER_BYTES:] for run in runs]
    assert records[0] == records[1] and records[0]


def test_a_uniform_model_costs_log2_v_a_token_and_cannot_win(score):
    run = score(architecture=UNIFORM_ARCHITECTURE, options=("--tokenizer", "gpt2", "--json"))
    assert run.code == 0, run.stderr
    manifest = run.manifest()
    tokens, n_bytes = manifest.metrics.predicted_tokens, manifest.metrics.covered_bytes
    assert manifest.score.prequential_bpb == pytest.approx(tokens * math.log2(50304) / n_bytes, rel=1e-7)
    assert manifest.score.val_bpb_trained == manifest.score.val_bpb_random_init
    assert manifest.anti_cheat.no_learning
    summary = orjson.loads(run.stdout)
    assert summary["seeds"][0]["final_score"] == manifest.score.final_score


@pytest.mark.parametrize("tokenizer", ["gpt2", "bytes"])
def test_a_bundle_without_a_tokenizer_is_scored_on_bytes(score, tokenizer):
    training = TINY_TRAINING.replace("tokenizer=tokenizer", "seq_len=33").replace(
        'ctx.reference_tokenizer("gpt2")', "None"
    )
    run = score(training=training, options=("--tokenizer", tokenizer))
    assert run.code == 0, run.stderr
    manifest = run.manifest()
    assert manifest.metrics.covered_bytes == manifest.metrics.predicted_tokens
    assert manifest.metrics.predicted_tokens + manifest.metrics.special_tokens == 8 * 4 * 32
    assert manifest.score.val_bpb_uniform == pytest.approx(math.log2(257), rel=1e-12)


def test_the_whole_corpus_is_covered_when_no_budget_stops_the_run(score, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    lines = [{"id": f"doc-{i}", "text": f"number {i} — naïve 日本 " * (i % 5)} for i in range(60)]
    (data / "some.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    run = score(options=("--data", str(data), "--step-budget", "100000", "--token-budget", "0"))
    assert run.code == 0, run.stderr
    manifest = run.manifest()
    assert manifest.run.stopped_reason == "data_exhausted"
    assert manifest.data.covered_bytes + manifest.data.unread_tail_bytes == manifest.data.available_bytes
    assert manifest.data.unread_tail_tokens < 64
    assert manifest.data.covered_bytes > 0


@pytest.mark.long
def test_several_seeds_are_summarised_and_resumed(score):
    run = score(options=("--seeds", "1337,2027,4242"))
    assert run.code == 0, run.stderr
    summary = RunSummary.model_validate_json((run.out / c.SUMMARY_FILE).read_bytes())
    assert [s.seed for s in summary.seeds] == [1337, 2027, 4242]
    assert summary.posture == "public" and summary.final_score.n == 3 and summary.final_score.std > 0
    before = {s: (run.seed_dir(s) / c.RUN_MANIFEST_FILE).stat().st_mtime_ns for s in (1337, 2027, 4242)}
    again = score(options=("--seeds", "1337,2027,4242", "--resume"))
    assert again.code == 0, again.stderr
    assert before == {s: (run.seed_dir(s) / c.RUN_MANIFEST_FILE).stat().st_mtime_ns for s in (1337, 2027, 4242)}
    assert "already scored" in again.stderr


def test_without_a_val_split_the_score_is_degraded_and_says_so(score, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "train-00000.jsonl").write_bytes(
        b"".join(orjson.dumps({"id": str(i), "text": "all work and no play " * 50}) + b"\n" for i in range(20))
    )
    run = score(options=("--data", str(data)))
    assert run.code == 0, run.stderr
    manifest = run.manifest()
    assert manifest.score.heldout_delta is None and manifest.score.final_score < 1
    assert "no held-out figure" in manifest.score.emission_ineligible_reasons
    assert "degraded" in run.stderr


def test_a_bundle_of_any_name_is_scored_and_shown(score, tmp_path):
    bundle = write_bundle(tmp_path / os.fsdecode(b"[red]a[bold\x1b[2J\xffb"))
    run = score(bundle=bundle)
    assert run.code == 0, run.stderr
    name = run.manifest().submission_id
    assert name.startswith("[red]a[bold_[2J_b-") and name in run.stdout and "\x1b" not in run.stdout + run.stderr
