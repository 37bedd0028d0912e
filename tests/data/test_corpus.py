"""The locked corpus, and what `resolve_data` makes of what it is given."""

from __future__ import annotations

import gzip
import hashlib
import json
import multiprocessing
import re
import shutil

import numpy as np
import pytest

from prism_fast.data import corpus as module
from prism_fast.data.corpus import build_corpus, corpus_faults, open_corpus, resolve_data, verify_corpus
from prism_fast.data.manifest import FINEWEB_EDU, FINEWEB_EDU_REVISION, Dataset, split_of
from prism_fast.data.shards import document_id, open_shard, write_shard
from prism_fast.data.tokenizers import reference_tokenizer
from prism_fast.protocol.errors import DataError, UsageError

GPT2 = reference_tokenizer("gpt2")
BYTES = reference_tokenizer("bytes")
DATASET = Dataset(name="unit")


def jsonl(path, documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": i, "text": t} if i is not None else {"text": t}) + "\n" for i, t in documents]
    data = "".join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def documents(count):
    return [(f"doc-{i}", f"Text number {i}.\n" * (i % 5)) for i in range(count)]


def tree(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def texts(corpus, split):
    return [BYTES.decode_bytes(r).decode() for s in corpus.split(split).open() for r in s]


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return resolve_data("sample", "gpt2", tmp_path_factory.mktemp("cache"))


def test_the_sample_corpus_holds_every_byte_once(sample):
    assert sample.splits == ("train", "val", "test")
    assert sum(sample.split(s).documents for s in sample.splits) == 1189
    assert sum(sample.split(s).bytes for s in sample.splits) == 4_151_621
    assert sample.split("train").tokenizer_fingerprint == GPT2.fingerprint
    assert sample.fingerprint == hashlib.sha256((sample.folder / "MANIFEST.json").read_bytes()).hexdigest()
    assert verify_corpus(sample.folder, fingerprint=sample.fingerprint).fingerprint == sample.fingerprint
    with pytest.raises(UsageError, match="no split 'dev'"):
        sample.split("dev")


def test_the_sample_is_packed_once(sample):
    before = (sample.folder / "MANIFEST.json").stat().st_mtime_ns
    again = resolve_data("sample", GPT2, sample.folder.parent)
    assert again.fingerprint == sample.fingerprint
    assert (again.folder / "MANIFEST.json").stat().st_mtime_ns == before


def test_documents_go_where_the_sha256_of_their_id_says(tmp_path):
    jsonl(tmp_path / "in/a.jsonl", documents(500))
    build_corpus([tmp_path / "in"], tmp_path / "out", BYTES, dataset=DATASET, documents_per_shard=100)
    corpus = open_corpus(tmp_path / "out")
    for split in corpus.splits:
        found = np.concatenate([s.doc_ids for s in corpus.split(split).open()])
        expected = sorted(
            name for name, _ in documents(500)
            if (int(hashlib.sha256(name.encode()).hexdigest(), 16) % 1000 < 950) == (split == "train")
            and (int(hashlib.sha256(name.encode()).hexdigest(), 16) % 1000 >= 975) == (split == "test")
        )  # fmt: skip
        assert found.tolist() == [document_id(name) for name in expected]
        assert all(split_of(name) == split for name in expected)
    assert [len(s) for s in corpus.split("train").open()][:-1] == [100] * (len(corpus.split("train").shards) - 1)


@pytest.mark.parametrize("run_bytes", [1 << 30, 1500, 40])
def test_output_is_the_same_bytes_whatever_the_input_order(tmp_path, run_bytes):
    docs = [*documents(300), *documents(20), ("doc-3", "another text"), ("doc-4", "")]
    jsonl(tmp_path / "a/x.jsonl", docs)
    build_corpus([tmp_path / "a"], tmp_path / "one", GPT2, dataset=DATASET, documents_per_shard=64, workers=1)
    order = np.random.default_rng(run_bytes).permutation(len(docs))
    jsonl(tmp_path / "b/1.jsonl", [docs[i] for i in order[:99]])
    jsonl(tmp_path / "b/0.jsonl.gz", [docs[i] for i in order[99:]])
    manifest = build_corpus(
        [tmp_path / "b"],
        tmp_path / "two",
        GPT2,
        dataset=DATASET,
        documents_per_shard=64,
        workers=2,
        run_bytes=run_bytes,
    )
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert (manifest.input.duplicates, manifest.input.conflicting_duplicates) == (22, 3)  # doc-3 once, doc-4 twice
    assert sum(s.documents for s in manifest.splits.values()) == 300
    verify_corpus(tmp_path / "two")


@pytest.fixture
def locked(tmp_path):
    jsonl(tmp_path / "in/a.jsonl", documents(400))
    pin = Dataset(name=FINEWEB_EDU, revision=FINEWEB_EDU_REVISION, licence="odc-by", subset="sample-10BT")
    build_corpus([tmp_path / "in"], tmp_path / "out", GPT2, dataset=pin, documents_per_shard=100)
    assert list(corpus_faults(tmp_path / "out")) == []
    return tmp_path / "out"


def edit(folder, change, redigest=False):
    path = folder / "MANIFEST.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))
    if redigest:
        fields["digest"] = module.Manifest.read(folder).compute_digest()
        path.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["dataset"].update(revision="0" * 40), "dataset.revision: expected the pin 87f09149"),
        (lambda m: m["dataset"].update(licence="mit"), "dataset.licence"),
        (lambda m: m["dataset"].update(subset="sample-1BT"), "dataset.subset"),
        (lambda m: m["partition"]["ranges"].update(train=[0, 975]), "partition: expected"),
        (lambda m: m["tokenizer"].update(fingerprint="0" * 64), "tokenizer.fingerprint: expected"),
        (lambda m: m["splits"]["train"].update(bytes=5), r"splits.train.bytes: expected the sum \d+, found 5"),
        (lambda m: m["splits"]["train"]["shards"][0].update(tokens=1), "expected tokens 1 .*found"),
        (lambda m: m["splits"]["train"]["shards"].pop(), "shard-00003.prsh: not listed in"),
    ],
)
@pytest.mark.parametrize("redigest", [False, True])
def test_verify_finds_an_edited_manifest_even_with_a_new_digest(locked, change, message, redigest):
    known = open_corpus(locked).fingerprint
    edit(locked, change, redigest)
    with pytest.raises(DataError):
        verify_corpus(locked, fingerprint=known)
    faults = list(corpus_faults(locked))
    assert any(re.search(message, fault) for fault in faults), faults
    assert any("it was edited" in fault for fault in faults) is not redigest


def test_verify_finds_altered_missing_unlisted_and_swapped_shards(locked):
    shards = sorted((locked / "train").iterdir())
    data = shards[0].read_bytes()
    shards[0].write_bytes(data[:300] + bytes([data[300] ^ 1]) + data[301:])
    with pytest.raises(DataError, match=r"shard-00000\.prsh: expected sha256"):
        verify_corpus(locked)
    shards[0].write_bytes(data[:-1])
    with pytest.raises(DataError, match=r"shard-00000\.prsh: offset \d+: expected a file of"):
        open_corpus(locked)
    shards[0].unlink()
    assert any("missing" in fault for fault in corpus_faults(locked))
    with pytest.raises(DataError, match=r"shard-00000\.prsh: listed in"):
        open_corpus(locked)
    shutil.copy(shards[1], shards[0])
    assert any("again: document id hash" in fault for fault in corpus_faults(locked))
    shards[0].write_bytes(data)
    (locked / "val" / "shard-00009.prsh").write_bytes(data)
    assert list(corpus_faults(locked)) == [f"{locked}/val/shard-00009.prsh: not listed in {locked}/MANIFEST.json"]


def test_the_secret_split_may_live_elsewhere_or_nowhere(locked, tmp_path):
    shutil.move(locked / "val", tmp_path / "secret")
    assert open_corpus(locked).splits == ("train", "test")
    assert list(corpus_faults(locked)) == []
    whole = verify_corpus(locked, mounts={"val": tmp_path / "secret"})
    assert whole.split("val").documents > 0 and whole.split("val").shards[0].parent == tmp_path / "secret"


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"{\"schema\": \"prism_locked_data.v2\"}", b"\xff", b"null", b"{"]
)  # fmt: skip
def test_a_manifest_that_is_none_is_named(tmp_path, content):
    (tmp_path / "MANIFEST.json").write_bytes(content)
    with pytest.raises(DataError, match=r"MANIFEST\.json: .*expected a prism_locked_data\.v1 manifest"):
        open_corpus(tmp_path)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd"])
def test_a_manifest_cannot_point_outside_its_corpus(locked, name):
    edit(locked, lambda m: m["splits"]["train"]["shards"][0].update(name=name))
    with pytest.raises(DataError, match="expected a shard name below the corpus"):
        open_corpus(locked)


# ------------------------------------------------------------------------------------------------ resolve_data


def test_original_layout_keeps_its_splits_and_its_order(tmp_path):
    jsonl(tmp_path / "in/train-00001.jsonl", [("c", "third"), ("a", "fourth")])
    jsonl(tmp_path / "in/train-00000.jsonl.gz", [("z", "first"), (None, "second")])
    jsonl(tmp_path / "in/val-00000.jsonl", [("a", "held out")])
    (tmp_path / "in/README.md").write_text("not text to pack")
    corpus = resolve_data(tmp_path / "in", "bytes", tmp_path / "cache")
    assert corpus.splits == ("train", "val")
    assert texts(corpus, "train") == ["first", "second", "third", "fourth"]
    assert texts(corpus, "val") == ["held out"]


def test_other_jsonl_is_put_in_splits_by_id_or_file_and_line(tmp_path):
    jsonl(tmp_path / "in/b.jsonl", [(None, f"text {i}") for i in range(200)])
    corpus = resolve_data(tmp_path / "in", "bytes", tmp_path / "cache")
    expected = sorted((f"b.jsonl:{i + 1}", f"text {i}") for i in range(200))
    for split in ("train", "val", "test"):
        assert texts(corpus, split) == [text for name, text in expected if split_of(name) == split]
    assert corpus.split("train").documents + corpus.split("val").documents + corpus.split("test").documents == 200


def test_a_packed_corpus_is_taken_as_it_is_and_another_tokenizer_refused(sample, tmp_path):
    assert resolve_data(str(sample.folder), "gpt2", tmp_path).fingerprint == sample.fingerprint
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match=r"packed with tokenizer 'gpt2' .* asked for 'bytes'"):
        resolve_data(sample.folder, "bytes", tmp_path)


def test_a_changed_input_is_packed_again(tmp_path):
    jsonl(tmp_path / "in/train-0.jsonl", [("a", "one")])
    first = resolve_data(tmp_path / "in", "bytes", tmp_path / "cache")
    jsonl(tmp_path / "in/train-0.jsonl", [("a", "one more")])
    second = resolve_data(tmp_path / "in", "bytes", tmp_path / "cache")
    assert first.folder != second.folder and texts(second, "train") == ["one more"]


def test_what_cannot_be_data_is_named_with_what_was_expected(tmp_path):
    cache = tmp_path / "cache"
    with pytest.raises(UsageError, match="no such file or folder"):
        resolve_data(tmp_path / "none", "gpt2", cache)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/notes.md").write_text("x")
    with pytest.raises(UsageError, match=r"no text in this folder: expected \*\.jsonl"):
        resolve_data(tmp_path / "empty", "gpt2", cache)
    jsonl(tmp_path / "mixed/train-0.jsonl", [("a", "x")])
    jsonl(tmp_path / "mixed/more.jsonl", [("b", "x")])
    with pytest.raises(UsageError, match=r"more\.jsonl is named for no split"):
        resolve_data(tmp_path / "mixed", "gpt2", cache)
    (tmp_path / "bare").mkdir()
    write_shard(tmp_path / "bare/a.prsh", [[1]], tokenizer=GPT2)
    with pytest.raises(UsageError, match=r"shards without a MANIFEST\.json"):
        resolve_data(tmp_path / "bare", "gpt2", cache)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/a.jsonl").write_bytes(b'{"text": "x"}\n{"text": \n')
    with pytest.raises(DataError, match=r"bad/a\.jsonl:2: expected a JSON object"):
        resolve_data(tmp_path / "bad", "gpt2", cache)


def test_a_half_written_cache_is_never_taken_for_a_whole_one(tmp_path, monkeypatch):
    jsonl(tmp_path / "in/a.jsonl", documents(300))

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.Manifest, "write", die)
        with pytest.raises(KeyboardInterrupt):
            resolve_data(tmp_path / "in", "bytes", tmp_path / "cache")
    (partial,) = [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]
    with pytest.raises(UsageError, match="packing was not finished"):
        open_corpus(partial)
    with pytest.raises(UsageError, match="packing was not finished"):
        resolve_data(partial, "bytes", tmp_path / "other")
    corpus = resolve_data(tmp_path / "in", "bytes", tmp_path / "cache")
    verify_corpus(corpus.folder)
    clean = resolve_data(tmp_path / "in", "bytes", tmp_path / "clean")
    assert tree(corpus.folder) == tree(clean.folder)


def _resolve(folder, cache, pipe):
    pipe.send(resolve_data(folder, "bytes", cache).fingerprint)


def test_two_packers_at_once_share_one_corpus(tmp_path):
    jsonl(tmp_path / "in/a.jsonl", documents(2000))
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(2)]
    children = [context.Process(target=_resolve, args=(tmp_path / "in", tmp_path / "cache", end[1])) for end in ends]
    for child in children:
        child.start()
    assert all(end[0].poll(120) for end in ends)
    assert ends[0][0].recv() == ends[1][0].recv()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    (folder,) = [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]
    verify_corpus(folder)


def test_the_default_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert module.default_cache_dir() == tmp_path / "prism-fast"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert module.default_cache_dir() == tmp_path / "home/.cache/prism-fast"


def test_a_corrupt_cached_shard_is_an_error_that_names_it(tmp_path):
    jsonl(tmp_path / "in/a.jsonl", documents(50))
    corpus = resolve_data(tmp_path / "in", "bytes", tmp_path / "cache")
    path = corpus.split("train").shards[0]
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"shard-00000\.prsh: offset \d+: expected .*, found"):
        open_shard(path)
