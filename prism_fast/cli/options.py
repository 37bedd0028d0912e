"""What the values of every command are held to, in one place: paths made absolute, numbers within their bounds.

`Commands` is the Typer of all groups. What a command's function receives has been through `settled`: a relative path
means a place where the user stands, and must not change its meaning in a process that stands elsewhere; a number
that no run could be made with is refused by the option's name before anything starts.
"""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer

from prism_fast.protocol.errors import UsageError

MOST = 2**63 - 1  # of a count: what 64-bit records, files and SQLite hold
MOST_POSITIONS = 2**31 - 1
MOST_THREADS = 4096
MOST_SECONDS = 1e9
SEEDS = (0, MOST)

# The least and the most of every numeric parameter, by its name; "command name" where a command has bounds of its own.
BOUNDS: dict[str, tuple[float, float]] = {
    "accumulate": (1, MOST_POSITIONS),
    "artifacts_quota": (0, MOST),
    "batch_size": (1, MOST_POSITIONS),
    "budget_seconds": (1e-3, MOST_SECONDS),
    "cost_rows": (1, MOST_POSITIONS),
    "cpus": (1, MOST_THREADS),
    "documents_per_shard": (1, MOST_POSITIONS),
    "eot": (0, 2**32 - 1),
    "flops_budget": (1, 1e30),
    "gpus": (0, MOST_THREADS),
    "head": (0, MOST),
    "micro_batch": (1, MOST_POSITIONS),
    "nproc": (-MOST, MOST),  # one node's: `check_single_node` refuses by rule
    "prefetch": (1, 1024),
    "snapshots": (0, 1024),
    "repeats": (1, 1_000_000),
    "replay": (0, MOST),
    "retries": (0, 1000),
    "seconds": (1, MOST_SECONDS),
    "seed": (0, 2**64 - 1),
    "seq_len": (2, MOST_POSITIONS),
    "step_budget": (1, MOST),
    "steps": (1, MOST_POSITIONS),
    "check steps": (4, MOST_POSITIONS),
    "token_budget": (0, MOST),
    "plan token_budget": (1, MOST),
    "torch_threads": (1, MOST_THREADS),
    "val_byte_budget": (1, MOST),
    "vocab_size": (2, MOST_POSITIONS),
    "warmup": (0, MOST_POSITIONS),
    "watchdog_grace": (0, MOST_SECONDS),
    "width": (1, MOST_POSITIONS),
    "window": (1, MOST_POSITIONS),
    "workers": (1, MOST_THREADS),
}
# Parameters of text that may name a place: by name, words that are none, and endings without which it is none.
PLACES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "data": (("sample",), ()),
    "val": (("sample",), ()),
    "phase2": (("sample",), ()),
    "corpus": (("sample",), ()),
    "tokenizer": ((), (".tiktoken",)),
    "cost": ((), (".json",)),
}


class Commands(typer.Typer):
    """A Typer whose commands' values are settled."""

    def command(  # type: ignore[override]
        self, name: str | None = None, **options: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        register = super().command(name, **options)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            return register(settled(function, name or function.__name__))

        return decorate


def settled(function: Callable[..., Any], command: str) -> Callable[..., Any]:
    """`function`, given its values as `settle` leaves them."""
    hints: dict[str, Any] = {}

    @functools.wraps(function)
    def run(**values: Any) -> Any:
        if not hints:
            hints.update(typing.get_type_hints(function))
        return function(**{name: settle(command, name, hints.get(name), value) for name, value in values.items()})

    return run


def settle(command: str, name: str, hint: Any, value: Any) -> Any:
    """One value of a parameter: absolute if it names a place. Raises UsageError for a number out of its bounds."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, list):
        return [settle(command, name, hint, item) for item in value]
    if isinstance(value, Path):
        return value.absolute()
    if isinstance(value, int | float):
        low, high = bounds_of(command, name)
        return within(f"--{name.replace('_', '-')}", value, low, high)
    return placed(name, value) if name in PLACES and type(value) is str else value


def placed(name: str, text: str | None) -> str | None:
    """The value of a parameter of PLACES, wherever it comes from."""
    return None if text is None else place(text, *PLACES[name])


def bounds_of(command: str, name: str) -> tuple[float, float]:
    return BOUNDS.get(f"{command} {name}") or BOUNDS[name]


def place(text: str, words: Iterable[str] = ("sample",), endings: tuple[str, ...] = ()) -> str:
    """`text` as an absolute path, unless it is empty, one of `words`, or has none of the `endings`."""
    if not text or text in words or (endings and not text.endswith(endings)):
        return text
    return str(Path(text).absolute())


def within(option: str, value: Any, low: float, high: float) -> Any:
    """`value`, a number. Raises UsageError for what is not finite, or not from `low` to `high`."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{option} {value}: expected a finite number")
    if value < low or value > high:
        expected = f"at least {low:g}" if value < low else f"at most {int(high) if high < 1e19 else high}"
        raise UsageError(f"{option} {str(value)[:40]}: expected {expected}")
    return value


def whole_numbers(option: str, text: str, low: float, high: float, example: str) -> tuple[int, ...]:
    """The numbers of "1337,2027". Raises UsageError for what is none, or is out of its bounds."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option} {text[:80]}: expected whole numbers with commas between, for example {example}"
        ) from None
    return tuple(within(option, number, low, high) for number in numbers)


def places_of(function: Callable[..., Any]) -> dict[str, Callable[[str], str]]:
    """Options of a command that name places, and what makes each absolute: for those that travel to other machines."""
    found: dict[str, Callable[[str], str]] = {}
    for name in inspect.signature(function).parameters:
        hint = str(typing.get_type_hints(function).get(name))
        if "Path" in hint:
            found[f"--{name.replace('_', '-')}"] = functools.partial(place, words=())
        elif name in PLACES:
            words, endings = PLACES[name]
            found[f"--{name.replace('_', '-')}"] = functools.partial(place, words=words, endings=endings)
    return found
