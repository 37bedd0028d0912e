"""Every field of every file of a run, altered one at a time: `verify` names each, and raises for none."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import orjson
import pytest

from prism_fast.harness.audits.verify import verify_run, verify_summary
from prism_fast.protocol import constants as c
from prism_fast.protocol import manifest as m
from prism_fast.protocol import receipts
from prism_fast.protocol.canonical import canonical_json, file_sha256
from prism_fast.protocol.errors import DataError
from prism_fast.report.compare import compare_runs
from prism_fast.report.rank import rank_runs
from tests.harness.conftest import ROOT, score_command, write_bundle

# The table of docs/receipts.md: every file of a run by name, and what verify does with it.
TABLE = dict(re.findall(r"^\| `([\w.<>/-]+)` \| (\w+)", (ROOT / "docs" / "receipts.md").read_text(), re.MULTILINE))
OBSERVED = {name for name, how in TABLE.items() if how == "observed"}
BYTES_A_FILE = 12  # of a binary file, altered one at a time
WRITES_AN_ARTIFACT = """
import pathlib, torch
from torch.nn import functional as F
from architecture import build_model

def train(ctx):
    model = build_model(ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in ctx.iter_train_batches(model, batch_size=4, tokenizer=ctx.reference_tokenizer("gpt2")):
        logits = model(batch.tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pathlib.Path(ctx.artifacts_dir, "notes.txt").write_text("trained")
    return {"loss": 0.5}
"""


@pytest.fixture(scope="module", params=["sealed", "open"])
def run(request, tmp_path_factory, cache_dir) -> Path:
    """One scored run a mode: two snapshots, an artifact, something returned."""
    root = tmp_path_factory.mktemp(request.param)
    bundle = write_bundle(root / "bundle", training=WRITES_AN_ARTIFACT)
    options = ("--snapshots=2", "--isolation=auto") if request.param == "sealed" else ()
    command = score_command(bundle, root / "run", cache_dir, f"--seal={request.param}", *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return root / "run"


def seed_dir(run: Path) -> Path:
    return run / f"seed-{c.DEFAULT_SEED}"


def found(run: Path) -> list[str]:
    return [*verify_run(seed_dir(run)), *verify_summary(run)]


def leaves(document, where=()):
    """(path, value) of every leaf and every list or table that is not empty."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from leaves(value, (*where, key))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from leaves(value, (*where, index))
        if document and where:
            yield where, document
    else:
        yield where, document


def altered(value):
    """Something else of the same kind, as near as can be."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * (1 + 2**-50) if value else 1e-300
    if isinstance(value, str):
        flipped = value[:-1] + ("0" if value[-1:] != "0" else "1")
        return flipped if value else "x"
    return value[:-1] if isinstance(value, list) else 1


def with_value(document, where, value):
    for key in where[:-1]:
        document = document[key]
    document[where[-1]] = value


def files_of(run: Path) -> list[Path]:
    return sorted(p for p in run.rglob("*") if p.is_file() and p.name not in OBSERVED)


def test_a_whole_run_verifies(run):
    assert found(run) == []


def test_every_field_of_every_json_file_is_named_when_it_is_altered(run):
    missed, tried = [], 0
    for path in files_of(run):
        if path.suffix != ".json":
            continue
        original = path.read_bytes()
        try:
            for where, value in leaves(orjson.loads(original)):
                document = orjson.loads(original)
                with_value(document, where, altered(value))
                path.write_bytes(orjson.dumps(document))
                tried += 1
                sentences = found(run)
                if not any(path.name in sentence for sentence in sentences):
                    missed.append((path.name, where, value, sentences[:2]))
        finally:
            path.write_bytes(original)
    assert missed == [] and tried > 150


def test_every_byte_that_is_altered_in_another_file_is_named(run):
    random = np.random.default_rng(0)
    missed = []
    for path in files_of(run):
        original = path.read_bytes()
        if path.suffix == ".json" or not original:
            continue
        places = {0, len(original) - 1, *random.integers(len(original), size=BYTES_A_FILE).tolist()}
        try:
            for place in sorted(places):
                data = bytearray(original)
                data[place] ^= 1 << int(random.integers(8))
                path.write_bytes(data)
                if not found(run):
                    missed.append((path.name, place))
            path.write_bytes(original[:-1])
            if not found(run):
                missed.append((path.name, "cut"))
        finally:
            path.write_bytes(original)
    assert missed == []


def test_a_file_that_is_missing_empty_or_rubbish_is_named_and_raises_nothing(run, tmp_path):
    random = np.random.default_rng(1)
    for path in files_of(run):
        for content in (None, b"", b"{}", b"null", b"[" * 100_000, random.bytes(300)):
            original = path.read_bytes()
            try:
                if content is None:
                    path.unlink()
                else:
                    path.write_bytes(content)
                assert found(run), (path, content)
            finally:
                path.write_bytes(original)


def test_a_key_that_stands_twice_or_another_spelling_is_named(run):
    """A reader that takes the first of two equal keys would see another score."""
    for path in (seed_dir(run) / c.RUN_MANIFEST_FILE, seed_dir(run) / c.RUN_SPEC_FILE, run / c.SUMMARY_FILE):
        original = path.read_bytes()
        try:
            for written in (original.replace(b"{", b'{"submission_id": "x", "mode": "x", ', 1), original + b" "):
                path.write_bytes(written)
                assert any(path.name in sentence for sentence in found(run)), written[:80]
        finally:
            path.write_bytes(original)


def test_what_no_receipt_names_is_named_where_a_reader_would_take_it_for_the_runs(run):
    folders = (c.PROGRAM_DIR, c.SNAPSHOTS_DIR, c.BUNDLE_DIR)
    names = [f"{folder}/more" for folder in folders] + [c.INITIAL_STATE_FILE]
    for name in names:
        path = seed_dir(run) / name
        made = not path.parent.is_dir()
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            continue
        path.write_bytes(b"x")
        try:
            assert any(str(path) in sentence for sentence in found(run)), name
        finally:
            path.unlink()
            if made:
                path.parent.rmdir()


def test_a_pipe_in_a_receipts_place_is_not_waited_for(run, tmp_path):
    for path in files_of(run):
        kept = path.rename(tmp_path / "kept")
        os.mkfifo(path)
        try:
            assert found(run), path
        finally:
            path.unlink()
            kept.rename(path)


def test_a_seed_that_the_summary_leaves_out_is_named(run, tmp_path):
    more = shutil.copytree(run, tmp_path / "more")
    shutil.copytree(seed_dir(more), more / "seed-1")
    assert any("says nothing of seed-1" in sentence for sentence in verify_summary(more))


def test_a_difference_behind_any_number_of_equal_fields_is_named(run):
    path = seed_dir(run) / c.RUN_MANIFEST_FILE
    stated = m.RunManifest.model_validate_json(path.read_bytes())
    many = stated.model_copy(
        update={"artifacts": [m.ArtifactRef(path=f"artifacts/{i}", bytes=1, sha256="0") for i in range(300)]}
    )
    other = many.model_copy(update={"submission_id": "other"})
    sentences = list(receipts.differences(path, other, many, b""))
    assert len(sentences) == 1 and "submission_id" in sentences[0]
    assert len(list(receipts.differences(path, many, stated, b""))) == receipts.MAX_SENTENCES


def test_a_series_that_does_not_follow_from_ledger_and_observations_is_named(run, tmp_path):
    """Its digest and all behind it made anew: what would be a fault of ours, not of a forger's."""
    copy = shutil.copytree(seed_dir(run), tmp_path / "copy")
    path = copy / c.TRAIN_SERIES_FILE
    document = orjson.loads(path.read_bytes())
    document["columns"]["wall_s"][-1] += 1.0
    path.write_bytes(canonical_json(document))
    receipt = receipts.Receipt.model_validate_json((copy / c.RECEIPT_FILE).read_bytes())
    receipt = receipt.model_copy(update={"sha256": {**receipt.sha256, path.name: file_sha256(path)}})
    (copy / c.RECEIPT_FILE).write_bytes(receipts.document_bytes(receipt))
    assert any(f"{path.name}: does not follow" in sentence for sentence in verify_run(copy))


def test_the_table_of_the_docs_names_every_file_and_every_field_of_a_manifest(run):
    written = {path.relative_to(seed_dir(run)) for path in seed_dir(run).rglob("*") if path.is_file()}
    names = {path.name if len(path.parts) == 1 else f"{path.parts[0]}/" for path in written} | {c.SUMMARY_FILE}
    assert names <= TABLE.keys(), names - TABLE.keys()
    page = (ROOT / "docs" / "receipts.md").read_text()
    for block, field in m.RunManifest.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        for name in [block] if inner is None else [f"{block}.{inside}" for inside in inner]:
            assert f"`{name}`" in page, name


def test_a_forged_run_is_neither_ranked_nor_compared(run, tmp_path):
    forged = shutil.copytree(run, tmp_path / "forged")
    path = seed_dir(forged) / c.RUN_MANIFEST_FILE
    document = orjson.loads(path.read_bytes())
    document["score"] |= {"final_score": 150.0, "emission_rank_score": 150.0, "emission_crown_eligible": True}
    path.write_bytes(orjson.dumps(document))
    board = rank_runs([run, forged], verify=True)
    assert [row["path"] for row in board["rows"]] == [str(run)]
    assert "does not verify" in board["unranked"][0]["reason"] and "score." in board["unranked"][0]["reason"]
    for pair in ((run, forged), (forged, run)):
        with pytest.raises(DataError, match=r"seed 1337 does not verify: .*score"):
            compare_runs(*pair, verify=True)
    assert rank_runs([run, forged])["rows"][0]["path"] == str(forged)
    assert compare_runs(run, forged)["mode"] == "SystemCompare"


@pytest.mark.parametrize("damage", [b"", b"{}", None])
def test_a_run_with_a_damaged_manifest_is_unranked_and_the_others_are_ranked(run, tmp_path, damage):
    broken = shutil.copytree(run, tmp_path / "broken")
    path = seed_dir(broken) / c.RUN_MANIFEST_FILE
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    for verify in (False, True):
        board = rank_runs([broken, run], verify=verify)
        assert [row["path"] for row in board["rows"]] == [str(run)]
        assert board["unranked"][0]["path"] == str(broken) and c.RUN_MANIFEST_FILE in board["unranked"][0]["reason"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_that_is_not_finite_is_unranked_with_the_reason(run, tmp_path, value):
    broken = shutil.copytree(run, tmp_path / "broken")
    path = seed_dir(broken) / c.RUN_MANIFEST_FILE
    text = path.read_text()
    stated = orjson.loads(text)["score"]["final_score"]
    path.write_text(
        text.replace(f'"final_score": {stated!r}', f'"final_score": {"NaN" if value != value else "Infinity"}')
    )
    board = rank_runs([run, broken])
    assert len(board["rows"]) == 1 and "no finite number" in board["unranked"][0]["reason"]
