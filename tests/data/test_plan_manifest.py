"""A plan's manifest replays to the same order, or says what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from prism_fast.data.plan import plan_corpus, read_manifest
from prism_fast.protocol.errors import DataError


@pytest.fixture
def lengths() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 300, 1001)


def write(directory: Path, lengths: np.ndarray, **arguments: Any) -> Path:
    np.save(directory / "lengths.npy", lengths)
    result = plan_corpus(directory / "lengths.npy", corpus_is_lengths=True, **arguments)
    result.write(directory / "plan.json")
    return directory / "plan.json"


@pytest.mark.parametrize(
    "arguments",
    [
        {"micro_batch": 2, "buckets": [8], "seed": 2**64 - 1},
        {"micro_batch": 3, "buckets": ["width"], "seed": 1},
        {"micro_batch": None, "buckets": [64], "token_budget": 1000, "cost": (1, 1), "cost_rows": 2},
        {"micro_batch": 2, "buckets": [2, 8], "seq_len": 100, "over": "split"},
        {"micro_batch": 2, "buckets": [], "seq_len": 100, "over": "drop"},
    ],
)
def test_a_manifest_replays_to_the_same_order(tmp_path: Path, lengths: np.ndarray, arguments: dict) -> None:
    path = write(tmp_path, lengths, **arguments)
    plan, rows = read_manifest(path, lengths)
    original = plan_corpus(tmp_path / "lengths.npy", corpus_is_lengths=True, **arguments)
    assert plan.digest == original.plan.digest
    assert np.array_equal(plan.records, original.plan.records)
    assert np.array_equal(rows.start, original.rows.start)
    document = orjson.loads(path.read_bytes())
    assert document["report"]["bucket"] == plan.bucket
    assert document["corpus"] == {
        "name": "lengths.npy",
        "fingerprint": None,
        "records": 1001,
        "tokens": int(lengths.sum()),
    }
    assert [name.name for name in tmp_path.iterdir() if name.suffix == ".tmp"] == []


def test_a_manifest_of_another_corpus_is_refused(tmp_path: Path, lengths: np.ndarray) -> None:
    path = write(tmp_path, lengths, micro_batch=2, buckets=[8])
    lengths[5] += 1
    with pytest.raises(DataError, match=r"plan.json: made for record lengths with sha256 .* plan this corpus anew"):
        read_manifest(path, lengths)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", 9, "replayed from its parameters"),
        ("schema", "prism_bucket_plan.v2", "this engine replays 'prism_bucket_plan.v1'"),
        ("generator", "mt19937", "made with 'splitmix64"),
        ("order_sha256", "0" * 64, "expected 0000"),
        ("corpus", {"fingerprint": "abc"}, "made for corpus abc, but this corpus is xyz"),
        ("parameters", {"micro_batches": 2}, "not a prism_bucket_plan.v1 manifest"),
        ("seq_len", "long", "not a prism_bucket_plan.v1 manifest"),
    ],
)
def test_an_altered_manifest_is_refused(
    tmp_path: Path, lengths: np.ndarray, key: str, value: Any, message: str
) -> None:
    path = write(tmp_path, lengths, micro_batch=2, buckets=[8])
    document = orjson.loads(path.read_bytes())
    (document["parameters"] if key == "seed" else document)[key] = value
    path.write_bytes(orjson.dumps(document))
    with pytest.raises(DataError, match=message):
        read_manifest(path, lengths, fingerprint="xyz")


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"schema": 1}'])
def test_a_file_that_is_no_manifest_is_refused(tmp_path: Path, lengths: np.ndarray, content: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(DataError, match=r"plan\.json: not a prism_bucket_plan\.v1 manifest"):
        read_manifest(tmp_path / "plan.json", lengths)


@pytest.mark.parametrize(
    ("key", "value"),
    [("micro_batch", 0), ("micro_batch", "2"), ("micro_batch", 2**70), ("bucket", -8), ("bucket", "wide"),
     ("seed", -1), ("seed", 2**64), ("token_budget", 1), ("nonsense", 1)],
)  # fmt: skip
def test_altered_parameters_are_faults_of_the_file(tmp_path: Path, lengths: np.ndarray, key: str, value: Any) -> None:
    path = write(tmp_path, lengths, micro_batch=2, buckets=[8])
    document = orjson.loads(path.read_bytes())
    document["parameters"][key] = value
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"plan\.json: .*(not a .* manifest|replayed from its parameters)"):
        read_manifest(path, lengths)


@pytest.mark.parametrize("changed", [{"seq_len": 0}, {"seq_len": "9"}, {"over": "cut"}])
def test_altered_row_limits_are_faults_of_the_file(tmp_path: Path, lengths: np.ndarray, changed: dict) -> None:
    path = write(tmp_path, lengths, micro_batch=2, buckets=[8], seq_len=100)
    path.write_text(json.dumps({**orjson.loads(path.read_bytes()), **changed}))
    with pytest.raises(DataError, match=r"plan\.json: not a .* manifest"):
        read_manifest(path, lengths)
