"""The locked corpus: three disjoint splits of packed shards under one manifest (`prism_locked_data.v1`)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from prism_fast.data import manifest as schema
from prism_fast.data.documents import EXPECTED, Document, DocumentReader, Source, find_sources
from prism_fast.data.manifest import Dataset, InputCounts, Manifest, Partition, SplitEntry, split_of
from prism_fast.data.pack import (
    DOCUMENTS_PER_SHARD,
    JOURNAL,
    Encoders,
    Progress,
    ProgressCallback,
    claimed,
    default_workers,
    finish,
    locked,
    pack_given,
    pack_splits,
    sha256_of,
    source_identity,
    tokenizer_entry,
)
from prism_fast.data.shards import Shard, open_shard
from prism_fast.data.sorting import RUN_BYTES, DocumentSorter
from prism_fast.data.tokenizers import Tokenizer, reference_tokenizer
from prism_fast.protocol.errors import DataError, UsageError

SPLITS = schema.SPLITS
PathLike = str | os.PathLike[str]
_CACHE_VERSION = 1  # part of every cache key: raised when packing the same text gives other shards
_SORTING = "sorting"


@dataclass(frozen=True)
class Split:
    """One split: shard paths in order, and totals. bytes: UTF-8 of its text, end-of-text not counted."""

    name: str
    shards: tuple[Path, ...]
    documents: int
    tokens: int
    bytes: int
    tokenizer_name: str
    tokenizer_fingerprint: str

    def open(self, access: str = "auto") -> list[Shard]:
        """The shards, opened; DataError when one is not what it says it is."""
        return [open_shard(path, access=access) for path in self.shards]


@dataclass(frozen=True)
class Corpus:
    """A packed corpus. fingerprint: sha256 of MANIFEST.json, which holds the sha256 of every shard."""

    folder: Path
    manifest: Manifest
    fingerprint: str
    splits: tuple[str, ...]
    _splits: Mapping[str, Split]
    mounts: Mapping[str, PathLike] | None = None  # folders of splits that live elsewhere, as it was opened with

    def split(self, name: str) -> Split:
        """UsageError when the corpus has no such split."""
        if name not in self._splits:
            raise UsageError(f"{self.folder}: no split {name!r}: expected one of {', '.join(self.splits)}")
        return self._splits[name]

    @property
    def tokenizer_name(self) -> str:
        return self.manifest.tokenizer.name

    @property
    def tokenizer_fingerprint(self) -> str:
        return self.manifest.tokenizer.fingerprint


def joined_splits(first: Split, *others: Split) -> Split:
    """One split that reads the shards of several, one split after the other; UsageError for another tokenizer."""
    for other in others:
        if other.tokenizer_fingerprint != first.tokenizer_fingerprint:
            raise UsageError(
                f"splits packed with tokenizers {first.tokenizer_name!r} and {other.tokenizer_name!r}: expected one "
                "tokenizer, to read them as one split"
            )
    splits = (first, *others)
    return Split(
        first.name,
        tuple(path for split in splits for path in split.shards),
        sum(split.documents for split in splits),
        sum(split.tokens for split in splits),
        sum(split.bytes for split in splits),
        first.tokenizer_name,
        first.tokenizer_fingerprint,
    )


# --------------------------------------------------------------------------------------------------- open, verify


def open_corpus(folder: PathLike, *, mounts: Mapping[str, PathLike] | None = None) -> Corpus:
    """Opens a packed corpus: the manifest is read and every shard that is mounted must have its listed size.

    mounts: folder of a split that lives elsewhere ({"val": "/secret/val"} for shards listed as val/...). A split
    whose folder is absent is left out: a trainer rank in a sandbox never sees the secret one.
    Raises UsageError (no such folder, no manifest), DataError naming file, expected and found.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UsageError(f"{root}: no such folder")
    path = root / schema.NAME
    if not path.is_file():
        unfinished = (root / JOURNAL).exists()
        raise UsageError(
            f"{root}: " + ("packing was not finished: pack again" if unfinished else f"expected a {schema.NAME}")
        )
    manifest = Manifest.read(root)
    splits: dict[str, Split] = {}
    for name in SPLITS:
        entry = manifest.splits.get(name)
        place = split_folder(root, name, mounts)
        if entry is None or (entry.shards and not place.is_dir()):
            continue
        paths = tuple(place / Path(shard.name).name for shard in entry.shards)
        for shard, file in zip(entry.shards, paths, strict=True):
            try:
                size = file.stat().st_size
            except OSError as error:
                raise DataError(f"{file}: listed in {path}, cannot be read: {error.strerror}") from None
            if size != shard.size_bytes:
                raise DataError(
                    f"{file}: offset {min(size, shard.size_bytes)}: expected a file of {shard.size_bytes} bytes "
                    f"({path}), found {size}"
                )
        splits[name] = Split(
            name, paths, entry.documents, entry.tokens, entry.bytes, manifest.tokenizer.name,
            manifest.tokenizer.fingerprint,
        )  # fmt: skip
    return Corpus(root, manifest, sha256_of(path), tuple(splits), splits, mounts)


def split_folder(root: Path, split: str, mounts: Mapping[str, PathLike] | None) -> Path:
    return Path(mounts[split]) if mounts and split in mounts else root / split


def verify_corpus(
    folder: PathLike,
    *,
    mounts: Mapping[str, PathLike] | None = None,
    tokenizer: Tokenizer | None = None,
    fingerprint: str | None = None,
    progress: Callable[[Path], None] | None = None,
) -> Corpus:
    """Reads every mounted byte and raises DataError unless all of it is as the manifest says; else the corpus.

    See `corpus_faults` for what is checked. The first fault is named and the others counted.
    """
    faults = list(corpus_faults(folder, mounts=mounts, tokenizer=tokenizer, fingerprint=fingerprint, progress=progress))
    if faults:
        more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
        raise DataError(faults[0] + more)
    return open_corpus(folder, mounts=mounts)


def corpus_faults(
    folder: PathLike,
    *,
    mounts: Mapping[str, PathLike] | None = None,
    tokenizer: Tokenizer | None = None,
    fingerprint: str | None = None,
    progress: Callable[[Path], None] | None = None,
) -> Iterator[str]:
    """Every way in which a corpus is not what it says, one sentence each.

    Altered, missing or unlisted shards; an altered manifest, pin or partition; tokenizer drift; totals that do not
    add up; a document in two splits; and, when `fingerprint` is given, a manifest other than the one it names (an
    edit that recomputes every digest can be found no other way).
    """
    root = Path(folder)
    if not (root / schema.NAME).is_file():
        open_corpus(root)  # raises
    path = root / schema.NAME
    manifest = Manifest.read(root)
    if fingerprint is not None and (found := sha256_of(path)) != fingerprint:
        yield f"{path}: expected sha256 {fingerprint}, found {found}"
    if manifest.digest != (computed := manifest.compute_digest()):
        yield f"{path}: expected digest {computed} of its own fields, found {manifest.digest or 'none'}: it was edited"
    if manifest.partition.kind == "sha256-id" and manifest.partition != Partition.by_id():
        yield f"{path}: partition: expected {Partition.by_id()}, found {manifest.partition}"
    pin = manifest.dataset
    if pin.name == schema.FINEWEB_EDU:
        if pin.revision != schema.FINEWEB_EDU_REVISION:
            yield f"{path}: dataset.revision: expected the pin {schema.FINEWEB_EDU_REVISION}, found {pin.revision}"
        if pin.licence != schema.FINEWEB_EDU_LICENCE:
            yield f"{path}: dataset.licence: expected {schema.FINEWEB_EDU_LICENCE}, found {pin.licence}"
        if pin.subset not in schema.FINEWEB_EDU_SUBSETS:
            yield f"{path}: dataset.subset: expected one of {schema.FINEWEB_EDU_SUBSETS}, found {pin.subset}"
    entry = manifest.tokenizer
    if tokenizer is None and entry.name in ("gpt2", "bytes"):
        tokenizer = reference_tokenizer(entry.name)
    if tokenizer is not None and tokenizer.fingerprint != entry.fingerprint:
        yield (
            f"{path}: tokenizer.fingerprint: expected {tokenizer.fingerprint} of {tokenizer.name!r}, "
            f"found {entry.fingerprint}"
        )
        tokenizer = None
    seen: list[tuple[str, np.ndarray]] = []
    for name, split in manifest.splits.items():
        place = split_folder(root, name, mounts)
        if split.shards and not place.is_dir():
            continue  # lives elsewhere
        listed = {Path(shard.name).name for shard in split.shards}
        for extra in (
            sorted(p.name for p in place.iterdir() if p.name not in listed | {schema.NAME}) if place.is_dir() else []
        ):
            yield f"{place / extra}: not listed in {path}"
        sums = SplitEntry()
        for shard in split.shards:
            sums.documents += shard.documents
            sums.tokens += shard.tokens
            sums.bytes += shard.bytes
            file = place / Path(shard.name).name
            if progress is not None:
                progress(file)
            if not file.is_file():
                yield f"{file}: listed in {path}, but missing"
                continue
            if (found := sha256_of(file)) != shard.sha256:
                yield f"{file}: expected sha256 {shard.sha256} ({path}), found {found}"
            try:
                opened = open_shard(file)
                opened.verify(tokenizer)
            except DataError as error:
                yield str(error)
                continue
            for what, listed_as, is_ in (
                ("documents", shard.documents, len(opened)),
                ("tokens", shard.tokens, opened.n_tokens),
                ("UTF-8 bytes", shard.bytes, opened.n_bytes),
                ("tokenizer fingerprint", entry.fingerprint, opened.tokenizer_fingerprint),
            ):
                if listed_as != is_:
                    yield f"{file}: expected {what} {listed_as} ({path}), found {is_}"
            seen.append((name, opened.doc_ids))
        for what in ("documents", "tokens", "bytes"):
            if getattr(sums, what) != getattr(split, what):
                total, found = getattr(sums, what), getattr(split, what)
                yield f"{path}: splits.{name}.{what}: expected the sum {total}, found {found}"
    if manifest.partition.kind == "sha256-id":
        yield from _shared_documents(path, seen)


def _shared_documents(path: Path, seen: Sequence[tuple[str, np.ndarray]]) -> Iterator[str]:
    """Splits of a locked corpus have no document in common, and no split has one twice."""
    if not seen:
        return
    ids = np.concatenate([ids for _, ids in seen])
    of = np.concatenate([np.full(len(ids), SPLITS.index(name), np.int8) for name, ids in seen])
    order = np.argsort(ids, kind="stable")
    ids, of = ids[order], of[order]
    twice = np.flatnonzero(ids[1:] == ids[:-1])
    if twice.size:
        first = twice[0]
        yield (
            f"{path}: expected every document once, found {twice.size} again: document id hash 0x{ids[first]:016x} is "
            f"in {SPLITS[of[first]]} and in {SPLITS[of[first + 1]]}"
        )


# ---------------------------------------------------------------------------------------------------------- build


def build_corpus(
    inputs: Sequence[PathLike],
    out: PathLike,
    tokenizer: Tokenizer,
    *,
    dataset: Dataset,
    documents_per_shard: int = DOCUMENTS_PER_SHARD,
    workers: int | None = None,
    encoders: Encoders | None = None,
    on_error: str = "raise",
    id_key: str = "id",
    text_key: str = "text",
    run_bytes: int = RUN_BYTES,
    progress: ProgressCallback | None = None,
) -> Manifest:
    """Builds the locked corpus: documents freed of duplicate ids, put in splits by `split_of`, sorted by id.

    The output is the same bytes whatever the order of the input, the number of workers or of restarts. Memory:
    `run_bytes` of text, the workers' runs, 20 bytes a document of the open shards; disk: the text once over while it
    is sorted. A killed build goes on after its last finished shards, once the input is sorted again.
    Raises as `pack`.
    """
    out = Path(out)
    reader = DocumentReader(find_sources(inputs), on_error=on_error, id_key=id_key, text_key=text_key)
    sorter = DocumentSorter(out / _SORTING, run_bytes)
    read = text = 0

    def reading() -> Iterator[Document]:
        nonlocal read, text
        for document in reader:
            read += 1
            text += len(document.data)
            if progress is not None and read % 1024 == 0:
                progress(Progress("sort", reader.bytes_done, reader.bytes_total, read, 0, text))
            yield document

    def report(total: SplitEntry) -> None:
        if progress is not None:
            progress(Progress("pack", total.bytes, text, total.documents, total.tokens, total.bytes))

    with claimed(out):
        entries = pack_splits(
            ((split_of(document.id), document) for document in sorter.sort(reading())),
            out,
            tokenizer,
            splits=SPLITS,
            identity={"sources": source_identity(reader.sources), "keys": [id_key, text_key], "on_error": on_error,
                      "dataset": dataset.model_dump()},
            documents_per_shard=documents_per_shard,
            workers=workers or default_workers(),
            encoders=encoders,
            refuse=reader.refuse_tokens,
            progress=report,
        )  # fmt: skip
        manifest = Manifest(
            dataset=dataset,
            partition=Partition.by_id(),
            order="id",
            tokenizer=tokenizer_entry(tokenizer),
            documents_per_shard=documents_per_shard,
            input=InputCounts(
                skipped_lines=reader.skipped,
                duplicates=sorter.duplicates,
                conflicting_duplicates=sorter.conflicts,
            ),
            splits=entries,
        )
        finish(out, manifest)
    return manifest


# -------------------------------------------------------------------------------------------------------- resolve


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/prism-fast`, or `~/.cache/prism-fast`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "prism-fast"


def resolve_data(
    spec: PathLike,
    tokenizer: str | Tokenizer = "gpt2",
    cache_dir: PathLike | None = None,
    progress: ProgressCallback | None = None,
    *,
    mount_of: str | None = None,
) -> Corpus:
    """The corpus that `spec` means: "sample" (the bundled text), a packed corpus, or text to be packed first.

    Text (a folder or a file of JSONL, Parquet or .txt) is packed once into the cache. Files named `train-*`, `val-*`
    or `test-*` are those splits, in their order; otherwise documents are put in splits by the sha256 of their id
    ("<file name>:<line>" where there is none) and sorted by it. Two processes may ask at once: one packs, the other
    waits; a killed one leaves a folder that is never taken for a corpus and is gone on with.

    mount_of: the split that `spec` holds where it is a mount of one split's shards, with the corpus' manifest in it or
    beside it. A folder of JSONL may hold a manifest of the original engine's: its text is what is read.

    Raises UsageError (no such folder, no text in it, a corpus packed with another tokenizer), DataError naming file,
    offset or line, expected and found.
    """
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = reference_tokenizer(tokenizer)
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    if spec == "sample":
        with resources.as_file(resources.files("prism_fast.data").joinpath("assets", "kjv-chapters.jsonl.gz")) as asset:
            key = _cache_key([sha256_of(asset)], tokenizer)
            dataset = Dataset(name="kjv-chapters", licence="public domain")
            return _cached(
                cache / f"sample-{key}",
                lambda out: build_corpus([asset], out, tokenizer, dataset=dataset, progress=progress),
            )
    path = Path(spec)
    root, mounts = _mount(path, mount_of)
    if (root / schema.NAME).is_file() and not _is_original_layout(path):
        corpus = open_corpus(root, mounts=mounts)
        if corpus.tokenizer_fingerprint != tokenizer.fingerprint:
            raise UsageError(
                f"{path}: packed with tokenizer {corpus.tokenizer_name!r} ({corpus.tokenizer_fingerprint[:12]}), asked "
                f"for {tokenizer.name!r} ({tokenizer.fingerprint[:12]}): pack the text again with that tokenizer"
            )
        return corpus
    if (path / JOURNAL).exists():
        open_corpus(path)  # raises: packing was not finished
    if path.is_dir() and any(path.rglob("*.prsh")):
        raise UsageError(
            f"{path}: shards without a {schema.NAME}: expected a packed corpus, or a folder with {EXPECTED}"
        )
    sources = find_sources([path])
    given = _given_splits(path, sources)
    key = _cache_key([path.name, *map(str, source_identity(sources))], tokenizer)
    dataset = Dataset(name=path.resolve().name)

    def build(out: Path) -> None:
        if not given:
            build_corpus([path], out, tokenizer, dataset=dataset, progress=progress)
            return
        reader = DocumentReader(sources)
        pack_given(
            ((split, document) for source, split in given for document in reader.read(source)),
            reader,
            out,
            tokenizer,
            splits=[name for name in SPLITS if any(split == name for _, split in given)],
            dataset=dataset,
            documents_per_shard=DOCUMENTS_PER_SHARD,
            workers=None,
            progress=progress,
        )

    return _cached(cache / f"text-{key}", build)


def _mount(path: Path, split: str | None) -> tuple[Path, dict[str, Path] | None]:
    """-> (folder of the manifest, mounts) of a folder of one split's shards; (path, None) for any other."""
    if split is None or not path.is_dir() or not any(path.glob("*.prsh")):
        return path, None
    return (path if (path / schema.NAME).is_file() else path.parent), {split: path}


def _is_original_layout(path: Path) -> bool:
    """JSONL splits under a manifest of the original engine's, whose schema has the same name as ours."""
    return any(path.rglob("*.jsonl*")) and not any(path.rglob("*.prsh"))


def _given_splits(path: Path, sources: Sequence[Source]) -> list[tuple[Source, str]]:
    """Sources with the splits that their names claim; none when no name claims one. All of them must, or none."""
    named = [(source, source.split) for source in sources]
    if all(split is None for _, split in named):
        return []
    for source, split in named:
        if split is None:
            raise UsageError(
                f"{path}: {source.name} is named for no split, while others are named train-*, val-* or test-*: "
                "name all of them, or none"
            )
    return [(source, split) for source, split in named if split is not None]


def _cache_key(parts: Sequence[str], tokenizer: Tokenizer) -> str:
    text = "\0".join([str(_CACHE_VERSION), tokenizer.fingerprint, *parts])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _cached(target: Path, build: Callable[[Path], object]) -> Corpus:
    """The corpus at `target`, built into a folder beside it first: `target` is whole or absent."""
    if not target.is_dir():
        with locked(target.with_name(f"{target.name}.lock"), wait=True):
            if not target.is_dir():  # nobody built it while we waited
                partial = target.with_name(f"{target.name}.partial")
                if not (partial / schema.NAME).is_file():
                    build(partial)
                partial.rename(target)
    return open_corpus(target)
