"""How fast do batches come out of shards, against what people read tokens with today?

    python -m benchmarks.reader [--tokens 8000000] [--records 4000] [--repeats 9]

Three tables: packed batches in order (warm cache) against nanoGPT's reading of a numpy memmap and against the bandwidth
bound of widening u16 to int64; padded pairs of records in the order of a bucket plan against Megatron-core's
IndexedDataset, mosaicml-streaming and HF datasets (those that are installed); and the time from opening 10 GB of shards
to the first batch. Every peer reads the same tokens in the same order and ends in int64 torch tensors.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import machine, median, median_seconds, save
from prism_fast import _core
from prism_fast.data import TokenLoader, TokenStream, bucket_plan, open_shard, reference_tokenizer, write_shard
from prism_fast.data.synthetic import LogNormal, draw_lengths, write_synthetic_shard

GPT2 = reference_tokenizer("gpt2")
SHAPES = ((8, 128), (8, 1024), (16, 2048))  # rows, positions
LENGTHS = LogNormal(median=780, sigma=0.8, shortest=16, longest=16384)
MICRO_BATCH, BUCKET, SEED = 2, 128, 20260824
Run = Callable[[], object]


# ------------------------------------------------------------------------------------------------ packed, in order


def nanogpt(tokens: np.ndarray, rows: int, length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The `get_batch` idiom: slice the memmap, widen each row, stack the rows."""
    for first in range(0, len(tokens) - rows * (length - 1) - 1, rows * (length - 1)):
        starts = range(first, first + rows * (length - 1), length - 1)
        yield (
            torch.stack([torch.from_numpy(tokens[i : i + length].astype(np.int64)) for i in starts]),
            torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + length].astype(np.int64)) for i in starts]),
        )


def widening(tokens: np.ndarray, rows: int, length: int) -> Iterator[None]:
    """Nothing but widening u16 to int64 twice, into buffers that stay in cache: what no reader can beat by much."""
    size = rows * length
    ring = np.empty((6, 2, size), np.int64)
    for number, first in enumerate(range(0, len(tokens) - size - 1, size)):
        np.copyto(ring[number % 6, 0], tokens[first : first + size])
        np.copyto(ring[number % 6, 1], tokens[first + 1 : first + 1 + size])
        yield


def stream(path: Path, rows: int, length: int, access: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for batch in TokenStream(path, length, rows, access=access):
        yield torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)


def drain(batches: Iterator[Any]) -> None:
    for _ in batches:
        pass


def packed_table(path: Path, flat: Path, repeats: int) -> list[dict[str, Any]]:
    tokens = np.memmap(flat, np.uint16, mode="r")
    rows_out = []
    print(f"\npacked batches in order, {len(tokens):,} tokens, medians of {repeats}")
    print(f"{'rows x positions':>18}{'reader':>28}{'M tokens/s':>12}{'x nanoGPT':>11}{'of the bound':>14}")
    for rows, length in SHAPES:
        runs: dict[str, Run] = {
            "memmap + torch (nanoGPT)": lambda r=rows, n=length: drain(nanogpt(tokens, r, n)),
            "bound: widening alone": lambda r=rows, n=length: drain(widening(tokens, r, n)),
            "TokenStream": lambda r=rows, n=length: drain(stream(path, r, n, "map")),
            "TokenStream, pread": lambda r=rows, n=length: drain(stream(path, r, n, "pread")),
        }
        seconds = median_seconds(runs, repeats)
        rates = {name: len(tokens) / median(values) for name, values in seconds.items()}
        for name, rate in rates.items():
            row = {
                "table": "packed",
                "rows": rows,
                "positions": length,
                "reader": name,
                "tokens_per_s": rate,
                "over_nanogpt": rate / rates["memmap + torch (nanoGPT)"],
                "of_bound": rate / rates["bound: widening alone"],
                "seconds": seconds[name],
            }
            rows_out.append(row)
            print(
                f"{f'{rows} x {length}':>18}{name:>28}{rate / 1e6:>12,.0f}{row['over_nanogpt']:>11.1f}"
                f"{row['of_bound']:>14.2f}"
            )
    return rows_out


# ------------------------------------------------------------------------------------------------- bucketed pairs


def padded(records: list[np.ndarray]) -> torch.Tensor:
    """What a collator does: end-of-text, the record, padding to the longest."""
    out = torch.full((len(records), 1 + max(map(len, records))), GPT2.eot, dtype=torch.int64)
    for row, record in enumerate(records):
        out[row, 1 : 1 + len(record)] = torch.from_numpy(record.astype(np.int64))
    return out


def megatron(folder: Path, records: list[np.ndarray]) -> tuple[str, Callable[[int], np.ndarray]] | None:
    try:
        from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
    except Exception as error:
        return _missing("megatron-core", error)
    builder = IndexedDatasetBuilder(str(folder / "m.bin"), dtype=np.uint16)
    for record in records:
        builder.add_document(torch.from_numpy(record.astype(np.int32)), [len(record)])
    builder.finalize(str(folder / "m.idx"))
    dataset = IndexedDataset(str(folder / "m"), mmap=True)
    return "Megatron-core IndexedDataset", lambda i: dataset[i]


def mosaic(folder: Path, records: list[np.ndarray]) -> tuple[str, Callable[[int], np.ndarray]] | None:
    try:
        from streaming import LocalDataset, MDSWriter
    except Exception as error:
        return _missing("mosaicml-streaming", error)
    with MDSWriter(out=str(folder / "mds"), columns={"tokens": "ndarray:uint16"}) as writer:
        for record in records:
            writer.write({"tokens": record})
    dataset = LocalDataset(str(folder / "mds"))
    return "mosaicml-streaming", lambda i: dataset[i]["tokens"]


def hugging_face(folder: Path, records: list[np.ndarray]) -> tuple[str, Callable[[int], np.ndarray]] | None:
    try:
        from datasets import Dataset, disable_progress_bars, load_from_disk
    except Exception as error:
        return _missing("datasets", error)
    disable_progress_bars()
    Dataset.from_dict({"input_ids": records}).save_to_disk(str(folder / "hf"))
    dataset = load_from_disk(str(folder / "hf")).with_format("numpy")
    return "HF datasets + collator", lambda i: dataset[i]["input_ids"]


def _missing(name: str, error: Exception) -> None:
    print(f"{name}: not measured ({type(error).__name__}: {str(error)[:80]})")


def bucketed_table(folder: Path, path: Path, records: int, repeats: int) -> list[dict[str, Any]]:
    shard = open_shard(path)
    records = min(records, len(shard))
    kept = [np.array(shard[i]) for i in range(records)]
    small = folder / "small.prsh"
    write_shard(small, kept, tokenizer=GPT2)
    lengths = np.fromiter(map(len, kept), np.int64, records)
    plan = bucket_plan(lengths, MICRO_BATCH, BUCKET, SEED)
    order = [[int(i) for i in pair if i >= 0] for pair in plan.micro_batches]

    def ours() -> None:
        for _ in TokenLoader(small, plan):
            pass

    runs: dict[str, Run] = {"TokenLoader": ours}
    for make in (megatron, mosaic, hugging_face):
        peer = make(folder, kept)
        if peer is not None:
            name, get = peer
            first = padded([get(i) for i in order[0]])
            own = next(iter(TokenLoader(small, plan))).tokens
            assert torch.equal(first, own), name  # the same tokens, in the same order
            runs[name] = lambda get=get: [padded([get(i) for i in pair]) for pair in order]
    seconds = median_seconds(runs, repeats)
    total = int(lengths.sum())
    print(f"\nbucketed pairs, {records:,} records, {total:,} tokens, medians of {repeats}")
    print(f"{'reader':>30}{'micro-batches/s':>18}{'M tokens/s':>12}{'ours over it':>14}")
    rows = []
    for name, values in seconds.items():
        ratio = median(values) / median(seconds["TokenLoader"])
        row = {
            "table": "bucketed",
            "reader": name,
            "micro_batches_per_s": len(order) / median(values),
            "tokens_per_s": total / median(values),
            "ours_over_it": ratio,
            "seconds": values,
        }
        rows.append(row)
        print(f"{name:>30}{row['micro_batches_per_s']:>18,.0f}{row['tokens_per_s'] / 1e6:>12,.0f}{ratio:>14.1f}")
    return rows


# ---------------------------------------------------------------------------------------------------- first batch


def sparse_shard(path: Path, records: int, length: int) -> None:
    """A shard of `records` x `length` zeros that takes no room for them on disk, laid out by docs/shard-format.md."""

    def up(offset: int) -> int:
        return (offset + 63) // 64 * 64

    tokens = records * length
    offsets_at = up(256 + tokens * 2)
    bytes_at = up(offsets_at + (records + 1) * 8)
    ids_at = up(bytes_at + records * 4)
    foot_at = up(ids_at + records * 8)
    head = bytearray(256)
    size = tokens * int(GPT2.token_bytes[0])
    struct.pack_into("<8sII4Q", head, 0, b"PRSMSHRD", 1, 2, records, tokens, size, foot_at + 64)
    struct.pack_into("<5Q2I", head, 48, 256, offsets_at, bytes_at, ids_at, foot_at, GPT2.n_vocab, GPT2.eot)
    head[96:128] = bytes.fromhex(GPT2.fingerprint)
    head[128:132] = b"gpt2"
    struct.pack_into("<Q", head, 248, _core.xxh64(bytes(head[:248])))
    foot = bytearray(64)
    foot[:8] = b"PRSMFOOT"  # section checksums stay 0: nothing verifies them here
    foot[40:48] = head[248:256]
    struct.pack_into("<Q", foot, 56, _core.xxh64(bytes(foot[:56])))
    with path.open("wb") as file:
        file.write(head)
        file.seek(offsets_at)
        file.write(np.arange(0, tokens + 1, length, dtype=np.uint64).tobytes())
        file.seek(bytes_at)
        file.write(np.full(records, length * int(GPT2.token_bytes[0]), np.uint32).tobytes())
        file.seek(foot_at)
        file.write(foot)


def first_batch_table(folder: Path, repeats: int) -> list[dict[str, Any]]:
    paths = [folder / f"sparse-{i}.prsh" for i in range(20)]
    for path in paths:
        sparse_shard(path, 65_536, 4096)
    size = sum(path.stat().st_size for path in paths)
    rows = []
    print(f"\nfirst batch after open, {len(paths)} shards, {size / 1e9:.1f} GB, medians of {repeats}")
    for name, options in (
        ("from the start", {}),
        ("in the middle", {"start_batch": 130_000}),
        ("bytes, from the start", {"basis": "bytes"}),
    ):
        seconds = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            with TokenStream(paths, 1024, 16, **options) as opened:
                next(opened)
                seconds.append(time.perf_counter() - start)
        seconds = seconds[1:]
        rows.append({"table": "first batch", "where": name, "gigabytes": size / 1e9, "seconds": seconds})
        print(f"{name:>30}{median(seconds) * 1e3:>10.1f} ms")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8_000_000, help="of the packed table")
    parser.add_argument("--records", type=int, default=4_000, help="of the bucketed table")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    torch.set_num_threads(1)  # rows this small are not worth a thread, and idle torch threads would spin
    print(machine())
    versions = {"numpy": np.__version__, "torch": torch.__version__}
    for name in ("megatron-core", "mosaicml-streaming", "datasets"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    print(versions)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = draw_lengths(arguments.tokens // 1000, LENGTHS, SEED)
        path = folder / "corpus.prsh"
        write_synthetic_shard(path, lengths, GPT2, SEED)
        flat = folder / "flat.bin"
        shard = open_shard(path)
        with flat.open("wb") as file:  # end-of-text before each document, as the stream has it
            for record in shard:
                file.write(np.uint16(GPT2.eot).tobytes() + record.tobytes())
        rows = packed_table(path, flat, arguments.repeats)
        rows += bucketed_table(folder, path, arguments.records, arguments.repeats)
        rows += first_batch_table(folder, arguments.repeats)
    save("reader", versions, rows)


if __name__ == "__main__":
    main()
