"""What is known of an object while a script is followed without being run."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_OPTIONS = 6
birth: Callable[[], int] = itertools.count().__next__  # a number later than every earlier one


class Value:
    """Nothing is known."""


UNKNOWN = Value()


@dataclass(frozen=True)
class Known(Value):
    """A constant: bool, int, float, str, bytes or None."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and type(self.value) is type(other.value) and self.value == other.value

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


@dataclass(frozen=True)
class External(Value):
    """Something of another package, by its dotted name: `torch.distributed.init_process_group`."""

    path: str


@dataclass(frozen=True)
class Made(Value):
    """What a call of an external gave: `open(...)` is Made("builtins.open")."""

    path: str


@dataclass(frozen=True)
class Member(Value):
    """An attribute of something unknown: only its name is known."""

    name: str


@dataclass(frozen=True)
class Residue(Value):
    """Something unknown, modulo a known number."""

    modulus: int


@dataclass(frozen=True)
class Context(Value):
    """The `ctx` that train was given."""


class Scope:
    """Names of one function call, class body or module. `parent` is where Python looks next."""

    def __init__(self, parent: Scope | None = None) -> None:
        self.names: dict[str, Value] = {}
        self.parent = parent
        self.global_names: set[str] = set()
        self.nonlocal_names: set[str] = set()
        self.born = birth()

    def find(self, name: str) -> Scope | None:
        scope: Scope | None = self
        while scope is not None and name not in scope.names:
            scope = scope.parent
        return scope

    @property
    def module(self) -> Scope:
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope


@dataclass(eq=False)
class Routine(Value):
    """A function or lambda of the bundle. `script` is the file it stands in."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    script: str
    scope: Scope
    defaults: dict[str, Value] = field(default_factory=dict)
    receiver: Value | None = None
    owner: Blueprint | None = None
    decorated: bool = False

    @property
    def name(self) -> str:
        return getattr(self.node, "name", "<lambda>")

    def bound(self, receiver: Value) -> Routine:
        return Routine(self.node, self.script, self.scope, self.defaults, receiver, self.owner, self.decorated)


@dataclass(eq=False)
class Blueprint(Value):
    """A class of the bundle. `ancestors`: itself and the bundle's own classes above it, each once, nearest first."""

    name: str
    scope: Scope
    bases: tuple[Value, ...]
    fields: tuple[str, ...] = ()  # annotated names in order: what a dataclass' __init__ takes
    ancestors: tuple[Blueprint, ...] = ()
    external_bases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ours = [base for base in self.bases if isinstance(base, Blueprint)]
        above = dict.fromkeys(ancestor for base in ours for ancestor in base.ancestors)
        self.ancestors = (self, *above)
        own = [base.path for base in self.bases if isinstance(base, External)]
        self.external_bases = tuple(dict.fromkeys([*own, *(path for base in ours for path in base.external_bases)]))

    def lookup(self, name: str) -> Value | None:
        return next((a.scope.names[name] for a in self.ancestors if name in a.scope.names), None)


@dataclass(eq=False)
class Thing(Value):
    """An instance of a class of the bundle."""

    blueprint: Blueprint
    attributes: dict[str, Value] = field(default_factory=dict)
    born: int = field(default_factory=birth)


@dataclass(eq=False)
class Super(Value):
    """`super()` inside a method."""

    receiver: Value
    owner: Blueprint


@dataclass(eq=False)
class Items(Value):
    """A tuple or list whose length is known."""

    values: list[Value]


@dataclass(eq=False)
class Table(Value):
    """A dict with constant keys; `open` once something unknown may be in it."""

    values: dict[Any, Value]
    open: bool = False
    born: int = field(default_factory=birth)


@dataclass(eq=False)
class Partial(Value):
    """functools.partial."""

    function: Value
    args: list[Value]
    kwargs: dict[str, Value]


@dataclass(eq=False)
class Pending(Value):
    """A generator or coroutine that was made and has not run: its body runs when somebody consumes it."""

    run: Callable[[], object]
    done: bool = False


@dataclass(eq=False)
class Module(Value):
    """A script of the bundle, imported."""

    scope: Scope


@dataclass(eq=False)
class Property(Value):
    """A method that is called when it is looked at."""

    function: Value


@dataclass(eq=False)
class Unbound(Value):
    """A static method, or a class method (`of_class`)."""

    function: Value
    of_class: bool


@dataclass(frozen=True)
class OneOf(Value):
    """One of several callables or things; None may be among them."""

    options: tuple[Value, ...]


CALLABLE_OR_THING = (Routine, Blueprint, External, Made, Thing, Partial, Context)


def options_of(value: Value) -> tuple[Value, ...]:
    return value.options if isinstance(value, OneOf) else (value,)


def join(a: Value, b: Value) -> Value:
    """What is known after two ways led here, one with `a`, one with `b`."""
    if a is b or a == b:
        return a
    merged: list[Value] = []
    for option in options_of(a) + options_of(b):
        if not (isinstance(option, CALLABLE_OR_THING) or option == Known(None)):
            return UNKNOWN
        if not any(option is m or option == m for m in merged):
            merged.append(option)
    return OneOf(tuple(merged)) if len(merged) <= MAX_OPTIONS else UNKNOWN


def truth(value: Value) -> bool | None:
    """Whether `value` is true, or None when that is not known."""
    if isinstance(value, Known):
        return bool(value.value)
    if isinstance(value, Items):
        return bool(value.values)
    if isinstance(value, Table):
        return True if value.values else (None if value.open else False)
    if isinstance(value, Routine | Blueprint | Partial | Context):
        return True
    return None


def callables_in(value: Value, spend: Callable[[int], None]) -> Iterator[Value]:
    """The bundle's own functions that whoever is handed `value` may call. A list that is in another twice, and that in
    a third twice, is looked into once."""
    seen: set[int] = set()
    queue: list[Value] = [value]
    while queue:
        value = queue.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Routine | Partial):
            yield value
            continue
        inner: list[Value] = []
        if isinstance(value, OneOf):
            inner = list(value.options)
        elif isinstance(value, Items):
            inner = value.values
        elif isinstance(value, Table):
            inner = list(value.values.values())
        spend(len(inner))
        queue.extend(reversed(inner))


def any_of(values: Sequence[Value] | None) -> Value:
    """What is known of one of `values`, whichever it is."""
    if not values:
        return UNKNOWN
    found = values[0]
    for value in values[1:]:
        found = join(found, value)
    return found
