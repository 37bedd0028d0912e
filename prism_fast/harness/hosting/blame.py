"""Whose fault an exception is, and in which sentence: of processes that host a bundle's code."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path

import prism_fast
from prism_fast.harness.process.jobs import Fault
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleFailed, BundleRejected, PrismError

PACKAGE = str(Path(prism_fast.__file__).parent)
STAND_INS = frozenset({"clip_grad_norm_", "destroy_process_group", "all_reduce"})  # ours, which call torch's


def fault_of(error: BaseException, bundle_dir: str, rank: int | None = None) -> Fault:
    """What the referee is told of how this process ended."""
    rule, kind, message = explain(error, bundle_dir)
    text = "".join(traceback.format_exception(error))[-100_000:]
    return Fault(kind=kind, rule=rule, message=message[:50_000], traceback=text, rank=rank)


def explain(error: BaseException, bundle_dir: str) -> tuple[str | None, str, str]:
    """-> (rule, kind, one sentence). Kind: rejected, failed, quota or engine, as in `jobs.Fault`.

    An error is ours where the last frame that is either ours or the bundle's is ours: what a library does on our
    behalf is ours, what it does on the bundle's is the bundle's. The losses are a library too where the bundle calls
    them: what they refuse are its arguments.
    """
    import torch

    if isinstance(error, BundleRejected):
        return error.rule, "rejected", str(error)
    if isinstance(error, BundleFailed):
        return error.rule, "failed", str(error)
    if isinstance(error, PrismError):
        return error.rule, "engine", str(error)
    frames = traceback.extract_tb(error.__traceback__)
    sides = [
        ("bundle" if f.filename.startswith(bundle_dir) else "ours", f)
        for f in frames
        if f.filename.startswith((bundle_dir, PACKAGE))
    ]
    last = next((f for side, f in reversed(sides) if side == "bundle"), None)
    where = f"{Path(last.filename).name} line {last.lineno}: " if last is not None else ""
    text = " ".join(str(error).split())[:500]
    message = f"{where}{type(error).__name__}: {text}" if text else f"{where}{type(error).__name__}"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return c.RULE_ARTIFACTS_QUOTA, "quota", f"{message} ({c.MARKER_ARTIFACTS_QUOTA})"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        return c.RULE_RESOURCE_OOM, "failed", message
    if isinstance(error, SystemExit):
        return c.RULE_RUNTIME_ERROR, "failed", f"{where}the bundle called sys.exit({error.code!r})"
    after = sides[max((i for i, (side, _) in enumerate(sides) if side == "bundle"), default=-1) + 1 :]
    called = bool(after) and len(after) < len(sides) and all(_is_library(f.filename) for _, f in after)
    if after and not called and not _hands_on(after[-1][1]):
        return None, "engine", message
    return c.RULE_RUNTIME_ERROR, "failed", message


def _is_library(filename: str) -> bool:
    """Our files that a bundle calls itself."""
    return Path(filename).relative_to(PACKAGE).parts[0] in {"kernels", "integrations"}


def _hands_on(frame: traceback.FrameSummary) -> bool:
    """Whether this frame of ours only hands on: to the bundle's own code (an import that fails in `importlib`, a
    builder given other arguments than it takes), or to the function of torch's whose place it takes."""
    path = Path(frame.filename)
    return path.parent.name == "hosting" or path.name == "seeding.py" or frame.name in STAND_INS
