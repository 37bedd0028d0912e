"""A bundle: `architecture.py` and `training.py`, from a directory or a .zip, read once and frozen by digest.

Nothing of the bundle is imported here. The two scripts are parsed, so that a bundle without `build_model` or `train`
is rejected before a process is started for it.
"""

from __future__ import annotations

import ast
import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleRejected, UsageError

SCRIPTS = {"architecture.py": "build_model", "training.py": "train"}
MAX_SCRIPT_BYTES = 128 * 1024  # scripts, not weights: what a bundle can carry in is bounded by this


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
    elif path.is_file() and zipfile.is_zipfile(path):
        scripts = _read_zip(path)
    elif path.exists():
        raise UsageError(f"{path}: not a bundle; expected a directory or a .zip holding {_both()}")
    else:
        raise UsageError(f"{path}: no such bundle; expected a directory or a .zip holding {_both()}")
    for name, entry_point in SCRIPTS.items():
        _check_script(path, name, scripts[name], entry_point)
    name = path.resolve().name.removesuffix(".zip")
    # The name goes into files, logs and terminals: no control characters, no bytes that are not UTF-8.
    return Bundle(name="".join(ch if ch.isprintable() else "_" for ch in name), scripts=scripts)


def _both() -> str:
    return " and ".join(SCRIPTS)


def _reject(message: str) -> BundleRejected:
    return BundleRejected(message, rule=c.RULE_BUNDLE_SHAPE)


def _read_plain(file: Path) -> bytes:
    if not file.is_file():
        raise _reject(f"{file.parent}: no {file.name}; a bundle holds {_both()}")
    if file.stat().st_size > MAX_SCRIPT_BYTES:
        raise _reject(f"{file}: {file.stat().st_size} bytes; expected at most {MAX_SCRIPT_BYTES}")
    return file.read_bytes()


def _read_zip(path: Path) -> dict[str, bytes]:
    """The scripts may lie at the archive's root or together in one folder, as zipping a folder leaves them."""
    scripts: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in SCRIPTS:
                found = [i for i in archive.infolist() if not i.is_dir() and Path(i.filename).name == name]
                found.sort(key=lambda i: i.filename.count("/"))
                if not found:
                    raise _reject(f"{path}: no {name} inside; a bundle holds {_both()}")
                shallowest = [i for i in found if i.filename.count("/") == found[0].filename.count("/")]
                if len(shallowest) > 1 or found[0].filename.count("/") > 1:
                    raise _reject(
                        f"{path}: {name} stands at {', '.join(i.filename for i in found)}; "
                        "expected one, at the archive's root or in one folder"
                    )
                if found[0].file_size > MAX_SCRIPT_BYTES:
                    raise _reject(f"{path}: {name} is {found[0].file_size} bytes; expected at most {MAX_SCRIPT_BYTES}")
                with archive.open(found[0]) as f:
                    scripts[name] = f.read(MAX_SCRIPT_BYTES + 1)
                if len(scripts[name]) > MAX_SCRIPT_BYTES:
                    raise _reject(f"{path}: {name} unpacks to more than {MAX_SCRIPT_BYTES} bytes")
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError) as e:
        raise _reject(f"{path}: not a readable zip archive: {e}") from e
    return scripts


def _check_script(path: Path, name: str, source: bytes, entry_point: str) -> None:
    try:
        tree = ast.parse(source, filename=name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        line = f" line {e.lineno}" if isinstance(e, SyntaxError) and e.lineno else ""
        raise _reject(f"{path}: {name}{line} is not Python: {e}") from e
    if not _defines(tree, entry_point):
        raise _reject(f"{path}: {name} does not define `{entry_point}(ctx)` at its top level")


def _defines(tree: ast.Module, wanted: str) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == wanted and node in tree.body:
            return True
        if isinstance(node, ast.Import | ast.ImportFrom) and any((a.asname or a.name) == wanted for a in node.names):
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == wanted:
            return True
    return False
