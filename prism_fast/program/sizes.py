"""How much memory a program says it takes, from its traced shapes, before anything runs. Needs no torch.

A file may lie about its shapes; the executor's memory limit holds all the same. This is what refuses an honest program
that is too large with a sentence, rather than by a killed process.
"""

from __future__ import annotations

from typing import NamedTuple

from prism_fast.program import operators
from prism_fast.program.format import AUTOCAST, CONSTANT, GETITEM, Program, TensorSpec, flatten, tensors_in, values_in

_MOST = (1 << 63) - 1


class Bounds(NamedTuple):
    """`largest`: bytes of the largest intermediate. `peak`: bytes of the most that lives at once, without state."""

    largest: int
    peak: int


# Operators that show their input, or hand it back: they take no memory of their own.
_VIEWS = frozenset(name for name, item in operators.OPERATORS.items() if item.kind in ("view", "in place", "size"))
_COPY = frozenset({"aten.reshape.default", "aten.contiguous.default"})  # may copy: counted as if they did


def bounds(program: Program, batch: int) -> Bounds:
    """Bounds for `batch` rows, at most 2^63 - 1. A view keeps what it shows alive."""
    flat = flatten(program)
    owner: dict[int, int] = {}  # value -> the value whose memory it shows
    last: dict[int, int] = {}
    own: dict[int, int] = {}
    for index, step in enumerate(flat.steps):
        read = [value for item in (*step.arguments, *(v for _, v in step.keywords)) for value in values_in(item)]
        for value in read:
            last[owner.get(value, value)] = index
        if step.operator in (AUTOCAST, CONSTANT):
            continue
        shows = (step.operator in _VIEWS and step.operator not in _COPY) or step.operator == GETITEM
        if shows and read:
            owner[step.output] = owner.get(read[0], read[0])
        else:
            own[step.output] = min(_MOST, sum(spec.bytes(batch) for spec in tensors_in(step.result)))
        last[owner.get(step.output, step.output)] = index
    last[owner.get(flat.output, flat.output)] = len(flat.steps)
    ends: dict[int, list[int]] = {}
    for value, index in last.items():
        ends.setdefault(index, []).append(value)
    live = peak = 0
    for index, step in enumerate(flat.steps):
        live += own.get(step.output, 0)
        peak = max(peak, live)
        live -= sum(own.get(value, 0) for value in ends.get(index, ()))
    return Bounds(min(_MOST, max(own.values(), default=0)), min(_MOST, peak))


def logits_spec(program: Program) -> TensorSpec | None:
    """dtype and shape of the logits as traced; None where the file does not say."""
    flat = flatten(program)
    result = next((step.result for step in flat.steps if step.output == flat.output), None)
    return result if isinstance(result, TensorSpec) else None
