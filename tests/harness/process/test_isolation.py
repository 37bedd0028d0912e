"""What a sandbox shows, hides and lets a process write to: asked of processes in it."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import prism_fast
from prism_fast.harness.process import isolation
from prism_fast.harness.process.commands import child_environment, python_command
from prism_fast.harness.process.isolation import Sandbox, bwrap_fault, check_hideable, data_places
from prism_fast.protocol.errors import UsageError

needs_bwrap = pytest.mark.skipif(bwrap_fault() is not None, reason="bubblewrap cannot isolate here")
ROLES = ("trainer", "tracer", "executor")
LOOK = """
import os, pathlib
def seen(path):
    try:
        return sorted(os.listdir(path)) if os.path.isdir(path) else pathlib.Path(path).read_text()
    except OSError as error:
        return type(error).__name__
def writes(folder):
    try:
        pathlib.Path(folder, "mine").write_text("x")
        return True
    except OSError:
        return False
"""


@pytest.fixture
def rooms(tmp_path):
    """Folders of a role outside /tmp, which a sandbox has for itself."""
    for name in ("bundle", "channel", "written"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "there.txt").write_text(name)
    return SimpleNamespace(**{name: tmp_path / name for name in ("bundle", "channel", "written")})


def ask(sandbox: Sandbox, role: str, rooms: SimpleNamespace, expression: str):
    command = python_command("-c", f"{LOOK}\nresult = {expression}\nprint(repr(result))")
    if role == "trainer":
        command = sandbox.trainer(command, rooms.bundle, rooms.channel, rooms.written)
    elif role == "tracer":
        command = sandbox.tracer(command, rooms.bundle, rooms.written)
    else:
        command = sandbox.executor(command)
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), timeout=60)
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)


@needs_bwrap
@pytest.mark.parametrize("role", ROLES)
def test_each_role_sees_and_writes_its_own_alone(rooms, role):
    here = [str(rooms.bundle), str(rooms.channel), str(rooms.written)]
    found = ask(Sandbox("bwrap"), role, rooms, f"[(seen(p), writes(p)) for p in {here}], os.getcwd(), seen('/work')")
    hidden, read, written = ("FileNotFoundError", False), (["there.txt"], False), (["there.txt"], True)
    expected = {
        "trainer": [read, read, written],
        "tracer": [read, hidden, written],
        "executor": [hidden, hidden, hidden],
    }[role]
    assert found == (expected, str(rooms.written) if role != "executor" else "/tmp", found[2])
    assert "shared" not in found[2]


@needs_bwrap
@pytest.mark.parametrize("role", ROLES)
def test_each_role_compiles_into_caches_of_its_own(rooms, role, monkeypatch):
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "/usr/closed")
    names = list(isolation.PRIVATE_FOLDERS)
    found = ask(Sandbox("bwrap"), role, rooms, f"[(os.environ[n], writes(os.environ[n])) for n in {names}]")
    assert found == [(folder, True) for folder in isolation.PRIVATE_FOLDERS.values()]


@needs_bwrap
def test_no_sandbox_shows_the_text_that_ships_with_the_package(rooms):
    asset = Path(prism_fast.__file__).parent / "data" / "assets" / "kjv-chapters.jsonl.gz"
    assert asset.stat().st_size > 0
    for role in ROLES:
        assert ask(Sandbox("bwrap"), role, rooms, f"seen({str(asset)!r})") == "PermissionError"


@pytest.fixture
def system_folder(tmp_path, monkeypatch):
    """A folder that sandboxes show, as they show /usr, and a link to it under which it is shown too."""
    real = tmp_path / "system"
    (real / "share/text/inner").mkdir(parents=True)
    (real / "share/text/inner/a.txt").write_text("text")
    (real / "share/one.txt").write_text("text")
    (real / "share/library.txt").write_text("library")
    (tmp_path / "alias").symlink_to(real)
    monkeypatch.setattr(isolation, "SYSTEM_PATHS", (*isolation.SYSTEM_PATHS, str(real)))
    usual = isolation._python_paths
    monkeypatch.setattr(isolation, "_python_paths", lambda: [*usual(), str(tmp_path / "alias")])
    return real


@needs_bwrap
@pytest.mark.parametrize("through", ["system", "alias"])
def test_text_below_a_path_that_is_shown_is_covered_under_every_name(rooms, system_folder, through):
    share = system_folder.parent / through / "share"
    sandbox = Sandbox("bwrap", hidden=(share / "text", share / "one.txt", share / "not there"))
    places = [str(system_folder.parent / name / "share") for name in ("system", "alias")]
    for role in ROLES:
        for place in places:
            found = ask(sandbox, role, rooms, f"[seen({place!r} + p) for p in ('/text', '/one.txt', '/library.txt')]")
            assert found == [[], "PermissionError", "library"]
            assert not ask(sandbox, role, rooms, f"writes({place!r} + '/text')")


@needs_bwrap
def test_a_role_s_own_folder_below_what_is_hidden_is_still_its_own(rooms, system_folder):
    run = system_folder / "share/text/run"
    run.mkdir()
    sandbox = Sandbox("bwrap", hidden=(system_folder / "share/text",))
    rooms = SimpleNamespace(bundle=rooms.bundle, channel=rooms.channel, written=run)
    assert ask(sandbox, "trainer", rooms, f"seen({str(run.parent)!r}), writes({str(run)!r})") == (["run"], True)
    readable = replace(sandbox, readable=(system_folder / "share/text/inner",))
    assert ask(readable, "trainer", rooms, f"seen({str(run.parent)!r})") == ["inner", "run"]


@needs_bwrap
def test_what_a_trainer_may_read_may_lie_anywhere(rooms):
    """Outside /tmp too, where the sandbox's root has to take the mount point: the default cache lies there."""
    with tempfile.TemporaryDirectory(dir=Path(prism_fast.__file__).parents[1], prefix=".readable-") as folder:
        Path(folder, "text").write_text("text")
        sandbox = Sandbox("bwrap", readable=(Path(folder),))
        found = ask(sandbox, "trainer", rooms, f"seen({folder!r} + '/text'), writes({folder!r})")
        assert found == ("text", False)
        assert ask(sandbox, "tracer", rooms, f"seen({folder!r} + '/text')") == "FileNotFoundError"


def test_text_that_cannot_be_covered_is_refused_in_one_sentence(system_folder, tmp_path):
    check_hideable([system_folder / "share/text", tmp_path / "elsewhere", Path("/nowhere")])
    for path in (system_folder, system_folder.parent, tmp_path / "alias", Path(sysconfig.get_path("purelib")).parent):
        with pytest.raises(UsageError, match=r"the sandbox shows .* keep the text in a folder of its own$"):
            check_hideable([path])


def test_every_folder_with_text_of_a_run_is_named(sample, tmp_path, monkeypatch):
    from prism_fast.data.corpus import open_corpus

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    secret = tmp_path / "secret"
    secret.symlink_to(sample / "val")
    corpus = open_corpus(sample, mounts={"val": secret})
    found = data_places(corpus, None, places=("sample", None, "text", "not there"))
    assert {sample, sample / "train", secret, tmp_path / "text"} <= set(found)
    assert all(path.is_absolute() and path.is_dir() for path in found)


@needs_bwrap
def test_triton_compiles_inside_a_sandbox(rooms, monkeypatch):
    """The compiler's own cache folder, as a launch of a kernel uses it; compiled for a GPU that need not be there."""
    pytest.importorskip("triton")
    monkeypatch.setenv("HOME", "/root")
    (rooms.bundle / "k.py").write_text(
        "import triton, triton.language as tl\n"
        "@triton.jit\ndef k(p, N: tl.constexpr):\n    tl.store(p + tl.arange(0, N), 1.0)\n"
    )
    code = (
        f"__import__('sys').path.insert(0, {str(rooms.bundle)!r}) or"
        " __import__('triton').compile(__import__('triton').compiler.ASTSource(__import__('k').k, "
        "{'p': '*fp32', 'N': 'constexpr'}, constexprs={'N': 32}), "
        "target=__import__('triton.backends.compiler', fromlist=['x']).GPUTarget('cuda', 90, 32)).metadata.name, "
        "len(os.listdir('/tmp/triton')) > 0"
    )
    assert ask(Sandbox("bwrap"), "trainer", rooms, code) == ("k", True)


def test_without_a_sandbox_a_command_is_itself(rooms):
    command = ["a", "b"]
    sandbox = Sandbox("none")
    assert sandbox.executor(command) == sandbox.tracer(command, rooms.bundle, rooms.written) == command
    assert os.path.isdir(rooms.written)
