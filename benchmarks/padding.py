"""How much padding does bucketing take away, and what would it save?

    python -m benchmarks.padding [--records 10000000]

On the sample corpus (GPT-2 lengths), on a corpus that the field notes on training throughput describe, and on the same
at scale. Time is predicted with the cost model those notes fitted, t(w) = A w + B w^2.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import numpy as np

from benchmarks.measure import machine, save
from prism_fast.data import resolve_data
from prism_fast.data.plan import compare_buckets
from prism_fast.data.synthetic import FIELD_COST, FIELD_LENGTHS, FIELD_RECORDS, draw_lengths, draw_sources

BUCKETS = (2, 8, 32, 128, 512)
SEED = 20260824


def table(title: str, lengths: np.ndarray, sources: np.ndarray | None) -> list[dict[str, Any]]:
    _, reports = compare_buckets(lengths, 2, BUCKETS, SEED, sources=sources, cost=FIELD_COST)
    print(f"\n{title}: {len(lengths):,} records, {reports[0]['real_tokens']:,} tokens, micro-batches of 2")
    print(
        f"{'bucket':>10}{'padded tokens':>18}{'waste':>8}{'mean w':>9}{'zero-pad':>10}{'adjacent r':>12}"
        f"{'sources mean/min':>18}{'step s':>9}{'tokens saved':>14}{'time saved':>12}"
    )
    for row in reports:
        bucket = "file order" if row["bucket"] is None else row["bucket"]
        mixing = "-" if row["sources_mean"] is None else f"{row['sources_mean']:.2f}/{row['sources_min']}"
        print(
            f"{bucket:>10}{row['padded_tokens']:>18,}{row['waste']:>8.1%}{row['mean_width']:>9.0f}"
            f"{row['zero_pad_micro_batches'] / row['micro_batches']:>10.1%}{row['adjacent_correlation']:>+12.3f}"
            f"{mixing:>18}{row['predicted_step_s']:>9.2f}{row['saved_padded_tokens']:>14.1%}{row['saved_time']:>12.1%}"
        )
    return [{"corpus": title, **row} for row in reports]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=10_000_000, help="of the corpus at scale")
    arguments = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as cache:
        corpus = resolve_data("sample", "gpt2", cache_dir=cache)
        shards = [shard for name in corpus.splits for shard in corpus.split(name).open()]
        lengths = np.concatenate([shard.lengths for shard in shards])
    rows = table("sample, all splits", lengths, None)
    for title, records in (("field notes", FIELD_RECORDS), ("field notes, at scale", arguments.records)):
        rows += table(title, draw_lengths(records, FIELD_LENGTHS, 1), draw_sources(records, 12, 2))
    save("padding", {"numpy": np.__version__}, rows)


if __name__ == "__main__":
    main()
