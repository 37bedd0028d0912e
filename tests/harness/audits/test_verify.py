"""A forger who rewrites every file consistently is found by executing the run again."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest

from prism_fast.harness.audits.verify import verify_run
from prism_fast.harness.referee.request import ScoreRequest, request_again
from prism_fast.harness.referee.train_series import build_series
from prism_fast.protocol import constants as c
from prism_fast.protocol import ledger as layout
from prism_fast.protocol import receipts
from prism_fast.protocol.canonical import canonical_json, file_sha256, write_json
from prism_fast.protocol.run_spec import RunSpec
from tests.harness.conftest import score_command, write_bundle


@pytest.fixture(scope="module")
def scored(tmp_path_factory, cache_dir):
    """One sealed run with all of its weights kept, scored once for the tests of this file."""
    root = tmp_path_factory.mktemp("scored")
    bundle = write_bundle(root / "bundle")
    command = score_command(bundle, root / "run", cache_dir, "--seal=sealed", "--isolation=auto", "--snapshots=8")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture
def copy(scored, tmp_path) -> Path:
    return shutil.copytree(scored / "run" / "seed-1337", tmp_path / "seed-1337")


def verify(*arguments) -> tuple[int, str]:
    command = [sys.executable, "-m", "prism_fast.cli.main", "verify", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def reseal(run: Path) -> None:
    """What a forger does who knows the format: every digest, the chain and the manifest made anew."""
    spec = RunSpec.model_validate_json((run / c.RUN_SPEC_FILE).read_bytes())
    genesis = receipts.Genesis.model_validate_json((run / c.GENESIS_FILE).read_bytes())
    receipt = receipts.Receipt.model_validate_json((run / c.RECEIPT_FILE).read_bytes())
    names = {"submission_id": genesis.submission_id, "run_id": genesis.run_id}
    series = build_series(run, **names, token_budget=spec.token_budget, world_size=spec.world_size)
    (run / c.TRAIN_SERIES_FILE).write_bytes(canonical_json(series.model_dump(mode="json")))
    receipt = receipt.model_copy(update={"sha256": {name: file_sha256(run / name) for name in receipt.sha256}})
    data = receipts.document_bytes(receipt)
    (run / c.RECEIPT_FILE).write_bytes(data)
    digest = hashlib.sha256((run / c.GENESIS_FILE).read_bytes()).digest()
    links = layout.chain_of(run / c.LEDGER_FILE, digest)
    links.append(layout.next_link(links[-1], hashlib.sha256(data).digest()))
    (run / c.LEDGER_CHAIN_FILE).write_bytes(b"".join(links))
    records = layout.read_records(run / c.LEDGER_FILE, layout.LEDGER_MAGIC, layout.LEDGER_DTYPE)
    manifest = receipts.build_manifest(
        spec,
        genesis,
        receipt,
        receipts.Totals.of(records, spec.world_size),
        receipts.heldout_of(orjson.loads((run / c.HELDOUT_FILE).read_bytes())),
        ledger_sha256=file_sha256(run / c.LEDGER_FILE),
        ledger_chain=links[-1].hex(),
    )
    write_json(run / c.RUN_MANIFEST_FILE, manifest.model_dump(mode="json"))


def edit_ledger(run: Path, field: str, batch: int, change) -> None:
    raw = bytearray((run / c.LEDGER_FILE).read_bytes())
    records = np.frombuffer(raw, layout.LEDGER_DTYPE, offset=layout.HEADER_BYTES)
    records[field][batch] = change(records[field][batch])
    (run / c.LEDGER_FILE).write_bytes(raw)


def test_a_whole_run_verifies_against_corpus_reexecution_and_replay(scored, cache_dir):
    options = ("--data", "sample", "--cache-dir", cache_dir, "--bundle", scored / "bundle", "--replay", 3)
    code, said = verify(scored / "run", *options)
    assert code == 0 and "seed-1337: verified" in said, said


def test_bytes_forged_with_all_their_digests_are_found_in_the_corpus(copy, cache_dir):
    edit_ledger(copy, "bytes", 4, lambda n: n + 50)
    reseal(copy)
    assert list(verify_run(copy)) == []
    faults = list(verify_run(copy, data="sample", cache_dir=cache_dir))
    assert any("batch 4" in fault and "the corpus has" in fault for fault in faults), faults


def test_held_out_nats_forged_with_all_their_digests_are_found_by_executing_them_again(copy, cache_dir):
    documents = dict(np.load(copy / c.HELDOUT_DOCUMENTS_FILE))
    documents["nats_trained"] = documents["nats_trained"] * (1 - 2**-40)
    np.savez_compressed(copy / c.HELDOUT_DOCUMENTS_FILE, **documents)
    report = orjson.loads((copy / c.HELDOUT_FILE).read_bytes())
    total = 0.0
    for value in documents["nats_trained"].tolist():
        total += value
    report["trained"]["nats"] = total
    write_json(copy / c.HELDOUT_FILE, report)
    reseal(copy)
    assert list(verify_run(copy)) == []
    faults = list(verify_run(copy, data="sample", cache_dir=cache_dir))
    assert len(faults) == 1 and "trained states" in faults[0] and "executed again" in faults[0], faults


def test_nats_of_a_batch_whose_weights_were_kept_are_found_by_predicting_it_again(copy, cache_dir):
    edit_ledger(copy, "nats", 5, lambda nats: nats * (1 - 2**-40))
    reseal(copy)
    assert list(verify_run(copy)) == []
    faults = list(verify_run(copy, data="sample", cache_dir=cache_dir))
    assert len(faults) == 1 and "batch 5 states" in faults[0], faults


def test_executing_again_runs_no_code_of_the_bundle(copy, cache_dir):
    """The scripts are not even there; their digests are all that the receipts alone would miss."""
    shutil.rmtree(copy / c.BUNDLE_DIR)
    from prism_fast.data.corpus import resolve_data
    from prism_fast.data.tokenizers import reference_tokenizer
    from prism_fast.harness.audits.reexecution import reexecute

    kept: list[receipts.Kept] = []
    assert all(c.BUNDLE_DIR in sentence for sentence in receipts.disagreements(copy, kept))
    corpus = resolve_data("sample", reference_tokenizer("gpt2"), cache_dir)
    snapshots = [each.model_dump() for each in kept[0].receipt.snapshots]
    assert len(snapshots) == 8
    found = reexecute(
        copy,
        kept[0].manifest,
        kept[0].spec,
        corpus,
        corpus,
        corpus.split("train"),
        snapshots=snapshots,
        matmul_precision="highest",
        same_machine=True,
    )
    assert list(found) == []


def test_a_run_is_asked_for_again_with_every_setting_its_spec_has():
    """S8: no field is copied by hand, so none can be forgotten."""
    odd = {
        "seed": 7,
        "param_ladder_stage": "promote",
        "world_size": 2,
        "artifacts_quota_bytes": 12345,
        "watchdog_grace_seconds": 3.5,
        "budget_seconds": 17.0,
        "mode": "full_scale_eval",
        "val_byte_budget": 99,
        "flops_budget": 1e9,
        "vocab_size": 512,
        "sequence_length": 33,
        "batch_size": 5,
        "token_budget": 1000,
        "step_budget": 4,
        "torch_threads": 3,
        "tokenizer": "bytes",
        "device": "cpu",
        "accounting": "prism-v2",
    }
    fixed = {"engine_version": "", "bundle_digest": "", "tokenizer_fingerprint": "", "corpus_fingerprint": ""}
    spec = RunSpec(seal="open", isolation="none", val_corpus_fingerprint=None, **fixed, **odd)
    request = request_again(spec, bundle=Path("b"), data="d", out=Path("o"))
    renamed = {"param_ladder_stage": "stage", "world_size": "nproc"}
    for name, value in odd.items():
        if name == "seed":
            assert request.seeds == (7,)
        else:
            assert getattr(request, renamed.get(name, name)) == value, name
    missing = set(ScoreRequest.__dataclass_fields__) & set(RunSpec.model_fields) - set(odd) - {"seal", "isolation"}
    assert not missing, f"the test leaves out {missing}"


def test_what_is_no_run_is_a_usage_error(tmp_path):
    code, said = verify(tmp_path)
    assert code == 2 and "no seed-<seed> directory" in said
