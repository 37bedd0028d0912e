"""Tokenizers: the shipped ranks, exact bytes, and fingerprints that tell them apart."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_fast.data import tokenizers
from prism_fast.data.tokenizers import reference_tokenizer, tokenizer_from_file
from prism_fast.protocol.errors import DataError, UsageError

NAMES = ["gpt2", "bytes"]


def rank_file(tokens):
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def test_gpt2_is_the_published_vocabulary():
    gpt2 = reference_tokenizer("gpt2")
    assert (gpt2.name, gpt2.n_vocab, gpt2.eot) == ("gpt2", 50257, 50256)
    assert gpt2.encode_ordinary("hello world").tolist() == [31373, 995]
    assert gpt2.encoding is not None
    assert gpt2.encoding.encode("a<|endoftext|>", allowed_special="all") == [64, 50256]
    assert gpt2.token_bytes.dtype == np.int32 and gpt2.token_bytes[50256] == 0
    assert all(gpt2.token_bytes[i] == len(gpt2.encoding.decode_single_token_bytes(i)) for i in range(50256))


def test_bytes_are_bytes():
    raw = reference_tokenizer("bytes")
    assert (raw.n_vocab, raw.eot, raw.encoding) == (257, 256, None)
    assert raw.encode_ordinary("é\n").tolist() == [0xC3, 0xA9, 10]
    assert raw.token_bytes.tolist() == [1] * 256 + [0]


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=200))
def test_tokens_stand_for_exactly_the_bytes_of_the_text(name, text):
    tokenizer = reference_tokenizer(name)
    data, _ = tokenizers.utf8(text)
    tokens = tokenizer.encode_ordinary(text)
    assert tokenizer.decode_bytes(tokens) == data
    assert tokenizer.token_bytes[tokens].sum() == len(data)
    if tokenizer.encoding is not None:
        assert tokens.tolist() == tokenizer.encoding.encode_ordinary(text)


def test_special_text_is_ordinary_text():
    tokens = reference_tokenizer("gpt2").encode_ordinary("a<|endoftext|>b")
    assert 50256 not in tokens
    assert tokens.tolist() == [64, 27, 91, 437, 1659, 5239, 91, 29, 65]


def test_batches_are_what_single_calls_give():
    gpt2 = reference_tokenizer("gpt2")
    texts = ["one", "", "two three", "\ud800"]
    for got, text in zip(gpt2.encode_ordinary_batch(texts), texts, strict=True):
        assert got.tolist() == gpt2.encode_ordinary(text).tolist()


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=100)
@given(texts=st.lists(st.one_of(st.text(max_size=20), st.sampled_from([" ", "\n", "a ", " b", "<|endoftext|>", "'s"]))))
def test_a_run_is_tokenised_as_its_documents_are(name, texts):
    tokenizer = reference_tokenizer(name)
    single = [tokenizer.encode_utf8(tokenizers.utf8(text)[0]).tolist() for text in texts]
    tokens, lengths = tokenizer.encode_utf8_run([tokenizers.utf8(text)[0] for text in texts])
    assert lengths.tolist() == [len(one) for one in single]
    assert tokens.tolist() == [token for one in single for token in one]


def test_ids_outside_the_vocabulary_are_refused():
    for bad in (50257, -1):
        with pytest.raises(ValueError, match=f"token id {bad}"):
            reference_tokenizer("gpt2").decode_bytes([1, bad])


def test_unknown_names_say_what_is_known():
    with pytest.raises(UsageError, match="expected 'gpt2' or 'bytes'"):
        reference_tokenizer("gpt5")


def test_damaged_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(tokenizers, "GPT2_SHA256", "0" * 64)
    with pytest.raises(DataError, match=r"gpt2\.tiktoken: expected sha256 0000"):
        reference_tokenizer.__wrapped__("gpt2")


def test_fingerprints_follow_content_not_names(tmp_path):
    tokens = [bytes([i]) for i in range(256)] + [b"ab", b"cd"]
    (tmp_path / "x.tiktoken").write_bytes(rank_file(tokens))
    (tmp_path / "y.tiktoken").write_bytes(rank_file(tokens))
    (tmp_path / "z.tiktoken").write_bytes(rank_file([*tokens[:-2], b"cd", b"ab"]))
    x, y, z = (tokenizer_from_file(tmp_path / f"{n}.tiktoken") for n in "xyz")
    assert x.fingerprint == y.fingerprint and x.name != y.name
    other_pattern = tokenizer_from_file(tmp_path / "x.tiktoken", pattern=".")
    other_special = tokenizer_from_file(tmp_path / "x.tiktoken", specials={"<|endoftext|>": 300})
    assert len({t.fingerprint for t in (x, z, other_pattern, other_special)}) == 4
    assert x.encode_ordinary("abcd").tolist() == [256, 257] and x.eot == 258
    # Pinned: a fingerprint is in every shard, so its definition may not drift.
    assert reference_tokenizer("gpt2").fingerprint.startswith("aa2d78a54ff9535a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"YQ== x\n", "x.tiktoken:1: expected 'BASE64 RANK'"),
        (b"YQ==\n", "x.tiktoken:1"),
        (b"Y 1\n", "x.tiktoken:1"),
        (b"YQ== 0\nYQ== 1\n", "x.tiktoken:2: expected a new token"),
        (b"YQ== 0\nYg== 0\n", "x.tiktoken:2: expected a new token and a new rank"),
        (b"YQ== -1\n", "x.tiktoken:1"),
        (b"YQ== 0\n", "single bytes, found none for 0"),
        (b"", "single bytes"),
        (rank_file([bytes([i]) for i in range(256)]) + b"YWI= 99999999\n", "large gaps"),
    ],
)
def test_bad_rank_files_are_named(tmp_path, content, message):
    (tmp_path / "x.tiktoken").write_bytes(content)
    with pytest.raises(DataError, match=message):
        tokenizer_from_file(tmp_path / "x.tiktoken")


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_a_twin_gives_the_same_tokens_from_an_encoding_of_its_own(name: str) -> None:
    tokenizer = reference_tokenizer(name)
    twin = tokenizer.twin()
    text = "A twin's <|endoftext|> naïve 🙂 12345 text\n" * 3
    assert twin.encode_ordinary(text).tolist() == tokenizer.encode_ordinary(text).tolist()
    assert twin.fingerprint == tokenizer.fingerprint
    assert twin.encoding is None or twin.encoding is not tokenizer.encoding
