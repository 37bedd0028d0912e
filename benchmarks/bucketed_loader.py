"""How fast do bucketed batches of random records come, against the loaders people use for that?

    python -m benchmarks.bucketed_loader [--batches 1000]

Every loader serves the same micro-batches in the same order from its own file format, warm in the page cache: int64
tokens and targets, end-of-text first, padded to the longest row. The peers hand out records; they share one collator,
which fills preallocated numpy arrays. They are called directly, in this process: no `DataLoader` in front, which would
only add to their time.

Peers that are not installed are left out. They are no dependency of the project; an environment of their own will do:
`datasets` (Hugging Face), `megatron-core` and `mosaicml-streaming` from PyPI.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.metadata
import json
import logging
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
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


def our_batches(loader: TokenLoader, start: dict[str, Any], count: int) -> Iterator[Batch]:
    loader.load_state_dict(start)
    for block in loader:
        yield block.tokens, block.targets
        if block.index + 1 == count:
            break


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
        count = min(count, len(plan) - 1)
        order = [plan[k].tolist() for k in range(count)]
        tokens = int(lengths[plan.records[: count * rows]].sum())

        loaders = {"ours": TokenLoader(path, plan), "ours, prefetch=0": TokenLoader(path, plan, prefetch=0)}
        start = loaders["ours"].state_dict()
        runs: dict[str, Callable[[], None]] = {
            name: lambda loader=loader: drain(our_batches(loader, start, count)) for name, loader in loaders.items()
        }
        for peer, (package, make) in PEERS.items():
            try:
                importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
            fetch = make(shard, folder)
            ours = our_batches(loaders["ours"], start, count)
            for (mine, my_targets), (theirs, their_targets) in zip(ours, peer_batches(fetch, order[:50]), strict=False):
                assert torch.equal(mine, theirs) and torch.equal(my_targets, their_targets), peer
            runs[peer] = lambda fetch=fetch: drain(peer_batches(fetch, order))
        seconds = median_seconds(runs, repeats)

    print(f"\n{name}: {len(lengths):,} records, mean {lengths.mean():.0f} tokens, {count} micro-batches of {rows}")
    print(f"{'loader':>26}{'us/batch':>10}{'M tokens/s':>12}{'ours is':>9}{'(prefetch=0)':>14}")
    ours, alone = median(seconds["ours"]), median(seconds["ours, prefetch=0"])
    result = []
    for loader, values in seconds.items():
        taken = median(values)
        print(
            f"{loader:>26}{taken / count * 1e6:>10.1f}{tokens / taken / 1e6:>12.1f}{taken / ours:>8.1f}x"
            f"{taken / alone:>13.1f}x"
        )
        result.append(
            {"corpus": name, "rows": rows, "batches": count, "tokens": tokens, "loader": loader, "seconds": values}
        )
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
        ("short documents", LogNormal(250, 0.8, 8, 8192), 30_000),
        ("field notes", FIELD_LENGTHS, 12_000),
    ):
        lengths = draw_lengths(records, distribution, 1)
        for micro_batch in (2, 8):
            rows += measure(name, lengths, micro_batch, arguments.batches, arguments.repeats)
    save("bucketed_loader", versions, rows)


if __name__ == "__main__":
    main()
