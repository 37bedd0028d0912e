"""Packing: every byte of every document, the same shards whatever the workers or the kills, and faults by name."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from prism_fast.data.corpus import open_corpus, verify_corpus
from prism_fast.data.documents import DocumentReader, find_sources
from prism_fast.data.pack import JOURNAL, pack
from prism_fast.data.shards import document_id, open_shard
from prism_fast.data.tokenizers import reference_tokenizer, tokenizer_from_file
from prism_fast.protocol.errors import DataError, UsageError

GPT2 = reference_tokenizer("gpt2")
BYTES = reference_tokenizer("bytes")


def write_jsonl(path, texts, ids=None):
    lines = [json.dumps({"id": f"d{i}" if ids is None else ids[i], "text": t}) for i, t in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n")
    return path


def packed(folder, split="train"):
    return [r for shard in open_corpus(folder).split(split).open() for r in shard]


def packed_texts(folder, tokenizer=BYTES):
    return [tokenizer.decode_bytes(record).decode() for record in packed(folder)]


def tree(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def some_texts(count):
    return [f"Line {i} of prose, with 🙂 and \x00.\r\n" * (i % 7) for i in range(count)]


# ----------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_every_byte_of_every_document_is_packed_in_order(tmp_path, name):
    tokenizer = reference_tokenizer(name)
    texts = some_texts(50)
    write_jsonl(tmp_path / "a.jsonl", texts)
    manifest = pack([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer, documents_per_shard=16)
    assert packed_texts(tmp_path / "out", tokenizer) == texts
    assert manifest.splits["train"].bytes == sum(len(t.encode()) for t in texts)
    assert [s.documents for s in manifest.splits["train"].shards] == [16, 16, 16, 2]
    shard = open_corpus(tmp_path / "out").split("train").open()[1]
    assert shard.doc_ids.tolist() == [document_id(f"d{i}") for i in range(16, 32)]
    verify_corpus(tmp_path / "out")


def test_output_is_the_same_bytes_whatever_the_workers(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", some_texts(300) + ["no spaces" * 200_000])
    for workers in (1, 2, 5):
        pack([tmp_path / "a.jsonl"], tmp_path / str(workers), GPT2, documents_per_shard=70, workers=workers)
    assert tree(tmp_path / "1") == tree(tmp_path / "2") == tree(tmp_path / "5")


@pytest.mark.parametrize("texts", [["", "a"], ["a", ""], [""], ["a", "", "b"]])
def test_d10_empty_documents_are_counted_records_of_no_tokens(tmp_path, texts):
    write_jsonl(tmp_path / "a.jsonl", texts)
    manifest = pack([tmp_path / "a.jsonl"], tmp_path / "out", GPT2)
    assert [len(r) for r in packed(tmp_path / "out")] == [len(t) for t in texts]
    assert manifest.splits["train"].empty_documents == texts.count("")
    verify_corpus(tmp_path / "out")


def test_d14_end_of_text_inside_text_is_ordinary_text(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["a<|endoftext|>b", "<|endoftext|>"])
    pack([tmp_path / "a.jsonl"], tmp_path / "out", GPT2)
    records = packed(tmp_path / "out")
    assert len(records) == 2 and all(50256 not in r for r in records)
    assert GPT2.decode_bytes(records[0]) == b"a<|endoftext|>b"


def test_d16_a_million_carets_are_packed(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["^" * 1_000_000, " " * 1_000_000])
    pack([tmp_path / "a.jsonl"], tmp_path / "out", GPT2, workers=2)
    assert packed_texts(tmp_path / "out", GPT2) == ["^" * 1_000_000, " " * 1_000_000]


@pytest.fixture
def odd_tokenizer(tmp_path):
    """Real tiktoken encodings that fail: one loses spaces, one gives up on long runs of a."""
    from base64 import b64encode

    (tmp_path / "odd.tiktoken").write_bytes(b"".join(b64encode(bytes([i])) + b" %d\n" % i for i in range(256)))
    return lambda pattern: tokenizer_from_file(tmp_path / "odd.tiktoken", pattern=pattern)


@pytest.mark.parametrize(
    ("pattern", "text", "message"),
    [
        (r"\S+", "two words", "expected tokens of its 9 UTF-8 bytes, found tokens of 8"),
        (r"(?:(a|aa)+)\1c|\S", "a" * 60, "the tokenizer failed: Regex error"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_d16_a_worker_that_fails_names_its_document(tmp_path, odd_tokenizer, pattern, text, message, workers):
    tokenizer = odd_tokenizer(pattern)
    write_jsonl(tmp_path / "a.jsonl", ["fine", text, "good", "", "last"])
    with pytest.raises(DataError, match=rf"a\.jsonl:2: document 'd1': {message}"):
        pack([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer, workers=workers)
    manifest = pack([tmp_path / "a.jsonl"], tmp_path / "skipped", tokenizer, workers=workers, on_error="skip")
    assert packed_texts(tmp_path / "skipped", tokenizer) == ["fine", "good", "", "last"]
    assert manifest.splits["train"].refused_documents == 1
    verify_corpus(tmp_path / "skipped", tokenizer=tokenizer)


def test_lone_surrogates_are_replaced_as_tiktoken_does_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"id":"a","text":"x\\ud800y"}\n{"id":"b","text":"\\ud83d\\ude42"}\n')
    manifest = pack([tmp_path / "a.jsonl"], tmp_path / "out", GPT2)
    assert packed_texts(tmp_path / "out", GPT2) == ["x\ufffdy", "🙂"]
    assert packed(tmp_path / "out")[0].tolist() == GPT2.encoding.encode_ordinary("x\ud800y")
    assert manifest.splits["train"].replaced_surrogates == 1


def test_d08_ids_beyond_u16_choose_u32(tmp_path, odd_tokenizer):
    from base64 import b64encode

    tokens = [bytes([i]) for i in range(256)] + [b"a" + i.to_bytes(3, "big") for i in range(70_000)]
    (tmp_path / "wide.tiktoken").write_bytes(b"".join(b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    wide = tokenizer_from_file(tmp_path / "wide.tiktoken")
    write_jsonl(tmp_path / "a.jsonl", ["text"])
    pack([tmp_path / "a.jsonl"], tmp_path / "out", wide)
    assert open_corpus(tmp_path / "out").split("train").open()[0].token_width == 4
    assert packed_texts(tmp_path / "out", wide) == ["text"]


# -------------------------------------------------------------------------------------------------------- inputs


def test_compressed_plain_text_and_parquet_inputs(tmp_path):
    line = b'{"id": "%s", "text": "%s"}\n'
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "1.jsonl.gz").write_bytes(gzip.compress(line % (b"g", b"gz")) + gzip.compress(line % (b"h", b"member 2")))
    (folder / "2.jsonl.zst").write_bytes(
        zstandard.compress(line % (b"z", b"zst")) + zstandard.compress(line % (b"y", b"frame 2"))
    )
    (folder / "3.txt").write_bytes("plain\r\n\ttext é".encode())
    pq.write_table(pa.table({"text": ["pq 1", "pq 2"], "id": ["p1", "p2"], "url": ["u", "v"]}), folder / "4.parquet")
    pq.write_table(pa.table({"text": pa.array(["large"], pa.large_string()), "id": [7]}), folder / "5.parquet")
    (folder / "6.txt.gz").write_bytes(gzip.compress(b"packed text"))
    dictionary = pa.array(["dict", "dict"]).dictionary_encode()
    pq.write_table(pa.table({"text": dictionary, "id": ["e1", "e2"]}), folder / "7.parquet")
    pack([folder], tmp_path / "out", BYTES)
    assert packed_texts(tmp_path / "out") == [
        "gz", "member 2", "zst", "frame 2", "plain\r\n\ttext é", "pq 1", "pq 2", "large", "packed text", "dict", "dict",
    ]  # fmt: skip
    ids = np.concatenate([s.doc_ids for s in open_corpus(tmp_path / "out").split("train").open()])
    names = ["g", "h", "z", "y", "3.txt", "p1", "p2", "7", "6.txt.gz", "e1", "e2"]
    assert ids.tolist() == [document_id(name) for name in names]


def test_d24_folders_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b/2.jsonl", "a.jsonl", "b/10.jsonl", "c.jsonl", ".hidden.jsonl", "b/.git/x.jsonl", "b/notes.md"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, [name])
    names = [source.name for source in find_sources([tmp_path / "in"])]
    assert names == ["a.jsonl", "b/10.jsonl", "b/2.jsonl", "c.jsonl"]
    pack([tmp_path / "in/c.jsonl", tmp_path / "in/a.jsonl"], tmp_path / "out", BYTES)
    assert packed_texts(tmp_path / "out") == ["c.jsonl", "a.jsonl"]  # but given files in the order given


def test_d25_a_parquet_column_over_2_gib_is_streamed(tmp_path):
    rows, size = 520, (4 << 20) + 3
    texts = [(b"%08d" % i).ljust(size, b"x").decode() for i in range(8)]
    chunks = pa.chunked_array([pa.array(texts)] * (rows // 8))  # one buffer, many times
    table = pa.table({"id": [str(i) for i in range(rows)], "text": chunks})
    path = tmp_path / "big.parquet"
    pq.write_table(table, path, row_group_size=rows, compression="zstd", use_dictionary=False, write_statistics=False)
    del table, chunks
    assert pq.ParquetFile(path).metadata.num_row_groups == 1 and rows * size > 2 << 30
    tracemalloc.start()
    arrow_before = pa.total_allocated_bytes()
    most = seen = 0
    for number, document in enumerate(DocumentReader(find_sources([path]))):
        assert document.id == str(number) and document.data.startswith(b"%08d" % (number % 8))
        seen += len(document.data)
        most = max(most, pa.total_allocated_bytes() - arrow_before + tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert seen == rows * size
    assert most < 256 << 20


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (b'{"text": "a"}\n{"text": "b"\n', 2, "expected a JSON object, found"),
        (b'{"text": "a"}\n[1]\n', 2, "expected a JSON object, found"),
        (b'{"text": "a"}\n{"id": "x"}\n', 2, "expected a string under 'text', found 'None'"),
        (b'{"text": "a"}\n{"text": 5}\n', 2, "expected a string under 'text', found '5'"),
        (b'{"text": "a"}\n\n{"text": "b", "id": [1]}\n', 3, r"expected a string under 'id', found '\[1\]'"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', 2, "expected a JSON object, found"),
        (b'\xef\xbb\xbf{"text": "a"}\n', 1, "expected a JSON object, found"),
        (b'{"text": "a"}\n{"text": "b\nc"}\n', 2, "expected a JSON object, found"),
        (b'{"text": "a"}\n' + b"[" * 100_000 + b"\n", 2, "expected a JSON object, found"),
    ],
)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path, content, line, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.jsonl:{line}: {message}"):
        pack([tmp_path / "a.jsonl"], tmp_path / "out", BYTES)
    manifest = pack([tmp_path / "a.jsonl"], tmp_path / "skipped", BYTES, on_error="skip")
    assert manifest.input.skipped_lines >= 1
    assert all(text == "a" for text in packed_texts(tmp_path / "skipped"))


def test_lines_end_at_newline_alone(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        '{"text": "a\u2028b\x85c"}\r\n\n  \n{"text": "\\r\\n"}'.encode()  # no newline at the end
    )
    pack([tmp_path / "a.jsonl"], tmp_path / "out", BYTES)
    assert packed_texts(tmp_path / "out") == ["a\u2028b\x85c", "\r\n"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n' * 1000, mtime=0)[:-12],
            r"a\.jsonl\.gz:\d+: the compressed file is damaged",
        ),
        ("a.jsonl.gz", b"not gzip", r"a\.jsonl\.gz:1: the compressed file is damaged"),
        ("a.jsonl.zst", b"not zstd", r"a\.jsonl\.zst:1: the file is damaged"),
        ("a.parquet", b"PAR1 not parquet PAR1", r"a\.parquet: expected a Parquet file"),
        ("a.txt", b"abc\xff", r"a\.txt: expected UTF-8, found byte 0xff at byte 3"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        pack([tmp_path / name], tmp_path / "out", BYTES)


def test_parquet_faults_name_file_and_row(tmp_path):
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: expected a column 'text', found body"):
        pack([tmp_path / "a.parquet"], tmp_path / "out", BYTES)
    pq.write_table(pa.table({"text": ["x", None]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet:2: expected a string under 'text'"):
        pack([tmp_path / "b.parquet"], tmp_path / "out2", BYTES)
    pq.write_table(pa.table({"text": pa.array([b"ok", b"\xff"], pa.binary())}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet:2: expected UTF-8, found byte 0xff at byte 0"):
        pack([tmp_path / "c.parquet"], tmp_path / "out3", BYTES)
    pack([tmp_path / "a.parquet"], tmp_path / "out4", BYTES, text_key="body")
    assert packed_texts(tmp_path / "out4") == ["x"]


def test_inputs_that_are_not_there_or_not_text_are_named(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(UsageError, match=r"a\.csv: expected \*\.jsonl"):
        pack([tmp_path / "a.csv"], tmp_path / "out", BYTES)
    with pytest.raises(UsageError, match="no such file or folder"):
        pack([tmp_path / "b.jsonl"], tmp_path / "out", BYTES)
    with pytest.raises(ValueError, match="on_error 'ignore'"):
        pack([write_jsonl(tmp_path / "c.jsonl", ["a"])], tmp_path / "out", BYTES, on_error="ignore")


# ------------------------------------------------------------------------------------------------ kills, folders


def _pack_until(folder, out, documents):
    """Dies by SIGKILL once `documents` are packed, from inside the packer."""

    def die(progress):
        if progress.documents >= documents:
            os.kill(os.getpid(), signal.SIGKILL)

    pack([folder], out, GPT2, documents_per_shard=100, workers=2, on_error="skip", progress=die)


def test_a_killed_packer_goes_on_and_gives_the_same_bytes(tmp_path):
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in/a.jsonl", some_texts(6_000))
    with (tmp_path / "in/a.jsonl").open("ab") as file:
        file.write(b"bad line\n")
    write_jsonl(tmp_path / "in/b.jsonl", some_texts(3_000))
    pack([tmp_path / "in"], tmp_path / "whole", GPT2, documents_per_shard=100, on_error="skip")
    context = multiprocessing.get_context("spawn")
    finished = []
    for documents in (2_000, 7_000):
        child = context.Process(target=_pack_until, args=(tmp_path / "in", tmp_path / "out", documents))
        child.start()
        child.join(120)
        assert child.exitcode == -signal.SIGKILL
        with pytest.raises(UsageError, match="packing was not finished: pack again"):
            open_corpus(tmp_path / "out")
        finished.append(len(json.loads((tmp_path / "out" / JOURNAL).read_text())["splits"]["train"]["entry"]["shards"]))
    assert 0 < finished[0] < finished[1] < 90
    first = (tmp_path / "out/train/shard-00000.prsh").stat().st_mtime_ns
    manifest = pack([tmp_path / "in"], tmp_path / "out", GPT2, documents_per_shard=100, on_error="skip")
    assert (tmp_path / "out/train/shard-00000.prsh").stat().st_mtime_ns == first  # kept, not packed again
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert (manifest.splits["train"].documents, manifest.input.skipped_lines) == (9_000, 1)


def test_an_unfinished_folder_is_not_gone_on_with_from_other_inputs(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", some_texts(10))
    (tmp_path / "b.jsonl").write_text("bad")

    with pytest.raises(DataError):
        pack([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "out", BYTES, documents_per_shard=2)
    for inputs, tokenizer, size in ((["a"], BYTES, 2), (["a", "b"], GPT2, 2), (["a", "b"], BYTES, 3)):
        with pytest.raises(UsageError, match="holds an unfinished packing of other inputs or settings"):
            pack([tmp_path / f"{i}.jsonl" for i in inputs], tmp_path / "out", tokenizer, documents_per_shard=size)
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_folders_that_hold_something_else_are_left_alone(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full/precious.txt").write_text("x")
    with pytest.raises(UsageError, match=r"expected an empty or new folder, found 'precious\.txt'"):
        pack([source], tmp_path / "full", BYTES)
    pack([source], tmp_path / "out", BYTES)
    before = tree(tmp_path / "out")
    with pytest.raises(UsageError, match="already holds a packed corpus"):
        pack([source], tmp_path / "out", BYTES)
    assert tree(tmp_path / "out") == before
    assert sorted(before) == ["MANIFEST.json", "train/shard-00000.prsh"]


def test_two_packers_do_not_share_a_folder(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])

    def second(_):
        with pytest.raises(UsageError, match="another process is packing into this folder"):
            pack([source], tmp_path / "out", BYTES)
        tried.append(True)

    tried: list[bool] = []
    pack([source], tmp_path / "out", BYTES, progress=second)
    assert tried


def test_progress_reaches_the_end(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", some_texts(5000))
    seen = []
    pack([tmp_path / "a.jsonl"], tmp_path / "out", GPT2, progress=seen.append)
    assert [p.documents for p in seen] == sorted(p.documents for p in seen)
    assert seen[-1].bytes_done == seen[-1].bytes_total == (tmp_path / "a.jsonl").stat().st_size
    assert (seen[-1].documents, seen[-1].text_bytes) == (5000, open_shard(
        tmp_path / "out/train/shard-00000.prsh").n_bytes)  # fmt: skip


def test_parquet_ids_that_are_not_utf8_and_damaged_pages_are_named(tmp_path):
    ids = pa.array([b"a", b"\x9a"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": ["x", "y"], "id": ids}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet:2: expected UTF-8 under 'id', found b'\\x9a'"):
        pack([tmp_path / "a.parquet"], tmp_path / "out", BYTES)
    pq.write_table(pa.table({"text": ["some text"] * 2000}), tmp_path / "b.parquet", use_dictionary=False)
    data = bytearray((tmp_path / "b.parquet").read_bytes())
    data[4:12] = b"\xff" * 8  # the first page's header, which is read when its rows are
    (tmp_path / "b.parquet").write_bytes(data)
    with pytest.raises(DataError, match=r"b\.parquet:1: the file is damaged or cut short"):
        pack([tmp_path / "b.parquet"], tmp_path / "out2", BYTES)
