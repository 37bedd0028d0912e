"""Token files of other tools, read in place: right documents, or one sentence that says what is wrong."""

from __future__ import annotations

import gc
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_fast.data.shards import convert_shard, open_shard
from prism_fast.data.stream import TokenStream
from prism_fast.data.tokenizers import reference_tokenizer
from prism_fast.protocol.errors import DataError

GPT2 = reference_tokenizer("gpt2")
EOT = 50256
ACCESS = pytest.mark.parametrize("access", ["map", "pread"])
MEGATRON_CODES = {np.uint8: 1, np.int32: 4, np.int64: 5, np.uint16: 8}


def write_llmc(path, tokens, width=2, count=None):
    head = np.zeros(256, "<i4")
    head[:3] = (20240520, 1, len(tokens)) if width == 2 else (20240801, 7, len(tokens))
    if count is not None:
        head[2] = count
    path.write_bytes(head.tobytes() + np.asarray(tokens, f"<u{width}").tobytes())
    return path


def write_megatron(path, documents, dtype=np.uint16, code=None):
    """documents: list of lists of sequences."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(s) for s in sequences], "<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[:-1] * np.dtype(dtype).itemsize
    bounds = np.concatenate([[0], np.cumsum([len(d) for d in documents], dtype=np.int64)])
    code = MEGATRON_CODES[dtype] if code is None else code
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(bounds))
    path.with_suffix(".idx").write_bytes(
        head + lengths.tobytes() + pointers.astype("<i8").tobytes() + bounds.astype("<i8").tobytes()
    )
    path.with_suffix(".bin").write_bytes(b"".join(np.asarray(s, dtype).tobytes() for s in sequences))
    return path.with_suffix(".bin")


def write_datatrove(path, documents, width=2):
    path.write_bytes(b"".join(np.asarray(d, f"<u{width}").tobytes() for d in documents))
    ends = np.cumsum([len(d) for d in documents], dtype="<u8")
    path.with_name(path.name + ".index").write_bytes(np.asarray(ends, "<u8").tobytes())
    return path


def lists(shard):
    return [record.tolist() for record in shard]


# ------------------------------------------------------------------------------------------- the right documents


@ACCESS
@pytest.mark.parametrize("width", [2, 4])
def test_llmc_documents_lie_between_end_of_text_ids(tmp_path, width, access):
    path = write_llmc(tmp_path / "a.bin", [EOT, 1, 2, EOT, EOT, 3], width)
    shard = open_shard(path, eot=EOT, access=access)
    assert (shard.format, shard.token_width) == ("llmc", width)
    assert lists(shard) == [[1, 2], [], [3]]
    assert shard.lengths.tolist() == [2, 0, 1]
    assert shard.n_tokens == 3


@ACCESS
@pytest.mark.parametrize("dtype", MEGATRON_CODES)
def test_megatron_documents_come_from_the_index(tmp_path, dtype, access):
    path = write_megatron(tmp_path / "a", [[[1, 2], [3]], [], [[4]], [[]]], dtype)
    for name in (path, path.with_suffix(".idx")):
        shard = open_shard(name, access=access)
        assert shard.format == "megatron" and shard.path == str(path)
        assert lists(shard) == [[1, 2, 3], [], [4], []]


@pytest.mark.parametrize("width", [2, 4])
def test_datatrove_documents_come_from_the_index(tmp_path, width):
    path = write_datatrove(tmp_path / "a.ds", [[1, 2, EOT], [], [3, EOT]], width)
    assert lists(open_shard(path)) == [[1, 2, EOT], [], [3, EOT]]
    assert lists(open_shard(path, eot=EOT)) == [[1, 2], [], [3]]
    assert open_shard(path).token_width == width


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<u4", "<i4", "<u8", "<i8"])
def test_npy_arrays_of_one_dimension(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.array([1, 2, 200, 3], dtype))
    assert lists(open_shard(tmp_path / "a.npy", eot=200)) == [[1, 2], [3]]


@pytest.mark.parametrize("dtype", ["u16", "u32", "i32", "u64"])
def test_headerless_files_of_a_named_dtype(tmp_path, dtype):
    np.array([1, 2, 0, 3, 0], dtype.replace("u", "uint").replace("i3", "int3")).tofile(tmp_path / "a.bin")
    assert lists(open_shard(tmp_path / "a.bin", dtype=dtype, eot=0)) == [[1, 2], [3]]
    assert lists(open_shard(tmp_path / "a.bin", dtype=dtype, one_record=True)) == [[1, 2, 0, 3, 0]]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=6), st.booleans())
def test_delimited_documents_are_those_that_were_written(tmp_path_factory, documents, first):
    """end-of-text 10 before each document (llm.c) or after each (nanoGPT)."""
    if not first and not documents[0]:  # then the file begins with end-of-text, and reads as if it came first
        documents = [[1], *documents]
    flat = [token for d in documents for token in ([10, *d] if first else [*d, 10])]
    path = tmp_path_factory.mktemp("f") / "a.bin"
    np.array(flat, "<u2").tofile(path)
    assert lists(open_shard(path, dtype="u16", eot=10)) == documents


@ACCESS
def test_foreign_shards_stream_like_converted_ones(tmp_path, access):
    texts = ["In the beginning", "", "naïve 🙂 words " * 50]
    flat = [token for text in texts for token in (EOT, *GPT2.encode_ordinary(text))]
    foreign = open_shard(write_llmc(tmp_path / "a.bin", flat), tokenizer=GPT2, access=access)
    assert foreign.utf8_bytes.tolist() == [len(t.encode()) for t in texts]
    convert_shard(foreign, tmp_path / "a.prsh", GPT2)
    own = open_shard(tmp_path / "a.prsh", tokenizer=GPT2, access=access)
    own.verify(GPT2)
    assert lists(own) == lists(foreign)
    assert len(set(own.doc_ids.tolist())) == 3
    for basis in ("tokens", "bytes"):
        streams = [TokenStream(s, 9, 2, basis=basis, tokenizer=GPT2) for s in (foreign, own)]
        assert streams[0].plan_summary() == streams[1].plan_summary()
        for a, b in zip(*streams, strict=True):
            assert (a.tokens == b.tokens).all() and (a.targets == b.targets).all() and a.bytes == b.bytes
    state = streams[0].state_dict()
    other = open_shard(write_llmc(tmp_path / "b.bin", [*flat[:-1], 5]), tokenizer=GPT2)
    with pytest.raises(ValueError, match="stream state: shards"):
        TokenStream(other, 9, 2, basis="bytes", tokenizer=GPT2).load_state_dict(state)


def test_utf8_lengths_need_a_tokenizer(tmp_path):
    shard = open_shard(write_llmc(tmp_path / "a.bin", [EOT, 1]), eot=EOT)
    with pytest.raises(ValueError, match=r"llmc file does not hold UTF-8 lengths: open it with tokenizer="):
        _ = shard.utf8_bytes
    assert shard.doc_ids.size == 0


# --------------------------------------------------------------------------------------------------- the cases


@ACCESS
def test_d01_a_megatron_file_over_4_gib_is_read_to_its_last_token(tmp_path, access):
    tokens = (4 << 30) // 2 + 7
    lengths = [2**31 - 1, tokens - (2**31 - 1)]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3)
    (tmp_path / "a.idx").write_bytes(head + struct.pack("<2i2q3q", *lengths, 0, lengths[0] * 2, 0, 1, 2))
    with (tmp_path / "a.bin").open("wb") as file:
        file.seek((tokens - 1) * 2)
        file.write(struct.pack("<H", 31337))
    shard = open_shard(tmp_path / "a.bin", access=access)
    assert shard.n_tokens == tokens and shard[1][-1] == 31337 and shard[1].tolist()[:-1] == [0] * (lengths[1] - 1)


def test_d02_a_header_of_1_2e9_tokens_is_believed_only_if_they_are_there(tmp_path):
    count = 1_200_000_000
    path = write_llmc(tmp_path / "a.bin", [], count=count)
    with pytest.raises(DataError, match=r"a\.bin: offset 1024: expected 1200000000 tokens of 2 bytes.*found 0"):
        open_shard(path, one_record=True)
    with path.open("r+b") as file:
        file.seek(1024 + (count - 1) * 2)
        file.write(struct.pack("<H", 777))
    shard = open_shard(path, one_record=True)
    assert shard.n_tokens == count and shard[0][-1] == 777


def test_d04_a_truncated_bin_is_an_error_at_open_and_arrays_outlive_readers(tmp_path):
    path = write_megatron(tmp_path / "a", [[[1, 2, 3]], [[4, 5]]])
    shard = open_shard(path, access="map")
    array = shard[0]
    del shard
    gc.collect()
    data = path.read_bytes()
    path.unlink()
    assert array.tolist() == [1, 2, 3]
    path.write_bytes(data[:-2])
    with pytest.raises(DataError, match=r"a\.bin: offset 8: expected 5 tokens of 2 bytes.*, found 4"):
        open_shard(path)


@pytest.mark.parametrize("cut", [1, 6])
def test_d06_a_file_short_by_a_byte_or_a_record_is_an_error_at_open(tmp_path, cut):
    path = write_datatrove(tmp_path / "a.ds", [[1, 2, 3], [4, 5, 6]])
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match=r"a\.ds: offset .*expected .*, found"):
        open_shard(path)


def test_d07_a_u16_file_read_as_u32_shows_ids_above_the_vocabulary(tmp_path):
    np.array([EOT, 1, 2, 3], "<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(
        DataError, match=r"a\.bin: offset 0: expected end-of-text id 50256 between documents, found none"
    ):
        open_shard(tmp_path / "a.bin", dtype="u32", eot=EOT)
    shard = open_shard(tmp_path / "a.bin", dtype="u32", one_record=True)
    with pytest.raises(DataError, match=rf"a\.bin: offset 0: expected a token id below 50257, found {EOT + 65536}"):
        shard.verify(GPT2)
    with pytest.raises(DataError, match="expected a token id below 50257 in record 0"):
        open_shard(tmp_path / "a.bin", dtype="u32", one_record=True, tokenizer=GPT2)
    (tmp_path / "b.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match=r"b\.bin: offset 2: expected tokens of 2 bytes to the end.*found 1 bytes left"):
        open_shard(tmp_path / "b.bin", dtype="u16", eot=EOT)


def test_d11_lengths_of_documents_with_end_of_text_sum_to_the_tokens(tmp_path):
    path = write_megatron(tmp_path / "a", [[[1, EOT]], [[2, 3, EOT]]])
    shard = open_shard(path)
    assert shard.lengths.sum() == shard.n_tokens == 5
    text = open_shard(path, eot=EOT)
    assert lists(text) == [[1], [2, 3]] and text.n_tokens == 3 and text.core.stored_tokens == 5


def test_d12_a_document_without_end_of_text_comes_back_and_so_does_the_next(tmp_path):
    np.array([1, 2, EOT, 3, 4], "<u2").tofile(tmp_path / "a.bin")
    assert lists(open_shard(tmp_path / "a.bin", dtype="u16", eot=EOT)) == [[1, 2], [3, 4]]
    path = write_megatron(tmp_path / "b", [[[1, 2]], [[3, EOT]]])
    assert lists(open_shard(path, eot=EOT)) == [[1, 2], [3]]


def test_d13_a_file_without_document_boundaries_is_refused_or_one_declared_record(tmp_path):
    path = write_llmc(tmp_path / "a.bin", [1, 2, 3])
    with pytest.raises(DataError, match="expected an end-of-text id to tell documents apart"):
        open_shard(path)
    with pytest.raises(DataError, match="none in 3 tokens: name the right id, or say that all is one record"):
        open_shard(path, eot=EOT)
    assert lists(open_shard(path, one_record=True)) == [[1, 2, 3]]


# ------------------------------------------------------------------------------------------------ clear errors


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.bin", b"", {}, "found an empty file"),
        ("a.bin", b"hello world", {}, "headerless tokens need their dtype named"),
        ("a.bin", struct.pack("<3i", 20240520, 1, 0), {}, "expected an llm.c header of 1024 bytes"),
        ("a.bin", struct.pack("<3i", 20240520, 9, 0).ljust(1024, b"\0"), {}, "found 20240520 version 9"),
        ("a.npy", b"\x93NUMPY", {}, "expected 1 bytes of npy version, found 0"),
        ("a.npy", b"\x93NUMPY\x09\x00\x00\x00", {}, "expected npy version 1, 2 or 3, found 9"),
        ("a.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\xff", {}, "expected an npy header inside the file"),
        ("a.npy", b"\x93NUMPY\x01\x00\x02\x00{}", {}, "expected an npy header with 'descr'"),
        ("a.prsh", b"x" * 1000, {}, "expected the magic 'PRSMSHRD'"),
        ("a.prsh", b"", {}, "found a file of 0 bytes"),
        ("a.idx", b"MMIDIDX\0\0", {}, "expected 8 bytes of index header, found 0"),
        ("a.idx", b"nonsense", {}, "expected the magic MMIDIDX"),
    ],
)
def test_damaged_files_are_named_with_what_was_expected(tmp_path, name, content, options, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        open_shard(tmp_path / name, **options)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("array", [np.zeros((2, 2), "<u2"), np.zeros(3, "<f4"), np.zeros(3, ">u2"), np.array(3, "<u2")])
def test_npy_arrays_that_are_no_token_lists_are_refused(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=r"a\.npy: offset 10: expected an array of"):
        open_shard(tmp_path / "a.npy", one_record=True)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (9, struct.pack("<Q", 2), "expected index version 1, found 2"),
        (17, b"\x07", "expected dtype code .*found 7"),
        (18, struct.pack("<Q", 2**62), "expected an index of the"),
        (26, struct.pack("<Q", 2**61), "expected an index of the"),
        (34, struct.pack("<i", -1), "expected a sequence length of 0 or more, found -1"),
        (34, struct.pack("<i", 5), "expected sequences end to end"),
        (42, struct.pack("<q", 2), "expected sequences end to end, sequence 0 at byte 0, found 2"),
        (58, struct.pack("<q", 1), "expected document bounds rising from 0"),
        (66, struct.pack("<q", 9), "expected document bounds rising from 0"),
        (74, struct.pack("<q", 1), "expected document bounds that reach all 2 sequences, found 1"),
    ],
)
def test_megatron_indices_that_contradict_are_refused(tmp_path, offset, value, message):
    path = write_megatron(tmp_path / "a", [[[1, 2]], [[3]]]).with_suffix(".idx")
    data = bytearray(path.read_bytes())
    assert len(data) == 82
    data[offset : offset + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"a\.idx: offset \d+: {message}"):
        open_shard(path)


def test_datatrove_indices_that_contradict_are_refused(tmp_path):
    path = write_datatrove(tmp_path / "a.ds", [[1, 2], [3]])
    index = tmp_path / "a.ds.index"
    index.write_bytes(struct.pack("<2Q", 5, 3))
    with pytest.raises(DataError, match=r"a\.ds\.index: offset 0: expected document ends rising"):
        open_shard(path)
    index.write_bytes(b"123")
    with pytest.raises(DataError, match=r"a\.ds\.index: offset 0: expected u64 document ends"):
        open_shard(path)
    index.write_bytes(struct.pack("<Q", 2**63 + 1))
    with pytest.raises(DataError, match=r"a\.ds: offset 6: expected 9223372036854775809 tokens"):
        open_shard(path)


def test_misuse_is_named(tmp_path):
    path = write_llmc(tmp_path / "a.bin", [1])
    with pytest.raises(ValueError, match="dtype 'f32': expected one of u8, u16"):
        open_shard(path, dtype="f32")
    with pytest.raises(ValueError, match="format 'zip': expected prism"):
        open_shard(path, format="zip")
    with pytest.raises(ValueError, match="access 'net': expected 'auto'"):
        open_shard(path, access="net")
    with pytest.raises(ValueError, match="headerless tokens need their dtype named"):
        open_shard(path, format="raw")
