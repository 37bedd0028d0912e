"""Tokenizers that a score can name: GPT-2's byte-pair encoding, raw bytes, or any tiktoken rank file.

Nothing is downloaded: GPT-2's ranks ship with the package and are checked against their published sha256.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from prism_fast import _core
from prism_fast.protocol.errors import DataError, UsageError

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
# OpenAI's pinned hash of r50k_base.tiktoken, the GPT-2 ranks.
GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
# GPT-2's split pattern as tiktoken writes it: possessive, so that no text makes it backtrack.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

Tokens = npt.NDArray[np.uint32]


def utf8(text: str) -> tuple[bytes, bool]:
    """The UTF-8 bytes of `text`, and whether lone surrogates had to be replaced (by U+FFFD, as tiktoken does)."""
    try:
        return text.encode(), False
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode(), True


class Tokenizer:
    """A tokenizer whose every id has known bytes.

    name: what manifests call it. n_vocab: ids are 0..n_vocab-1. eot: id of end-of-text.
    fingerprint: sha256 (hex) over ranks, special tokens and split pattern: two tokenizers agree on every text
    if their fingerprints do, whatever their names. encoding: the tiktoken object, None for bytes.
    """

    def __init__(
        self,
        name: str,
        token_strings: Sequence[bytes],
        specials: Mapping[str, int],
        pattern: str,
        encoding: tiktoken.Encoding | None,
    ) -> None:
        self.name = name
        self.n_vocab = len(token_strings)
        self.eot = specials[END_OF_TEXT]
        self.encoding = encoding
        self.fingerprint = _fingerprint(token_strings, specials, pattern)
        lengths = np.fromiter(map(len, token_strings), np.uint64, self.n_vocab)
        offsets = np.zeros(self.n_vocab + 1, np.uint64)
        np.cumsum(lengths, out=offsets[1:])
        self._lengths = lengths
        self._table = _core.TokenTable(offsets, np.frombuffer(b"".join(token_strings), np.uint8))

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.int32]:
        """int32 [n_vocab]: UTF-8 bytes that each id stands for; 0 for special tokens. Read-only."""
        lengths = self._lengths.astype(np.int32)
        lengths.flags.writeable = False
        return lengths

    @property
    def table(self) -> Any:
        """The compiled table of token bytes (`prism_fast._core.TokenTable`), shared by readers."""
        return self._table

    def encode_utf8(self, data: bytes) -> Tokens:
        """uint32 tokens of valid UTF-8, special tokens in the text being ordinary text. Releases the GIL."""
        if self.encoding is None:
            return np.frombuffer(data, np.uint8).astype(np.uint32)
        return self.encoding.encode_to_numpy(data.decode(), disallowed_special=())

    def encode_utf8_run(self, documents: Sequence[bytes]) -> tuple[Tokens, npt.NDArray[np.uint64]]:
        """Tokens of many documents end to end, and each document's number of them: as `encode_utf8` of each.

        One call into the tokenizer instead of one a document: end-of-text between them separates, because it splits
        the text before the pattern sees it. Worth 10 % on short documents, and the GIL is taken once.
        """
        separator = END_OF_TEXT.encode()
        if self.encoding is not None and len(documents) > 1 and not any(separator in data for data in documents):
            joined = separator.join(documents).decode()
            tokens = self.encoding.encode_to_numpy(joined, allowed_special={END_OF_TEXT}, disallowed_special=())
            ends = np.flatnonzero(tokens == self.eot)
            if len(ends) == len(documents) - 1:
                bounds = np.concatenate([[-1], ends, [len(tokens)]])
                return np.delete(tokens, ends), (np.diff(bounds) - 1).astype(np.uint64)
        arrays = [self.encode_utf8(data) for data in documents]
        lengths = np.fromiter(map(len, arrays), np.uint64, len(arrays))
        return np.concatenate(arrays) if arrays else np.empty(0, np.uint32), lengths

    def twin(self) -> Tokenizer:
        """The same tokenizer with a tiktoken encoding of its own (60 ms), for another thread.

        The regular expressions inside keep their scratch memory for the first thread that uses them; all others share
        what is behind a lock, and take 15 % more processor time, whether or not they meet.
        """
        other = Tokenizer.__new__(Tokenizer)
        other.__dict__.update(self.__dict__)
        if self.encoding is not None:
            import tiktoken

            other.encoding = tiktoken.Encoding(
                name=self.encoding.name,
                pat_str=self.encoding._pat_str,
                mergeable_ranks=self.encoding._mergeable_ranks,
                special_tokens=self.encoding._special_tokens,
            )
        return other

    def encode_ordinary(self, text: str) -> Tokens:
        """uint32 tokens of `text`; lone surrogates count as U+FFFD, special tokens as ordinary text."""
        return self.encode_utf8(utf8(text)[0])

    def encode_ordinary_batch(self, texts: Sequence[str], num_threads: int = 2) -> list[Tokens]:
        """`encode_ordinary` of each text, over threads."""
        with ThreadPoolExecutor(num_threads) as pool:
            return list(pool.map(self.encode_ordinary, texts))

    def decode_bytes(self, tokens: npt.ArrayLike) -> bytes:
        """The bytes that `tokens` stand for; ValueError on an id outside the vocabulary."""
        ids = np.asarray(tokens, np.int64).ravel()
        bad = ids[(ids < 0) | (ids >= self.n_vocab)]
        if bad.size:
            raise ValueError(f"token id {bad[0]}: expected 0 to {self.n_vocab - 1} for tokenizer {self.name!r}")
        return self._table.decode(ids.astype(np.uint32))

    def __reduce__(self) -> tuple[Any, ...]:
        """By what it is made of: tiktoken's own way is to look the name up, and to download it."""
        if self.encoding is None:
            return reference_tokenizer, (self.name,)
        made_of = (self.encoding._mergeable_ranks, self.encoding._pat_str, self.encoding._special_tokens)
        return _from_ranks, (self.name, *made_of)

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, n_vocab={self.n_vocab}, fingerprint={self.fingerprint[:12]})"


def _fingerprint(token_strings: Sequence[bytes], specials: Mapping[str, int], pattern: str) -> str:
    """sha256 over length-prefixed fields, so that no two tokenizers can share a message."""
    digest = hashlib.sha256(b"prism_tokenizer.v1")

    def field(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    field(pattern.encode())
    for token in token_strings:
        field(token)
    for text, token_id in sorted(specials.items()):
        field(text.encode())
        field(str(token_id).encode())
    return digest.hexdigest()


@cache
def reference_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`: "gpt2" (50,257 ids) or "bytes" (ids 0..255 are the bytes, end-of-text 256)."""
    if name == "gpt2":
        asset = resources.files("prism_fast.data").joinpath("assets", "gpt2.tiktoken")
        data = asset.read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if found != GPT2_SHA256:
            raise DataError(f"{asset}: expected sha256 {GPT2_SHA256}, found {found}: reinstall the package")
        return _from_ranks("gpt2", parse_ranks(data, str(asset)), GPT2_PATTERN, {END_OF_TEXT: 50256})
    if name == "bytes":
        return Tokenizer("bytes", [bytes([i]) for i in range(256)] + [b""], {END_OF_TEXT: 256}, "", None)
    raise UsageError(f"tokenizer {name!r}: expected 'gpt2' or 'bytes', or a .tiktoken rank file")


def tokenizer_from_file(
    path: str | Path,
    *,
    pattern: str = GPT2_PATTERN,
    specials: Mapping[str, int] | None = None,
    name: str | None = None,
) -> Tokenizer:
    """A tokenizer from a tiktoken rank file (a line each: base64 of the token, space, rank).

    `pattern` is the split pattern (GPT-2's by default). `specials` must hold `<|endoftext|>`; by default it is given
    the first id after the ranks. Raises DataError naming file and line, FileNotFoundError.
    """
    path = Path(path)
    ranks = parse_ranks(path.read_bytes(), str(path))
    if specials is None:
        specials = {END_OF_TEXT: max(ranks.values()) + 1}
    if END_OF_TEXT not in specials:
        raise UsageError(f"{path}: the special tokens must name {END_OF_TEXT}, which separates documents")
    return _from_ranks(name or path.stem, ranks, pattern, specials)


def parse_ranks(data: bytes, source: str) -> dict[bytes, int]:
    """Token -> rank from the text of a tiktoken rank file. `source` names it in errors (DataError)."""
    ranks: dict[bytes, int] = {}
    taken: set[int] = set()
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            token_text, rank_text = line.split()
            token, rank = base64.b64decode(token_text, validate=True), int(rank_text)
        except (ValueError, binascii.Error):
            raise DataError(f"{source}:{number}: expected 'BASE64 RANK', found {line[:60]!r}") from None
        if not token or not 0 <= rank < 2**31 or token in ranks or rank in taken:
            raise DataError(f"{source}:{number}: expected a new token and a new rank, found {line[:60]!r}")
        ranks[token] = rank
        taken.add(rank)
    missing = [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        raise DataError(f"{source}: expected a rank for each of the 256 single bytes, found none for {missing[0]}")
    return ranks


def _from_ranks(name: str, ranks: dict[bytes, int], pattern: str, specials: Mapping[str, int]) -> Tokenizer:
    import tiktoken

    highest = max(max(ranks.values()), max(specials.values()))
    if highest >= 2 * (len(ranks) + len(specials)):
        raise DataError(
            f"tokenizer {name!r}: expected ids without large gaps, found id {highest} for {len(ranks)} ranks"
        )
    strings = [b""] * (highest + 1)
    for token, rank in ranks.items():
        strings[rank] = token
    for text, token_id in specials.items():
        if strings[token_id]:
            raise DataError(f"tokenizer {name!r}: special token {text} has id {token_id}, which is a rank's")
    encoding = tiktoken.Encoding(name=name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=dict(specials))
    return Tokenizer(name, strings, specials, pattern, encoding)
