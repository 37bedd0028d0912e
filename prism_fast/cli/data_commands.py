"""`prism-fast shards|pack|corpus`: token files shown, checked and converted; text packed; the locked corpus built."""

from __future__ import annotations

from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prism_fast.cli.options import Commands

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from prism_fast.data.manifest import Manifest
    from prism_fast.data.pack import Encoders
    from prism_fast.data.shards import Shard
    from prism_fast.data.tokenizers import Tokenizer


class OnError(StrEnum):
    RAISE = "raise"
    SKIP = "skip"


Files = Annotated[list[Path], typer.Argument(help="Shards, or folders of .prsh shards.")]
Format = Annotated[
    str | None, typer.Option(help="prism, llmc, megatron, datatrove, npy or raw. [default: told by the content]")
]
Dtype = Annotated[str | None, typer.Option(help="Token type of headerless files: u16, u32, i32, ...")]
Eot = Annotated[int | None, typer.Option(help="Id that separates documents where the file has no index.")]
OneRecord = Annotated[bool, typer.Option("--one-record", help="No boundaries: the whole file is one record.")]
Access = Annotated[str, typer.Option(help="map, pread (a file cut short is an error, not a crash), or auto.")]
TokenizerName = Annotated[str, typer.Option(help="gpt2, bytes, or a .tiktoken rank file.")]
TokenizerOrNone = Annotated[
    str | None, typer.Option("--tokenizer", help="gpt2, bytes, or a .tiktoken rank file: counts and checks bytes.")
]
Inputs = Annotated[list[Path], typer.Argument(help="JSONL (.gz, .zst), Parquet or text files, or folders of them.")]
Out = Annotated[Path, typer.Option(help="A new folder; one that a killed run left is gone on with.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Tokeniser threads. [default: the cores at hand]")]
Address = Annotated[
    str | None,
    typer.Option(help="Tokenise on a Ray cluster: auto, HOST:PORT, or local for this machine. [default: threads]"),
]
ShardSize = Annotated[int | None, typer.Option(min=1, help="Documents a shard. [default: 65536]")]
OnErrorOption = Annotated[OnError, typer.Option(help="Lines that cannot be read: stop, or leave out and count.")]
IdKey = Annotated[str, typer.Option(help="JSON key or Parquet column of the document id.")]
TextKey = Annotated[str, typer.Option(help="JSON key or Parquet column of the text.")]


def register(app: typer.Typer) -> None:
    shards = Commands(no_args_is_help=True, help="Token files: ours, and those of other tools.")
    shards.command("inspect")(inspect)
    shards.command("verify")(verify)
    shards.command("convert")(convert)
    app.add_typer(shards, name="shards")
    app.command("pack")(pack)
    corpus = Commands(no_args_is_help=True, help="The locked corpus (prism_locked_data.v1).")
    corpus.command("build")(build)
    corpus.command("verify")(verify_corpus)
    app.add_typer(corpus, name="corpus")


def _encoders(tokenizer: Tokenizer, address: str | None) -> AbstractContextManager[Encoders | None]:
    if address is None:
        return nullcontext()
    from prism_fast.campaign.encoders import RayEncoders

    return RayEncoders(tokenizer, address)


def inspect(
    paths: Files,
    tokenizer: TokenizerOrNone = None,
    format: Format = None,
    dtype: Dtype = None,
    eot: Eot = None,
    one_record: OneRecord = False,
    access: Access = "auto",
    head: Annotated[int, typer.Option(min=0, help="Also print the first records, as text with --tokenizer.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """Show what token files hold."""
    named = tokenizer_named(tokenizer)
    rows = []
    for path in _shard_files(paths):
        shard = _open(path, named, format, dtype, eot, one_record, access)
        rows.append(_describe(shard))
        if not as_json:
            for key, value in rows[-1].items():
                typer.echo(f"{key:>16}  {'unknown' if value is None else value}")
            for record in range(min(head, len(shard))):
                tokens = shard[record]
                shown = named.decode_bytes(tokens[:64]) if named else tokens[:16].tolist()
                typer.echo(f"{'record ' + str(record):>16}  {len(tokens)} tokens: {shown!r}")
            typer.echo()
    if as_json:
        import orjson

        typer.echo(orjson.dumps(rows, option=orjson.OPT_INDENT_2))


def verify(
    paths: Files,
    tokenizer: TokenizerOrNone = None,
    format: Format = None,
    dtype: Dtype = None,
    eot: Eot = None,
    one_record: OneRecord = False,
    access: Access = "auto",
) -> None:
    """Read token files whole: checksums, offsets, ids, and each record's UTF-8 bytes. Exit 5 at the first fault."""
    from prism_fast.data.shards import PRISM_SHARD
    from prism_fast.data.tokenizers import reference_tokenizer

    named = tokenizer_named(tokenizer)
    for path in _shard_files(paths):
        shard = _open(path, named, format, dtype, eot, one_record, access)
        known = named
        if known is None and shard.format == PRISM_SHARD and shard.tokenizer_name in ("gpt2", "bytes"):
            known = reference_tokenizer(shard.tokenizer_name)
        shard.verify(known)
        depth = "bytes checked" if known else "bytes not checked: name the tokenizer"
        typer.echo(f"{path}: good, {len(shard):,} records, {shard.n_tokens:,} tokens, {depth}")


def convert(
    path: Annotated[Path, typer.Argument(help="A token file of any known format.")],
    out: Annotated[Path, typer.Argument(help="The .prsh file to write.")],
    tokenizer: TokenizerName = "gpt2",
    format: Format = None,
    dtype: Dtype = None,
    eot: Eot = None,
    one_record: OneRecord = False,
    access: Access = "auto",
) -> None:
    """Write a token file as a prism_shard.v1 shard, which also knows every record's UTF-8 bytes."""
    from prism_fast.data.shards import convert_shard
    from prism_fast.protocol.errors import UsageError

    if out.exists():
        raise UsageError(f"{out}: exists: choose another name")
    named = tokenizer_named(tokenizer)
    assert named is not None
    convert_shard(_open(path, named, format, dtype, eot, one_record, access), out, named)
    shard = _open(out, named)
    typer.echo(f"{out}: {len(shard):,} records, {shard.n_tokens:,} tokens, {shard.n_bytes:,} UTF-8 bytes")


def pack(
    inputs: Inputs,
    out: Out,
    tokenizer: TokenizerName = "gpt2",
    split: Annotated[str, typer.Option(help="train, val or test.")] = "train",
    workers: Workers = None,
    address: Address = None,
    documents_per_shard: ShardSize = None,
    on_error: OnErrorOption = OnError.RAISE,
    id_key: IdKey = "id",
    text_key: TextKey = "text",
) -> None:
    """Pack text into shards, in input order. The same bytes at any number of workers."""
    from prism_fast.cli.progress import TerminalReporter
    from prism_fast.data.pack import DOCUMENTS_PER_SHARD
    from prism_fast.data.pack import pack as pack_files

    named = tokenizer_named(tokenizer)
    assert named is not None
    with TerminalReporter() as reporter, _encoders(named, address) as encoders:
        manifest = pack_files(
            inputs,
            out,
            named,
            split=split,
            workers=workers,
            encoders=encoders,
            documents_per_shard=documents_per_shard or DOCUMENTS_PER_SHARD,
            on_error=on_error.value,
            id_key=id_key,
            text_key=text_key,
            progress=reporter.packing,
        )
    _print_manifest(out, manifest)


def build(
    inputs: Inputs,
    out: Out,
    tokenizer: TokenizerName = "gpt2",
    name: Annotated[
        str | None, typer.Option(help="Dataset name. [default: HuggingFaceFW/fineweb-edu with --subset]")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Revision pin of the source.")] = None,
    licence: Annotated[str | None, typer.Option(help="Licence of the text.")] = None,
    subset: Annotated[
        str | None, typer.Option(help="sample-10BT, sample-100BT or sample-350BT: the official source, with its pins.")
    ] = None,
    workers: Workers = None,
    address: Address = None,
    documents_per_shard: ShardSize = None,
    on_error: OnErrorOption = OnError.RAISE,
    id_key: IdKey = "id",
    text_key: TextKey = "text",
) -> None:
    """Build the locked corpus: train, val and test by the sha256 of the id. The same bytes in any input order."""
    from prism_fast.cli.progress import TerminalReporter
    from prism_fast.data.corpus import build_corpus
    from prism_fast.data.manifest import Dataset, fineweb_edu
    from prism_fast.data.pack import DOCUMENTS_PER_SHARD
    from prism_fast.protocol.errors import UsageError

    if name is None and subset is None:
        raise UsageError("name the dataset: --name NAME, or --subset sample-10BT for the official source")
    if name is None and subset is not None:
        dataset = fineweb_edu(subset)
    else:
        dataset = Dataset(name=str(name), revision=revision, licence=licence, subset=subset)
    named = tokenizer_named(tokenizer)
    assert named is not None
    with TerminalReporter() as reporter, _encoders(named, address) as encoders:
        manifest = build_corpus(
            inputs,
            out,
            named,
            dataset=dataset,
            workers=workers,
            encoders=encoders,
            documents_per_shard=documents_per_shard or DOCUMENTS_PER_SHARD,
            on_error=on_error.value,
            id_key=id_key,
            text_key=text_key,
            progress=reporter.packing,
        )
    _print_manifest(out, manifest)


def verify_corpus(
    folder: Annotated[Path, typer.Argument(help="A packed corpus.")],
    tokenizer: TokenizerOrNone = None,
    val: Annotated[Path | None, typer.Option(help="Folder of the val shards, where they live elsewhere.")] = None,
    fingerprint: Annotated[str | None, typer.Option(help="sha256 that MANIFEST.json must have.")] = None,
) -> None:
    """Read every byte of a packed corpus and print every fault. Exit 5 when there is one."""
    from prism_fast.data.corpus import corpus_faults, open_corpus
    from prism_fast.protocol.errors import DataError

    mounts = {"val": val} if val else None
    faults = list(corpus_faults(folder, mounts=mounts, tokenizer=tokenizer_named(tokenizer), fingerprint=fingerprint))
    for fault in faults:
        typer.echo(fault, err=True)
    if faults:
        raise DataError(f"{folder}: {len(faults)} fault{'s' * (len(faults) > 1)} found")
    corpus = open_corpus(folder, mounts=mounts)
    typer.echo(f"{folder}: good, fingerprint {corpus.fingerprint}")
    for name in corpus.splits:
        split = corpus.split(name)
        typer.echo(f"{name:>7}  {split.documents:,} documents, {split.tokens:,} tokens, {split.bytes:,} UTF-8 bytes")


# ---------------------------------------------------------------------------------------------------------- helpers


def tokenizer_named(name: str | None) -> Tokenizer | None:
    """What `--tokenizer` means; UsageError for a name or a file that is none."""
    from prism_fast.data.tokenizers import reference_tokenizer, tokenizer_from_file
    from prism_fast.protocol.errors import UsageError

    if name is None:
        return None
    if not name.endswith(".tiktoken"):
        return reference_tokenizer(name)
    try:
        return tokenizer_from_file(name)
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from error


def _shard_files(paths: Sequence[Path]) -> list[Path]:
    from prism_fast.protocol.errors import UsageError

    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(path.rglob("*.prsh"))
        if not found:
            raise UsageError(f"{path}: no .prsh shard in this folder: name the file")
        files += found
    return files


def _open(
    path: Path,
    tokenizer: Tokenizer | None,
    format: str | None = None,
    dtype: str | None = None,
    eot: int | None = None,
    one_record: bool = False,
    access: str = "auto",
) -> Shard:
    from prism_fast.data.shards import open_shard
    from prism_fast.protocol.errors import DataError, UsageError

    try:
        return open_shard(
            path, tokenizer=tokenizer, format=format, dtype=dtype, eot=eot, one_record=one_record, access=access
        )
    except DataError:
        raise
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(str(error)) from error


def _describe(shard: Shard) -> dict[str, Any]:
    core = shard.core
    lengths = shard.lengths
    return {
        "path": shard.path,
        "format": shard.format,
        "file_bytes": core.file_bytes,
        "token_width": shard.token_width,
        "records": len(shard),
        "tokens": shard.n_tokens,
        "longest_record": int(lengths.max()) if len(shard) else 0,
        "empty_records": int((lengths == 0).sum()),
        "utf8_bytes": core.utf8_bytes_total if core.knows_utf8_bytes else None,
        "tokenizer": shard.tokenizer_name or None,
        "fingerprint": shard.tokenizer_fingerprint if shard.tokenizer_name else None,
        "n_vocab": core.n_vocab or None,
        "end_of_text": core.end_of_text,
        "access": "map" if core.mapped else "pread",
    }


def _print_manifest(out: Path, manifest: Manifest) -> None:
    for name, split in manifest.splits.items():
        notes = [
            f"{count:,} {what}"
            for count, what in (
                (split.empty_documents, "empty"),
                (split.replaced_surrogates, "with lone surrogates replaced"),
                (split.refused_documents, "refused by the tokenizer"),
            )
            if count
        ]
        typer.echo(
            f"{out / name}: {split.documents:,} documents, {split.tokens:,} tokens, {split.bytes:,} UTF-8 bytes, "
            f"{len(split.shards)} shards" + (f" ({', '.join(notes)})" if notes else "")
        )
    if manifest.input.skipped_lines:
        typer.echo(f"{manifest.input.skipped_lines:,} lines could not be read and were left out")
    if manifest.input.duplicates:
        typer.echo(
            f"{manifest.input.duplicates:,} documents had an id that came before "
            f"({manifest.input.conflicting_duplicates:,} with another text)"
        )
