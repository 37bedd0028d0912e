"""How fast do bucketed batches of random records come, against the loaders people use for that?

    python -m benchmarks.bucketed_loader [--batches 1000]

Every loader serves the same micro-batches in the same order from its own file format, warm in the page cache: int64
tokens and targets, end-of-text first, padded to the longest row. Each repeat reads micro-batches that none before it
read, as an epoch does: nothing is warm that would not be. The peers hand out records; they share one collator, which
fills new numpy arrays, as collators do (ours writes recycled buffers). They are measured twice: called directly, in a
bare loop over a list of record numbers, which is the least they can take; and as they are used, behind torch's
`DataLoader` in this process (`num_workers=0`: a worker process adds the copy between processes).

Widths decide how much memory has to be written: "bound" is numpy filling buffers of the same sizes, recycled, with a
constant (memset, a copy and torch's fill_ take longer), about the least for tokens and targets in int64 on one core.

Peers that are not installed are left out. They are no dependency of the project; an environment of their own will do:
`datasets` (Hugging Face), `megatron-core` and `mosaicml-streaming` from PyPI.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.metadata
import itertools
import json
import logging
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import machine, median, median_seconds, save
from prism_fast.data import TokenLoader, bucket_plan, open_shard
from prism_fast.data.synthetic import FIELD_LENGTHS, LogNormal, draw_lengths, write_synthetic_shard
from prism_fast.data.tokenizers import reference_tokenizer

EOT, IGNORE = 50256, -100
Fetch = Callable[[Sequence[int]], Sequence[Any]]
Batch = tuple[Any, Any]


def collate(records: Sequence[Any]) -> Batch:
    width = max(map(len, records)) + 1
    tokens = np.full((len(records), width), EOT, np.int64)
    targets = np.full((len(records), width), IGNORE, np.int64)
    for row, record in enumerate(records):
        size = len(record)
        tokens[row, 1 : size + 1] = record
        targets[row, :size] = record
    return torch.from_numpy(tokens), torch.from_numpy(targets)


# ------------------------------------------------------------------------------------------------ peers


def numpy_memmap(shard: Any, folder: Path) -> Fetch:
    """The plainest peer: a memory-mapped file of ids and an array of offsets."""
    shard.tokens.tofile(folder / "tokens.bin")
    tokens = np.memmap(folder / "tokens.bin", shard.tokens.dtype, mode="r")
    bounds = shard.offsets.astype(np.int64).tolist()
    return lambda ids: [tokens[bounds[i] : bounds[i + 1]] for i in ids]


def hf_datasets(shard: Any, folder: Path) -> Fetch:
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    offsets = pa.array(shard.offsets.astype(np.int64))
    column = pa.LargeListArray.from_arrays(offsets, pa.array(shard.tokens.astype(np.int32)))
    table = pa.table({"input_ids": column.cast(pa.list_(pa.int32()))})
    datasets.Dataset(datasets.table.InMemoryTable(table)).save_to_disk(folder / "hf")
    # Of the output formats numpy is the fastest here: torch tensors and Python lists both take longer to make.
    dataset = datasets.load_from_disk(folder / "hf").with_format("numpy")
    return lambda ids: dataset[list(ids)]["input_ids"]


def megatron(shard: Any, folder: Path) -> Fetch:
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    prefix = str(folder / "megatron")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    for record in shard:
        builder.add_item(torch.from_numpy(record.astype(np.int32)))
        builder.end_document()
    builder.finalize(prefix + ".idx")
    dataset = IndexedDataset(prefix, mmap=True)
    return lambda ids: [dataset[i] for i in ids]


def mosaicml(shard: Any, folder: Path) -> Fetch:
    _without_torchvision()
    from streaming import MDSWriter, StreamingDataset

    with MDSWriter(out=str(folder / "mds"), columns={"tokens": "ndarray:uint16"}) as writer:
        for record in shard:
            writer.write({"tokens": np.asarray(record, np.uint16)})
    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=False, batch_size=1)
    return lambda ids: [dataset[int(i)]["tokens"] for i in ids]


def _without_torchvision() -> None:
    """mosaicml-streaming imports torchvision for its image datasets; where it is absent an empty one will do."""
    try:
        importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        for name in ("", ".datasets", ".transforms", ".transforms.functional"):
            module: Any = types.ModuleType("torchvision" + name)
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
            module.VisionDataset, module.to_tensor = object, None
            sys.modules[module.__name__] = module


PEERS: dict[str, tuple[str, Callable[[Any, Path], Fetch]]] = {
    "numpy memmap": ("numpy", numpy_memmap),
    "HF datasets": ("datasets", hf_datasets),
    "Megatron IndexedDataset": ("megatron-core", megatron),
    "mosaicml-streaming": ("mosaicml-streaming", mosaicml),
}


# ---------------------------------------------------------------------------------------------- measuring


def peer_batches(fetch: Fetch, order: list[list[int]]) -> Iterator[Batch]:
    return (collate(fetch(ids)) for ids in order)


class _Records:
    """A peer as `DataLoader` takes it, all records of a micro-batch at once."""

    def __init__(self, fetch: Fetch) -> None:
        self.__getitems__ = fetch


def data_loader_batches(fetch: Fetch, order: list[list[int]]) -> Iterator[Batch]:
    return iter(torch.utils.data.DataLoader(_Records(fetch), batch_sampler=order, collate_fn=collate))  # type: ignore


def our_batches(loader: TokenLoader, first: int, count: int) -> Iterator[Batch]:
    loader.load_state_dict({**loader.state_dict(), "next_step": first})
    for block in itertools.islice(loader, count):
        yield block.tokens, block.targets


def filled(ring: np.ndarray, widths: list[int], rows: int) -> Iterator[None]:
    for number, width in enumerate(widths):
        ring[number % 6, 0, : rows * width].fill(EOT)
        ring[number % 6, 1, : rows * width].fill(IGNORE)
        yield


def drain(batches: Iterator[Batch]) -> None:
    for _ in batches:
        pass


def measure(name: str, lengths: np.ndarray, rows: int, count: int, repeats: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = folder / "a.prsh"
        write_synthetic_shard(path, lengths, reference_tokenizer("gpt2"), seed=0)
        shard = open_shard(path)
        plan = bucket_plan(shard.lengths, rows, 4 * rows, seed=1)
        count = min(count, (len(plan) - 1) // (repeats + 1))
        order = [plan[k].tolist() for k in range(count * (repeats + 1))]
        widths = [int(lengths[ids].max()) + 1 for ids in order]
        tokens = int(lengths[plan.records[: len(order) * rows]].sum()) // (repeats + 1)

        bodies: dict[str, Callable[[int], Iterator[Any]]] = {}
        for prefetch in (4, 0):
            loader = TokenLoader(path, plan, prefetch=prefetch)
            bodies["ours" if prefetch else "ours, prefetch=0"] = partial(our_batches, loader, count=count)
        bodies["bound: filling alone"] = lambda first: filled(ring, widths[first : first + count], rows)
        ring = np.zeros((6, 2, rows * max(widths)), np.int64)
        for peer, (package, make) in PEERS.items():
            try:
                importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
            fetch = make(shard, folder)
            for way, batches in (("", peer_batches), (" + DataLoader", data_loader_batches)):
                ours = our_batches(loader, 0, 50)
                for mine, theirs in zip(ours, batches(fetch, order[:50]), strict=True):
                    assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1]), peer
                bodies[peer + way] = lambda first, fetch=fetch, batches=batches: batches(
                    fetch, order[first : first + count]
                )
        turns = {name: itertools.count(0, count) for name in bodies}
        runs = {name: lambda body=body, turn=turns[name]: drain(body(next(turn))) for name, body in bodies.items()}
        seconds = median_seconds(runs, repeats)

    print(f"\n{name}: {len(lengths):,} records, mean {lengths.mean():.0f} tokens, {count} micro-batches of {rows}")
    print(f"{'loader':>38}{'us/batch':>10}{'M tokens/s':>12}{'ours is':>9}{'(prefetch=0)':>14}")
    ours, alone = median(seconds["ours"]), median(seconds["ours, prefetch=0"])
    result = []
    for loader, values in seconds.items():
        taken = median(values)
        print(
            f"{loader:>38}{taken / count * 1e6:>10.1f}{tokens / taken / 1e6:>12.1f}{taken / ours:>8.1f}x"
            f"{taken / alone:>13.1f}x"
        )
        result.append(
            {"corpus": name, "rows": rows, "batches": count, "tokens": tokens, "loader": loader,
             "us_per_batch": taken / count * 1e6, "ours_over_it": taken / ours, "alone_over_it": taken / alone,
             "seconds": values}
        )  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    versions = {"torch": torch.__version__}
    for package, _ in PEERS.values():
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed, not measured"
    print(machine(), json.dumps(versions))
    rows = []
    for name, distribution, records in (
        ("short documents", LogNormal(250, 0.8, 8, 8192), 60_000),
        ("field notes", FIELD_LENGTHS, 24_000),
    ):
        lengths = draw_lengths(records, distribution, 1)
        for micro_batch in (2, 8):
            rows += measure(name, lengths, micro_batch, arguments.batches, arguments.repeats)
    save("bucketed_loader", versions, rows)


if __name__ == "__main__":
    main()
