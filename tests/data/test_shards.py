"""`prism_shard.v1`: what is written is read back, and no damage goes unnamed."""

from __future__ import annotations

import gc
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_fast import _core
from prism_fast.data.shards import ShardWriter, document_id, open_shard, write_shard
from prism_fast.data.tokenizers import Tokenizer, reference_tokenizer
from prism_fast.protocol.errors import DataError

GPT2 = reference_tokenizer("gpt2")
HEADER, FOOTER = 256, 64


def wide_tokenizer(n_vocab=70_001):
    strings = [bytes([i % 256]) * (i // 4096 + 1) for i in range(n_vocab - 1)] + [b""]
    return Tokenizer("wide", strings, {"<|endoftext|>": n_vocab - 1}, "", None)


WIDE = wide_tokenizer()


def reseal(data: bytearray) -> bytes:
    """Recomputes the checksums of header and footer: what a forger, not an accident, would leave."""
    data[248:256] = struct.pack("<Q", _core.xxh64(bytes(data[:248])))
    foot = len(data) - FOOTER
    data[foot + 40 : foot + 48] = data[248:256]
    data[foot + 56 : foot + 64] = struct.pack("<Q", _core.xxh64(bytes(data[foot : foot + 56])))
    return bytes(data)


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "a.prsh"
    write_shard(path, [[1, 2, 3], [], [50255, 0]], tokenizer=GPT2, doc_ids=[7, 8, 9])
    return path


@pytest.mark.parametrize("access", ["map", "pread", "auto"])
def test_round_trip(shard, access):
    opened = open_shard(shard, tokenizer=GPT2, access=access)
    assert [r.tolist() for r in opened] == [[1, 2, 3], [], [50255, 0]]
    assert opened[-1].dtype == np.uint16
    assert opened.lengths.tolist() == [3, 0, 2]
    assert opened.utf8_bytes.tolist() == [3, 0, len(GPT2.decode_bytes([50255, 0]))]
    assert opened.doc_ids.tolist() == [7, 8, 9]
    assert opened.tokens.tolist() == [1, 2, 3, 50255, 0]
    assert (opened.n_tokens, opened.n_bytes) == (5, int(opened.utf8_bytes.sum()))
    assert opened.tokenizer_name == "gpt2"
    opened.verify(GPT2)
    with pytest.raises(IndexError, match="record 3 of 3"):
        opened[3]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(0, 70_000), max_size=30), max_size=30))
def test_round_trip_of_any_records_in_u32(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("s") / "a.prsh"
    tokenizer = WIDE
    write_shard(path, records, tokenizer=tokenizer)
    opened = open_shard(path, tokenizer=tokenizer)
    assert [r.tolist() for r in opened] == records
    opened.verify(tokenizer)


def test_ids_beyond_u16_choose_u32_and_never_wrap(tmp_path):
    write_shard(tmp_path / "a.prsh", [[70_000]], tokenizer=WIDE)
    assert open_shard(tmp_path / "a.prsh")[0].tolist() == [70_000]
    assert open_shard(tmp_path / "a.prsh").token_width == 4
    for bad, error in ((70_000, DataError), (-1, ValueError), (2**32 + 5, ValueError)):
        with pytest.raises(error, match=str(bad)):
            write_shard(tmp_path / "b.prsh", [[bad]], tokenizer=GPT2)
    with pytest.raises(TypeError, match="float64"):
        write_shard(tmp_path / "b.prsh", [[0.5]], tokenizer=GPT2)
    assert [p.name for p in tmp_path.iterdir()] == ["a.prsh"]


def test_the_byte_offsets_of_the_specification(shard):
    data = shard.read_bytes()
    magic, version, width, records, tokens, text, size = struct.unpack_from("<8sII4Q", data)
    assert (magic, version, width, records, tokens, size) == (b"PRSMSHRD", 1, 2, 3, 5, len(data))
    assert text == open_shard(shard).n_bytes
    tokens_at, offsets_at, bytes_at, ids_at, foot_at, n_vocab, eot = struct.unpack_from("<5Q2I", data, 48)
    assert (n_vocab, eot) == (50257, 50256)
    assert data[96:128].hex() == GPT2.fingerprint
    assert data[128:192] == b"gpt2".ljust(64, b"\0")
    assert [tokens_at % 64, offsets_at % 64, bytes_at % 64, ids_at % 64, foot_at % 64] == [0] * 5
    assert struct.unpack_from("<5H", data, tokens_at) == (1, 2, 3, 50255, 0)
    assert struct.unpack_from("<4Q", data, offsets_at) == (0, 3, 3, 5)
    assert struct.unpack_from("<3I", data, bytes_at)[1] == 0
    assert struct.unpack_from("<3Q", data, ids_at) == (7, 8, 9)
    assert data[foot_at : foot_at + 8] == b"PRSMFOOT" and len(data) == foot_at + 64
    sums = struct.unpack_from("<4Q", data, foot_at + 8)
    assert sums == tuple(
        map(_core.xxh64, (data[tokens_at : tokens_at + 10], data[offsets_at : offsets_at + 32],
                          data[bytes_at : bytes_at + 12], data[ids_at : ids_at + 24]))
    )  # fmt: skip


# Values of the xxHash reference implementation (Python package xxhash, xxh64_intdigest, seed 0).
XXH64 = {
    b"": 0xEF46DB3751D8E999,
    b"a": 0xD24EC4F1A98C6E5B,
    b"abc": 0x44BC2CF5AD770999,
    bytes(range(100)): 0x6AC1E58032166597,
}


def test_xxh64_is_the_reference_function():
    for data, expected in XXH64.items():
        assert _core.xxh64(data) == expected


def test_every_altered_byte_is_found(shard, tmp_path):
    data = shard.read_bytes()
    broken = tmp_path / "b.prsh"
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 0x55
        broken.write_bytes(changed)
        with pytest.raises(DataError, match=r"b\.prsh: offset \d+: expected .*, found "):
            open_shard(broken).verify()


def test_a_file_of_any_other_size_is_refused_at_open(shard, tmp_path):
    data = shard.read_bytes()
    broken = tmp_path / "b.prsh"
    for size in [*range(len(data)), len(data) + 1, len(data) + 64]:
        broken.write_bytes((data + bytes(64))[:size])
        with pytest.raises(DataError, match=rf"expected a .*file of .*found a file of {size} bytes"):
            open_shard(broken)


@pytest.mark.parametrize("field", range(8, 92, 4))
@pytest.mark.parametrize("value", [0, 1, 3, 8, 2**31, 2**32 - 1])
def test_a_forged_header_is_refused_or_harmless(shard, tmp_path, field, value):
    data = bytearray(shard.read_bytes())
    data[field : field + 4] = struct.pack("<I", value)
    forged = tmp_path / "b.prsh"
    forged.write_bytes(reseal(data))
    try:
        opened = open_shard(forged)
        opened.verify(GPT2)
    except DataError:
        return
    assert forged.read_bytes() == shard.read_bytes() or field == 88  # a larger vocabulary contradicts nothing


@pytest.mark.parametrize("access", ["map", "pread"])
def test_offsets_that_contradict_are_refused_before_they_are_followed(shard, tmp_path, access):
    data = bytearray(shard.read_bytes())
    (at,) = struct.unpack_from("<Q", data, 56)
    for position, value in ((0, 1), (1, 2**60), (1, 4), (2, 2**63), (3, 4)):
        forged = bytearray(data)
        forged[at + 8 * position : at + 8 * position + 8] = struct.pack("<Q", value)
        path = tmp_path / "b.prsh"
        path.write_bytes(reseal(forged))
        with pytest.raises(DataError, match="expected"):
            list(open_shard(path, access=access))


def test_a_returned_array_outlives_its_reader_and_its_file(shard):
    opened = open_shard(shard, access="map")
    record, counts = opened[0], opened.utf8_bytes
    del opened
    gc.collect()
    shard.unlink()
    assert record.tolist() == [1, 2, 3] and counts[0] == 3
    with pytest.raises(ValueError, match="read-only"):
        record[0] = 5


def test_a_failed_writer_leaves_nothing_and_the_old_file_stays(shard, tmp_path):
    before = shard.read_bytes()
    with pytest.raises(RuntimeError, match="stop"), ShardWriter(shard, GPT2) as writer:
        writer.add([1], [1], [1], [1])
        raise RuntimeError("stop")
    writer = ShardWriter(shard, GPT2)
    writer.add([1], [1], [1], [1])
    del writer
    gc.collect()
    assert [p.name for p in tmp_path.iterdir()] == ["a.prsh"]
    assert shard.read_bytes() == before


def test_a_refused_add_leaves_the_shard_as_it_was(tmp_path):
    with ShardWriter(tmp_path / "a.prsh", GPT2) as writer:
        writer.add([1, 2], [2], [2], [0])
        for bad in (([1, 60_000], [2], [2], [0]), ([1], [2], [1], [0]), ([1, 2], [1], [1], [0]), ([1], [1], [1], []),
                    ([1], [1], [2**32], [0]), ([1], [2**64 - 1], [1], [0])):  # fmt: skip
            with pytest.raises(ValueError):
                writer.add(*bad)
        writer.add([3], [1], [1], [0])
    opened = open_shard(tmp_path / "a.prsh")
    opened.verify(GPT2)
    assert [r.tolist() for r in opened] == [[1, 2], [3]]


def test_integers_of_any_size_keep_every_bit(tmp_path):
    ids = [2**64 - 1, 1, 2**63, 2**53 + 1]
    write_shard(tmp_path / "a.prsh", [[1]] * 4, tokenizer=GPT2, doc_ids=ids)
    assert open_shard(tmp_path / "a.prsh").doc_ids.tolist() == ids
    for bad, error in (([2**64], ValueError), ([-1], ValueError), ([2**63, 0.5], TypeError), (["1"], TypeError)):
        with pytest.raises(error, match="document id"):
            write_shard(tmp_path / "b.prsh", [[1]] * len(bad), tokenizer=GPT2, doc_ids=bad)


def test_another_tokenizer_is_refused(shard):
    with pytest.raises(DataError, match=r"offset 96: expected the fingerprint .* of tokenizer 'bytes', found"):
        open_shard(shard, tokenizer=reference_tokenizer("bytes"))


def test_utf8_lengths_that_are_not_those_of_the_tokens_are_found(tmp_path):
    with ShardWriter(tmp_path / "a.prsh", GPT2) as writer:
        writer.add([1, 2], [1, 1], [1, 2], [0, 1])
    opened = open_shard(tmp_path / "a.prsh")
    opened.verify()
    with pytest.raises(DataError, match="expected record 1 to have the 1 UTF-8 bytes of its tokens, found 2"):
        opened.verify(GPT2)


def test_paths_that_are_no_files_are_os_errors(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_shard(tmp_path / "none.prsh")
    with pytest.raises(IsADirectoryError):
        open_shard(tmp_path)
    with pytest.raises(OSError, match="No such file"):
        ShardWriter(tmp_path / "none" / "a.prsh", GPT2)
    with pytest.raises(DataError, match="not a regular file"):
        open_shard("/dev/null")


def test_a_document_id_is_the_head_of_its_sha256():
    assert document_id("abc") == int.from_bytes(bytes.fromhex("ba7816bf8f01cfea"), "little")


def test_a_sparse_shard_over_4_gib_reads_its_last_token(tmp_path):
    """The writer cannot make one in test time, so the file is laid out by the specification, zeros between."""
    tokens = (5 << 30) // 2 + 1  # 5 GiB of u16
    write_shard(tmp_path / "small.prsh", [[0]], tokenizer=GPT2)
    head = bytearray((tmp_path / "small.prsh").read_bytes()[:HEADER])
    align = lambda n: (n + 63) // 64 * 64  # noqa: E731
    offsets_at = align(HEADER + tokens * 2)
    bytes_at = align(offsets_at + 3 * 8)
    ids_at = align(bytes_at + 2 * 4)
    foot_at = align(ids_at + 2 * 8)
    struct.pack_into(
        "<10Q", head, 16, 2, tokens, 2 * 65535, foot_at + 64, HEADER, offsets_at, bytes_at, ids_at, foot_at, 0
    )
    struct.pack_into("<II", head, 88, 50257, 50256)
    path = tmp_path / "big.prsh"
    with path.open("wb") as file:
        file.write(head)
        file.seek(HEADER + (tokens - 1) * 2)
        file.write(struct.pack("<H", 4242))
        file.seek(offsets_at)
        file.write(struct.pack("<3Q", 0, tokens - 1, tokens))
        file.seek(foot_at)
        file.write(b"PRSMFOOT".ljust(64, b"\0"))
        file.seek(0)
    with path.open("r+b") as file:
        head[248:256] = struct.pack("<Q", _core.xxh64(bytes(head[:248])))
        file.write(head)
        foot = bytearray(b"PRSMFOOT".ljust(64, b"\0"))
        foot[40:48] = head[248:256]
        foot[56:64] = struct.pack("<Q", _core.xxh64(bytes(foot[:56])))
        file.seek(foot_at)
        file.write(foot)
    for access in ("map", "pread"):
        opened = open_shard(path, access=access)
        assert opened[1].tolist() == [4242]
        assert len(opened) == 2 and opened.n_tokens == tokens
