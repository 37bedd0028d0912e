"""Where a walk stands: frames and names, whether the process group exists, and how ways part and meet again."""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Protocol

from prism_fast.harness.bundle.script.source import Script
from prism_fast.harness.bundle.script.values import (
    UNKNOWN,
    Blueprint,
    Context,
    External,
    Items,
    Known,
    Made,
    Member,
    Module,
    OneOf,
    Pending,
    Property,
    Routine,
    Scope,
    Super,
    Table,
    Thing,
    Unbound,
    Value,
    any_of,
    join,
    options_of,
)

MAX_STEPS = 200_000  # under a second; training.py of an example takes 6,000
COPIED_A_STEP = 32  # names of a scope, copied or compared, that take as long as one node that is looked at


class TooLarge(Exception):
    """The script takes more steps to follow than are granted."""


class Budget:
    """Steps that the walks of one bundle may take, all of them together. Everything that takes time takes steps: a
    node that is looked at, a name that is copied, an item that is unpacked."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self.left = steps

    def spend(self, steps: int) -> None:
        """Raises TooLarge once there are none left: before whatever they are for is done, so nothing outgrows them."""
        self.left -= steps
        if self.left < 0:
            raise TooLarge


class Stop(Exception):
    """An expression that never returns: it exits or always raises."""


class Exits(IntFlag):
    """How a block may be left."""

    NONE = 0
    FALLS = 1
    RETURNS = 2
    BREAKS = 4
    CONTINUES = 8
    RAISES = 16


@dataclass(frozen=True)
class Site:
    """One reached call. `path`: the external called, or None; `name`: the last part of what was called."""

    script: str
    line: int
    path: str | None
    name: str
    args: tuple[Value, ...]
    kwargs: Mapping[str, Value]

    def argument(self, position: int, keyword: str) -> Value | None:
        """The argument given at a position or by a keyword, or None when it is not given."""
        if keyword in self.kwargs:
            return self.kwargs[keyword]
        return self.args[position] if position < len(self.args) else None


class Observer(Protocol):
    """Is told what is reached."""

    def called(self, site: Site) -> None: ...

    def sliced(self, script: str, line: int, start: Value | None, step: Value | None) -> None: ...

    def residue_compared(self, script: str, line: int, modulus: int, other: Value) -> None: ...

    def stored(self, script: str, line: int, path: str, key: Value, value: Value) -> None: ...


@dataclass
class Frame:
    """A function call, class body or module that is being followed."""

    scope: Scope
    script: str
    receiver: Value | None = None
    owner: Blueprint | None = None
    in_class_body: bool = False
    returned: list[Value] = field(default_factory=list)


@dataclass(frozen=True)
class Mark:
    """What a way may change and another way must not see."""

    names: dict[str, Value]
    group: Value


class WalkState:
    """The ground that statements, expressions and calls stand on."""

    def __init__(
        self, scripts: Mapping[str, Script], rank: int, world: int, observer: Observer, budget: Budget
    ) -> None:
        self.scripts, self.observer = scripts, observer
        self.spend = budget.spend
        self.frames: list[Frame] = []
        self.modules: dict[str, Scope] = {}
        self.active: list[ast.AST] = []
        self.built: list[Blueprint] = []  # classes that have instances
        self.patched: dict[str, Value] = {}
        self.group: Value = Known(False)  # whether the default process group exists
        self.oldest_change = math.inf  # the birth of the oldest object that was changed in place
        self.line = 0
        self.rank, self.world = Known(rank), Known(world)

    # What the other parts of a walk offer each other.

    def evaluate(self, node: ast.expr) -> Value:
        raise NotImplementedError

    def block(self, statements: list[ast.stmt]) -> Exits:
        raise NotImplementedError

    def call(self, function: Value, args: list[Value], kwargs: dict[str, Value], line: int) -> Value:
        raise NotImplementedError

    # ----------------------------------------------------------------------------------------------------- standing

    @property
    def frame(self) -> Frame:
        return self.frames[-1]

    @property
    def scope(self) -> Scope:
        return self.frames[-1].scope

    def step(self, node: ast.AST) -> None:
        self.spend(1)
        self.line = getattr(node, "lineno", self.line)

    def module(self, name: str) -> Scope:
        """The scope of a script, followed from its first line on when it is first imported."""
        if name not in self.modules:
            scope = self.modules[name] = Scope()
            scope.names["__name__"] = Known(name)
            scope.global_names.update(self.scripts[name].rebound)  # what a function may rebind is no constant
            self.frames.append(Frame(scope, name))
            self.block(self.scripts[name].tree.body)
            self.frames.pop()
        return self.modules[name]

    # ----------------------------------------------------------------------------------------------------- branches

    def mark(self) -> Mark:
        self._copy(len(self.scope.names))
        return Mark(dict(self.scope.names), self.group)

    def restore(self, mark: Mark) -> None:
        self._copy(len(mark.names))
        self.scope.names, self.group = dict(mark.names), mark.group

    def meet(self, a: Mark, b: Mark) -> None:
        """Goes on from where two ways met. A name bound on one way only keeps that way's value: on the other its
        use would be an error."""
        self._copy(2 * len(a.names) + len(b.names))
        met = dict(a.names)
        for name, value in b.names.items():
            if (other := met.get(name, value)) is not value:
                self.spend(1)
                value = join(other, value)
            met[name] = value
        self.scope.names = met
        self.group = join(a.group, b.group)

    def _copy(self, names: int) -> None:
        self.spend(1 + names // COPIED_A_STEP)

    def either(self, ways: list[Callable[[], Exits]]) -> Exits:
        """Follows every way from here; those that fall through meet again after it."""
        start, ends, exits = self.mark(), [], Exits.NONE
        for way in ways:
            self.restore(start)
            left = way()
            exits |= left
            if left & Exits.FALLS:
                ends.append(self.mark())
        for i, end in enumerate(ends):
            if i == 0:
                self.restore(end)
            else:
                self.meet(self.mark(), end)
        return exits

    # -------------------------------------------------------------------------------------------------------- names

    def look_up(self, name: str) -> Value:
        scope = self.scope.find(name)
        if scope is not None:
            value = scope.names[name]
            rebound = scope.parent is None and name in scope.global_names and isinstance(value, Known)
            return UNKNOWN if rebound else value
        if hasattr(builtins, name):
            return self.external(f"builtins.{name}")
        stars = self.scope.module.names.get("*")
        if isinstance(stars, Items):
            self.spend(len(stars.values))
            return any_of([self.external(f"{s.path}.{name}") for s in stars.values if isinstance(s, External)])
        return UNKNOWN

    def bind(self, name: str, value: Value) -> None:
        scope = self.scope
        if name in scope.global_names and scope.parent is not None:
            target = scope.module
        elif name in scope.nonlocal_names and scope.parent is not None:
            target = scope.parent.find(name) or scope.parent
        else:
            scope.names[name] = value
            return
        target.names[name] = self._changed(target.born, target.names.get(name), value)

    def _changed(self, born: float, old: Value | None, new: Value) -> Value:
        """What a place in an object holds from now on: either value, since the object may be seen from any round."""
        value = new if old is None else join(old, new)
        if not (value is old or value == old):
            self.oldest_change = min(self.oldest_change, born)
        return value

    def assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self.bind(target.id, value)
        elif isinstance(target, ast.Tuple | ast.List):
            items = self.items(value)
            starred = any(isinstance(t, ast.Starred) for t in target.elts)
            self.spend(len(target.elts))
            if items is None or starred or len(items) != len(target.elts):
                items = [UNKNOWN] * len(target.elts)
            for element, item in zip(target.elts, items, strict=True):
                self.assign(element, item)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, UNKNOWN)
        elif isinstance(target, ast.Attribute):
            self.set_attribute(self.evaluate(target.value), target.attr, value)
        elif isinstance(target, ast.Subscript):
            container, key = self.evaluate(target.value), self.evaluate(target.slice)
            if isinstance(container, External):
                self.observer.stored(self.frame.script, target.lineno, container.path, key, value)
            elif isinstance(container, Table):
                self._set_item(container, key, value)

    def _set_item(self, table: Table, key: Value, value: Value) -> None:
        if isinstance(key, Known):
            table.values[key.value] = self._changed(table.born, table.values.get(key.value), value)
        else:
            self.spend(len(table.values))
            table.open = True
            table.values = {k: self._changed(table.born, v, value) for k, v in table.values.items()}

    def set_attribute(self, owner: Value, name: str, value: Value) -> None:
        for option in options_of(owner):
            if isinstance(option, Thing):
                option.attributes[name] = self._changed(option.born, option.attributes.get(name), value)
            elif isinstance(option, Blueprint):
                names = option.scope.names
                names[name] = self._changed(option.scope.born, names.get(name), value)
            elif isinstance(option, External):
                self.patched[f"{option.path}.{name}"] = value

    # --------------------------------------------------------------------------------------------------- attributes

    def external(self, path: str) -> Value:
        if path == "typing.TYPE_CHECKING":
            return Known(False)
        return self.patched.get(path, External(path))

    def attribute(self, owner: Value, name: str) -> Value:
        match owner:
            case External():
                return self.external(f"{owner.path}.{name}")
            case Made():
                return self.external(f"{owner.path}().{name}")
            case Context():
                known = {"rank": self.rank, "local_rank": self.rank, "world_size": self.world}
                return known.get(name, Member(name))
            case Module():
                return owner.scope.names.get(name, UNKNOWN)
            case Thing():
                return owner.attributes.get(name) or self._class_attribute(owner.blueprint, owner, name)
            case Blueprint():
                return self._class_attribute(owner, None, name)
            case Super():
                bases = [b for b in owner.owner.bases if isinstance(b, Blueprint)]
                return self._class_attribute(bases[0], owner.receiver, name) if bases else Member(name)
            case OneOf():
                return any_of([self.attribute(o, name) for o in owner.options if o != Known(None)])
        return Member(name)

    def _class_attribute(self, blueprint: Blueprint, receiver: Value | None, name: str) -> Value:
        found = blueprint.lookup(name)
        match found:
            case None:
                return Member(name)
            case Property() if receiver is not None:
                return self.call(found.function, [receiver], {}, self.line)
            case Unbound():
                bound = found.of_class and isinstance(found.function, Routine)
                return found.function.bound(blueprint) if bound else found.function  # type: ignore[attr-defined]
            case Routine() if receiver is not None:
                return found.bound(receiver)
        return found

    # ---------------------------------------------------------------------------------------------------- iteration

    def consumed(self, value: Value) -> Value:
        """Follows what a generator or coroutine put off: somebody is about to run it."""
        if isinstance(value, Pending) and not value.done:
            value.done = True
            value.run()
        return value

    def items(self, value: Value) -> list[Value] | None:
        """What iterating over `value` gives, where that is known."""
        if isinstance(value, Items):
            return value.values
        if isinstance(value, Table) and not value.open:
            self.spend(len(value.values))
            return [Known(k) for k in value.values]
        if isinstance(value, Known) and value.value in ("", b""):
            return []
        return None
