"""Constants: arithmetic, comparisons, and what the syntax alone says of a statement or a function."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from prism_fast.harness.bundle.script.values import UNKNOWN, Items, Known, Table, Value

MAX_TEXT = 10_000
MAX_NUMBER = 2**63
FOLDED_BUILTINS: dict[str, Callable[..., Any]] = {
    f"builtins.{f.__name__}": f for f in (int, str, float, bool, len, min, max, abs)
}
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.BitAnd: lambda a, b: a & b,
    ast.BitOr: lambda a, b: a | b,
    ast.BitXor: lambda a, b: a ^ b,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Is: lambda a, b: a is b or (type(a) is type(b) and a == b),
    ast.IsNot: lambda a, b: not (a is b or (type(a) is type(b) and a == b)),
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}


def operate(operator: ast.operator, left: Any, right: Any) -> Value:
    """`left operator right` for constants; UNKNOWN for what would be large or fails."""
    if isinstance(left, str) and isinstance(right, str):
        fits = isinstance(operator, ast.Add) and len(left) + len(right) <= MAX_TEXT
        return Known(left + right) if fits else UNKNOWN
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    if not numbers or type(operator) not in ARITHMETIC or max(abs(left), abs(right)) > MAX_NUMBER:
        return UNKNOWN
    with contextlib.suppress(ArithmeticError, TypeError):
        return Known(ARITHMETIC[type(operator)](left, right))
    return UNKNOWN


def negate(operator: ast.unaryop, value: Any) -> Value:
    """Unary plus, minus and inversion of a constant number."""
    if not isinstance(value, int | float):
        return UNKNOWN
    if isinstance(operator, ast.Invert):
        return Known(~value) if isinstance(value, int) else UNKNOWN
    return Known(-value if isinstance(operator, ast.USub) else +value)


def compare(operator: ast.cmpop, left: Value, right: Value) -> bool | None:
    """The truth of a comparison, or None where it is not known."""
    if not isinstance(left, Known):
        return None
    if isinstance(operator, ast.In | ast.NotIn):
        found = _contains(right, left.value)
        return found if found is None or isinstance(operator, ast.In) else not found
    if isinstance(right, Known):
        with contextlib.suppress(TypeError):
            return bool(COMPARISONS[type(operator)](left.value, right.value))
    return None


def _contains(container: Value, value: Any) -> bool | None:
    if isinstance(container, Items) and all(isinstance(i, Known) for i in container.values):
        return any(i.value == value for i in container.values if isinstance(i, Known))
    if isinstance(container, Table) and not container.open:
        return value in container.values
    if isinstance(container, Known) and isinstance(container.value, str) and isinstance(value, str):
        return value in container.value
    return None


def is_empty_range(args: Sequence[Value]) -> bool:
    """Whether range(*args) is known to give nothing."""
    numbers = [a.value for a in args if isinstance(a, Known) and isinstance(a.value, int)]
    if len(numbers) != len(args) or not 1 <= len(numbers) <= 3 or (len(numbers) == 3 and numbers[2] == 0):
        return False
    return not range(*numbers)


def may_raise(statement: ast.stmt) -> bool:
    """Whether anything in a statement could raise: not so for `pass`, constants and plain names."""
    safe = (ast.Pass, ast.Expr, ast.Assign, ast.Constant, ast.Name, ast.Store, ast.Load, ast.Global, ast.Nonlocal)
    return not all(isinstance(node, safe) for node in ast.walk(statement))
