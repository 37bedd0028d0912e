"""A run's receipts: whole, they verify; altered anywhere, what was altered is named."""

import shutil
import subprocess
import sys

import numpy as np
import orjson
import pytest

from prism_fast.protocol import constants as c
from prism_fast.protocol import ledger as layout
from tests.harness.conftest import score_command, write_bundle


@pytest.fixture(scope="module")
def scored(tmp_path_factory, cache_dir):
    """One sealed run, scored once for the tests of this file."""
    root = tmp_path_factory.mktemp("scored")
    bundle = write_bundle(root / "bundle")
    command = score_command(bundle, root / "run", cache_dir, "--seal=sealed", "--isolation=auto")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return root


def verify(*arguments) -> tuple[int, str]:
    command = [sys.executable, "-m", "prism_fast.cli.main", "verify", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def test_a_whole_run_verifies_against_corpus_and_replay(scored, cache_dir):
    options = ("--data", "sample", "--cache-dir", cache_dir, "--bundle", scored / "bundle", "--replay", 3)
    code, said = verify(scored / "run", *options)
    assert code == 0 and "seed-1337: verified" in said, said


def edit_json(path, change):
    document = orjson.loads(path.read_bytes())
    change(document)
    path.write_bytes(orjson.dumps(document))


def set_path(*keys, to):
    def change(document):
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = to

    return change


def edit_ledger(run):
    path = run / c.LEDGER_FILE
    raw = bytearray(path.read_bytes())
    records = np.frombuffer(raw, layout.LEDGER_DTYPE, offset=layout.HEADER_BYTES)
    records["nats"][2] *= 0.5
    path.write_bytes(raw)


def cut_ledger(run):
    path = run / c.LEDGER_FILE
    path.write_bytes(path.read_bytes()[: -layout.LEDGER_DTYPE.itemsize])


def edit_documents(run):
    documents = dict(np.load(run / c.HELDOUT_DOCUMENTS_FILE))
    documents["nats_trained"] = documents["nats_trained"] * 0.9
    np.savez_compressed(run / c.HELDOUT_DOCUMENTS_FILE, **documents)


def manifest_edit(*keys, to):
    return lambda run: edit_json(run / c.RUN_MANIFEST_FILE, set_path(*keys, to=to))


ALTERATIONS = {
    "final score": (manifest_edit("score", "final_score", to=200.0), "score.final_score"),
    "prequential bpb": (manifest_edit("score", "prequential_bpb", to=1.0), "score.prequential_bpb"),
    "flags": (manifest_edit("score", "flags", to=["prism:noncausal"]), "score.final_score"),
    "covered bytes": (manifest_edit("metrics", "covered_bytes", to=10**6), "covered_bytes"),
    "seed": (manifest_edit("run", "seed", to=1), "run.seed"),
    "a field of another type": (manifest_edit("metrics", "covered_bytes", to="many"), "not of its schema"),
    "the spec": (lambda run: edit_json(run / c.RUN_SPEC_FILE, set_path("seed", to=5)), c.RUN_SPEC_FILE),
    "a ledger record": (edit_ledger, c.LEDGER_FILE),
    "the ledger's length": (cut_ledger, c.LEDGER_FILE),
    "the chain": (lambda run: (run / c.LEDGER_CHAIN_FILE).write_bytes(bytes(32)), c.LEDGER_CHAIN_FILE),
    "a held-out document": (edit_documents, c.HELDOUT_DOCUMENTS_FILE),
    "the held-out report": (
        lambda run: edit_json(run / c.HELDOUT_FILE, set_path("trained", "nats", to=5.0)),
        c.HELDOUT_FILE,
    ),
    "the weights": (lambda run: (run / c.WEIGHTS_FILE).write_bytes(b"x"), c.WEIGHTS_FILE),
    "a missing series": (lambda run: (run / c.TRAIN_SERIES_FILE).unlink(), c.TRAIN_SERIES_FILE),
    "the status": (lambda run: edit_json(run / c.RUN_STATUS_FILE, set_path("status", to="failed")), "not scored"),
}


@pytest.mark.parametrize("what", ALTERATIONS)
def test_an_alteration_is_named(scored, tmp_path, what):
    from prism_fast.harness.audits.verify import verify_run

    alter, named = ALTERATIONS[what]
    run = tmp_path / "seed-1337"
    shutil.copytree(scored / "run" / "seed-1337", run)
    assert list(verify_run(run)) == []
    alter(run)
    faults = list(verify_run(run))
    assert any(named in fault for fault in faults), faults


def test_figures_forged_together_are_found_in_the_corpus(scored, tmp_path, cache_dir):
    """A ledger rewritten with its digests and sums still has to match the text."""
    from prism_fast.harness.audits.verify import verify_run

    run = tmp_path / "seed-1337"
    shutil.copytree(scored / "run" / "seed-1337", run)
    raw = bytearray((run / c.LEDGER_FILE).read_bytes())
    np.frombuffer(raw, layout.LEDGER_DTYPE, offset=layout.HEADER_BYTES)["bytes"][4] += 50
    (run / c.LEDGER_FILE).write_bytes(raw)
    faults = list(verify_run(run, data="sample", cache_dir=cache_dir))
    assert any("batch 4" in fault and "the corpus has" in fault for fault in faults), faults


def test_what_is_no_run_is_a_usage_error(tmp_path):
    code, said = verify(tmp_path)
    assert code == 2 and "no seed-<seed> directory" in said
