"""A script, parsed once, with what its syntax alone says and every walk through it asks for."""

from __future__ import annotations

import ast


class Script:
    """`rebound`: names that a function declares global. `lazy`: functions whose call only makes a generator or a
    coroutine. `bound_by`: the names that a loop binds anew."""

    def __init__(self, source: bytes | str) -> None:
        """Raises SyntaxError, ValueError or RecursionError for what Python cannot parse."""
        self.tree = ast.parse(source)
        self.rebound: set[str] = set()
        self.lazy: set[ast.AST] = set()
        self.bound_by: dict[ast.AST, set[str]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Global):
                self.rebound.update(node.names)
            elif isinstance(node, ast.AsyncFunctionDef) or (isinstance(node, ast.FunctionDef) and _yields(node)):
                self.lazy.add(node)
            elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
                self.bound_by[node] = {
                    n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
                }


def _yields(function: ast.FunctionDef) -> bool:
    queue = list(ast.iter_child_nodes(function))
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            queue.extend(ast.iter_child_nodes(node))
    return False
