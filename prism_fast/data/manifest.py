"""`prism_locked_data.v1`: the MANIFEST.json of a packed corpus, and how such files are written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prism_fast.protocol.canonical import write_atomically
from prism_fast.protocol.errors import DataError, UsageError

SCHEMA = "prism_locked_data.v1"
NAME = "MANIFEST.json"
SPLITS = ("train", "val", "test")

# Partition of a locked corpus: bucket = int(sha256(id), 16) % 1000; [first, last + 1) of each split.
BUCKETS = 1000
BUCKET_RANGES: dict[str, tuple[int, int]] = {"train": (0, 950), "val": (950, 975), "test": (975, 1000)}

# The official source.
FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
FINEWEB_EDU_REVISION = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
FINEWEB_EDU_LICENCE = "odc-by"
FINEWEB_EDU_SUBSETS = ("sample-10BT", "sample-100BT", "sample-350BT")


def split_of(document_id: str) -> str:
    """The split that a locked corpus puts a document in, from its id alone."""
    digest = hashlib.sha256(document_id.encode("utf-8", "surrogatepass")).digest()
    bucket = int.from_bytes(digest, "big") % BUCKETS
    return next(name for name, (first, end) in BUCKET_RANGES.items() if first <= bucket < end)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ShardEntry(_Model):
    """One shard. name: path below the corpus. size_bytes: of the file; bytes: UTF-8 of its text."""

    name: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size_bytes: int = Field(ge=0)
    documents: int = Field(ge=0)
    tokens: int = Field(ge=0)
    bytes: int = Field(ge=0)


class SplitEntry(_Model):
    """One split. replaced_surrogates: documents in which lone surrogates became U+FFFD. refused_documents: left out
    because they could not be tokenised exactly."""

    documents: int = Field(default=0, ge=0)
    tokens: int = Field(default=0, ge=0)
    bytes: int = Field(default=0, ge=0)
    empty_documents: int = Field(default=0, ge=0)
    replaced_surrogates: int = Field(default=0, ge=0)
    refused_documents: int = Field(default=0, ge=0)
    shards: list[ShardEntry] = Field(default_factory=list)


class Dataset(_Model):
    """Where the text comes from. revision: the pin of the source."""

    name: str
    revision: str | None = None
    licence: str | None = None
    subset: str | None = None


def fineweb_edu(subset: str) -> Dataset:
    """The official source, with its pins; UsageError for an unknown subset."""
    if subset not in FINEWEB_EDU_SUBSETS:
        raise UsageError(f"subset {subset!r}: expected one of {', '.join(FINEWEB_EDU_SUBSETS)}")
    return Dataset(name=FINEWEB_EDU, revision=FINEWEB_EDU_REVISION, licence=FINEWEB_EDU_LICENCE, subset=subset)


class Partition(_Model):
    """How documents were put in splits: by `split_of` their id, or as the input files were named or given."""

    kind: Literal["sha256-id", "as-given"]
    buckets: int | None = None
    ranges: dict[str, tuple[int, int]] | None = None

    @classmethod
    def by_id(cls) -> Partition:
        return cls(kind="sha256-id", buckets=BUCKETS, ranges=dict(BUCKET_RANGES))


class TokenizerEntry(_Model):
    name: str
    fingerprint: str = Field(pattern=r"^[0-9a-f]{64}$")
    n_vocab: int = Field(gt=0)
    end_of_text: int = Field(ge=0)


class InputCounts(_Model):
    """What was read but is in no split. skipped_lines: not readable (`on_error="skip"`). duplicates: documents whose
    id came before; conflicting_duplicates: those of them whose text differs (the smallest in byte order is kept)."""

    skipped_lines: int = Field(default=0, ge=0)
    duplicates: int = Field(default=0, ge=0)
    conflicting_duplicates: int = Field(default=0, ge=0)


class Manifest(_Model):
    """MANIFEST.json. order: documents sorted by id, or in input order. digest: sha256 of the canonical JSON of
    everything else, so that an edit by hand is found even where no shard contradicts it."""

    schema_: Literal["prism_locked_data.v1"] = Field(default="prism_locked_data.v1", alias="schema")
    dataset: Dataset
    partition: Partition
    order: Literal["id", "input"]
    tokenizer: TokenizerEntry
    documents_per_shard: int = Field(gt=0)
    input: InputCounts
    splits: dict[str, SplitEntry]
    digest: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")

    def compute_digest(self) -> str:
        body = self.model_dump(mode="json", by_alias=True, exclude={"digest"})
        return hashlib.sha256(canonical_json(body)).hexdigest()

    def write(self, folder: Path) -> None:
        self.digest = self.compute_digest()
        write_atomically(folder / NAME, canonical_json(self.model_dump(mode="json", by_alias=True)))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """DataError when the file is not a manifest; FileNotFoundError when there is none."""
        path = folder / NAME
        try:
            manifest = cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the whole file"
            raise DataError(f"{path}: {place}: {first['msg']}: expected a {SCHEMA} manifest") from None
        for name, split in manifest.splits.items():
            if name not in SPLITS:
                raise DataError(f"{path}: expected splits {', '.join(SPLITS)}, found {name!r}")
            for shard in split.shards:
                if Path(shard.name).is_absolute() or ".." in Path(shard.name).parts:
                    raise DataError(f"{path}: expected a shard name below the corpus, found {shard.name!r}")
        return manifest


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys, one space of indent and a final newline: the same value has the same bytes."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()
