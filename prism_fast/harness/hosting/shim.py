"""`prism_challenge.evaluator.interface`, importable inside a process that hosts a bundle and nowhere else.

Bundles written for the original engine import their context from there. The modules are made in memory, so that
installing this package can never collide with a real `prism_challenge`.
"""

from __future__ import annotations

import sys
from types import ModuleType

from prism_fast.protocol import PrismBatch, PrismContext


def install_interface_shim() -> None:
    parent: ModuleType | None = None
    for name in ("prism_challenge", "prism_challenge.evaluator", "prism_challenge.evaluator.interface"):
        module = ModuleType(name)
        module.__path__ = []  # a package, so that the dotted import works
        sys.modules[name] = module
        if parent is not None:
            setattr(parent, name.rpartition(".")[2], module)
        parent = module
    assert parent is not None
    parent.PrismContext = PrismContext  # type: ignore[attr-defined]
    parent.PrismBatch = PrismBatch  # type: ignore[attr-defined]
