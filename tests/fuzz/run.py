"""Builds and runs the fuzzers: `python -m tests.fuzz.run --inputs 1000000 --out benchmarks/results/fuzz.json`.

The C++ parsers run under AddressSanitizer and UndefinedBehaviorSanitizer (fuzz_data.cpp); the Python ones run here.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.messages import fuzz_messages, fuzz_tracers
from tests.fuzz.zips import fuzz_zips

ROOT = Path(__file__).resolve().parents[2]


def build() -> Path:
    """The sanitized driver, built (again) where its sources are newer."""
    folder = ROOT / "build" / "fuzz"
    ninja = shutil.which("ninja") or str(Path(sys.executable).parent / "ninja")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if Path(ninja).exists() else []
    for command in (
        ["cmake", *generator, "-S", str(ROOT / "tests" / "fuzz"), "-B", str(folder)],
        ["cmake", "--build", str(folder), "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return folder / "fuzz_data"


def fuzz_core(inputs: int, seed: int, processes: int = 1) -> dict[str, int]:
    """Runs `inputs` mutated files; RuntimeError with the sanitizer's report at the first fault. Inputs by format."""
    driver = build()
    share = -(-inputs // processes)
    running = [
        subprocess.Popen(
            [str(driver), str(share), str(seed + i * share)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(processes)
    ]
    counts: dict[str, int] = {}
    for process in running:
        out, err = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{' '.join(process.args)}: {err[-6000:]}")  # type: ignore[arg-type]
        for line in out.splitlines()[:-1]:
            name, count = line.split()
            counts[name] = counts.get(name, 0) + int(count)
    return counts


def mutated(data: bytes, source: random.Random) -> bytes:
    """`data` with a few bytes flipped, set, cut, doubled or moved."""
    out = bytearray(data)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(out) + 1)
        match source.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << source.randrange(8)
            case 1 if at < len(out):
                out[at] = source.randrange(256)
            case 2:
                del out[at:]
            case 3:
                out[at:at] = source.randbytes(source.randrange(9))
            case 4:
                out[at:at] = out[max(0, at - source.randrange(40)) : at]
            case 5:
                del out[at : at + source.randrange(9)]
    return bytes(out)


def fuzz_python(inputs: int, seed: int) -> dict[str, int]:
    """Manifests of corpora and plans, text in every wrapping, rank files: one of our errors or a good result."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    from prism_fast.data.corpus import corpus_faults, open_corpus
    from prism_fast.data.documents import DocumentReader, find_sources
    from prism_fast.data.pack import pack
    from prism_fast.data.plan import bucket_plan, fit_rows, read_manifest, write_manifest
    from prism_fast.data.tokenizers import parse_ranks, reference_tokenizer
    from prism_fast.protocol.errors import DataError, UsageError

    source = random.Random(seed)
    lines = b"".join(
        json.dumps({"id": f"d{i}", "text": text}).encode() + b"\n"
        for i, text in enumerate(["plain", "", "é🙂\ud800", "a\nb", "\x00" * 3, "<|endoftext|>"])
    )
    ranks = (ROOT / "prism_fast/data/assets/gpt2.tiktoken").read_bytes()[:4000]
    wrap = {
        "jsonl": lambda data: data,
        "jsonl.gz": lambda data: gzip.compress(data, 1),
        "jsonl.zst": zstandard.compress,
    }
    table = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": ["a", "b"], "text": ["some text", None]}), table)
    parquet = table.getvalue().to_pybytes()
    lengths = np.arange(1, 40)
    counts = dict.fromkeys(("manifest", "plan", "ranks", "parquet", *wrap), 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in.jsonl").write_bytes(lines)
        pack([folder / "in.jsonl"], folder / "out", reference_tokenizer("bytes"), documents_per_shard=4)
        manifest = (folder / "out/MANIFEST.json").read_bytes()
        rows = fit_rows(lengths, 30, "split")
        ordered = bucket_plan(rows.length, 2, 8, 1)
        write_manifest(folder / "plan.json", ordered, corpus={"name": "c"}, rows=rows, truncation={}, report={})
        plan = (folder / "plan.json").read_bytes()
        for i in range(inputs):
            kind = list(counts)[i % len(counts)]
            try:
                if kind == "manifest":
                    (folder / "out/MANIFEST.json").write_bytes(mutated(manifest, source))
                    open_corpus(folder / "out")
                    list(corpus_faults(folder / "out"))
                elif kind == "ranks":
                    parse_ranks(mutated(ranks, source), "ranks")
                elif kind == "plan":
                    (folder / "plan.json").write_bytes(mutated(plan, source))
                    read_manifest(folder / "plan.json", lengths)
                else:
                    path = folder / f"a.{kind}"
                    if kind == "parquet":
                        path.write_bytes(mutated(parquet, source))
                    else:
                        data = mutated(lines, source) if source.random() < 0.8 else lines
                        wrapped = wrap[kind](data)
                        path.write_bytes(wrapped if kind == "jsonl" else mutated(wrapped, source))
                    reader = DocumentReader(find_sources([path]), on_error=source.choice(["raise", "skip"]))
                    for document in reader:
                        document.data.decode()
            except (DataError, UsageError):
                pass
            except Exception as error:
                raise RuntimeError(f"input {i} of seed {seed} ({kind}): {type(error).__name__}: {error}") from error
            counts[kind] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    core = fuzz_core(options.inputs, options.seed, processes=min(2, os.cpu_count() or 1))
    python = fuzz_python(options.inputs // 20, options.seed)
    zips = fuzz_zips(options.inputs // 20, options.seed)
    loaded = zips.pop("loaded")
    messages = fuzz_messages(options.inputs // 20, options.seed)
    tracers = fuzz_tracers(options.inputs // 20, options.seed)
    result = {
        "question": "does any mutated file crash a parser?",
        "inputs": sum(core.values())
        + sum(python.values())
        + sum(zips.values())
        + sum(messages.values())
        + sum(tracers.values()),
        "faults": 0,
        "seed": options.seed,
        "core (ASan + UBSan)": core,
        "python": python,
        "zipped bundles": {**zips, "of these still good": loaded},
        "conversations with the referee": messages,
        "files of a tracer": tracers,
        "seconds": round(time.perf_counter() - started, 1),
        "machine": {"python": platform.python_version(), "processor": platform.machine(), "cores": os.cpu_count()},
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
