"""`python -m benchmarks` runs every benchmark that needs no GPU, `python -m benchmarks losses` one."""

from __future__ import annotations

import importlib
import sys

# padding and planner, packer and reader, bucketed_loader: data.md's tables; losses: kernels.md's CPU rows;
# overhead, head_fusion, feed: what scoring costs; growth, startup, heldout: at length, before and after;
# step_time, mask: profiles.md's probes on the examples.
NAMES = (
    "losses",
    "planner",
    "padding",
    "packer",
    "reader",
    "bucketed_loader",
    "transformers_patch",
    "overhead",
    "head_fusion",
    "feed",
    "growth",
    "startup",
    "heldout",
    "step_time",
    "mask",
)


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"no benchmark named {unknown[0]!r}: expected one of {', '.join(NAMES)}", file=sys.stderr)
        return 2
    for name in names or NAMES:
        print(f"== {name}", flush=True)
        sys.argv = [name]  # what a benchmark parses are its own options
        importlib.import_module(f"benchmarks.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
