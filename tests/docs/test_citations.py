"""A page that a comment or a docstring names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CITED = re.compile(r"[\w./-]*\b[\w-]+\.md\b")
OTHERS = {"doc/xxhash_spec.md"}  # of another project


def test_the_pages_that_sources_cite_exist():
    missing = []
    for folder, suffixes in (("prism_fast", {".py"}), ("benchmarks", {".py", ".md"}), ("csrc", {".hpp", ".cpp", ".h"})):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in suffixes:
                continue
            for name in CITED.findall(path.read_text()):
                if name not in OTHERS and not (ROOT / name).is_file() and not (path.parent / name).is_file():
                    missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing, "\n".join(missing)
