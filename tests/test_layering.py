"""The house's import order, the trust boundary, and what importing the package may cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "prism_fast"

# Rooms by level: a room may import itself, rooms of its own level and those below. Subrooms of the harness are named.
LEVELS = [
    {"protocol"},
    {"data", "kernels"},
    {"program", "integrations"},
    {"profiling", "harness.process", "harness.bundle", "harness.marking"},
    {"harness.hosting"},
    {"harness.referee"},
    {"harness.audits", "report", "harness.tracer", "harness.trainer", "harness.executor"},
    {"campaign"},
    {"cli"},
]
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
STARTED = ("harness.tracer", "harness.trainer", "harness.executor")  # processes: nobody imports them
HOSTS = ("harness.hosting", "harness.tracer", "harness.trainer")  # where a bundle's code runs
BY_NAME = ("", "data", "kernels.dispatch")  # modules that import others of ours lazily, by a name in a table
# What a room may import at all, where that is less than its level allows.
ONLY = {
    "report": {"protocol"},
    "integrations": {"kernels"},
    "program": {"protocol", "kernels"},
    "profiling": {"protocol", "kernels", "data", "program", "harness.process"},
    "kernels": {"protocol"},
    "data": {"protocol"},
    "harness.marking": {"protocol", "kernels", "data"},
    "harness.bundle": {"protocol", "harness.process"},
    "harness.hosting": {"protocol", "harness.process", "data"},
    "harness.executor": {"protocol", "kernels", "program", "harness.process", "harness.marking"},
}
NEVER = {("harness.referee", host) for host in HOSTS} | {("data", "kernels"), ("kernels", "data")}


def module_of(path: Path) -> str:
    """`harness.executor.main` of its file; a package's `__init__` is the package."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(module: str) -> str:
    first, _, rest = module.partition(".")
    return f"harness.{rest.partition('.')[0]}" if first == "harness" and rest else first


def is_type_checking(node: ast.AST) -> bool:
    test = node.test if isinstance(node, ast.If) else None
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node, in functions too, but for what only a type checker reads."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if is_type_checking(child):
            for other in child.orelse:
                yield from nodes_that_run(other)
        else:
            yield from nodes_that_run(child)


def imports_of(module: str) -> set[str]:
    """Modules of ours that a file imports, anywhere in it, and the packages above them, whose `__init__` runs too."""
    found: set[str] = set()
    for node in nodes_that_run(ast.parse(MODULES[module].read_bytes())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{MODULES[module]}: a relative import"
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            first, _, rest = name.partition(".")
            while first == "prism_fast" and rest:
                if rest in MODULES:
                    found.add(rest)
                rest = rest.rpartition(".")[0]
    return found - {module}


GRAPH = {module: imports_of(module) for module in MODULES}


def reached_from(room: str) -> dict[str, list[str]]:
    """Every module that importing a room's modules can come to import, with the way there."""
    ways = {module: [module] for module in MODULES if room_of(module) == room}
    assert ways, room
    queue = list(ways)
    while queue:
        module = queue.pop()
        for imported in GRAPH[module]:
            if imported not in ways:
                ways[imported] = [*ways[module], imported]
                queue.append(imported)
    return ways


def assert_unreached(room: str, *beginnings: str) -> None:
    for module, way in reached_from(room).items():
        for beginning in beginnings:
            assert not f"{module}.".startswith(f"{beginning}."), " -> ".join(way)


# --------------------------------------------------------------------------------------------------------- directions


@pytest.mark.parametrize("room", sorted(LEVEL_OF))
def test_imports_point_one_way(room):
    modules = [module for module in MODULES if room_of(module) == room]
    assert modules
    for module in modules:
        for imported in GRAPH[module]:
            other = room_of(imported)
            if other in ("", room, "harness") or other not in LEVEL_OF:
                continue
            assert LEVEL_OF[other] <= LEVEL_OF[room], f"{module} imports {imported}"
            assert other in ONLY.get(room, {other}), f"{module} imports {imported}"
            assert (room, other) not in NEVER, f"{module} imports {imported}"


def test_every_room_has_its_level():
    assert {room_of(module) for module in MODULES} - {"", "harness"} == set(LEVEL_OF)


@pytest.mark.parametrize("room", STARTED)
def test_a_process_is_started_and_imported_by_nobody(room):
    for module, imports in GRAPH.items():
        for imported in imports:
            assert room_of(imported) != room or room_of(module) == room, f"{module} imports {imported}"


# ------------------------------------------------------------------------------------------------- the trust boundary


def test_an_executor_cannot_come_by_a_bundles_code():
    assert_unreached(
        "harness.executor",
        *HOSTS,
        "harness.bundle",
        "harness.referee",
        "harness.audits",
        "program.capture",
        "data.corpus",
    )


def test_the_referee_cannot_come_by_a_bundles_code():
    assert_unreached("harness.referee", *HOSTS, "program.capture", "program.runnable")


def test_what_turns_predictions_into_sums_cannot_come_by_a_bundles_code():
    assert_unreached("harness.marking", *HOSTS, "harness.bundle", "program.capture")


@pytest.mark.parametrize("room", ["harness.executor", "harness.referee"])
def test_nothing_that_the_trusted_import_imports_by_name_or_runs_text(room):
    """No `import_module`, `__import__`, `runpy` or pickle, but `exec` of what the executor writes itself, whose every
    name is ours, and `import_module` of our own modules."""
    allowed = {"program.runnable": {"compile", "exec"}, **{module: {"import_module"} for module in BY_NAME}}
    for module, way in reached_from(room).items():
        for node in nodes_that_run(ast.parse(MODULES[module].read_bytes())):
            found = None
            if isinstance(node, ast.Import):
                found = next((a.name for a in node.names if a.name in ("runpy", "pickle", "marshal", "imp")), None)
                found = found or next((a.name for a in node.names if a.name.startswith("importlib.")), None)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "importlib":
                found = next((a.name for a in node.names if a.name in ("import_module", "util", "machinery")), None)
            elif isinstance(node, ast.Attribute) and node.attr in ("import_module", "__import__", "exec_module"):
                found = node.attr
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found = node.func.id if node.func.id in ("__import__", "exec", "eval", "compile") else None
            assert found is None or found in allowed.get(module, ()), f"{' -> '.join(way)}: {found}"


@pytest.mark.parametrize("module", BY_NAME)
def test_what_is_imported_by_name_is_our_own(module):
    calls = [n for n in ast.walk(ast.parse(MODULES[module].read_bytes())) if isinstance(n, ast.Call)]
    named = [ast.unparse(n.args[0]) for n in calls if ast.unparse(n.func).endswith("import_module")]
    assert named and all(name.lstrip("f").startswith("'prism_fast.") for name in named)


# ------------------------------------------------------------------------------------------------ what an import costs


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


@pytest.mark.parametrize(
    "statement",
    [
        "import prism_fast.harness.referee.referee, prism_fast.data.corpus",
        "import prism_fast.program.format, prism_fast.program.operators, prism_fast.program.sizes",
        "import prism_fast.harness.process.jobs, prism_fast.harness.process.shared_state",
    ],
)
def test_who_only_reads_programs_needs_no_torch(statement):
    assert "torch" not in modules_after(statement)


def test_an_executor_holds_nothing_of_a_host():
    loaded = modules_after("import prism_fast.harness.executor.main")
    ours = {name.removeprefix("prism_fast.") for name in loaded if name.startswith("prism_fast.")}
    assert not {name for name in ours if name.startswith((*HOSTS, "harness.bundle", "harness.referee"))}
    assert "program.runnable" in ours and "program.capture" not in ours


# ---------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("room", sorted(LEVEL_OF))
def test_every_room_has_its_tests_folder(room):
    # What hosts a bundle is tested where it is used: by whole runs of the trainer's and the tracer's.
    if room == "harness.hosting":
        room = "harness.trainer"
    assert any((ROOT / "tests" / room.replace(".", "/")).glob("test_*.py")), room
