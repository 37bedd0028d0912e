"""`prism-fast init`: a working bundle to start from, copied from the examples that ship with the package."""

from __future__ import annotations

from pathlib import Path

import prism_fast
from prism_fast.harness.bundle.bundle import SCRIPTS
from prism_fast.protocol.canonical import write_atomically
from prism_fast.protocol.errors import EngineFault, UsageError

DEFAULT_EXAMPLE = "fused_loss"


def examples() -> dict[str, Path]:
    """Every shipped example by name: inside an installed package, or beside it in a source tree."""
    package = Path(prism_fast.__file__).parent
    for folder in (package / "examples", package.parent / "examples"):
        found = {p.name: p for p in sorted(folder.glob("*")) if all((p / script).is_file() for script in SCRIPTS)}
        if found:
            return found
    raise EngineFault(f"{package / 'examples'}: no examples; expected them there, install the package again")


def summary(example: Path) -> str:
    """What an example is, in the first sentence of its architecture.py."""
    first = (example / "architecture.py").read_text().split('"""')[1].strip().split("\n\n")[0]
    return " ".join(first.split())


def write_starter(directory: Path, example: str = DEFAULT_EXAMPLE) -> list[Path]:
    """Copies `example` into `directory`, which is made; returns the files written.

    Raises UsageError for an example that does not exist, and rather than write over a script that is there.
    """
    known = examples()
    if example not in known:
        raise UsageError(f"--example {example}: no such example; expected {', '.join(known)}")
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory}: a file is in the way; expected a directory or nothing")
    targets = [directory / name for name in SCRIPTS]
    for target in targets:
        if target.exists():
            raise UsageError(f"{target}: is there already; choose another directory, nothing was written")
    directory.mkdir(parents=True, exist_ok=True)
    for target in targets:
        write_atomically(target, (known[example] / target.name).read_bytes())
    return targets
