"""What does packing cost over tokenising alone, and are threads or processes the better workers?

    python -m benchmarks.packer [--quick] [--json]

The text is the sample corpus, repeated. The peer is tiktoken's `encode_ordinary` on the same cores: in one thread,
with tiktoken's own batch threads, and in processes that get chunks of documents. Packing reads JSONL, tokenises, checks
every document's bytes, and writes shards, checksums and a manifest.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import resources
from pathlib import Path

import orjson
import tiktoken

from benchmarks.measure import Table, median, parser_for
from prism_fast.data.pack import default_workers, pack
from prism_fast.data.tokenizers import reference_tokenizer

GPT2 = reference_tokenizer("gpt2")
COLUMNS = {
    "run": "34", "documents": ",", "mb": ".1f", "mb_per_s": ".1f", "of_best_raw": ".2f", "of_one_thread": ".2f",
}  # fmt: skip
CHUNK = 256  # documents a process is handed at once


def encode(texts: list[str]) -> int:
    assert GPT2.encoding is not None
    return sum(len(GPT2.encoding.encode_ordinary(text)) for text in texts)


def main() -> None:
    arguments = parser_for(__doc__, quick="a quarter of the text, twice").parse_args()
    copies, repeats = (8, 2) if arguments.quick else (32, 5)
    asset = resources.files("prism_fast.data").joinpath("assets", "kjv-chapters.jsonl.gz")
    texts = [orjson.loads(line)["text"] for line in gzip.decompress(asset.read_bytes()).splitlines()]
    texts *= copies
    chunks = [texts[i : i + CHUNK] for i in range(0, len(texts), CHUNK)]
    size = sum(len(text.encode()) for text in texts)
    workers = default_workers()
    table = Table("packer", {"tiktoken": tiktoken.__version__}, COLUMNS, arguments)
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
        for repeat in range(repeats + 1):
            for run, body in runs.items():
                start = time.perf_counter()
                body()
                if repeat:  # the first is the warm-up
                    seconds[run].append(time.perf_counter() - start)

    rates = {run: size / median(values) / 1e6 for run, values in seconds.items()}
    raw = {run: rate for run, rate in rates.items() if run.startswith("encode")}
    best = max(raw.values())
    for run, rate in rates.items():
        single = rates["encode_ordinary, 1 thread"]
        table.add(
            {"run": run, "documents": len(texts), "mb": size / 1e6, "mb_per_s": rate, "of_best_raw": rate / best,
             "of_one_thread": rate / single, "seconds": seconds[run]}
        )  # fmt: skip
    table.finish()


if __name__ == "__main__":
    main()
