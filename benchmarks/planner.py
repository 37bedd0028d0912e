"""How fast is a bucket plan, against the same steps in numpy, and does its cost stay linear in time and memory?

    python -m benchmarks.planner [--records 10000000] [--most 100000000]

The peer does what docs/bucket-plan.md says with numpy's own generator: stable argsort, `permuted` inside buckets,
a permutation of the micro-batches.
"""

from __future__ import annotations

import argparse
import subprocess
import time

import numpy as np

from benchmarks.measure import machine, median, median_seconds, save
from prism_fast.data.plan import bucket_plan
from prism_fast.data.synthetic import FIELD_LENGTHS, draw_lengths
from prism_fast.harness.process.commands import child_environment, python_command

MICRO_BATCH, SEED = 2, 20260824

# Peak resident memory of a fresh process over what it held just before the call. VmHWM, not getrusage: ru_maxrss begins
# at what the parent held when it forked.
MEMORY = """
import sys
from prism_fast.data.plan import bucket_plan
from prism_fast.data.synthetic import FIELD_LENGTHS, draw_lengths
records, bucket = int(sys.argv[1]), int(sys.argv[2])

def peak():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

import numpy as np
lengths = np.empty(records, np.int32)  # drawn in pieces, so that drawing does not set the peak
for first in range(0, records, 1 << 20):
    piece = lengths[first : first + (1 << 20)]
    piece[:] = draw_lengths(len(piece), FIELD_LENGTHS, first)
bucket_plan(lengths[:1000], 2, bucket, 1)
before = peak()
plan = bucket_plan(lengths, 2, bucket, 1)
print(peak() - before, plan.records.nbytes, lengths.nbytes, peak())
"""


def numpy_plan(lengths: np.ndarray, bucket: int) -> np.ndarray:
    random = np.random.default_rng(SEED)
    order = np.argsort(lengths, kind="stable")
    order = random.permuted(order.reshape(-1, bucket), axis=1, out=order.reshape(-1, bucket))
    micro_batches = order.reshape(-1, MICRO_BATCH)
    return micro_batches[random.permutation(len(micro_batches))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--most", type=int, default=100_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    rows = []
    print(machine(), f"numpy {np.__version__}")

    lengths = draw_lengths(arguments.records, FIELD_LENGTHS, 1)
    print(f"\n{arguments.records:,} records, micro-batches of {MICRO_BATCH}: seconds (median of {arguments.repeats})")
    print(f"{'bucket':>8}{'numpy':>10}{'ours':>10}{'ratio':>8}")
    for bucket in (2, 8, 32, 128, 512):
        usable = lengths[: len(lengths) // bucket * bucket]
        seconds = median_seconds(
            {
                "numpy": lambda usable=usable, bucket=bucket: numpy_plan(usable, bucket),
                "ours": lambda usable=usable, bucket=bucket: bucket_plan(usable, MICRO_BATCH, bucket, SEED),
            },
            arguments.repeats,
        )
        peer, ours = median(seconds["numpy"]), median(seconds["ours"])
        rows.append({"question": "numpy", "records": len(usable), "bucket": bucket, "seconds": seconds})
        print(f"{bucket:>8}{peer:>10.3f}{ours:>10.3f}{peer / ours:>8.1f}")

    print("\ncost a record, bucket 8 (processor seconds do not count what neighbours on the machine take)")
    print(f"{'records':>12}{'wall s':>10}{'cpu s':>10}{'cpu ns/record':>15}")
    size = 100_000
    while size <= arguments.most:
        lengths = draw_lengths(size, FIELD_LENGTHS, 1)
        bucket_plan(lengths, MICRO_BATCH, 8, SEED)
        wall, processor = [], []
        for _ in range(arguments.repeats):
            before = time.perf_counter(), time.process_time()
            bucket_plan(lengths, MICRO_BATCH, 8, SEED)
            wall.append(time.perf_counter() - before[0])
            processor.append(time.process_time() - before[1])
        rows.append({"question": "scaling", "records": size, "bucket": 8, "seconds": wall, "cpu_seconds": processor})
        ours = median(processor)
        print(f"{size:>12,}{median(wall):>10.4f}{ours:>10.4f}{ours / size * 1e9:>15.1f}")
        size *= 10
    del lengths

    print("\npeak memory of a fresh process (VmHWM), bucket 8 and a bucket of 3, which leaves a third over")
    print(
        f"{'records':>12}{'bucket':>8}{'working B/record':>18}{'plan MB':>9}{'working+plan MB':>17}{'process MB':>12}"
    )
    for size in (arguments.records, arguments.most):
        for bucket in (8, 3):
            command = python_command("-c", MEMORY, str(size), str(bucket))
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=child_environment())
            out = done.stdout
            grown, plan, given, whole = (int(word) for word in out.split())
            rows.append(
                {"question": "memory", "records": size, "bucket": bucket, "grown_bytes": grown, "plan_bytes": plan,
                 "lengths_bytes": given, "process_bytes": whole}
            )  # fmt: skip
            working = (grown - plan) / size
            print(f"{size:>12,}{bucket:>8}{working:>18.1f}{plan / 1e6:>9.0f}{grown / 1e6:>17.0f}{whole / 1e6:>12.0f}")
    save("planner", {"numpy": np.__version__}, rows)


if __name__ == "__main__":
    main()
