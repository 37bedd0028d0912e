"""`python -m benchmarks` runs every benchmark that needs no GPU, `python -m benchmarks losses` one."""

from __future__ import annotations

import importlib
import sys

# The tables of docs/performance.md, in its order but for what takes long; probe_power: docs/security.md's table;
# step_time, mask: docs/profiles.md's probes on the examples.
NAMES = (
    "losses",
    "planner",
    "padding",
    "packer",
    "reader",
    "bucketed_loader",
    "transformers_patch",
    "overhead",
    "executor",
    "feed",
    "growth",
    "startup",
    "heldout",
    "probe_power",
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
