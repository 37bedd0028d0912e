"""What does writing the causal mask out cost against `is_causal`, and a sliding window against both?

    python -m benchmarks.mask [--widths 256,512,1024,2048]

One attention, forward and backward, at fixed shapes; the masks take turns in one process. On a GPU in bfloat16 by
events; on the CPU in float32, with one thread and in processor time, which neighbours do not add to.
`prism-fast profile mask BUNDLE` says which of them a bundle's layers take.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.measure import machine, save
from prism_fast.profiling.mask import time_masks

HEADS, HEAD_WIDTH = 8, 64


def measure(width: int, repeats: int) -> list[dict[str, Any]]:
    on_gpu = torch.cuda.is_available()
    shape = [2, HEADS, width, HEAD_WIDTH]
    call = {
        "query": shape,
        "key": shape,
        "dtype": "bfloat16" if on_gpu else "float32",
        "device": "cuda" if on_gpu else "cpu",
    }
    timed = time_masks(call, window=max(2, width // 8), repeats=repeats, processor=not on_gpu)
    for row in timed["rows"]:
        print(f"{width:>8}  {row['mask']:<22} {row['ms']:>10.3f} ms {row['ratio']:>8.3f} of is_causal", flush=True)
    return [{"width": width, "shape": shape, "dtype": call["dtype"], "device": call["device"], **row}
            for row in timed["rows"]]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="256,512,1024,2048")
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    print(machine())
    torch.set_num_threads(1)
    rows = []
    for width in arguments.widths.split(","):
        rows += measure(int(width), arguments.repeats)
    save("mask", {"torch": torch.__version__}, rows)


if __name__ == "__main__":
    main()
