"""Stops a program before its last linear layer, so that a caller makes code lengths by chunks of rows.

The logits of a small model are most of its memory: [B, L, V] never stands in memory where the program ends in a linear
layer, with or without a scale, a softcap, a cast. What follows the layer has to work on each row alone; it is handed
back as a function. The walk goes back from the output; a layer whose logits anything else reads is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from prism_fast.program.format import (
    AUTOCAST,
    Argument,
    FlatProgram,
    ProgramError,
    Special,
    Step,
    TensorSpec,
    Value,
    values_in,
)
from prism_fast.program.runnable import DTYPES, Function, Runnable

_LINEAR = "aten.linear.default"
# Of a row of logits, whatever the other rows hold; none of them is on an autocast list.
_ROWWISE = frozenset(
    f"aten.{name}"
    for name in (
        "_to_copy.default",
        "add.Tensor",
        "clamp.default",
        "contiguous.default",
        "div.Scalar",
        "div.Tensor",
        "mul.Scalar",
        "mul.Tensor",
        "neg.default",
        "sigmoid.default",
        "sub.Tensor",
        "tanh.default",
        "to.dtype",
        "to.dtype_layout",
    )
)
_SAME_ROWS = frozenset({"aten.alias.default", "aten.reshape.default", "aten.view.default"})


class Hidden(NamedTuple):
    """`tail(F.linear(hidden, weight, bias))` is the logits, for all of hidden [B, L, H] or rows [N, H] of it.

    `weight` [V, H] and `bias` [V] or None are in the dtype in which the layer computes. `softcap`: the tail is
    cap * tanh(logits / cap) and nothing else. `plain`: there is no tail.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    tail: Callable[[Tensor], Tensor]
    plain: bool
    softcap: float | None


@dataclass(frozen=True)
class _Cut:
    """Where a program ends in a linear layer. `tail`: steps after it, in order."""

    linear: Step
    tail: tuple[Step, ...]
    autocast: tuple[torch.dtype | None, bool] | None


def find(flat: FlatProgram) -> _Cut | None:
    """The last linear layer, None where the program does not end in one."""
    makers = {step.output: step for step in flat.steps if step.operator != AUTOCAST}
    depends = {0}
    uses: dict[int, int] = {flat.output: 1}
    regions: list[tuple[torch.dtype | None, bool] | None] = []
    inside: dict[int, tuple[torch.dtype | None, bool] | None] = {}
    for step in flat.steps:
        if step.operator == AUTOCAST:
            if step.enters:
                dtype, enabled, _ = step.arguments
                regions.append((DTYPES[dtype.name] if isinstance(dtype, Special) else None, enabled))
            else:
                regions.pop()
            continue
        read = _read(step)
        for value in read:
            uses[value] = uses.get(value, 0) + 1
        if any(value in depends for value in read):
            depends.add(step.output)
        inside[step.output] = regions[-1] if regions else None
    tail: list[Step] = []
    value = flat.output
    while True:
        found = makers.get(value)
        if found is None or uses.get(value, 0) != 1:
            return None
        step = found
        if step.operator == _LINEAR:
            break
        read = _read(step)
        before = [v for v in read if v in depends]
        if len(before) != 1 or step.operator not in _ROWWISE | _SAME_ROWS:
            return None
        if step.operator in _SAME_ROWS and not _keeps_rows(step, makers.get(before[0])):
            return None
        tail.append(step)
        value = before[0]
    if step.keywords or not 2 <= len(step.arguments) <= 3 or type(step.arguments[0]) is not Value:
        return None
    if any(v in depends for item in step.arguments[1:] for v in values_in(item)):
        return None
    return _Cut(step, tuple(reversed(tail)), inside[step.output])


def _keeps_rows(step: Step, before: Step | None) -> bool:
    """True if the reshape leaves the last dimension as it is, as traced; the run checks it again."""
    if step.operator == "aten.alias.default":
        return True
    one, other = step.result, None if before is None else before.result
    return (
        isinstance(one, TensorSpec)
        and isinstance(other, TensorSpec)
        and bool(one.shape and other.shape)
        and one.shape[-1] == other.shape[-1]
    )


class Headless:
    """A program that stops at its head."""

    def __init__(self, runnable: Runnable, cut: _Cut) -> None:
        self._runnable, self._cut = runnable, cut
        linear = cut.linear
        wanted = [v for item in linear.arguments for v in values_in(item)]
        self._has_bias = len(wanted) == 3
        chain = {linear.output} | {step.output for step in cut.tail}
        self._steps = tuple(step for step in cut.tail if step.operator not in _SAME_ROWS)
        self._operands = sorted({v for step in self._steps for v in _read(step) if v not in chain})
        flat = runnable.flat
        # Kinds are by value: those of the steps left out stay in the list and are never read.
        self._function = Function(
            replace(flat, steps=tuple(step for step in flat.steps if step.output not in chain)),
            [*wanted, *self._operands],
            runnable.constants,
            runnable.device,
            kinds=runnable.kinds,
        )
        self._softcap = _softcap(self._steps)
        self._tail = self._tail_function()

    @staticmethod
    def of(runnable: Runnable) -> Headless | None:
        cut = find(runnable.flat)
        return None if cut is None else Headless(runnable, cut)

    def run_hidden(self, state: Sequence[Tensor], tokens: Tensor) -> Hidden:
        """Hidden states of tokens int64 [B, L] and the head that makes logits of them. Writes to neither argument.

        Raises ProgramError as `Runnable.run` does, and where a shape is not what was traced.
        """
        self._runnable.check_tokens(tokens)
        values = self._function([tokens, *state])
        found = values[: 3 if self._has_bias else 2]
        operands = dict(zip(self._operands, values[len(found) :], strict=True))
        hidden, weight = found[0], found[1]
        bias = found[2] if self._has_bias else None
        if hidden.shape[:-1].numel() != tokens.numel() or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
            raise ProgramError("the program's head is not given a hidden state a token")
        hidden = hidden.reshape(*tokens.shape, hidden.shape[-1])
        classes = weight.shape[0]
        for operand in operands.values():
            if isinstance(operand, Tensor) and operand.numel() != 1 and tuple(operand.shape) != (classes,):
                raise ProgramError("what follows the program's head is not the same for every token")
        hidden, weight, bias = self._cast(hidden, weight, bias)
        if self._tail is None:
            return Hidden(hidden, weight, bias, _unchanged, True, None)
        function, given = self._tail, [operands[value] for value in self._operands]

        def tail(logits: Tensor) -> Tensor:
            return function([logits, *given])[0]  # type: ignore[no-any-return]

        return Hidden(hidden, weight, bias, tail, False, self._softcap)

    def _cast(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """What autocast makes of a linear layer's arguments, by the region it lies in or the caller's own."""
        kind = self._runnable.device.type
        region = self._cut.autocast
        enabled = torch.is_autocast_enabled(kind) if region is None else region[1]
        if not enabled:
            return hidden, weight, bias
        dtype = None if region is None else region[0]
        dtype = torch.get_autocast_dtype(kind) if dtype is None else dtype

        def cast(tensor: Tensor) -> Tensor:
            eligible = tensor.is_floating_point() and tensor.dtype is not torch.float64
            return tensor.to(dtype) if eligible else tensor

        return cast(hidden), cast(weight), None if bias is None else cast(bias)

    def _tail_function(self) -> Function | None:
        """The steps after the layer as a function of its output and the other operands."""
        if not self._steps:
            return None
        numbers = {value: index + 1 for index, value in enumerate(self._operands)}
        inputs = len(numbers) + 1
        renumbered = []
        for index, step in enumerate(self._steps):
            before = 0 if index == 0 else inputs + index - 1
            arguments = tuple(_placed(argument, numbers, before) for argument in step.arguments)
            keywords = tuple((name, _placed(argument, numbers, before)) for name, argument in step.keywords)
            renumbered.append(replace(step, arguments=arguments, keywords=keywords, output=inputs + index))
        runnable = self._runnable
        kinds = ["tensor", *(runnable.kinds[value] for value in self._operands), *("tensor" for _ in renumbered)]
        flat = FlatProgram(inputs, tuple(renumbered), inputs + len(renumbered) - 1)
        return Function(flat, [flat.output], runnable.constants, runnable.device, kinds=kinds)


def _read(step: Step) -> list[int]:
    return [value for item in (*step.arguments, *(v for _, v in step.keywords)) for value in values_in(item)]


def _placed(argument: Argument, numbers: dict[int, int], before: int) -> Argument:
    """The argument with operands renumbered; any other value is the one made just before."""
    if type(argument) is Value:
        return Value(numbers.get(argument.index, before))
    return tuple(_placed(item, numbers, before) for item in argument) if type(argument) is tuple else argument


def _unchanged(logits: Tensor) -> Tensor:
    return logits


def logits_of(found: Hidden) -> Tensor:
    """All logits [B, L, V]: what `Runnable.run` gives."""
    return found.tail(F.linear(found.hidden, found.weight, found.bias))


def _softcap(steps: tuple[Step, ...]) -> float | None:
    """cap, if the tail is cap * tanh(logits / cap) with a cap that is a number."""
    names = [step.operator for step in steps]
    if names != ["aten.div.Tensor", "aten.tanh.default", "aten.mul.Tensor"]:
        return None
    caps = [argument for step in (steps[0], steps[2]) for argument in step.arguments if type(argument) is not Value]
    if len(caps) != 2 or type(steps[0].arguments[1]) is Value or caps[0] != caps[1] or type(caps[0]) is bool:
        return None
    return float(caps[0])
