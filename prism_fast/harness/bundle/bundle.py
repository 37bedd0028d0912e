"""A bundle: `architecture.py` and `training.py`, from a directory or a .zip, read once and frozen by digest.

Nothing of the bundle is imported here. The two scripts are parsed, so that a bundle without `build_model` or `train`
is rejected before a process is started for it.
"""

from __future__ import annotations

import ast
import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path

from prism_fast.harness.bundle.archive import is_archive, read_scripts
from prism_fast.harness.bundle.script.source import on_a_fresh_stack
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleRejected, UsageError

SCRIPTS = {"architecture.py": "build_model", "training.py": "train"}
MAX_SCRIPT_BYTES = 128 * 1024  # scripts, not weights: what a bundle can carry in is bounded by this
MAX_NAME_BYTES = 160  # folders are called by it, with a digest, a seed and an attempt behind it: 255 in all


@dataclass(frozen=True)
class Bundle:
    """The two scripts' exact bytes. `digest` is the sha256 that names the submission."""

    name: str
    scripts: dict[str, bytes]

    @property
    def digest(self) -> str:
        h = hashlib.sha256()
        for name in sorted(self.scripts):
            h.update(f"{name}\0{len(self.scripts[name])}\0".encode())
            h.update(self.scripts[name])
        return h.hexdigest()

    @property
    def submission_id(self) -> str:
        return f"{self.name}-{self.digest[:12]}"

    def write_to(self, directory: Path, names: tuple[str, ...] = tuple(SCRIPTS)) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for name in names:
            (directory / name).write_bytes(self.scripts[name])


def load_bundle(path: str | Path) -> Bundle:
    """Reads and checks a bundle.

    Raises UsageError when `path` is neither a directory nor a .zip, BundleRejected (`prism:bundle-shape`) when a
    script is missing, too large, not Python, or does not define its entry point.
    """
    path = Path(path)
    if path.is_dir():
        scripts = {name: _read_plain(path / name) for name in SCRIPTS}
    elif path.is_file() and is_archive(path):
        scripts = read_scripts(path, SCRIPTS, MAX_SCRIPT_BYTES)
    elif path.exists():
        raise UsageError(f"{path}: not a bundle; expected a directory or a .zip holding {_both()}")
    else:
        raise UsageError(f"{path}: no such bundle; expected a directory or a .zip holding {_both()}")
    for name, entry_point in SCRIPTS.items():
        _check_script(path, name, scripts[name], entry_point)
    return Bundle(name=submission_name(path), scripts=scripts)


def submission_name(path: Path) -> str:
    """What a submission at `path` is called in files, folders, logs and terminals.

    No control characters, no bytes that are not UTF-8, no name of a folder's own, and short enough to stand in one.
    """
    name = path.resolve().name.removesuffix(".zip")
    name = "".join(ch if ch.isprintable() and ch != "/" else "_" for ch in name)
    name = name.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
    return "_" if name in ("", ".", "..") else name


def _both() -> str:
    return " and ".join(SCRIPTS)


def _reject(message: str) -> BundleRejected:
    return BundleRejected(message, rule=c.RULE_BUNDLE_SHAPE)


def _read_plain(file: Path) -> bytes:
    try:
        if not file.is_file():
            raise _reject(f"{file.parent}: no {file.name}; a bundle holds {_both()}")
        with file.open("rb") as stream:
            source = stream.read(MAX_SCRIPT_BYTES + 1)
    except OSError as error:
        raise _reject(f"{file}: cannot be read: {error.strerror or error}") from error
    if len(source) > MAX_SCRIPT_BYTES:
        raise _reject(f"{file}: more than {MAX_SCRIPT_BYTES} bytes; expected at most {MAX_SCRIPT_BYTES}")
    return source


def _check_script(path: Path, name: str, source: bytes, entry_point: str) -> None:
    try:
        defines = on_a_fresh_stack(lambda: _defines(_parsed(source, name), entry_point))
    except Exception as error:  # whatever a parser makes of a stranger's bytes
        line = f" line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise _reject(f"{path}: {name}{line} is not Python: {str(error)[:200]}") from error
    if not defines:
        raise _reject(f"{path}: {name} does not define `{entry_point}(ctx)` at its top level")


def _parsed(source: bytes, name: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a stranger's invalid escapes are no news for this terminal
        return ast.parse(source, filename=name)


def _defines(tree: ast.Module, wanted: str) -> bool:
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == wanted and id(node) in top:
            return True
        if isinstance(node, ast.Import | ast.ImportFrom) and any((a.asname or a.name) == wanted for a in node.names):
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == wanted:
            return True
    return False
