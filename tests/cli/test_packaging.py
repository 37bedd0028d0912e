"""What is under packaging/ fits the command line and the isolation rules it was written for."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from prism_fast.cli.app import app
from prism_fast.protocol import errors

PACKAGING = Path(__file__).parents[2] / "packaging"
UNIT = PACKAGING / "prism-fast-score@.service"


def unit_settings() -> dict[str, str]:
    text = UNIT.read_text().replace("\\\n", " ")
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key: value for key, _, value in pairs}


def score_words() -> dict[str, list[str]]:
    """The arguments of every `prism-fast score` that the unit and the README show."""
    shown = {"unit": unit_settings()["ExecStart"]}
    readme = (PACKAGING / "README.md").read_text().replace("\\\n", " ")
    shown["readme"] = next(line for line in readme.splitlines() if "prism-fast score" in line)
    return {name: shlex.split(text.partition("score ")[2]) for name, text in shown.items()}


@pytest.mark.parametrize("place", ["unit", "readme"])
def test_the_commands_shown_have_options_that_exist_and_insist_on_isolation(place):
    words = score_words()[place]
    known = {option for p in get_command(app).commands["score"].params for option in p.opts}
    assert {w for w in words if w.startswith("--")} <= known
    assert words[words.index("--isolation") + 1] == "bwrap"


def test_the_unit_tells_verdicts_from_faults_of_the_machine():
    settings = unit_settings()
    verdicts = {
        errors.EXIT_BUNDLE_REJECTED,
        errors.EXIT_BUNDLE_FAILED,
        errors.EXIT_WATCHDOG,
        errors.EXIT_ARTIFACTS_QUOTA,
    }
    assert {int(code) for code in settings["SuccessExitStatus"].split()} == verdicts
    assert settings["RestartForceExitStatus"] == str(errors.EXIT_ENGINE)


def test_the_unit_leaves_bubblewrap_its_namespaces_and_a_bundle_no_network():
    settings = unit_settings()
    forbidden = {"RestrictNamespaces", "ProtectProc", "ProtectKernelTunables", "SystemCallFilter", "PrivateUsers"}
    assert not forbidden & set(settings)
    assert settings["PrivateNetwork"] == settings["NoNewPrivileges"] == "yes"
    assert settings["KillMode"] == "mixed"  # the first signal is for the referee alone


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path):
    # Its program stands elsewhere on a validator; here any will do.
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/prism-fast/bin/prism-fast", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60)
    assert "prism-fast-score@" not in done.stderr, done.stderr


def test_the_image_installs_bubblewrap_and_the_pinned_versions_and_is_not_root():
    text = (PACKAGING / "Dockerfile").read_text()
    final = text.rpartition("\nFROM ")[2]
    assert "bubblewrap" in final and "USER prism-fast" in final
    assert text.count("-c constraints.txt") == text.count("pip install")
