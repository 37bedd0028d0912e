"""A built wheel, away from the source tree: complete, and enough for a miner's first command."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the sdist's files, as a release is."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", out, ROOT]
    done = subprocess.run(
        [*command, f"-Cbuild-dir={out / 'build'}"], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("prism_fast-*.whl")
    return built


def test_the_wheel_holds_every_module_and_data_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {str(p.relative_to(ROOT)) for p in (ROOT / "prism_fast").rglob("*.py")}
    assert package <= names
    for data in ("py.typed", "data/assets/gpt2.tiktoken", "data/assets/kjv-chapters.jsonl.gz", "data/assets/README.md"):
        assert f"prism_fast/{data}" in names
    examples = {f"prism_fast/{p.relative_to(ROOT)}" for p in (ROOT / "examples").rglob("*.py")}
    assert examples <= names
    assert [n for n in names if n.startswith("prism_fast/_core")]
    strangers = [n for n in names if not n.startswith(("prism_fast/", "prism_fast-"))]
    assert not strangers and not any("__pycache__" in n for n in names)


def test_a_miner_can_begin_from_an_installed_wheel(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    # The dependencies of this environment, without its editable prism_fast: a .pth in a .pth's folder is not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = tmp_path / "venv" / "bin" / "python"
    code = "import sys, prism_fast.cli.main as m; print(m.__file__, file=sys.stderr); m.main()"
    done = subprocess.run(
        [python, "-I", "-c", code, "init", "bundle", "--example", "moe_tiny"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and str(site) in done.stderr, done.stderr
    assert (tmp_path / "bundle" / "architecture.py").read_bytes() == (
        ROOT / "examples" / "moe_tiny" / "architecture.py"
    ).read_bytes()
    loss = "import torch, prism_fast; print(prism_fast.cross_entropy(torch.zeros(4, 8), torch.arange(4)).item())"
    done = subprocess.run([python, "-I", "-c", loss], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("2.0794"), done.stderr
