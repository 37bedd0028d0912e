"""The page about programs says what the allow-list and the tests say."""

import importlib.util
import re
from pathlib import Path

from prism_fast.program import operators

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "programs.md").read_text()


def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def short(name: str) -> str:
    return name.removeprefix("aten.").removesuffix(".default")


def test_the_page_shows_every_operator_once():
    shown = hooks().on_page_markdown("<!-- operators -->")
    names = re.findall(r"`([^`]+)`", shown)
    assert sorted(names) == sorted(short(name) for name in operators.OPERATORS)
    counts = [int(count) for count in re.findall(r"^\| [a-z ]+ \| (\d+) \|", shown, re.MULTILINE)]
    assert sum(counts) == len(operators.OPERATORS) == int(shown.split()[0])


def test_every_condition_has_its_line():
    conditions = PAGE.partition("| operator | condition | why |")[2]
    named = set(
        re.findall(r"`([^`]+)`", "\n".join(line.split("|")[1] for line in re.findall(r"^\|.*$", conditions, re.M)))
    )
    held = {short(name) for name, operator in operators.OPERATORS.items() if operator.condition is not None}
    assert named == held | {short(name) for name in operators.GUARDED}


def test_every_family_of_transformers_that_is_tried_is_named():
    tried = re.findall(r'^    "(\w+)": \{', (ROOT / "tests" / "program" / "test_transformers.py").read_text(), re.M)
    tried += re.findall(
        r'^    "(\w+)": EXPERTS,', (ROOT / "tests" / "program" / "test_transformers.py").read_text(), re.M
    )
    said = PAGE.partition("## transformers")[2].partition("\n## ")[0]
    missing = [name for name in tried if not re.search(rf"\b{name}\b", said)]
    assert not missing and len(tried) == 41, (missing, len(tried))
