"""Follows a bundle's `train(ctx)` as one rank of one world size would run it, without running it.

A partial evaluation of the syntax tree. Rank, world size and constants have values; everything else is unknown.
Where a condition is known, only the way it leads is followed, so `if False:`, code after `return`, a function nobody
calls and `if rank == 0:` on rank 1 are not reached. Where it is not known, every way is followed. What is reached is
told to an observer, call by call. The claim is "may be reached by this rank"; nothing is claimed about what a script
builds as it runs (`exec`, `getattr` with a computed name).
"""

from __future__ import annotations

import ast
import contextlib
import math
from collections.abc import Callable
from functools import partial

from prism_fast.harness.bundle.script.calls import Calls
from prism_fast.harness.bundle.script.folding import may_raise
from prism_fast.harness.bundle.script.state import Exits, Frame, Mark, Stop, TooLarge
from prism_fast.harness.bundle.script.values import (
    UNKNOWN,
    Blueprint,
    Context,
    External,
    Items,
    Known,
    Made,
    Module,
    Partial,
    Property,
    Routine,
    Scope,
    Thing,
    Unbound,
    Value,
    any_of,
    birth,
    options_of,
    truth,
)

MAX_ANCESTORS = 64  # of a class: every method that is looked for is looked for in each
LEAVES_FUNCTION = Exits.RETURNS | Exits.RAISES


class Walk(Calls):
    """One walk through `scripts["training"]`, as one rank of one world size. Each is good for one `run`."""

    def run(self) -> None:
        """Imports training.py and calls `train(ctx)`. Raises TooLarge when the script cannot be followed."""
        try:
            scope = self.module("training")
            self.frames.append(Frame(scope, "training"))
            with contextlib.suppress(Stop):
                self.consumed(self.call(scope.names.get("train", UNKNOWN), [Context()], {}, line=0))
        except RecursionError:
            raise TooLarge from None

    def block(self, statements: list[ast.stmt]) -> Exits:
        exits = Exits.NONE
        for statement in statements:
            self.step(statement)
            follow = getattr(self, f"_do_{type(statement).__name__}", None)
            try:
                left = Exits.FALLS if follow is None else follow(statement)
            except Stop:
                left = Exits.RAISES
            exits |= left & ~Exits.FALLS
            if not left & Exits.FALLS:
                return exits
        return exits | Exits.FALLS

    # ------------------------------------------------------------------------------------------------------- simple

    def _do_Expr(self, node: ast.Expr) -> Exits:
        self.evaluate(node.value)
        return Exits.FALLS

    def _do_Return(self, node: ast.Return) -> Exits:
        self.frame.returned.append(self.evaluate(node.value) if node.value else Known(None))
        return Exits.RETURNS

    def _do_Raise(self, node: ast.Raise) -> Exits:
        if node.exc is not None:
            self.evaluate(node.exc)
        return Exits.RAISES

    def _do_Break(self, node: ast.Break) -> Exits:
        return Exits.BREAKS

    def _do_Continue(self, node: ast.Continue) -> Exits:
        return Exits.CONTINUES

    def _do_Assert(self, node: ast.Assert) -> Exits:
        return Exits.RAISES if truth(self.evaluate(node.test)) is False else Exits.FALLS

    def _do_Global(self, node: ast.Global) -> Exits:
        self.spend(len(node.names))
        self.scope.global_names.update(node.names)
        return Exits.FALLS

    def _do_Nonlocal(self, node: ast.Nonlocal) -> Exits:
        self.spend(len(node.names))
        self.scope.nonlocal_names.update(node.names)
        return Exits.FALLS

    def _do_Delete(self, node: ast.Delete) -> Exits:
        self.spend(len(node.targets))
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.scope.names.pop(target.id, None)
        return Exits.FALLS

    def _do_Assign(self, node: ast.Assign) -> Exits:
        value = self.evaluate(node.value)
        for target in node.targets:
            self.assign(target, value)
        return Exits.FALLS

    def _do_AnnAssign(self, node: ast.AnnAssign) -> Exits:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value))
        return Exits.FALLS

    def _do_AugAssign(self, node: ast.AugAssign) -> Exits:
        value = UNKNOWN
        amount = self.evaluate(node.value)
        if isinstance(node.target, ast.Name):
            value = self.operate(node.op, self.look_up(node.target.id), amount)
        self.assign(node.target, value)
        return Exits.FALLS

    def _do_Import(self, node: ast.Import) -> Exits:
        self.spend(len(node.names))
        for alias in node.names:
            if alias.name in self.scripts:
                self.bind(alias.asname or alias.name, Module(self.module(alias.name)))
            else:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                self.bind(alias.asname or name, self.external(name))
        return Exits.FALLS

    def _do_ImportFrom(self, node: ast.ImportFrom) -> Exits:
        self.spend(len(node.names))
        module = node.module or ""
        ours = self.module(module).names if module in self.scripts else None
        for alias in node.names:
            if alias.name != "*":
                value = self.external(f"{module}.{alias.name}") if ours is None else ours.get(alias.name, UNKNOWN)
                self.bind(alias.asname or alias.name, value)
            elif ours is not None:
                self.spend(len(ours))
                self.scope.names.update({k: v for k, v in ours.items() if not k.startswith("_")})
            else:
                stars = self.scope.names.setdefault("*", Items([]))
                assert isinstance(stars, Items)
                stars.values.append(External(module))
        return Exits.FALLS

    # -------------------------------------------------------------------------------------------------- definitions

    def _do_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Exits:
        routine = self.routine(node)
        routine.decorated = bool(node.decorator_list)
        self.bind(node.name, self._decorated(node, routine))
        return Exits.FALLS

    _do_AsyncFunctionDef = _do_FunctionDef

    def _do_ClassDef(self, node: ast.ClassDef) -> Exits:
        bases = tuple(self.evaluate(base) for base in node.bases)
        self.spend(sum(len(b.ancestors) + len(b.external_bases) for b in bases if isinstance(b, Blueprint)))
        blueprint = Blueprint(node.name, Scope(self.scope), bases)
        if len(blueprint.ancestors) > MAX_ANCESTORS:
            raise TooLarge
        self.frames.append(Frame(blueprint.scope, self.frame.script, owner=blueprint, in_class_body=True))
        self.block(node.body)
        self.frames.pop()
        blueprint.fields = tuple(
            s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
        )
        self.bind(node.name, self._decorated(node, blueprint))
        return Exits.FALLS

    def _decorated(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, value: Value) -> Value:
        for expression in reversed(node.decorator_list):
            decorator = self.evaluate(expression)
            path = decorator.path if isinstance(decorator, External) else ""
            if isinstance(decorator, Routine | Partial | Thing):
                result = self.call(decorator, [value], {}, expression.lineno)
                value = value if result is UNKNOWN else result
            elif path in ("builtins.property", "functools.cached_property"):
                value = Property(value)
            elif path in ("builtins.staticmethod", "builtins.classmethod"):
                value = Unbound(value, of_class=path == "builtins.classmethod")
            # Any other decorator (contextmanager, no_grad, wraps, dataclass) calls what it was given.
        return value

    # ----------------------------------------------------------------------------------------------------- branches

    def _do_If(self, node: ast.If) -> Exits:
        known = truth(self.evaluate(node.test))
        if known is not None:
            return self.block(node.body if known else node.orelse)
        return self.either([partial(self.block, node.body), partial(self.block, node.orelse)])

    def _do_Match(self, node: ast.Match) -> Exits:
        subject = self.evaluate(node.subject)
        ways: list[Callable[[], Exits]] = []
        for case in node.cases:
            matches = self._matches(case.pattern, subject)
            if matches is not False:
                ways.append(partial(self._case, case))
            if matches is True and case.guard is None:
                return self.either(ways)
        return self.either([*ways, lambda: Exits.FALLS])

    def _case(self, case: ast.match_case) -> Exits:
        for node in ast.walk(case.pattern):
            self.spend(1)
            for name in (getattr(node, "name", None), getattr(node, "rest", None)):
                if isinstance(name, str):
                    self.bind(name, UNKNOWN)
        if case.guard is not None and truth(self.evaluate(case.guard)) is False:
            return Exits.FALLS
        return self.block(case.body)

    def _matches(self, pattern: ast.pattern, subject: Value) -> bool | None:
        self.spend(1)
        match pattern:
            case ast.MatchAs(pattern=None):
                return True
            case ast.MatchOr():
                found = [self._matches(p, subject) for p in pattern.patterns]
                return True if True in found else (None if None in found else False)
            case ast.MatchSingleton() if isinstance(subject, Known):
                return subject.value is pattern.value
            case ast.MatchValue() if isinstance(subject, Known):
                value = self.evaluate(pattern.value)
                return bool(value.value == subject.value) if isinstance(value, Known) else None
        return None

    def _do_Try(self, node: ast.Try) -> Exits:
        start = self.mark()
        body = self.block(node.body)
        after_body = self.mark()
        ways: list[Callable[[], Exits]] = []
        if body & Exits.FALLS:
            ways.append(partial(self._from, after_body, partial(self.block, node.orelse)))
        if any(may_raise(s) for s in node.body):
            self.meet(start, after_body)
            half_way = self.mark()
            ways += [partial(self._from, half_way, partial(self._handle, h)) for h in node.handlers]
            if node.handlers:
                body &= ~Exits.RAISES
        exits = (body & ~Exits.FALLS) | (self.either(ways) if ways else Exits.NONE)
        if node.finalbody:
            if not exits & Exits.FALLS:
                self.restore(after_body)
            final = self.block(node.finalbody)
            exits = exits | (final & ~Exits.FALLS) if final & Exits.FALLS else final
        return exits

    _do_TryStar = _do_Try

    def _from(self, mark: Mark, way: Callable[[], Exits]) -> Exits:
        self.restore(mark)
        return way()

    def _handle(self, handler: ast.ExceptHandler) -> Exits:
        if handler.type is not None:
            self.evaluate(handler.type)
        if handler.name:
            self.bind(handler.name, UNKNOWN)
        return self.block(handler.body)

    def _do_With(self, node: ast.With | ast.AsyncWith) -> Exits:
        managers = []
        for item in node.items:
            manager = self.consumed(self.evaluate(item.context_expr))
            managers.append(manager)
            entered = manager if isinstance(manager, Made) else UNKNOWN
            for option in options_of(manager):
                if isinstance(option, Thing):
                    entered = self.call_method(option, "__enter__", "__aenter__")
            if item.optional_vars is not None:
                self.assign(item.optional_vars, entered)
        exits = self.block(node.body)
        for manager in reversed(managers):
            for option in options_of(manager):
                if isinstance(option, Thing):
                    self.call_method(option, "__exit__", "__aexit__")
        return exits | Exits.FALLS if Made("contextlib.suppress") in managers else exits

    _do_AsyncWith = _do_With

    # -------------------------------------------------------------------------------------------------------- loops

    def _do_While(self, node: ast.While) -> Exits:
        if truth(self.evaluate(node.test)) is False:
            return self.block(node.orelse)
        self._forget(node)
        forever = truth(self.evaluate(node.test)) is True
        body = self._rounds(node.body)
        if forever:
            return (body & LEAVES_FUNCTION) | (Exits.FALLS if body & Exits.BREAKS else Exits.NONE)
        return (body & LEAVES_FUNCTION) | self._after_loop(node, body)

    def _do_For(self, node: ast.For | ast.AsyncFor) -> Exits:
        items = self.items(self.consumed(self.evaluate(node.iter)))
        if items == []:
            return self.block(node.orelse)
        self._forget(node)
        self.assign(node.target, any_of(items))
        body = self._rounds(node.body)
        return (body & LEAVES_FUNCTION) | self._after_loop(node, body)

    _do_AsyncFor = _do_For

    def _forget(self, loop: ast.For | ast.AsyncFor | ast.While) -> None:
        """Names that the loop binds anew hold, at its head, the value of some earlier round."""
        bound = self.scripts[self.frame.script].bound_by[loop]
        self._copy(len(bound))
        for name in bound & self.scope.names.keys():
            self.scope.names[name] = UNKNOWN

    def _rounds(self, body: list[ast.stmt]) -> Exits:
        """A loop's body, followed again as long as a round changes what the next one starts from."""
        exits, settled = Exits.NONE, False
        while not settled:
            start, began = self.mark(), birth()
            earlier, self.oldest_change = self.oldest_change, math.inf
            exits |= self.block(body)
            self.meet(start, self.mark())
            settled = start.names.keys() == self.scope.names.keys() and start.group == self.group
            settled &= self.oldest_change > began
            self.oldest_change = min(earlier, self.oldest_change)
        return exits

    def _after_loop(self, node: ast.For | ast.AsyncFor | ast.While, body: Exits) -> Exits:
        exits = self.block(node.orelse)
        return exits | Exits.FALLS if body & Exits.BREAKS else exits
