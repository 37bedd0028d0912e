"""Expressions: what each kind gives, with short cuts taken as Python takes them."""

from __future__ import annotations

import ast
import contextlib

from prism_fast.harness.bundle.script import folding
from prism_fast.harness.bundle.script.state import Stop, WalkState
from prism_fast.harness.bundle.script.values import (
    UNKNOWN,
    External,
    Items,
    Known,
    Made,
    Residue,
    Routine,
    Scope,
    Table,
    Value,
    any_of,
    truth,
)


class Expressions(WalkState):
    def evaluate(self, node: ast.expr) -> Value:
        self.step(node)
        return getattr(self, f"_eval_{type(node).__name__}", self._eval_other)(node)

    def _eval_other(self, node: ast.expr) -> Value:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.evaluate(child)
        return UNKNOWN

    def _eval_Constant(self, node: ast.Constant) -> Value:
        return Known(node.value) if isinstance(node.value, bool | int | float | str | bytes | None) else UNKNOWN

    def _eval_Name(self, node: ast.Name) -> Value:
        return self.look_up(node.id)

    def _eval_Attribute(self, node: ast.Attribute) -> Value:
        return self.attribute(self.evaluate(node.value), node.attr)

    def _eval_NamedExpr(self, node: ast.NamedExpr) -> Value:
        value = self.evaluate(node.value)
        self.bind(node.target.id, value)
        return value

    def _eval_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        values, known = [], True
        for element in node.elts:
            if isinstance(element, ast.Starred):
                inner = self.unpacked(element)
                known &= inner is not None
                values += inner or []
            else:
                values.append(self.evaluate(element))
        return Items(values) if known else UNKNOWN

    _eval_List = _eval_Set = _eval_Tuple

    def unpacked(self, node: ast.Starred) -> list[Value] | None:
        """What `*value` stands for, where that is known. Its length is paid for: of two, a script can make four."""
        inner = self.items(self.consumed(self.evaluate(node.value)))
        self.spend(len(inner or ()))
        return inner

    def _eval_Dict(self, node: ast.Dict) -> Value:
        table = Table({})
        for key_node, value_node in zip(node.keys, node.values, strict=True):
            key = Known(None) if key_node is None else self.evaluate(key_node)
            value = self.evaluate(value_node)
            if key_node is None and isinstance(value, Table):
                self.spend(len(value.values))
                table.values.update(value.values)
                table.open |= value.open
            elif key_node is not None and isinstance(key, Known):
                table.values[key.value] = value
            else:
                table.open = True
        return table

    def _eval_JoinedStr(self, node: ast.JoinedStr) -> Value:
        text = []
        for part in node.values:
            formatted = isinstance(part, ast.FormattedValue)
            value = self.evaluate(part.value if isinstance(part, ast.FormattedValue) else part)
            plain = not formatted or (part.format_spec is None and part.conversion == -1)  # type: ignore[attr-defined]
            text.append(str(value.value) if isinstance(value, Known) and plain else None)
        known = [t for t in text if t is not None]
        fits = len(known) == len(text) and sum(map(len, known)) <= folding.MAX_TEXT
        return Known("".join(known)) if fits else UNKNOWN

    def _eval_BoolOp(self, node: ast.BoolOp) -> Value:
        settles = isinstance(node.op, ast.Or)  # the truth value after which nothing more is looked at
        certain, value = True, UNKNOWN
        for operand in node.values:
            try:
                value = self.evaluate(operand)
            except Stop:
                if certain:
                    raise
                continue
            known = truth(value)
            if known is settles:
                return value if certain else Known(settles)
            certain &= known is not None
        return value if certain else UNKNOWN

    def _eval_UnaryOp(self, node: ast.UnaryOp) -> Value:
        value = self.evaluate(node.operand)
        if isinstance(node.op, ast.Not):
            known = truth(value)
            return UNKNOWN if known is None else Known(not known)
        return folding.negate(node.op, value.value) if isinstance(value, Known) else UNKNOWN

    def _eval_BinOp(self, node: ast.BinOp) -> Value:
        return self.operate(node.op, self.evaluate(node.left), self.evaluate(node.right))

    def operate(self, operator: ast.operator, left: Value, right: Value) -> Value:
        if isinstance(left, Known) and isinstance(right, Known):
            return folding.operate(operator, left.value, right.value)
        if isinstance(operator, ast.Div) and isinstance(left, Made) and left.path.startswith("pathlib."):
            return left
        if isinstance(operator, ast.Mod) and isinstance(right, Known) and isinstance(right.value, int):
            return Residue(right.value)
        return UNKNOWN

    def _eval_Compare(self, node: ast.Compare) -> Value:
        left, certain = self.evaluate(node.left), True
        for operator, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.evaluate(right_node)
            if isinstance(operator, ast.Eq | ast.NotEq):
                for one, other in ((left, right), (right, left)):
                    if isinstance(one, Residue):
                        self.observer.residue_compared(self.frame.script, node.lineno, one.modulus, other)
            if isinstance(right, Items | Table):
                self.spend(len(right.values))
            known = folding.compare(operator, left, right)
            if known is False:
                return Known(False)
            certain &= known is True
            left = right
        return Known(True) if certain else UNKNOWN

    def _eval_IfExp(self, node: ast.IfExp) -> Value:
        known = truth(self.evaluate(node.test))
        if known is not None:
            return self.evaluate(node.body if known else node.orelse)
        values = []
        for way in (node.body, node.orelse):
            with contextlib.suppress(Stop):
                values.append(self.evaluate(way))
        if not values:
            raise Stop
        return any_of(values)

    def _eval_Subscript(self, node: ast.Subscript) -> Value:
        container = self.evaluate(node.value)
        if isinstance(node.slice, ast.Slice):
            parts = (node.slice.lower, node.slice.upper, node.slice.step)
            start, _, step = (None if p is None else self.evaluate(p) for p in parts)
            self.observer.sliced(self.frame.script, node.lineno, start, step)
            return UNKNOWN
        key = self.evaluate(node.slice)
        if isinstance(container, External) and container.path == "os.environ":
            return self.variable(key)
        if isinstance(container, Table | Items) and not isinstance(key, Known):
            self.spend(len(container.values))
        if isinstance(container, Table):
            if isinstance(key, Known) and key.value in container.values:
                return container.values[key.value]
            return UNKNOWN if container.open else any_of(list(container.values.values()))
        if isinstance(container, Items):
            with contextlib.suppress(IndexError, TypeError):
                return container.values[key.value] if isinstance(key, Known) else any_of(container.values)
        return UNKNOWN

    def variable(self, name: Value) -> Value:
        """An environment variable, where torchrun sets it."""
        rank, world = (Known(str(v.value)) for v in (self.rank, self.world))
        known = {
            Known("RANK"): rank,
            Known("LOCAL_RANK"): rank,
            Known("WORLD_SIZE"): world,
            Known("LOCAL_WORLD_SIZE"): world,
            Known("GROUP_RANK"): Known("0"),
        }
        return known.get(name, UNKNOWN) if isinstance(name, Known) else UNKNOWN

    def _eval_Lambda(self, node: ast.Lambda) -> Value:
        return self.routine(node)

    def routine(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Routine:
        """The function that a definition makes here: its defaults are looked at now, its body when it is called."""
        arguments = node.args
        self.spend(len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs))
        positional = [a.arg for a in arguments.posonlyargs + arguments.args]
        given = [self.evaluate(d) for d in arguments.defaults]
        defaults = dict(zip(positional[len(positional) - len(given) :], given, strict=True))
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if default is not None:
                defaults[argument.arg] = self.evaluate(default)
        scope = self.scope
        if self.frame.in_class_body and scope.parent is not None:  # methods do not see the class body's names
            scope = scope.parent
        return Routine(node, self.frame.script, scope, defaults, owner=self.frame.owner)

    def _eval_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
        outer = self.scope
        self.frame.scope = Scope(outer)
        try:
            for generator in node.generators:
                items = self.items(self.consumed(self.evaluate(generator.iter)))
                self.spend(len(items or ()))
                if items == []:
                    return Items([])
                self.assign(generator.target, any_of(items))
                if any(truth(self.evaluate(test)) is False for test in generator.ifs):
                    return Items([])
            for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
                with contextlib.suppress(Stop):
                    self.evaluate(part)
        finally:
            self.frame.scope = outer
        return UNKNOWN

    _eval_SetComp = _eval_GeneratorExp = _eval_DictComp = _eval_ListComp

    def _eval_Await(self, node: ast.Await | ast.YieldFrom) -> Value:
        self.consumed(self.evaluate(node.value))
        return UNKNOWN

    _eval_YieldFrom = _eval_Await
