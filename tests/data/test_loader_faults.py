"""Stopping, resuming, dying threads and forks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prism_fast.data import Block, TokenLoader, write_shard
from prism_fast.data.tokenizers import Tokenizer, reference_tokenizer
from prism_fast.protocol.errors import DataError, UsageError

BYTES = reference_tokenizer("bytes")


def write_records(path: Path, count: int, seed: int, longest: int = 80) -> Path:
    random = np.random.default_rng(seed)
    write_shard(
        path, [random.integers(0, 256, length) for length in random.integers(1, longest, count)], tokenizer=BYTES
    )
    return path


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_records(tmp_path_factory.mktemp("faults") / "a.prsh", 400, seed=0)


def contents(loader: Iterator[Any]) -> Iterator[tuple[list, list, int]]:
    return ((block.tokens.tolist(), block.targets.tolist(), block.bytes) for block in loader)


PLANS: list[dict[str, Any]] = [
    {"plan": 8, "batch": 2, "seed": 1},
    {"plan": 64, "token_budget": 200, "seed": 1},
    {"plan": 8, "batch": 2, "seq_len": 32, "over": "split", "world": 2, "rank": 1},
    {"plan": "packed", "batch": 2, "seq_len": 32},
]


@pytest.mark.parametrize("arguments", PLANS)
def test_d18_stopped_and_resumed_twice_gives_the_uninterrupted_stream(shard: Path, arguments: dict[str, Any]) -> None:
    uninterrupted = list(contents(TokenLoader(shard, prefetch=2, **arguments)))
    assert len(uninterrupted) > 50
    pieces = []
    state = None
    for stop, settings in (
        (30, {"prefetch": 2}),
        (10, {"prefetch": 7, "threads": 3}),
        (None, {"prefetch": 0, "output": "numpy", "dtype": "int32"}),
    ):
        loader = TokenLoader(shard, **settings, **arguments)  # type: ignore[arg-type]
        if state is not None:
            loader.load_state_dict(state)
        piece = contents(loader)
        pieces += list(piece) if stop is None else [next(piece) for _ in range(stop)]
        state = loader.state_dict()
    assert pieces == uninterrupted


def test_a_loader_can_go_back(shard: Path) -> None:
    loader = TokenLoader(shard, 8, 2, prefetch=3)
    start = loader.state_dict()
    first = list(contents(loader))
    assert next(loader, None) is None
    loader.load_state_dict(start)
    assert list(contents(loader)) == first


def test_a_state_fits_every_rank(shard: Path) -> None:
    for arguments in ({"plan": 8, "batch": 2}, {"plan": "packed", "batch": 2, "seq_len": 32}):
        ranks = [TokenLoader(shard, rank=rank, world=2, **arguments) for rank in range(2)]  # type: ignore[arg-type]
        for loader in ranks:
            next(loader)
        assert ranks[0].state_dict() == ranks[1].state_dict()
        expected = next(contents(ranks[1]))
        again = TokenLoader(shard, rank=1, world=2, **arguments)  # type: ignore[arg-type]
        again.load_state_dict({**ranks[0].state_dict(), "next_step": 1})
        assert next(contents(again)) == expected


@pytest.mark.parametrize(
    ("key", "arguments"),
    [
        ("corpus", {"other": True}),
        ("plan", {"plan": 16}),
        ("plan", {"batch": 4}),
        ("plan", {"seed": 2}),
        ("world", {"world": 2}),
        ("plan", {"seq_len": 20}),
        ("plan", {"plan": "packed", "seq_len": 20, "seed": None}),
    ],
)
def test_a_state_of_something_else_is_refused(shard: Path, tmp_path: Path, key: str, arguments: dict[str, Any]) -> None:
    base: dict[str, Any] = {"plan": 8, "batch": 2, "seed": 1}
    state = TokenLoader(shard, **base).state_dict()
    path = write_records(tmp_path / "b.prsh", 400, seed=7) if arguments.pop("other", False) else shard
    loader = TokenLoader(path, **{**base, **arguments})
    with pytest.raises(UsageError, match=f"loader state: {key}: expected .*, found "):
        loader.load_state_dict(state)
    assert len(list(loader)) == len(loader)  # and it still works


@pytest.mark.parametrize("step", [-1, 201, 1.0, True, None])
def test_a_position_outside_the_plan_is_refused(shard: Path, step: object) -> None:
    loader = TokenLoader(shard, 8, 2)
    with pytest.raises(UsageError, match="next_step: expected 0 to 200"):
        loader.load_state_dict({**loader.state_dict(), "next_step": step})


@pytest.mark.parametrize("prefetch", [0, 1, 6])
@pytest.mark.parametrize("plan", [8, "packed"])
def test_d22_what_kills_a_prefetch_thread_is_raised_in_the_consumer(tmp_path: Path, prefetch: int, plan: Any) -> None:
    path = write_records(tmp_path / "a.prsh", 2000, seed=0)
    loader = TokenLoader(path, plan, 2, 64, prefetch=prefetch, access="pread")
    good = [block[0] for block, _ in zip(contents(loader), range(3), strict=False)]
    assert len(good) == 3
    os.truncate(path, 4096)  # someone cuts the file under us: the thread's next read fails
    with pytest.raises(DataError, match=r"a\.prsh"):
        list(loader)
    with pytest.raises(DataError):  # and it stays failed, it does not end quietly
        next(loader)


def test_d22_blocks_before_the_failure_come_first(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.prsh", 200, seed=0)
    clean = list(contents(TokenLoader(path, None, 2)))
    data = bytearray(path.read_bytes())
    # Token ids above the vocabulary from the middle of the tokens on; only reading them can tell.
    data[64 * 40 : 64 * 40 + 2] = (60000).to_bytes(2, "little")
    path.write_bytes(data)
    for prefetch, threads in ((0, 1), (4, 1), (16, 4)):
        loader = TokenLoader(path, None, 2, prefetch=prefetch, threads=threads)
        good = []
        with pytest.raises(DataError, match=r"a\.prsh: record [0-9]+: expected token ids below 257, found 60000"):
            for block in contents(loader):
                good.append(block)
        assert 0 < len(good) < len(clean)
        assert good == clean[: len(good)]


@pytest.mark.parametrize("plan", [8, "packed"])
def test_d26_a_forked_child_is_told_and_the_parent_goes_on(shard: Path, plan: Any) -> None:
    loader = TokenLoader(shard, plan, 2, 32, output="numpy")
    next(loader)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # no pytest machinery may run here
        try:
            next(loader)
            message = "no error"
        except RuntimeError as error:
            message = str(error)
        del loader
        os.write(write, message.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        message = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert "did not survive the fork" in message
    assert len(list(loader)) == len(loader) - 1


def test_d26_a_loader_made_in_a_forked_child_works(shard: Path) -> None:
    with TokenLoader(shard, 8, 2, output="numpy", prefetch=4) as parent:
        next(parent)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                total = sum(block.bytes for block in TokenLoader(shard, 8, 2, output="numpy", prefetch=4))
                os.write(write, str(total).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        with os.fdopen(read) as pipe:
            total = int(pipe.read())
        assert os.waitpid(child, 0)[1] == 0
        assert total == sum(block.bytes for block in TokenLoader(shard, 8, 2, output="numpy"))


def test_a_closed_loader_says_so(shard: Path) -> None:
    loader = TokenLoader(shard, 8, 2)
    block = next(loader)
    kept = block.tokens.tolist()
    loader.close()
    loader.close()
    assert block.tokens.tolist() == kept
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_abandoned_loaders_stop_their_threads(shard: Path) -> None:
    before = len(os.listdir("/proc/self/task"))
    for _ in range(20):
        next(TokenLoader(shard, 8, 2, output="numpy", prefetch=2, threads=4))
    assert len(os.listdir("/proc/self/task")) == before


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("plan", [8, "packed"])
def test_an_id_that_32_bits_cannot_hold_is_named_whatever_the_block_holds(
    tmp_path: Path, plan: Any, dtype: Any
) -> None:
    strings = [bytes([i % 256]) * (i // 4096 + 1) for i in range(70_000)] + [b""]
    wide = Tokenizer("wide", strings, {"<|endoftext|>": 70_000}, "", None)
    path = tmp_path / "a.prsh"
    write_shard(path, [[1, 2, 69_999]], tokenizer=wide)
    assert next(TokenLoader(path, plan, 1, 4, tokenizer=wide, dtype=dtype)).tokens.tolist() == [[70_000, 1, 2, 69_999]]
    data = bytearray(path.read_bytes())
    data[256 + 4 : 256 + 8] = (2**32 - 5).to_bytes(4, "little")  # -5 as int32, no id at all
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.prsh: record 0.*below 70001, found 4294967291"):
        next(TokenLoader(path, plan, 1, 4, tokenizer=wide, dtype=dtype))


@pytest.mark.parametrize("output", ["torch", "numpy"])
@pytest.mark.parametrize("plan", [8, "packed"])
def test_blocks_outlive_their_loader_and_nothing_else_does(shard: Path, plan: Any, output: Any) -> None:
    before = len(os.listdir("/proc/self/task"))
    loader = TokenLoader(shard, plan, 2, 32, output=output)
    other = TokenLoader(shard, plan, 2, 32, output=output)
    block, expected = next(loader), next(other)
    gone = weakref.ref(loader._reader)
    del loader
    assert gone() is None  # at once: no cycle keeps threads and buffers until a collection
    assert block.tokens.tolist() == expected.tokens.tolist()
    assert block.cu_seqlens.tolist() == expected.cu_seqlens.tolist()
    assert block.lengths.tolist() == expected.lengths.tolist()
    other.close()
    assert len(os.listdir("/proc/self/task")) == before


def test_blocks_are_made_by_loaders_alone() -> None:
    with pytest.raises(TypeError, match="Block"):
        Block()
