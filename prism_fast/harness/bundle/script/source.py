"""A script, parsed once, with what its syntax alone says and every walk through it asks for."""

from __future__ import annotations

import ast
import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
STACK_BYTES = 64 << 20  # parsers recurse in C


def on_a_fresh_stack(work: Callable[[], T]) -> T:
    """`work()`, in a thread of its own: how deeply a script may be nested does not depend on who asks."""
    done: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            raised.append(error)

    usual = threading.stack_size()
    with contextlib.suppress(ValueError, RuntimeError):
        threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
    finally:
        threading.stack_size(usual)
    thread.join()
    if raised:
        raise raised[0]
    return done[0]


class Script:
    """`rebound`: names that a function declares global. `lazy`: functions whose call only makes a generator or a
    coroutine. `bound_by`: the names that a loop binds anew."""

    def __init__(self, source: bytes | str) -> None:
        """Raises SyntaxError, ValueError or RecursionError for what Python cannot parse."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.tree = ast.parse(source)
        self.rebound: set[str] = set()
        self.lazy: set[ast.AST] = set()
        self.bound_by: dict[ast.AST, set[str]] = {}
        queue: list[tuple[ast.AST, tuple[set[str], ...]]] = [(self.tree, ())]
        while queue:  # one pass, with the loops around each node: a walk from each loop takes time times their depth
            node, around = queue.pop()
            if isinstance(node, ast.Global):
                self.rebound.update(node.names)
            elif isinstance(node, ast.AsyncFunctionDef) or (isinstance(node, ast.FunctionDef) and _yields(node)):
                self.lazy.add(node)
            elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
                self.bound_by[node] = set()
                around = (*around, self.bound_by[node])
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                for names in around:
                    names.add(node.id)
            queue.extend((child, around) for child in ast.iter_child_nodes(node))


def _yields(function: ast.FunctionDef) -> bool:
    queue = list(ast.iter_child_nodes(function))
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            queue.extend(ast.iter_child_nodes(node))
    return False
