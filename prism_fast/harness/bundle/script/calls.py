"""Calls: into the bundle's own functions and classes, and out to packages that are known by name only."""

from __future__ import annotations

import ast
import contextlib

from prism_fast.harness.bundle.script import folding
from prism_fast.harness.bundle.script.expressions import Expressions
from prism_fast.harness.bundle.script.state import Exits, Frame, Site, Stop
from prism_fast.harness.bundle.script.values import (
    UNKNOWN,
    Blueprint,
    External,
    Items,
    Known,
    Made,
    Member,
    Module,
    OneOf,
    Partial,
    Pending,
    Routine,
    Scope,
    Super,
    Table,
    Thing,
    Value,
    any_of,
    callables_in,
    join,
    truth,
)

MAX_DEPTH = 60
STEPS_A_CALL = 6  # following one takes as long as looking at so many nodes
STOPS_HERE = {"sys.exit", "os._exit", "os.abort", "builtins.exit", "builtins.quit", "os.execv", "os.execve"}
RUNS_AT_EXIT = {"atexit.register"}


class Calls(Expressions):
    def _eval_Call(self, node: ast.Call) -> Value:
        function = self.evaluate(node.func)
        args: list[Value] = []
        kwargs: dict[str, Value] = {}
        exact = True
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                inner = self.unpacked(argument)
                exact &= inner is not None
                args += inner or []
            else:
                args.append(self.consumed(self.evaluate(argument)))
        for keyword in node.keywords:
            value = self.consumed(self.evaluate(keyword.value))
            if keyword.arg is not None:
                kwargs[keyword.arg] = value
            else:
                exact &= isinstance(value, Table) and not value.open
                self.spend(len(value.values) if isinstance(value, Table) else 0)
                kwargs |= {str(k): v for k, v in value.values.items()} if isinstance(value, Table) else {}
        self.line = node.lineno
        return self.call(function, args, kwargs, node.lineno, exact=exact)

    def call(
        self,
        function: Value,
        args: list[Value],
        kwargs: dict[str, Value],
        line: int,
        *,
        exact: bool = True,
        certain: bool = True,
    ) -> Value:
        """`exact`: no argument is missing from the lists. `certain`: the call is sure to happen, so where it never
        returns, neither does its caller (Stop)."""
        match function:
            case OneOf():
                options = [o for o in function.options if o != Known(None)]
                return any_of([self.call(o, args, kwargs, line, exact=exact, certain=False) for o in options])
            case Partial():
                self.spend(len(function.args) + len(function.kwargs))
                args, kwargs = function.args + args, function.kwargs | kwargs
                return self.call(function.function, args, kwargs, line, exact=exact, certain=certain)
            case Routine():
                return self._enter(function, args, kwargs, exact, certain)
            case Blueprint():
                return self._build(function, args, kwargs, line, exact)
            case External():
                return self._leave(function.path, args, kwargs, line, certain)
            case Made() if function.path.startswith("functools.") and args:
                return args[0]
            case Thing():
                for name in ("__call__", "forward"):
                    if isinstance(method := function.blueprint.lookup(name), Routine):
                        return self._enter(method.bound(function), args, kwargs, exact, certain)
        name = function.name if isinstance(function, Member) else ""
        self.observer.called(Site(self.frame.script, line, None, name, tuple(args), kwargs))
        self._hand_over(args, kwargs)
        if name and not name.startswith("__"):
            self.spend(len(self.built))
            for blueprint in list(self.built):  # the owner may be one of ours that was lost sight of
                if isinstance(method := blueprint.lookup(name), Routine):
                    self._enter(method.bound(Thing(blueprint)), args, kwargs, exact, certain=False)
        return UNKNOWN

    def call_method(self, thing: Thing, *names: str) -> Value:
        """Calls the first of the methods that the thing's class has, with unknown arguments, if it is called."""
        for name in names:
            if isinstance(method := thing.blueprint.lookup(name), Routine):
                return self._enter(method.bound(thing), [], {}, exact=False, certain=False)
        return UNKNOWN

    # ------------------------------------------------------------------------------------------ the bundle's own code

    def _enter(
        self, routine: Routine, args: list[Value], kwargs: dict[str, Value], exact: bool, certain: bool
    ) -> Value:
        node = routine.node
        self.spend(
            STEPS_A_CALL + len(routine.node.args.args) + len(routine.node.args.kwonlyargs) + len(args) + len(kwargs)
        )
        if self.active.count(node) >= 2 or len(self.active) >= MAX_DEPTH:
            return UNKNOWN
        scope = Scope(routine.scope)
        _bind_arguments(scope, routine, args, kwargs, exact)
        frame = Frame(scope, routine.script, routine.receiver, routine.owner)
        if node in self.scripts[routine.script].lazy and not routine.decorated:
            return Pending(lambda: self._follow_if_called(node, frame))
        return self._follow(node, frame) if certain else self._follow_if_called(node, frame)

    def _follow(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, frame: Frame) -> Value:
        """The value of a call. Raises Stop when it never returns."""
        line = self.line
        self.frames.append(frame)
        self.active.append(node)
        try:
            if isinstance(node, ast.Lambda):
                return self.evaluate(node.body)
            exits = self.block(node.body)
        finally:
            self.active.pop()
            self.frames.pop()
            self.line = line
        if not exits & (Exits.FALLS | Exits.RETURNS):
            raise Stop
        return any_of(frame.returned + ([Known(None)] if exits & Exits.FALLS else []))

    def _follow_if_called(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, frame: Frame) -> Value:
        before, value = self.group, UNKNOWN
        with contextlib.suppress(Stop):
            value = self._follow(node, frame)
        self.group = join(before, self.group)
        return value

    def _hand_over(self, args: list[Value], kwargs: dict[str, Value]) -> None:
        """Whoever receives one of the bundle's functions may call it, at any later time and with anything."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Known | External | Made):
                continue
            for function in callables_in(value, self.spend):
                target, given, named = function, [], {}
                if isinstance(function, Partial):
                    target, given, named = function.function, list(function.args), dict(function.kwargs)
                if isinstance(target, Routine):
                    before, self.group = self.group, UNKNOWN
                    self.consumed(self._enter(target, given, named, exact=False, certain=False))
                    self.group = before

    def _build(
        self, blueprint: Blueprint, args: list[Value], kwargs: dict[str, Value], line: int, exact: bool
    ) -> Value:
        thing = Thing(blueprint)
        self.spend(len(self.built))
        if blueprint not in self.built:
            self.built.append(blueprint)
        for base in blueprint.external_bases:
            name = base.rpartition(".")[2]
            self.observer.called(Site(self.frame.script, line, base, name, tuple(args), kwargs))
        if isinstance(start := blueprint.lookup("__init__"), Routine):
            self._enter(start.bound(thing), args, kwargs, exact, certain=True)
            return thing
        thing.attributes |= dict(zip(blueprint.fields, args, strict=False))
        thing.attributes |= {k: v for k, v in kwargs.items() if k in blueprint.fields}
        self.call_method(thing, "__post_init__")
        return thing

    # --------------------------------------------------------------------------------------------------- other packages

    def _leave(self, path: str, args: list[Value], kwargs: dict[str, Value], line: int, certain: bool) -> Value:
        self.observer.called(Site(self.frame.script, line, path, path.rpartition(".")[2], tuple(args), kwargs))
        if path in STOPS_HERE:
            if certain:
                raise Stop
            return UNKNOWN
        if path == "functools.partial" and args:
            return Partial(args[0], args[1:], kwargs)
        if path in RUNS_AT_EXIT:
            for argument in args:
                if isinstance(argument, External):
                    group = self.group
                    self._leave(argument.path, [], {}, line, certain=False)
                    self.group = group
        if not path.startswith("functools."):
            self._hand_over(args, kwargs)
        if path.startswith("torch.distributed."):
            known = self._process_group(path.rpartition(".")[2], bool(args or kwargs), certain)
            if known is not None:
                return known
        return self._standard(path, args, kwargs)

    def _process_group(self, name: str, has_arguments: bool, certain: bool) -> Value | None:
        """torch.distributed's answers about the default group, and what brings it up and down."""
        match name:
            case "init_process_group":
                self.group = Known(True) if certain else join(self.group, Known(True))
            case "destroy_process_group" if not has_arguments:
                self.group = Known(False) if certain else join(self.group, Known(False))
            case "is_initialized":
                return self.group
            case "is_available" | "is_torchelastic_launched":
                return Known(True)
            case "get_rank" | "get_node_local_rank" | "get_local_rank" if not has_arguments:
                return self.rank
            case "get_world_size" if not has_arguments:
                return self.world
        return None

    def _standard(self, path: str, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """The few builtins and library calls whose result matters here."""
        name = args[0].value if args and isinstance(args[0], Known) else None
        match path:
            case "os.environ.get" | "os.getenv" if args:
                return self.variable(args[0])
            case "builtins.getattr" | "builtins.setattr" if len(args) >= 2 and isinstance(args[1], Known):
                if path == "builtins.getattr":
                    return self.attribute(args[0], str(args[1].value))
                self.set_attribute(args[0], str(args[1].value), args[2] if len(args) > 2 else UNKNOWN)
                return Known(None)
            case "importlib.import_module" if isinstance(name, str):
                return Module(self.module(name)) if name in self.scripts else External(name)
            case "builtins.super" if self.frame.receiver is not None and self.frame.owner is not None:
                return Super(self.frame.receiver, self.frame.owner)
            case "builtins.list" | "builtins.tuple" | "builtins.iter" | "builtins.reversed" if args:
                return args[0] if isinstance(args[0], Items) else UNKNOWN
            case "builtins.dict" if not args:
                return Table(dict(kwargs))
            case "builtins.range":
                return Items([]) if folding.is_empty_range(args) else Made(path)
            case "builtins.bool" if args:
                known = truth(args[0])
                return UNKNOWN if known is None else Known(known)
        if path in folding.FOLDED_BUILTINS:
            values = [a.value for a in args if isinstance(a, Known)]
            if len(values) == len(args) > 0 and not kwargs:
                with contextlib.suppress(Exception):
                    return Known(folding.FOLDED_BUILTINS[path](*values))
            return UNKNOWN
        return Made(path)


def _bind_arguments(scope: Scope, routine: Routine, args: list[Value], kwargs: dict[str, Value], exact: bool) -> None:
    arguments = routine.node.args
    positional = [a.arg for a in arguments.posonlyargs + arguments.args]
    named = positional + [a.arg for a in arguments.kwonlyargs]
    given = ([routine.receiver] if routine.receiver is not None else []) + args
    scope.names |= {name: routine.defaults.get(name, UNKNOWN) if exact else UNKNOWN for name in named}
    scope.names |= dict(zip(positional, given, strict=False))
    scope.names |= {k: v for k, v in kwargs.items() if k in named}
    if arguments.vararg is not None:
        scope.names[arguments.vararg.arg] = Items(given[len(positional) :]) if exact else UNKNOWN
    if arguments.kwarg is not None:
        rest = {k: v for k, v in kwargs.items() if k not in named}
        scope.names[arguments.kwarg.arg] = Table(rest, open=not exact)
