"""What does packing cost over tokenising alone, and are threads or processes the better workers?

    python -m benchmarks.packer [--copies 32] [--repeats 5]

The text is the sample corpus, repeated. The peer is tiktoken's `encode_ordinary` on the same cores: in one thread,
with tiktoken's own batch threads, and in processes that get chunks of documents. Packing reads JSONL, tokenises, checks
every document's bytes, and writes shards, checksums and a manifest.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import orjson
import tiktoken

from benchmarks.measure import machine, median, save
from prism_fast.data.pack import default_workers, pack
from prism_fast.data.tokenizers import reference_tokenizer

GPT2 = reference_tokenizer("gpt2")
CHUNK = 256  # documents a process is handed at once


def encode(texts: list[str]) -> int:
    assert GPT2.encoding is not None
    return sum(len(GPT2.encoding.encode_ordinary(text)) for text in texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    asset = resources.files("prism_fast.data").joinpath("assets", "kjv-chapters.jsonl.gz")
    texts = [orjson.loads(line)["text"] for line in gzip.decompress(asset.read_bytes()).splitlines()]
    texts *= arguments.copies
    chunks = [texts[i : i + CHUNK] for i in range(0, len(texts), CHUNK)]
    size = sum(len(text.encode()) for text in texts)
    workers = default_workers()
    print(
        machine(), f"tiktoken {tiktoken.__version__}, {len(texts):,} documents, {size / 1e6:.1f} MB, {workers} workers"
    )

    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(workers) as pool:
        folder = Path(name)
        with (folder / "in.jsonl").open("wb") as file:
            for i, text in enumerate(texts):
                file.write(orjson.dumps({"id": str(i), "text": text}) + b"\n")

        def packing(count: int) -> None:
            shutil.rmtree(folder / "out", ignore_errors=True)
            pack([folder / "in.jsonl"], folder / "out", GPT2, workers=count)

        assert GPT2.encoding is not None
        batch = GPT2.encoding.encode_ordinary_batch
        runs: dict[str, Callable[[], object]] = {
            "encode_ordinary, 1 thread": lambda: encode(texts),
            f"encode_ordinary_batch, {workers} threads": lambda: batch(texts, num_threads=workers),
            f"encode_ordinary, {workers} processes": lambda: list(pool.map(encode, chunks)),
            "pack, 1 worker": lambda: packing(1),
            f"pack, {workers} workers": lambda: packing(workers),
        }
        seconds: dict[str, list[float]] = {run: [] for run in runs}
        for repeat in range(arguments.repeats + 1):
            for run, body in runs.items():
                start = time.perf_counter()
                body()
                if repeat:  # the first is the warm-up
                    seconds[run].append(time.perf_counter() - start)

    rates = {run: size / median(values) / 1e6 for run, values in seconds.items()}
    raw = {run: rate for run, rate in rates.items() if run.startswith("encode")}
    best = max(raw.values())
    rows: list[dict[str, Any]] = []
    print(f"\nmedians of {arguments.repeats}\n{'':>34}{'MB/s':>8}{'of the best raw rate':>22}{'of 1 thread':>13}")
    for run, rate in rates.items():
        share = rate / best
        single = rate / rates["encode_ordinary, 1 thread"]
        rows.append(
            {"run": run, "mb_per_s": rate, "of_best_raw": share, "of_one_thread": single, "seconds": seconds[run]}
        )
        print(f"{run:>34}{rate:>8.1f}{share:>22.2f}{single:>13.2f}")
    save("packer", {"tiktoken": tiktoken.__version__}, rows)


if __name__ == "__main__":
    main()
