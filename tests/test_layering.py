"""The house's import order, and what importing the package may cost."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "prism_fast"
# A layer may import itself, its own level and what lies below.
LEVELS = [
    {"protocol"},
    {"data", "kernels"},
    {"report", "harness", "profiling", "integrations"},
    {"campaign"},
    {"cli"},
]
LEVEL_OF = {layer: level for level, layers in enumerate(LEVELS) for layer in layers}
FORBIDDEN = {("kernels", "data"), ("data", "kernels"), ("report", "harness"), ("report", "profiling")}
FORBIDDEN |= {("profiling", "harness"), ("profiling", "report"), ("harness", "report")}
ONLY = {"report": {"protocol"}, "integrations": {"kernels"}}


def imports_of(path: Path) -> set[str]:
    """Layers of ours that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "prism_fast":
                names += [f"prism_fast.{a.name}" for a in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "prism_fast" and len(parts) > 1 and parts[1] in LEVEL_OF:
                found.add(parts[1])
    return found


@pytest.mark.parametrize("layer", sorted(LEVEL_OF))
def test_imports_point_one_way(layer):
    files = list((PACKAGE / layer).rglob("*.py"))
    assert files
    for file in files:
        for imported in imports_of(file) - {layer}:
            assert LEVEL_OF[imported] <= LEVEL_OF[layer], f"{file} imports {imported}"
            assert (layer, imported) not in FORBIDDEN, f"{file} imports {imported}"
            assert imported in ONLY.get(layer, {imported}), f"{file} imports {imported}"


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_does_not_import_torch():
    assert not {"torch", "numpy", "pydantic"} & modules_after("import prism_fast")


def test_the_command_line_starts_without_torch_numpy_or_pydantic():
    assert not {"torch", "numpy", "pydantic", "pyarrow"} & modules_after("import prism_fast.cli.app")


def test_a_miner_who_takes_a_loss_does_not_pay_for_the_harness():
    loaded = modules_after("from prism_fast import cross_entropy, linear_cross_entropy, token_nll")
    assert "torch" in loaded
    assert not {"pydantic", "typer", "pyarrow", "tiktoken"} & loaded
    assert not any(name.startswith(("prism_fast.harness", "prism_fast.data", "prism_fast.cli")) for name in loaded)


def test_the_referee_needs_no_torch():
    assert "torch" not in modules_after("import prism_fast.harness.referee.referee, prism_fast.data.corpus")


def test_every_layer_has_its_tests_folder():
    for layer in LEVEL_OF:
        assert (ROOT / "tests" / layer).is_dir()
