"""A program as code that a person can read: one line an operator, the bundle's lines as comments. Never run."""

from __future__ import annotations

from prism_fast.program.format import (
    AUTOCAST,
    CONSTANT,
    GETITEM,
    Argument,
    Program,
    Result,
    Size,
    Special,
    Step,
    TensorSpec,
    Value,
    flatten,
)

_SHORT = {
    "bfloat16": "bf16",
    "complex128": "c128",
    "complex64": "c64",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "int8": "i8",
    "uint8": "u8",
}


def listing(program: Program) -> str:
    """The program's text. `B` is the number of rows, `<=` before a size says that it depends on the tokens."""
    rows = "B" if program.batch is None else str(program.batch)
    lines = [
        f"# sha256 {program.digest}",
        f"# {program.node_count:,} operators, {program.parameter_elements:,} parameters, "
        f"{program.state_elements:,} elements of state, {program.constant_elements:,} of constants",
        f"# captured on {program.device}",
        f"def logits(tokens):  # i64[{rows}, {program.width}]",
    ]
    flat = flatten(program)
    names = {index + 1: f"state[{tensor.name!r}]" for index, tensor in enumerate(program.state)} | {0: "tokens"}
    depth, where = 1, None
    for step in flat.steps:
        if step.where is not None and step.where != where:
            where = step.where
            lines.append(f"{'    ' * depth}# {where}, {where.function}")
        if step.operator != AUTOCAST:
            names[step.output] = f"v{step.output}"
            lines.append(f"{'    ' * depth}v{step.output} = {_call(program, step, names)}{_comment(step.result)}")
        elif step.enters:
            dtype, enabled, _ = step.arguments
            given = ["" if dtype is None else dtype.name, "" if enabled else "enabled=False"]
            lines.append(f"{'    ' * depth}with autocast({', '.join(item for item in given if item)}):")
            depth += 1
        else:
            depth -= 1
    return "\n".join([*lines, f"    return {names[flat.output]}", ""])


def _call(program: Program, step: Step, names: dict[int, str]) -> str:
    if step.operator == CONSTANT:
        return f"constant[{program.constants[step.arguments[0]].name!r}]"
    arguments = [_shown(argument, names) for argument in step.arguments]
    if step.operator == GETITEM:
        return f"{arguments[0]}[{arguments[1]}]"
    arguments += [f"{name}={_shown(argument, names)}" for name, argument in step.keywords]
    name = step.operator.removeprefix("aten.").removesuffix(".default")
    return f"{name}({', '.join(arguments)})"


def _shown(argument: Argument, names: dict[int, str]) -> str:
    if type(argument) is Value:
        return names[argument.index]
    if type(argument) is tuple:
        return f"[{', '.join(_shown(item, names) for item in argument)}]"
    if type(argument) is Special:
        return argument.name or argument.kind
    return repr(argument)


def _comment(result: Result) -> str:
    text = _result(result)
    return f"  # {text}" if text else ""


def _result(result: Result) -> str:
    if type(result) is TensorSpec:
        return f"{_SHORT.get(result.dtype, result.dtype)}[{', '.join(_size(size) for size in result.shape)}]"
    if type(result) is tuple:
        shown = [_result(item) for item in result[:4]] + (["..."] if len(result) > 4 else [])
        return f"({', '.join(shown)})"
    return result or ""


def _size(size: int | Size) -> str:
    if not isinstance(size, Size):
        return str(size)
    terms = []
    for power, factor in enumerate(size.coefficients):
        if factor:
            variable = "" if power == 0 else "B" if power == 1 else f"B^{power}"
            terms.append(str(factor) if not variable else variable if factor == 1 else f"{factor}*{variable}")
    return f"{'' if size.exact else '<='}{' + '.join(terms) or '0'}"
