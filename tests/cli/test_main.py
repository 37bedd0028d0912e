"""The command line as a person meets it."""

import os
import subprocess
import sys

import pytest

import prism_fast


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "prism_fast.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_without_arguments_it_shows_its_commands():
    done = run()
    for command in ("score", "compare", "rank", "densify", "pack", "plan", "profile", "doctor", "shards", "corpus"):
        assert command in done.stdout


def test_version():
    assert run("--version").stdout.strip() == f"prism-fast {prism_fast.__version__}"


@pytest.mark.parametrize("arguments", [("score",), ("nonsense",), ("score", "x", "--data", "sample")])
def test_bad_usage_exits_with_2_and_no_traceback(arguments):
    done = run(*arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_doctor_reports_every_area_and_finds_nothing_broken_here():
    done = run("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    for area in ("machine", "torch", "device", "kernels", "tokenizer", "data", "isolation", "launch"):
        assert f'"area": "{area}"' in done.stdout
    assert '"broken"' not in done.stdout


def test_names_that_are_no_utf_8_and_terminals_that_are_not_are_no_tracebacks(tmp_path):
    place = tmp_path / os.fsdecode(b"no\xff")
    place.mkdir()
    for arguments in (("check", place), ("verify", place), ("program", place), ("rank", place), ("--help",)):
        done = subprocess.run(
            [sys.executable, "-m", "prism_fast.cli.main", *arguments],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            timeout=120,
        )
        assert done.returncode in (0, 2, 3, 5) and b"Traceback" not in done.stderr, done.stderr.decode()


def test_the_package_and_its_core_are_of_one_version():
    from prism_fast import _core

    assert _core.__version__ == prism_fast.__version__


INTERRUPTING = """
import os, signal, sys

meanwhile = sys.argv[1]

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == meanwhile:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from prism_fast.cli.main import main
sys.argv = ["prism-fast", "pack", "text.txt", "--out", "packed"]
main()
"""


@pytest.mark.parametrize("meanwhile", ["prism_fast.cli.app", "typer", "prism_fast.data.pack"])
def test_an_interrupt_is_one_sentence_whenever_it_comes(tmp_path, meanwhile):
    (tmp_path / "text.txt").write_text("some text\n")
    command = [sys.executable, "-c", INTERRUPTING, meanwhile]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "prism-fast: interrupted")
    assert not (tmp_path / "packed").exists()
