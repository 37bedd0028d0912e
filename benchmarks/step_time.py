"""Where does a training step's time go, and does it grow as the cost model says?

    python -m benchmarks.step_time [BUNDLE …] [--widths 64,128,256,512]

For each bundle (by default the example decoder and the same with our loss): one step at several widths, which take
turns in one process, and the fit t(w) = A w + B w^2 + constant; then the kinds of kernels of one width. On the CPU with
one thread and in processor time, which neighbours on a shared machine do not add to; on a GPU by events. The commands
behind it are `prism-fast profile scaling` and `prism-fast profile kernels`, for any bundle.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import machine, save
from prism_fast.profiling.bundle_process import BundleJob
from prism_fast.profiling.kernels import measure_kernels
from prism_fast.profiling.scaling import measure_scaling
from prism_fast.report.probes import print_probe

EXAMPLES = Path(__file__).parent.parent / "examples"
BUNDLES = (EXAMPLES / "transformer_tiny", EXAMPLES / "fused_loss")


def measure(bundle: Path, widths: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    job = BundleJob(bundle, widths, 0, {}, torch_threads=1)
    scaling = measure_scaling(job, repeats, processor=not torch.cuda.is_available())
    print_probe(scaling)
    kernels = measure_kernels(replace(job, widths=widths[-1:]))
    print_probe(kernels)
    rank = kernels["ranks"][0]
    common = {"bundle": bundle.name, "device": scaling["device"], "batch_size": scaling["batch_size"]}
    fit = {k: v for k, v in scaling.items() if k not in ("machine", "schema", "submission_id", "device", "batch_size")}
    groups = {g["group"]: g["seconds"] / kernels["steps"] for g in rank["groups"]}
    return [
        {**common, "what": "scaling", **fit},
        {**common, "what": "kernels", "width": widths[-1], "covered": rank["covered"], "named": rank["named"],
         "step_s": rank["window_s"] / kernels["steps"], "seconds_by_group": groups},
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="*", type=Path, default=BUNDLES)
    parser.add_argument("--widths", default="64,128,256,512")
    parser.add_argument("--repeats", type=int, default=12)
    arguments = parser.parse_args()
    print(machine())
    widths = tuple(int(word) for word in arguments.widths.split(","))
    rows = []
    for bundle in arguments.bundles:
        rows += measure(bundle, widths, arguments.repeats)
    save("step_time", {"torch": torch.__version__}, rows)


if __name__ == "__main__":
    main()
