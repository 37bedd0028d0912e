"""Children import from Python's own folders and the package's: not from where a shell stands, nor beside a bundle."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prism_fast.harness.process.commands import child_command, child_environment, python_command
from tests.harness.conftest import ROOT, TINY_ARCHITECTURE, TINY_TRAINING, write_bundle

HELPER = ROOT / "prism_fast/harness/process/commands.py"
NO_PYTHON = {ROOT / "prism_fast/harness/process/isolation.py"}  # starts bwrap
STARTERS = {f"subprocess.{name}" for name in ("run", "Popen", "call", "check_call", "check_output")}
# One of the standard library, ours and others'; the file beside a bundle and in the shell's folder are the same.
PLANTED = ("orjson", "torch", "numpy", "random", "prism_fast", "typer", "pydantic", "selectors")
TRAP = "import os\nopen(os.environ['PRISM_TRAP'], 'a').write(__name__ + ' in ' + ' '.join(os.sys.argv) + chr(10))\n"


def sources() -> list[Path]:
    return [path for folder in ("prism_fast", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_the_interpreter_is_named_in_one_place_and_no_child_has_another_environment():
    faults = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Attribute) and node.attr == "executable" and path != HELPER:
                faults.append(f"{path}:{node.lineno}: use child_command or python_command")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in STARTERS and path not in NO_PYTHON:
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if ROOT / "prism_fast" in path.parents and "child_environment(" not in given.get("env", ""):
                    faults.append(f"{path}:{node.lineno}: give the child env=child_environment(...)")
    assert not faults, "\n".join(faults)


def test_a_child_and_its_children_have_the_safe_path(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('planted')")
    grandchild = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', 'import json']).returncode)"
    for command in (python_command("-c", grandchild), child_command("json.tool", "--help")):
        done = subprocess.run(command, cwd=tmp_path, env=child_environment(), capture_output=True)
        assert done.returncode == 0, done.stderr


def test_the_search_path_loses_where_the_child_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"PYTHONPATH": f":/some/where::mine{os.pathsep}"}
    assert child_environment(given)["PYTHONPATH"] == f"/some/where:{tmp_path}/mine"
    assert child_environment({"PYTHONPATH": ":"}) == {"PYTHONSAFEPATH": "1"}
    assert child_environment({"A": "1"}, {"A": "2", "PYTHONSAFEPATH": ""}) == {"A": "2", "PYTHONSAFEPATH": "1"}


# ------------------------------------------------------------------------------------------------------ whole commands


@pytest.fixture
def planted(tmp_path, cache_dir):
    """A shell's folder with traps in it, which holds a bundle with traps beside its scripts."""
    here = tmp_path / "here"
    bundle = write_bundle(here / "bundle", TINY_ARCHITECTURE, TINY_TRAINING)
    for folder in (here, bundle):
        for name in PLANTED:
            (folder / f"{name}.py").write_text(TRAP)
    trap = tmp_path / "sprung"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONSAFEPATH", "PYTHONPATH")}
        done = subprocess.run(
            [str(Path(sys.executable).parent / "prism-fast"), *arguments],
            cwd=here,
            env={**environment, "PRISM_TRAP": str(trap)},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert not trap.exists(), trap.read_text()
        assert done.returncode == 0, done.stderr
        return done

    (here / "cache").symlink_to(cache_dir)
    run.cache = "--cache-dir=cache"
    return run


SHORT = ("--seq-len=64", "--step-budget=4", "--val-byte-budget=2000")


def test_doctor_imports_nothing_from_where_it_stands(planted):
    planted("doctor")


@pytest.mark.parametrize(("seal", "nproc"), [("open", 1), ("open", 2), ("sealed", 1)])
def test_score_imports_nothing_from_where_it_stands(planted, seal, nproc):
    """Two ranks are torchrun's own workers; sealed, there are a tracer and an executor. Every path is relative."""
    planted("score", "bundle", "--out=run", "--data=sample", f"--seal={seal}", f"--nproc={nproc}", "--policy=flag",
            "--metrics=scored.prom", planted.cache, *SHORT)  # fmt: skip


@pytest.mark.parametrize(
    "probe",
    [
        ("kernels", "--steps=1", "--warmup=1", "--seq-len=32"),
        pytest.param(("scaling", "--widths=16,32,64", "--repeats=1"), marks=pytest.mark.long),
        pytest.param(("overhead", "--steps=4", "--repeats=1", "--modes=bare,open"), marks=pytest.mark.long),
    ],
    ids=lambda probe: probe[0],
)
def test_profile_imports_nothing_from_where_it_stands(planted, probe):
    planted("profile", probe[0], "bundle", planted.cache, *probe[1:])


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_a_campaign_s_workers_import_nothing_from_where_it_stands(planted):
    planted("campaign", "bundle", "--data=sample", "--out=campaign", "--seeds=1", planted.cache,
            "--", "--seal=open", *SHORT)  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.long
def test_packing_on_a_cluster_imports_nothing_from_where_it_stands(planted, tmp_path):
    (tmp_path / "here/text.jsonl").write_text('{"text": "some text"}\n' * 50)
    planted("pack", "text.jsonl", "--out=packed", "--address=local")
