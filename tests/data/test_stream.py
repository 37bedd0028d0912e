"""The packed stream against a plain-Python reading of docs/numerics.md, and the promises of its buffers and state."""

from __future__ import annotations

import multiprocessing
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_fast.data.shards import ShardWriter, open_shard, write_shard
from prism_fast.data.stream import TokenStream
from prism_fast.data.tokenizers import reference_tokenizer
from prism_fast.protocol.errors import DataError, UsageError

GPT2 = reference_tokenizer("gpt2")
SHAPE = (7, 8)  # seq_len, batch_size of the plain tests


def reference(shards, length, batch, basis):
    """Rows of the stream, each element with its bytes (None: end-of-text)."""
    stream = []
    for shard in shards:
        for record in shard:
            if basis == "bytes":
                stream += [(256, None)] + [(byte, 1) for byte in GPT2.decode_bytes(record)]
            else:
                stream += [(50256, None)] + [(token, len(GPT2.decode_bytes([token]))) for token in record]
    rows = [stream[k : k + length] for k in range(0, len(stream) - length + 1, length - 1)]
    return stream, [rows[i : i + batch] for i in range(0, len(rows), batch)]


def write_shards(folder, shards):
    paths = []
    for number, records in enumerate(shards):
        paths.append(folder / f"{number}.prsh")
        write_shard(paths[-1], records, tokenizer=GPT2)
    return paths


def plain_shards(folder, count=60, seed=3):
    random = np.random.default_rng(seed)
    records = [random.integers(0, 50256, random.integers(0, 40)) for _ in range(count)]
    return write_shards(folder, [records[: count // 2], [], records[count // 2 :]])


def drain(stream):
    return [(b.tokens.copy(), b.targets.copy(), b.index, b.bytes) for b in stream]


records = st.lists(st.lists(st.integers(0, 50255), max_size=12), max_size=8)


@settings(deadline=None, max_examples=150)
@given(
    shards=st.lists(records, min_size=1, max_size=3),
    length=st.integers(2, 9),
    batch=st.integers(1, 4),
    world=st.integers(1, 3),
    basis=st.sampled_from(["tokens", "bytes"]),
    prefetch=st.integers(1, 3),
    access=st.sampled_from(["map", "pread"]),
)
def test_stream_is_the_ten_line_reference(tmp_path_factory, shards, length, batch, world, basis, prefetch, access):
    opened = [open_shard(p, access=access) for p in write_shards(tmp_path_factory.mktemp("s"), shards)]
    stream, batches = reference(opened, length, batch, basis)
    if world > 1:  # only whole groups of full batches
        batches = [b for b in batches if len(b) == batch]
        batches = batches[: len(batches) // world * world]
    total = 0
    for rank in range(world):
        reader = TokenStream(opened, length, batch, basis=basis, rank=rank, world=world, prefetch=prefetch)
        mine = batches[rank::world]
        assert len(reader) == len(mine)
        for number, (expected, got) in enumerate(zip(mine, reader, strict=True)):
            assert got.index == number * world + rank
            assert got.tokens.dtype == got.targets.dtype == np.int64
            assert got.tokens.tolist() == [[token for token, _ in row] for row in expected]
            assert got.targets.tolist() == [[token for token, _ in row[1:]] + [-100] for row in expected]
            targets = [size for row in expected for _, size in row[1:]]
            assert got.bytes == sum(size for size in targets if size is not None)
            assert got.scored_tokens == sum(size is not None for size in targets)
            assert got.special_tokens == sum(size is None for size in targets)
            assert got.documents == got.special_tokens + (got.index == 0)
            total += got.bytes
        plan = reader.plan_summary()
        assert plan.batches == len(batches)
    reached = stream[: sum(map(len, batches)) * (length - 1) + 1] if batches else []
    assert plan.covered_bytes == total == sum(size or 0 for _, size in reached)
    assert plan.covered_tokens == sum(size is not None for _, size in reached)
    assert plan.covered_documents == sum(size is None for _, size in reached)
    assert plan.covered_bytes + plan.tail_bytes == plan.corpus_bytes == sum(shard.n_bytes for shard in opened)
    assert plan.covered_tokens + plan.tail_tokens == plan.corpus_tokens == sum(size is not None for _, size in stream)


def test_byte_basis_of_gpt2_shards_is_the_bytes_tokenizer_stream(tmp_path):
    text = "naïve 🙂 text".encode()
    raw = reference_tokenizer("bytes")
    write_shard(tmp_path / "g.prsh", [GPT2.encode_utf8(text)] * 3, tokenizer=GPT2)
    write_shard(tmp_path / "b.prsh", [raw.encode_utf8(text)] * 3, tokenizer=raw)
    decoded = drain(TokenStream(tmp_path / "g.prsh", 8, 2, basis="bytes"))
    stored = drain(TokenStream(tmp_path / "b.prsh", 8, 2))
    assert [(t.tolist(), i, n) for t, _, i, n in decoded] == [(t.tolist(), i, n) for t, _, i, n in stored]


def test_a_batch_outlives_the_next_call_and_its_stream(tmp_path):
    paths = plain_shards(tmp_path)
    expected = drain(TokenStream(paths, *SHAPE))
    with TokenStream(paths, *SHAPE, prefetch=1) as stream:
        previous = next(stream)
        for number, batch in enumerate(stream, 1):
            assert (previous.tokens == expected[number - 1][0]).all()
            assert (batch.tokens == expected[number][0]).all()
            previous = batch
    del stream
    assert (previous.targets == expected[-1][1]).all()


@pytest.mark.parametrize("world", [1, 2])
def test_d18_stop_and_resume_twice_gives_the_uninterrupted_stream(tmp_path, world):
    paths = plain_shards(tmp_path, 400)
    whole = drain(TokenStream(paths, 9, 3, world=world))
    pieces, state = [], None
    for stop, prefetch in ((30, 1), (40, 5), (None, 2)):
        stream = TokenStream(paths, 9, 3, world=world, prefetch=prefetch)
        if state is not None:
            stream.load_state_dict(state)
        while stop is None or len(pieces) < stop:
            batch = next(stream, None)
            if batch is None:
                break
            pieces.append((batch.tokens.copy(), batch.targets.copy(), batch.index, batch.bytes))
        state = stream.state_dict()
    assert len(whole) > 60
    assert [p[2:] for p in pieces] == [w[2:] for w in whole]
    assert all((p[0] == w[0]).all() and (p[1] == w[1]).all() for p, w in zip(pieces, whole, strict=True))


def test_start_batch_equals_reading_up_to_it(tmp_path):
    paths = plain_shards(tmp_path)
    whole = drain(TokenStream(paths, *SHAPE, world=2, rank=1))
    for start in range(len(whole) + 1):
        rest = drain(TokenStream(paths, *SHAPE, world=2, rank=1, start_batch=start))
        assert [(t.tolist(), i, n) for t, _, i, n in rest] == [(t.tolist(), i, n) for t, _, i, n in whole[start:]]


@pytest.mark.parametrize(
    ("key", "value"),
    [("shards", "0" * 64), ("seq_len", 8), ("batch_size", 9), ("basis", "bytes"), ("rank", 1), ("world", 2),
     ("schema", "x"), ("next_batch", 10**6), ("next_batch", None)],
)  # fmt: skip
def test_a_state_of_another_stream_is_refused(tmp_path, key, value):
    stream = TokenStream(plain_shards(tmp_path), *SHAPE)
    with pytest.raises(UsageError, match=key):
        stream.load_state_dict({**stream.state_dict(), key: value})


def test_d22_a_reader_that_dies_raises_in_the_consumer_after_its_good_batches(tmp_path):
    write_shard(tmp_path / "a.prsh", [np.arange(1000)], tokenizer=GPT2)
    data = bytearray((tmp_path / "a.prsh").read_bytes())
    data[256 + 2 * 600 : 256 + 2 * 600 + 2] = (50257).to_bytes(2, "little")  # past the vocabulary
    (tmp_path / "a.prsh").write_bytes(data)
    stream = TokenStream(tmp_path / "a.prsh", 11, 5)
    good = 0
    with pytest.raises(DataError, match=r"a\.prsh: record 0, token 600: expected an id below 50257, found 50257"):
        for _ in stream:
            good += 1
    assert good == 600 // 50
    with pytest.raises(DataError):  # and again, rather than a wait without end
        next(stream)


def test_a_file_cut_short_while_it_is_read_is_an_error_in_pread_mode(tmp_path):
    path = tmp_path / "a.prsh"
    write_shard(path, [np.zeros(100_000, np.int64)], tokenizer=GPT2)
    stream = TokenStream(path, 101, 10, access="pread")
    next(stream)
    os.truncate(path, 20_000)
    with pytest.raises(DataError, match=r"a\.prsh: .*cut short"):
        list(stream)


def test_headers_that_promise_more_bytes_than_the_tokens_hold_are_found(tmp_path):
    with ShardWriter(tmp_path / "a.prsh", GPT2) as writer:
        writer.add([1, 2, 3, 4], [4], [3], [0])  # 4 tokens of one byte each
    with pytest.raises(DataError, match="expected the 3 UTF-8 bytes that the shard declares, found tokens of"):
        list(TokenStream(tmp_path / "a.prsh", 3, 1))


def test_empty_streams_end_at_once(tmp_path):
    (path,) = write_shards(tmp_path, [[]])
    for shards in ([], [path], [path, path]):
        stream = TokenStream(shards, 4, 2)
        assert list(stream) == []
        assert stream.plan_summary().corpus_bytes == 0


@pytest.mark.parametrize(
    "bad", [{"seq_len": 1}, {"batch_size": 0}, {"prefetch": 0}, {"world": 0}, {"rank": -1}, {"rank": 2, "world": 2},
            {"start_batch": 10**9}, {"basis": "words"}, {"seq_len": 2**40}],
)  # fmt: skip
def test_bad_arguments_are_named(tmp_path, bad):
    arguments = {"seq_len": 4, "batch_size": 2, **bad}
    with pytest.raises(ValueError, match=next(iter(bad))):
        TokenStream(plain_shards(tmp_path), **arguments)


def _after_fork(stream, pipe):
    try:
        next(stream)
        pipe.send("a batch")
    except RuntimeError as error:
        pipe.send(str(error))
    stream.close()  # must not wait for a thread that is not there
    pipe.send("closed")


def test_d26_a_forked_child_gets_a_clear_error_and_the_parent_reads_on(tmp_path):
    stream = TokenStream(plain_shards(tmp_path), *SHAPE)
    first = next(stream).tokens.copy()
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_after_fork, args=(stream, there))
    child.start()
    assert here.poll(60), "the child hangs"
    assert "open it again in this process" in here.recv()
    assert here.poll(60), "the child hangs in close()"
    assert here.recv() == "closed"
    child.join(60)
    assert child.exitcode == 0
    assert next(stream).index == 1
    assert first.shape == (8, 7)
