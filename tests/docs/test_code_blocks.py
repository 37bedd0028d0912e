"""What the documentation shows works: Python is executed, commands exist with their options, errors are ours.

On a page, Python blocks share one namespace, in order; `<!-- run ... -->` holds code that only a test needs. A block
after `<!-- slow -->` runs in the slow tests.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from prism_fast.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "packaging" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:(<!-- slow -->)\n)?^```(python|bash|)\n(.*?)^```$|^<!-- run\n(.*?)^-->$", re.MULTILINE | re.DOTALL
)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[tuple[bool, str]]:
    """(slow, code) of every block in `language`; what only tests need is Python."""
    found = []
    for slow, fence, code, hidden in BLOCK.findall(page.read_text()):
        if (fence or ("python" if hidden else "bash")) == language:
            found.append((bool(slow), hidden or code))
    return found


WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
QUICKSTARTS = sorted((ROOT / "docs" / "start").glob("*.md"))


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "documentation"}
    for _, code in blocks(page, "python"):
        exec(compile(code, name_of(page), "exec"), namespace)


def commands(page: Path) -> list[str]:
    """Every `prism-fast ...` line of a page's code, fenced or indented, its continuation lines joined."""
    code = "\n".join(code for _, code in blocks(page, "bash"))
    code += "\n" + "\n".join(re.findall(r"^    (?! )(.*(?:\\\n.*)*)$", page.read_text(), re.MULTILINE))
    lines = code.replace("\\\n", " ").splitlines()
    return [line.strip().partition("  #")[0] for line in lines if line.strip().startswith("prism-fast ")]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_the_commands_of_a_page_exist_with_their_options(page):
    for line in commands(page):
        command = get_command(app)
        words = shlex.split(line)[1:]
        while hasattr(command, "commands") and words and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        assert not hasattr(command, "commands") or words[:1] == ["COMMAND"] or words == ["--version"], line
        if hasattr(command, "commands"):
            continue
        known = {option for p in command.params for option in (*p.opts, *p.secondary_opts)} | {"--help"}
        own, _, passed_on = " ".join(words).partition(" -- ")
        assert {w.partition("=")[0] for w in own.split() if w.startswith("--")} <= known, line
        score = {o for p in get_command(app).commands["score"].params for o in p.opts}
        assert {w.partition("=")[0] for w in passed_on.split() if w.startswith("--")} <= score, line


def run_bash(page: Path, folder: Path, slow: bool) -> None:
    """Runs a page's bash blocks in one shell, in `folder`, which sees the examples; installing is not run again."""
    for wanted in ("examples", "benchmarks"):  # copied: a benchmark writes its results beside itself
        shutil.copytree(ROOT / wanted, folder / wanted, ignore=shutil.ignore_patterns("__pycache__"))
    code = [code for is_slow, code in blocks(page, "bash") if slow or not is_slow]
    lines = [line for block in code for line in block.splitlines()]
    lines = [line for line in lines if not line.startswith(("make install", ". .venv"))]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    done = subprocess.run(
        ["bash", "-euc", "\n".join(lines)], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", [p for p in QUICKSTARTS if any(not s for s, _ in blocks(p, "bash"))], ids=name_of)
def test_the_light_commands_of_a_quickstart_run(page, tmp_path):
    run_bash(page, tmp_path, slow=False)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("page", QUICKSTARTS, ids=name_of)
def test_a_whole_quickstart_runs(page, tmp_path):
    run_bash(page, tmp_path, slow=True)


def sources() -> str:
    """The package's text, with string literals that stand one below the other joined, and fields left as they are."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "prism_fast").rglob("*.py")))
    return re.sub(r'"\s*\n?\s*(?:\+ )?f?r?"', "", text).replace("`", "")


def test_every_error_of_the_page_is_one_that_the_package_says():
    text = sources()
    headings = re.findall(r"^### (.*)$", (ROOT / "docs" / "faq.md").read_text(), re.MULTILINE)
    assert len(headings) > 30
    for heading in headings:
        assert heading.startswith("`") and heading.endswith("`"), heading
        for part in heading.strip("`").split("…"):
            assert part.strip() in text, f"{heading}: no message says {part.strip()!r}"


def test_every_command_has_its_line_in_the_commands_page():
    page = (ROOT / "docs" / "cli.md").read_text()
    shown = set(re.findall(r"[`|, ]([a-z]+)", page.partition("## Exit codes")[0]))
    missing = set(get_command(app).commands) - shown
    assert not missing, f"docs/cli.md: no line for {', '.join(sorted(missing))}"
