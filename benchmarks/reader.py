"""How fast do packed batches come out of shards, against what people read tokens with today?

    python -m benchmarks.reader [--tokens 16000000] [--repeats 9]

Two tables: packed batches in order (warm cache) against nanoGPT's reading of a numpy memmap and against two bounds; and
the time from opening 10 GB of shards to the first batch. Both readers end in int64 torch tensors, tokens and targets;
nanoGPT's are new ones every time, ours are views of recycled buffers. The bounds do nothing but write the same sizes
into the same number of recycled buffers: widening u16 to int64 twice with numpy, and filling the
buffers with a constant, about the least for two int64 a token on one core.
"""

from __future__ import annotations

import argparse
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
from prism_fast.data import TokenLoader, TokenStream, open_shard, reference_tokenizer
from prism_fast.data.synthetic import LogNormal, draw_lengths, write_synthetic_shard

GPT2 = reference_tokenizer("gpt2")
SHAPES = ((8, 128), (8, 1024), (16, 2048))  # rows, positions
LENGTHS = LogNormal(median=780, sigma=0.8, shortest=16, longest=16384)
SEED = 20260824
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


def filling(rows: int, length: int, batches: int) -> Iterator[None]:
    """Nothing but writing as much: the bandwidth of the buffers themselves."""
    ring = np.zeros((6, 2 * rows * length), np.int64)
    for number in range(batches):
        ring[number % 6].fill(number)
        yield


def packed(loader: TokenLoader, start: dict[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    loader.load_state_dict(start)
    for block in loader:
        yield block.tokens, block.targets


def drain(batches: Iterator[Any]) -> None:
    for _ in batches:
        pass


def packed_table(path: Path, flat: Path, repeats: int) -> list[dict[str, Any]]:
    tokens = np.memmap(flat, np.uint16, mode="r")
    rows_out = []
    print(f"\npacked batches in order, {len(tokens):,} tokens, medians of {repeats}")
    print(
        f"{'rows x positions':>18}{'reader':>28}{'M tokens/s':>12}{'x nanoGPT':>11}"
        f"{'of widening':>14}{'of filling':>13}"
    )
    for rows, length in SHAPES:
        loaders = {access: TokenLoader(path, "packed", rows, length, access=access) for access in ("map", "pread")}
        mapped, read = loaders["map"], loaders["pread"]
        start = mapped.state_dict()
        first = next(mapped)
        for ours, theirs in zip(
            (first.tokens, first.targets[:, :-1]), next(nanogpt(tokens, rows, length)), strict=True
        ):
            assert torch.equal(ours, theirs[:, : ours.shape[1]])
        runs: dict[str, Run] = {
            "memmap + torch (nanoGPT)": lambda r=rows, n=length: drain(nanogpt(tokens, r, n)),
            "bound: widening alone": lambda r=rows, n=length: drain(widening(tokens, r, n)),
            "bound: filling alone": lambda r=rows, n=length, loader=mapped: drain(filling(r, n, len(loader))),
            "TokenLoader": lambda loader=mapped, at=start: drain(packed(loader, at)),
            "TokenLoader, pread": lambda loader=read, at=start: drain(packed(loader, at)),
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
                "of_filling": rate / rates["bound: filling alone"],
                "seconds": seconds[name],
            }
            rows_out.append(row)
            print(
                f"{f'{rows} x {length}':>18}{name:>28}{rate / 1e6:>12,.0f}{row['over_nanogpt']:>11.1f}"
                f"{row['of_bound']:>14.2f}{row['of_filling']:>13.2f}"
            )
    return rows_out


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
    parser.add_argument("--tokens", type=int, default=16_000_000, help="of the packed table")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # rows this small are not worth a thread, and idle torch threads would spin
    print(machine())
    versions = {"numpy": np.__version__, "torch": torch.__version__}
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
        rows += first_batch_table(folder, arguments.repeats)
    save("reader", versions, rows)


if __name__ == "__main__":
    main()
