"""Blocks hold exactly the rows that the plan names, and nothing of them is counted twice or lost."""

from __future__ import annotations

import base64
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prism_fast.data import TokenLoader, TokenStream, bucket_plan, fit_rows, open_shard, write_shard
from prism_fast.data.plan import plan_corpus
from prism_fast.data.tokenizers import Tokenizer, reference_tokenizer, tokenizer_from_file
from prism_fast.protocol.errors import DataError, UsageError

BYTES = reference_tokenizer("bytes")


def random_records(tokenizer: Tokenizer, count: int, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    lengths = np.where(random.random(count) < 0.1, 0, random.integers(1, 60, count))
    ids = np.setdiff1d(np.arange(tokenizer.n_vocab), [tokenizer.eot])
    return [random.choice(ids, length) for length in lengths]


@pytest.fixture(scope="module")
def wide_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """More than 65,536 ids, of one and of two bytes: its shards hold 32-bit tokens."""
    strings = [bytes([i]) for i in range(256)] + [bytes([i, j]) for i in range(256) for j in range(256)]
    path = tmp_path_factory.mktemp("ranks") / "wide.tiktoken"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(strings)))
    return tokenizer_from_file(path)


def write_corpus(folder: Path, tokenizer: Tokenizer, records: list[np.ndarray], cuts: tuple[int, ...]) -> list[Path]:
    bounds = [0, *cuts, len(records)]
    paths = []
    for k, (begin, end) in enumerate(itertools.pairwise(bounds)):
        paths.append(folder / f"{tokenizer.name}-{k}.prsh")
        write_shard(paths[-1], records[begin:end], tokenizer=tokenizer)
    return paths


@pytest.fixture(scope="module", params=["bytes", "wide"])
def corpus(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, wide_tokenizer: Tokenizer
) -> tuple[Tokenizer, list[np.ndarray], list[Path]]:
    tokenizer = BYTES if request.param == "bytes" else wide_tokenizer
    records = random_records(tokenizer, 101, seed=1)
    # An empty shard in the middle: a record number must not land in it.
    return tokenizer, records, write_corpus(tmp_path_factory.mktemp("corpus"), tokenizer, records, (40, 40, 90))


def reference_block(
    tokenizer: Tokenizer, records: list[np.ndarray], pieces: list[tuple[int, int, int]]
) -> dict[str, Any]:
    """Rows of (record, start, length) in plain Python."""
    width = max(length for _, _, length in pieces) + 1
    block: dict[str, Any] = {"tokens": [], "targets": [], "lengths": [], "row_bytes": [], "records": [], "cu": [0]}
    for record, start, length in pieces:
        ids = records[record].tolist()
        text = ids[start : start + length]
        context = ids[start - 1] if start else tokenizer.eot
        block["tokens"].append([context, *text] + [tokenizer.eot] * (width - length - 1))
        block["targets"].append(text + [-100] * (width - length))
        block["lengths"].append(length + 1)
        block["row_bytes"].append(len(tokenizer.decode_bytes(text)))
        block["records"].append(record)
        block["cu"].append(block["cu"][-1] + length + 1)
    return block


@pytest.mark.parametrize("output", ["torch", "numpy"])
@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize(("prefetch", "threads"), [(0, 1), (1, 1), (5, 3)])
@pytest.mark.parametrize(
    ("bucket", "batch", "budget", "seq_len", "over", "access"),
    [
        (8, 4, None, None, "truncate", "map"),
        (None, 3, None, 20, "truncate", "pread"),
        (16, 2, None, 20, "split", "map"),
        (16, None, 200, 20, "split", "pread"),
        ("width", 5, None, 40, "drop", "map"),
    ],
)
def test_blocks_equal_a_plain_reference(
    corpus: tuple[Tokenizer, list[np.ndarray], list[Path]],
    bucket: Any,
    batch: int | None,
    budget: int | None,
    seq_len: int | None,
    over: Any,
    access: str,
    prefetch: int,
    threads: int,
    dtype: Any,
    output: Any,
) -> None:
    tokenizer, records, paths = corpus
    rows = fit_rows([len(record) for record in records], seq_len, over)
    plan = bucket_plan(rows.length, batch, bucket, 3, token_budget=budget, row_overhead=1)
    loader = TokenLoader(
        paths,
        bucket,
        batch,
        seq_len,
        seed=3,
        prefetch=prefetch,
        over=over,
        token_budget=budget,
        dtype=dtype,
        output=output,
        threads=threads,
        tokenizer=tokenizer,
        access=access,
    )
    assert len(loader) == len(plan)
    seen = 0
    for k, block in enumerate(loader):
        expected = reference_block(
            tokenizer, records, [(int(rows.record[r]), int(rows.start[r]), int(rows.length[r])) for r in plan[k]]
        )
        assert block.tokens.tolist() == expected["tokens"]
        assert block.targets.tolist() == expected["targets"]
        assert block.lengths.tolist() == expected["lengths"]
        assert block.row_bytes.tolist() == expected["row_bytes"]
        assert block.records is not None
        assert block.records.tolist() == expected["records"]
        assert block.cu_seqlens.tolist() == expected["cu"]
        assert block.bytes == sum(expected["row_bytes"])
        assert block.scored_tokens == sum(expected["lengths"]) - len(expected["lengths"])
        assert (block.index, block.special_tokens) == (k, 0)
        kind = getattr(torch, dtype) if output == "torch" else np.dtype(dtype)
        assert block.tokens.dtype == block.targets.dtype == kind
        assert budget is None or block.tokens.shape[0] * block.tokens.shape[1] <= budget
        seen += 1
    assert seen == len(plan)
    loader.close()


def test_every_byte_is_counted_once_whatever_the_batch(corpus: tuple[Tokenizer, list[np.ndarray], list[Path]]) -> None:
    tokenizer, records, paths = corpus
    total = sum(len(tokenizer.decode_bytes(record)) for record in records)
    tokens = sum(len(record) for record in records)
    for arguments in (
        {"plan": 8, "batch": 4},
        {"plan": None, "batch": 1},
        {"plan": 32, "token_budget": 300},
        {"plan": "width", "batch": 7},
        {"plan": 8, "batch": 4, "seq_len": 10, "over": "split"},
    ):
        blocks = list(TokenLoader(paths, tokenizer=tokenizer, prefetch=0, **arguments))  # type: ignore[arg-type]
        assert sum(block.bytes for block in blocks) == total
        assert sum(block.scored_tokens for block in blocks) == tokens


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_read_disjoint_blocks_in_equal_number(
    corpus: tuple[Tokenizer, list[np.ndarray], list[Path]], world: int
) -> None:
    tokenizer, records, paths = corpus
    loaders = [TokenLoader(paths, 8, 2, rank=rank, world=world, tokenizer=tokenizer) for rank in range(world)]
    plan = loaders[0].plan
    assert plan is not None
    assert {len(loader) for loader in loaders} == {len(plan) // world}
    read: list[int] = []
    for rank, loader in enumerate(loaders):
        for step, block in enumerate(loader):
            assert block.index == step * world + rank
            assert block.records is not None
            read += block.records.tolist()
    assert len(set(read)) == len(read)
    assert len(read) + loaders[0].dropped.records == len(records)
    assert loaders[0].dropped == plan.dropped(world)


def test_d23_records_without_tokens_make_rows_of_context_alone(tmp_path: Path) -> None:
    paths = write_corpus(tmp_path, BYTES, [np.empty(0, np.int64)] * 6, ())
    blocks = list(TokenLoader(paths, 4, 2))
    assert [block.tokens.tolist() for block in blocks] == [[[256], [256]]] * 3
    assert all(block.targets.tolist() == [[-100], [-100]] for block in blocks)
    assert sorted(int(record) for block in blocks for record in block.records) == list(range(6))
    assert all((block.bytes, block.scored_tokens) == (0, 0) for block in blocks)


def test_a_corpus_without_records_has_no_blocks(tmp_path: Path) -> None:
    paths = write_corpus(tmp_path, BYTES, [], ())
    for plan in (8, None, "packed"):
        assert list(TokenLoader(paths, plan, 2, 16)) == []


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_packed_blocks_are_those_of_the_token_stream(
    corpus: tuple[Tokenizer, list[np.ndarray], list[Path]], dtype: Any
) -> None:
    tokenizer, _, paths = corpus
    loader = TokenLoader(paths, "packed", batch=3, seq_len=32, dtype=dtype, tokenizer=tokenizer)
    stream = TokenStream(paths, 32, 3, tokenizer=tokenizer)
    assert len(loader) == len(stream)
    for block, batch in zip(loader, stream, strict=True):
        assert block.tokens.tolist() == batch.tokens.tolist()
        assert block.targets.tolist() == batch.targets.tolist()
        assert block.tokens.dtype == getattr(torch, dtype)
        assert (block.bytes, block.scored_tokens, block.special_tokens) == (
            batch.bytes,
            batch.scored_tokens,
            batch.special_tokens,
        )
        assert block.lengths.tolist() == [32] * len(batch.tokens)
        flat = batch.tokens.reshape(-1)
        bounds = [i for i, token in enumerate(flat) if token == tokenizer.eot or i % 32 == 0]
        assert block.cu_seqlens.tolist() == [*bounds, len(flat)]
        assert block.cu_seqlens.dtype == torch.int32
    summary = stream.plan_summary()
    assert loader.dropped.tokens == summary.tail_tokens


@pytest.mark.parametrize("plan", [4, "packed"])
def test_a_block_stays_whole_until_the_second_next(tmp_path: Path, plan: Any) -> None:
    records = random_records(BYTES, 200, seed=2)
    paths = write_corpus(tmp_path, BYTES, records, ())
    expected = [block.tokens.copy() for block in TokenLoader(paths, plan, 2, 64, output="numpy")]
    loader = TokenLoader(paths, plan, 2, 64, output="numpy", prefetch=3)
    older = next(loader)
    addresses = {older.tokens.ctypes.data}
    for k, block in enumerate(loader, start=1):
        assert np.array_equal(older.tokens, expected[k - 1])
        older = block
        addresses.add(block.tokens.ctypes.data)
    assert len(addresses) <= 3 + 2  # recycled: prefetch + 2 buffers, however many blocks


def test_buffers_wait_for_copies_under_way(tmp_path: Path) -> None:
    class Copy:
        waited = 0

        def synchronize(self) -> None:
            self.waited += 1

    paths = write_corpus(tmp_path, BYTES, random_records(BYTES, 20, seed=2), ())
    loader = TokenLoader(paths, 4, 2)
    first, copies = next(loader), [Copy(), Copy(), Copy()]
    loader.recycle_after(first, copies[0])
    second = next(loader)
    loader.recycle_after(second, copies[1])
    assert copies[0].waited == 0
    next(loader)  # may overwrite the first block
    assert [copy.waited for copy in copies] == [1, 0, 0]
    with pytest.raises(ValueError, match="handed out too long ago"):
        loader.recycle_after(first, copies[2])
    loader.load_state_dict(loader.state_dict())  # takes all buffers back
    assert [copy.waited for copy in copies] == [1, 1, 0]


def test_a_manifest_can_be_loaded(tmp_path: Path) -> None:
    records = random_records(BYTES, 60, seed=4)
    paths = write_corpus(tmp_path, BYTES, records, ())
    result = plan_corpus(paths[0], micro_batch=2, buckets=[8], seed=5, seq_len=30, over="split")
    result.write(tmp_path / "plan.json")
    loader = TokenLoader(paths, tmp_path / "plan.json")
    assert loader.plan is not None
    assert loader.plan.digest == result.plan.digest
    direct = TokenLoader(paths, 8, 2, 30, seed=5, over="split")
    for block, other in zip(loader, direct, strict=True):
        assert torch.equal(block.tokens, other.tokens)
    with pytest.raises(UsageError, match="planned for seq_len 30, asked for 31"):
        TokenLoader(paths, tmp_path / "plan.json", seq_len=31)
    other_paths = write_corpus(tmp_path, BYTES, [*records[1:], records[0]], ())
    with pytest.raises(DataError, match="made for corpus"):
        TokenLoader(other_paths, tmp_path / "plan.json")


def test_a_plan_over_other_records_is_refused(tmp_path: Path) -> None:
    paths = write_corpus(tmp_path, BYTES, random_records(BYTES, 60, seed=4), ())
    lengths = open_shard(paths[0]).lengths
    plan = bucket_plan(lengths, 2, 8, 1)
    assert len(TokenLoader(paths, plan)) == 30
    for arguments, message in (
        ({"seq_len": 20}, "the plan is for 60 rows"),
        ({"batch": 4}, "batch is 4, but the plan was made with 2"),
        ({"seed": 2}, "seed is 2, but the plan was made with 1"),
        ({"token_budget": 99}, "token_budget is 99, but the plan was made with None"),
    ):
        with pytest.raises(UsageError, match=message):
            TokenLoader(paths, plan, **arguments)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the plan is for 59 rows"):
        TokenLoader(paths, bucket_plan(lengths[1:], 2, 8, 1))


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("rank 2: expected 0 to 1", {"rank": 2, "world": 2}),
        ("prefetch -1", {"prefetch": -1}),
        ("threads 0", {"threads": 0}),
        ("dtype 'float32'", {"dtype": "float32"}),
        ("output 'jax'", {"output": "jax"}),
        ("needs micro_batch", {"batch": None}),
        ("packed blocks need batch", {"plan": "packed"}),
        ("neither seed nor token_budget", {"plan": "packed", "seq_len": 8, "seed": 1}),
        ("record [0-9]+ takes [0-9]+ tokens alone", {"token_budget": 3}),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, message: str, arguments: dict[str, Any]) -> None:
    paths = write_corpus(tmp_path, BYTES, random_records(BYTES, 10, seed=4), ())
    with pytest.raises(ValueError, match=message):
        TokenLoader(paths, **{"plan": 4, "batch": 2, **arguments})


def test_numpy_blocks_need_no_torch(tmp_path: Path) -> None:
    paths = write_corpus(tmp_path, BYTES, random_records(BYTES, 10, seed=4), ())
    script = f"""
import sys
from prism_fast.data import TokenLoader
for plan in (4, "packed"):
    for block in TokenLoader({str(paths[0])!r}, plan, 2, 16, output="numpy"):
        block.cu_seqlens
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
