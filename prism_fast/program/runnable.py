"""Runs a program on text. Trusted: nothing of a bundle is imported, and nothing of its file ever becomes code's text.

A program is checked against the allow-list and each argument against its operator's schema when it is loaded, then
written out as Python functions whose names are all ours (v0 a value, f0 a function, c0 a constant). An operator costs
what calling it costs: the functions are faster than most eager forwards. Each tensor is deleted after its last use.

State, constants and tokens belong to others. An analysis of what may share memory with what, by schema and on the safe
side, finds the operators that write; what they may reach is copied at the start of each run, and nothing else.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prism_fast.program import operators
from prism_fast.program.format import (
    AUTOCAST,
    CONSTANT,
    DTYPE_BYTES,
    GETITEM,
    TOKENS,
    Argument,
    FlatProgram,
    Program,
    ProgramError,
    Special,
    StateTensor,
    Step,
    Value,
    constant_offsets,
    flatten,
    shown,
    values_in,
)

if TYPE_CHECKING:
    from prism_fast.program.head import Headless, Hidden

DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
STEPS_PER_FUNCTION = 2000  # a longer one takes Python's compiler more than its share of time
_INT64 = 1 << 63

# ---------------------------------------------------------------------------------------------------------------------
# Operators


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Arithmetic on sizes whose result is an int of 64 bits: a few products of products would fill the memory."""

    def bounded(*arguments: Any) -> Any:
        result = function(*arguments)
        if isinstance(result, int) and not -_INT64 <= result < _INT64:
            raise OverflowError("a size leaves 64 bits")
        return result

    return bounded


_PYTHON: dict[str, tuple[Callable[..., Any], int]] = {  # function, number of arguments
    "py.add": (_bounded(operator.add), 2),
    "py.sub": (_bounded(operator.sub), 2),
    "py.mul": (_bounded(operator.mul), 2),
    "py.floordiv": (_bounded(operator.floordiv), 2),
    "py.mod": (operator.mod, 2),
    "py.neg": (_bounded(operator.neg), 1),
    "py.truediv": (operator.truediv, 2),
    "py.eq": (operator.eq, 2),
    "py.ne": (operator.ne, 2),
    "py.lt": (operator.lt, 2),
    "py.le": (operator.le, 2),
    "py.gt": (operator.gt, 2),
    "py.ge": (operator.ge, 2),
    "py.max": (max, 2),
    "py.min": (min, 2),
    "py.int": (_bounded(int), 1),
    "py.float": (float, 1),
}
_KIND_OF_PYTHON = {"py.truediv": "float", "py.float": "float"} | dict.fromkeys(
    ("py.eq", "py.ne", "py.lt", "py.le", "py.gt", "py.ge"), "bool"
)

# torch's own bindings parse their arguments in less time than the operator object does. Only where positions agree, and
# only for nodes without keywords.
_BINDINGS: dict[str, Callable[..., Any]] = {
    "aten.add.Tensor": torch.add,
    "aten.bmm.default": torch.bmm,
    "aten.cat.default": torch.cat,
    "aten.chunk.default": torch.chunk,
    "aten.div.Tensor": torch.div,
    "aten.embedding.default": torch.embedding,
    "aten.exp.default": torch.exp,
    "aten.expand.default": torch.Tensor.expand,
    "aten.gelu.default": torch._C._nn.gelu,
    "aten.linear.default": torch._C._nn.linear,
    "aten.matmul.default": torch.matmul,
    "aten.mul.Tensor": torch.mul,
    "aten.neg.default": torch.neg,
    "aten.permute.default": torch.permute,
    "aten.reshape.default": torch.reshape,
    "aten.rsqrt.default": torch.rsqrt,
    "aten.select.int": torch.select,
    "aten.sigmoid.default": torch.sigmoid,
    "aten.silu.default": torch._C._nn.silu,
    "aten.squeeze.dim": torch.squeeze,
    "aten.stack.default": torch.stack,
    "aten.sub.Tensor": torch.sub,
    "aten.tanh.default": torch.tanh,
    "aten.transpose.int": torch.transpose,
    "aten.unbind.int": torch.unbind,
    "aten.unsqueeze.default": torch.unsqueeze,
    "aten.view.default": torch.Tensor.view,
}
# Identities under no_grad: their value is their input's.
_SAME = frozenset({"aten.alias.default", "aten.detach.default", "aten.lift_fresh.default"})
# Composite operators whose result is fresh though their schema cannot promise it. All other composites may hand back
# what they were given (`dropout` in evaluation, `type_as`, `atleast_1d`, `einsum`).
_FRESH = frozenset(
    (
        "aten.batch_norm.default",
        "aten.conv1d.default",
        "aten.conv2d.default",
        "aten.conv3d.default",
        "aten.cross_entropy_loss.default",
        "aten.group_norm.default",
        "aten.layer_norm.default",
        "aten.linear.default",
        "aten.log_softmax.int",
        "aten.matmul.default",
        "aten.one_hot.default",
        "aten.rms_norm.default",
        "aten.scaled_dot_product_attention.default",
        "aten.softmax.int",
    )
)


def _guarded_attention(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **keywords: Any) -> Tensor:
        # torch's CPU kernel reads as many rows of `value` as `key` has, and as many heads and batches.
        if key.shape[:-1] != value.shape[:-1] or query.shape[-1] != key.shape[-1]:
            raise ValueError("key and value differ in shape")
        return run(query, key, value, *rest, **keywords)

    return attention


def _guarded_recurrence(run: Callable[..., Any], gates: int, states: int) -> Callable[..., Any]:
    def recurrence(
        x: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        # oneDNN's kernel takes the weights to be of the size that the states imply, and reads that much.
        given = [hx] if isinstance(hx, Tensor) else list(hx)
        ways = 2 if bidirectional else 1
        each = 4 if has_biases else 2
        if not (x.dim() == 3 and len(given) >= states and num_layers >= 1 and len(params) == num_layers * ways * each):
            raise ValueError("a recurrent layer's input, states or number of weights do not fit")
        hidden = given[0].shape[-1]
        rows = gates * hidden
        expected_state = (num_layers * ways, x.shape[0 if batch_first else 1], hidden)
        if len(given) != states or any(tuple(state.shape) != expected_state for state in given):
            raise ValueError("a recurrent layer's states do not fit its input")
        for index, weight in enumerate(params):
            layer, place = index // (ways * each), index % each
            inside = (x.shape[2] if layer == 0 else ways * hidden) if place == 0 else hidden
            if tuple(weight.shape) != ((rows, inside) if place < 2 else (rows,)) or weight.dtype != params[0].dtype:
                raise ValueError("a recurrent layer's weights do not fit its input and states")
        return run(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)

    return recurrence


_GUARDS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "aten.scaled_dot_product_attention.default": _guarded_attention,
    "aten.lstm.input": lambda run: _guarded_recurrence(run, 4, 2),
    "aten.gru.input": lambda run: _guarded_recurrence(run, 3, 1),
    "aten.rnn_relu.input": lambda run: _guarded_recurrence(run, 1, 1),
    "aten.rnn_tanh.input": lambda run: _guarded_recurrence(run, 1, 1),
}
assert _GUARDS.keys() == operators.GUARDED


def overload(name: str) -> Any:
    """The operator object of a name on the allow-list. Raises ProgramError where this torch does not have it."""
    if name not in operators.OPERATORS or not name.startswith("aten."):
        raise ProgramError(f"{shown(name)} is not an operator of torch that a program may hold")
    _, packet, which = name.split(".")
    try:
        return getattr(getattr(torch.ops.aten, packet), which)
    except AttributeError:
        raise ProgramError(f"this torch has no operator {name}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Kinds: what a value is, known before anything runs

# "tensor" | "tensors" (a list) | "int" | "float" | "bool" | tuple of kinds
Kind = Any
_KIND_OF_TYPE = {
    "Tensor": "tensor",
    "List[Tensor]": "tensors",
    "int": "int",
    "SymInt": "int",
    "float": "float",
    "bool": "bool",
}


def _kinds_of_returns(schema: Any) -> Kind:
    kinds = tuple(_KIND_OF_TYPE.get(str(item.type)) for item in schema.returns)
    if None in kinds or not kinds:
        raise ProgramError(f"{schema.name} gives what no program can hold")
    return kinds[0] if len(kinds) == 1 else kinds


def _fits(argument: Argument, wanted: str, kinds: list[Kind]) -> bool:
    """True if `argument` is of the schema's type `wanted`, as printed by torch."""
    if wanted.startswith("Optional["):
        return argument is None or _fits(argument, wanted[9:-1], kinds)
    if wanted.startswith("List["):
        inner = wanted[5:-1]
        if type(argument) is Value:
            return inner == "Tensor" and kinds[argument.index] == "tensors"
        if type(argument) is tuple:
            return all(_fits(item, inner, kinds) for item in argument)
        # int[1] and the like: one number stands for a list of it
        return inner in ("int", "SymInt", "float") and _fits(argument, inner, kinds)
    kind = kinds[argument.index] if type(argument) is Value else None
    if wanted == "Tensor":
        # A number where a tensor is expected: `x * 0.5` is aten.mul.Tensor(x, 0.5).
        return kind in ("tensor", "int", "float", "bool") or type(argument) in (int, float, bool, complex)
    if kind is not None:
        numbers = {"int": ("int",), "SymInt": ("int",), "float": ("int", "float"), "bool": ("bool",)}
        numbers |= {"number": ("int", "float", "bool"), "Scalar": ("int", "float", "bool")}
        return kind in numbers.get(wanted, ())
    if isinstance(argument, Special):
        return (
            wanted
            == {"dtype": "ScalarType", "memory_format": "MemoryFormat", "device": "Device", "layout": "Layout"}[
                argument.kind
            ]
        )
    literals: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "SymInt": (int,),
        "float": (int, float),
        "bool": (bool,),
        "str": (str,),
        "number": (int, float, bool, complex),
        "Scalar": (int, float, bool, complex),
    }
    return type(argument) in literals.get(wanted, ())


def _check_arguments(step: Step, schema: Any, kinds: list[Kind]) -> None:
    """Raises ProgramError unless the step gives every argument of the schema once, each of its type."""
    keywords = dict(step.keywords)
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    if len(step.arguments) > len(positional):
        raise _Refused("too many arguments")
    for index, argument in enumerate(schema.arguments):
        if not argument.kwarg_only and index < len(step.arguments):
            if argument.name in keywords:
                raise _Refused(f"{argument.name} given twice")
            found = step.arguments[index]
        elif argument.name in keywords:
            found = keywords.pop(argument.name)
        elif argument.has_default_value():
            continue
        else:
            raise _Refused(f"{argument.name} is missing")
        if not _fits(found, str(argument.real_type), kinds):
            raise _Refused(f"{argument.name} is not of type {argument.real_type}")
    if keywords:
        raise _Refused(f"{shown(next(iter(keywords)))} is no argument of it")


class _Refused(Exception):
    """A clause about one step; becomes a ProgramError with the operator and the source line."""


def _place(step: Step) -> str:
    return f"{shown(step.operator)}{'' if step.where is None else f' ({step.where})'}"


def _number_kind(argument: Argument, kinds: list[Kind]) -> str:
    found = kinds[argument.index] if type(argument) is Value else type(argument).__name__
    if found not in ("int", "float", "bool"):
        raise _Refused("arithmetic on sizes is given something that is no number")
    return str(found)


def kinds_of(flat: FlatProgram) -> list[Kind]:
    """The kind of every value. Raises ProgramError where a step's arguments do not fit its operator's schema."""
    kinds: list[Kind] = ["tensor"] * flat.inputs
    for step in flat.steps:
        if step.operator == AUTOCAST:
            continue
        try:
            if step.operator == CONSTANT:
                kind: Kind = "tensor"
            elif step.operator == GETITEM:
                source, index = kinds[step.arguments[0].index], step.arguments[1]
                if index < 0 or (type(source) is tuple and index >= len(source)):
                    raise _Refused("the index lies outside")
                if source != "tensors" and type(source) is not tuple:
                    raise _Refused("it is given something that is no list")
                kind = source[index] if type(source) is tuple else "tensor"
            elif step.operator in _PYTHON:
                if len(step.arguments) != _PYTHON[step.operator][1] or step.keywords:
                    raise _Refused("the number of arguments does not fit")
                found = [_number_kind(argument, kinds) for argument in step.arguments]
                kind = _KIND_OF_PYTHON.get(step.operator) or ("float" if "float" in found else "int")
                if step.operator == "py.int":
                    kind = "int"
            else:
                schema = overload(step.operator)._schema
                _check_arguments(step, schema, kinds)
                kind = _kinds_of_returns(schema)
        except _Refused as refused:
            raise ProgramError(f"{_place(step)}: {refused}") from None
        kinds.append(kind)
    return kinds


# ---------------------------------------------------------------------------------------------------------------------
# What may share memory


def _composite(name: str) -> bool:
    packet = name.removeprefix("aten.").replace(".default", "")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{packet}", "CompositeImplicitAutograd"))


def may_share(name: str) -> bool:
    """True if a result of this operator may show memory of its arguments though its schema does not say so.

    Only composites are free to, by torch's own rules, but the `unsafe_` views break those.
    """
    return name not in _FRESH and (operators.OPERATORS[name].kind == "view" or _composite(name))


class Sharing:
    """Classes of values that may share memory, whatever the order of steps; `written`: roots of those written to."""

    def __init__(self, flat: FlatProgram, kinds: list[Kind]) -> None:
        self._parent = list(range(len(kinds)))
        constants: dict[int, int] = {}
        writes: list[int] = []
        for step in flat.steps:
            if step.operator == AUTOCAST or step.operator in _PYTHON:
                continue
            if step.operator == CONSTANT:
                self._join(step.output, constants.setdefault(step.arguments[0], step.output))
                continue
            read = [value for item in (*step.arguments, *(v for _, v in step.keywords)) for value in values_in(item)]
            if step.operator == GETITEM or step.operator in _SAME:
                self._join(step.output, read[0])
                continue
            schema = overload(step.operator)._schema
            by_name = dict(step.keywords)
            shared = any(item.alias_info is not None for item in schema.returns)
            for index, argument in enumerate(schema.arguments):
                given = step.arguments[index] if index < len(step.arguments) else by_name.get(argument.name)
                if argument.alias_info is None:
                    continue
                for value in values_in(given):
                    if argument.alias_info.is_write:
                        writes.append(value)
                    if shared:
                        self._join(step.output, value)
            if not shared and may_share(step.operator):
                for value in read:
                    self._join(step.output, value)
        self._written = {self.root(value) for value in writes}

    def root(self, value: int) -> int:
        while self._parent[value] != value:
            self._parent[value] = self._parent[self._parent[value]]
            value = self._parent[value]
        return value

    def written(self, value: int) -> bool:
        """True if an operator may write into the memory of `value`."""
        return self.root(value) in self._written

    def _join(self, one: int, other: int) -> None:
        self._parent[self.root(one)] = self.root(other)


# ---------------------------------------------------------------------------------------------------------------------
# The generated functions


class _Text:
    """Collects the lines of one function after another, and what the names in them stand for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names: dict[str, Any] = {}
        self._known: dict[tuple[str, Any], str] = {}

    def name(self, letter: str, value: Any, key: Any = None) -> str:
        """A name for `value`; the same one for the same key."""
        if key is not None and (letter, key) in self._known:
            return self._known[letter, key]
        name = f"{letter}{len(self.names)}"
        self.names[name] = value
        if key is not None:
            self._known[letter, key] = name
        return name

    def argument(self, argument: Argument, same: dict[int, int]) -> str:
        kind = type(argument)
        if kind is Value:
            return f"v{same.get(argument.index, argument.index)}"
        if kind is tuple:
            return f"[{','.join(self.argument(item, same) for item in argument)}]"
        if argument is None or kind is bool or kind is int:
            return repr(argument)
        if kind is Special:
            return self.name("c", self.special(argument), repr(argument))
        return self.name("c", argument, repr(argument))  # float, complex and text are never written out

    def special(self, argument: Special) -> Any:
        if argument.kind == "dtype":
            return DTYPES[argument.name]
        if argument.kind == "memory_format":
            return getattr(torch, argument.name)
        return self.device if argument.kind == "device" else torch.strided


def _call(text: _Text, step: Step, same: dict[int, int]) -> str:
    arguments = [text.argument(argument, same) for argument in step.arguments]
    if step.operator == GETITEM:
        return f"{arguments[0]}[{arguments[1]}]"
    if step.operator in _PYTHON:
        function: Any = _PYTHON[step.operator][0]
    elif not step.keywords and step.operator in _BINDINGS:
        function = _BINDINGS[step.operator]
    else:
        function = overload(step.operator)._op
        if step.operator in _GUARDS:
            function = _GUARDS[step.operator](function)
    keywords = [f"{name}={text.argument(argument, same)}" for name, argument in step.keywords]
    found = text.name("f", function, f"{step.operator}{'' if step.keywords else '()'}")
    return f"{found}({','.join([*arguments, *keywords])})"


class _Regions(list[Any]):
    """The autocast regions entered; left in reverse order, whatever happens."""

    def enter(self, region: Any) -> None:
        region.__enter__()
        self.append(region)

    def leave(self) -> None:
        self.pop().__exit__(None, None, None)


class Function:
    """`outputs` of a flat program as a function of its inputs. `constants`: the program's, on `device`."""

    def __init__(
        self,
        flat: FlatProgram,
        outputs: Sequence[int],
        constants: Sequence[Tensor],
        device: torch.device,
        *,
        kinds: list[Kind] | None = None,
    ) -> None:
        kinds = kinds_of(flat) if kinds is None else kinds
        sharing = Sharing(flat, kinds)
        text = _Text(device)
        same: dict[int, int] = {}  # a value that is another one
        steps: list[tuple[Step, list[int]]] = []
        for step in flat.steps:
            source = step.arguments[0].index if step.operator in _SAME and type(step.arguments[0]) is Value else None
            if source is not None:
                same[step.output] = same.get(source, source)
                continue
            values = [value for item in (*step.arguments, *(v for _, v in step.keywords)) for value in values_in(item)]
            steps.append((step, [same.get(value, value) for value in values]))
        self._outputs = [same.get(value, value) for value in outputs]
        self._copied = [sharing.written(value) for value in range(flat.inputs)]

        last = {value: index for index, (_, values) in enumerate(steps) for value in values}
        kept = set(self._outputs)
        self.inputs = sorted(value for value in (last.keys() | kept) if value < flat.inputs)
        self._steps: list[Step] = []
        self._functions: list[Callable[[list[Any], _Regions], list[Any]]] = []
        lines: list[str] = []
        live = set(self.inputs)
        start = sorted(live)

        def close() -> None:
            nonlocal lines, start
            end = sorted(live) if len(self._steps) < len(steps) else self._outputs
            number = len(self._functions)
            names = ",".join(f"v{value}" for value in start)
            # Line 2 unpacks the arguments and lets go of the list, so that nothing outlives its last use.
            head = [f"def run{number}(a,r):", f" {names + ',=a;' if names else ''}a.clear()"]
            tail = f" return [{','.join(f'v{value}' for value in end)}]"
            source = "\n".join([*head, *(f" {line}" for line in lines), tail, ""])
            exec(compile(source, f"{_FILE}{number}", "exec"), text.names)
            self._functions.append(text.names[f"run{number}"])
            self.sources.append(source)
            lines, start = [], end

        self.sources: list[str] = []
        self._first_step: list[int] = [0]
        for index, (step, values) in enumerate(steps):
            if step.operator == AUTOCAST:
                line = "r.leave()"
                if step.enters:
                    dtype, enabled, cached = step.arguments
                    made = text.name(
                        "f", _region(device, None if dtype is None else text.special(dtype), enabled, cached)
                    )
                    line = f"r.enter({made}())"
            elif step.operator == CONSTANT:
                constant = constants[step.arguments[0]]
                named = text.name("k", constant, step.arguments[0])
                line = f"v{step.output}={named}{'.clone()' if sharing.written(step.output) else ''}"
                live.add(step.output)
            else:
                line = f"v{step.output}={_call(text, step, same)}"
                live.add(step.output)
            done = {value for value in (*values, step.output) if last.get(value, index) == index and value not in kept}
            done = {value for value in done if value in live}
            if done:
                line += ";del " + ",".join(f"v{value}" for value in sorted(done))
                live -= done
            lines.append(line)
            self._steps.append(step)
            if len(lines) == STEPS_PER_FUNCTION and index + 1 < len(steps):
                close()
                self._first_step.append(index + 1)
        close()

    def __call__(self, given: Sequence[Tensor]) -> list[Any]:
        """The outputs. `given`: the program's inputs, tokens first. Raises ProgramError where an operator fails."""
        values: list[Any] = []
        for index in self.inputs:
            tensor = given[index]
            if tensor.dtype is torch.bool and index != TOKENS:
                tensor = tensor.view(torch.uint8) != 0  # another byte than 0 and 1 leads torch's kernels astray
            elif self._copied[index]:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            values.append(tensor)
            del tensor
        regions = _Regions()
        try:
            with torch.no_grad():
                for function in self._functions:
                    values = function(values, regions)
                return values
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            step = self._failed_step(error)
            where = "a step" if step is None else _place(step)
            raise ProgramError(f"{where} failed on this batch: {type(error).__name__}") from error
        finally:
            while regions:
                regions.leave()

    def _failed_step(self, error: BaseException) -> Step | None:
        traceback = error.__traceback__
        while traceback is not None:
            file = traceback.tb_frame.f_code.co_filename
            if file.startswith(_FILE):
                index = self._first_step[int(file.removeprefix(_FILE))] + traceback.tb_lineno - 3
                return self._steps[index] if 0 <= index < len(self._steps) else None
            traceback = traceback.tb_next
        return None


_FILE = "<prism program> "


def _region(device: torch.device, dtype: torch.dtype | None, enabled: bool, cached: bool | None) -> Callable[[], Any]:
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=cached)


# ---------------------------------------------------------------------------------------------------------------------


def constant_tensors(data: bytes, program: Program, device: torch.device) -> list[Tensor]:
    """The program's constants, each in a storage of its own on `device`. Raises ProgramError."""
    spans = constant_offsets(data, program)
    tensors = []
    for constant in program.constants:
        start, stop = spans[constant.name]
        if start == stop:
            tensors.append(torch.zeros(constant.shape, dtype=DTYPES[constant.dtype], device=device))
            continue
        raw = torch.frombuffer(bytearray(data[start:stop]), dtype=torch.uint8)
        tensors.append(raw.view(DTYPES[constant.dtype]).reshape(constant.shape).to(device))
    return tensors


class Runnable:
    """A checked program with its constants, ready to run on `device`.

    Raises ProgramError where the program holds what may not run, or the constants are not its own.
    """

    def __init__(self, program: Program, constants: bytes, device: torch.device | str = "cpu") -> None:
        operators.check(program)
        self.program = program
        self.device = torch.device(device)
        self.constants = constant_tensors(constants, program, self.device)
        self.flat = flatten(program)
        self.kinds = kinds_of(self.flat)
        if self.kinds[self.flat.output] != "tensor":
            raise ProgramError("the program's output is not a tensor")
        self._function = Function(self.flat, [self.flat.output], self.constants, self.device, kinds=self.kinds)

    @property
    def state(self) -> tuple[StateTensor, ...]:
        return self.program.state

    def run(self, state: Sequence[Tensor], tokens: Tensor) -> Tensor:
        """Logits [B, L, V] of tokens int64 [B, L]; `state` in the order of `self.state`. Writes to neither.

        Raises ProgramError where an operator fails, or the program was made for another number of rows or width.
        """
        self.check_tokens(tokens)
        return self._check_logits(self._function([tokens, *state])[0], tokens)

    def run_hidden(self, state: Sequence[Tensor], tokens: Tensor) -> Hidden | None:
        """As `run`, but for the last linear layer and what follows it; None for a program that ends in none."""
        return None if self._headless is None else self._headless.run_hidden(state, tokens)

    @functools.cached_property
    def _headless(self) -> Headless | None:
        from prism_fast.program.head import Headless

        return Headless.of(self)

    @property
    def has_head(self) -> bool:
        """True if `run_hidden` gives hidden states."""
        return self._headless is not None

    def check_tokens(self, tokens: Tensor) -> None:
        program = self.program
        if tokens.dim() != 2 or tokens.shape[1] != program.width or not program.takes(tokens.shape[0]):
            most = "any number of" if program.most is None else f"at most {program.most}"
            rows = most if program.batch is None else program.batch
            raise ProgramError(
                f"the program was made for {rows} rows of {program.width} tokens, not for {list(tokens.shape)}"
            )

    def _check_logits(self, logits: Tensor, tokens: Tensor) -> Tensor:
        if logits.dim() != 3 or logits.shape[:2] != tokens.shape or not logits.is_floating_point():
            raise ProgramError(
                f"the program gives {str(logits.dtype).removeprefix('torch.')} of shape {list(logits.shape)}, "
                f"not float logits of shape [{tokens.shape[0]}, {tokens.shape[1]}, V]"
            )
        return logits
