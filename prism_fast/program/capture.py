"""Turns a bundle's model into a program. UNTRUSTED: the bundle's forward runs here, beside no text and no data.

What torch.export records is taken as it is (non-strict, before any decomposition): operators as eager calls them, so
that a device's own autocast lists and kernels apply when the program runs. The capture is cold: no forward has run
before it, since a first eager call turns lazily built tables into constants.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import operator
import re
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from prism_fast.program import operators
from prism_fast.program.format import (
    AUTOCAST,
    CONSTANT,
    DTYPE_BYTES,
    GETITEM,
    MEMORY_FORMATS,
    SAFETENSORS_DTYPE,
    Argument,
    ConstantTensor,
    Graph,
    Node,
    Program,
    ProgramError,
    Result,
    Size,
    Special,
    StateTensor,
    TensorSpec,
    Value,
    Where,
    constants_file,
    shown,
)
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleFailed, BundleRejected

RULE_NOT_EXPORTABLE: str = getattr(c, "RULE_NOT_EXPORTABLE", "prism:not-exportable")
_ROWS_TRIED = 64  # numbers of rows whose branches are looked at one by one
_UNIFORM_BYTES = 1024  # a constant of one value, larger than this, is written as the operator that makes it


class Captured(NamedTuple):
    """`differs`: largest difference to the model's own logits on random ids (None: not compared)."""

    program: Program
    constants: bytes
    differs: float | None
    notes: list[str]


def capture(
    model: nn.Module,
    *,
    width: int,
    rows: int = 2,
    device: str = "cpu",
    bundle_dir: str | Path = ".",
    autocast: str | None = None,
    symbolic: bool = True,
    compare: bool = True,
) -> Captured:
    """The program of `model`'s evaluation forward for rows of `width` tokens; the model stands on `device`.

    Any number of rows where torch can leave it open and `symbolic`, else exactly `rows`: `program.batch` says which.
    `autocast`: dtype of an autocast region around the whole forward, written into the program. Raises BundleRejected
    (`prism:not-exportable`) with one sentence: operator or construct, the bundle's file and line, what to write
    instead; BundleFailed (`prism:output-shape`) where the output is no logits.
    """
    model = unwrapped(model)
    notes: list[str] = []
    forward = _Logits(model, None if autocast is None else (torch.device(device).type, getattr(torch, autocast)))
    tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
    where = Path(bundle_dir).resolve()
    training = [module for module in model.modules() if module.training]
    forward.eval()
    try:
        with _quiet(), _random_state_kept(device), _transformers_exportable(model, notes):
            program, constants, differs = _captured(forward, tokens, symbolic, where, notes, compare)
            if program.batch is None and differs:
                # Python that asks for the number of rows: a program for exactly that many may be right.
                fixed = _captured(forward, tokens, False, where, notes, compare)
                if fixed[2] == 0.0:
                    notes.append(f"the program is for exactly {rows} rows: the model's forward asks for their number")
                    program, constants, differs = fixed
    finally:
        for module in training:
            module.training = True
    return Captured(program, constants, differs, notes)


def _captured(
    forward: _Logits, tokens: Tensor, symbolic: bool, bundle_dir: Path, notes: list[str], compare: bool
) -> tuple[Program, bytes, float | None]:
    exported, batch = _exported(forward, tokens, symbolic, bundle_dir, notes)
    writer = _Writer(exported, forward.model, tokens.shape[1], batch, tokens.device.type, bundle_dir)
    program, constants = writer.written()
    differs = _difference(forward, program, constants, forward.model, tokens, notes) if compare else None
    return program, constants, differs


def unwrapped(model: nn.Module) -> nn.Module:
    """The module under torch.compile and DistributedDataParallel, at the top and anywhere inside, in place."""
    seen: set[int] = set()

    def inner(module: nn.Module) -> nn.Module:
        while True:
            modules = module.__dict__.get("_modules", {})
            if isinstance(found := modules.get("_orig_mod"), nn.Module) or (
                isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
                and isinstance(found := modules.get("module"), nn.Module)
            ):
                module = found
            else:
                return module

    def walk(module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        module._compiled_call_impl = None  # `module.compile()`
        for name, child in list(module._modules.items()):
            if child is not None:
                module._modules[name] = inner(child)
                walk(module._modules[name])  # type: ignore[arg-type]

    model = inner(model)
    walk(model)
    return model


class _Logits(nn.Module):
    """`model`'s logits [B, L, V], whatever it wraps them in."""

    def __init__(self, model: nn.Module, autocast: tuple[str, torch.dtype] | None) -> None:
        super().__init__()
        self.model = model
        self._autocast = autocast

    def forward(self, tokens: Tensor) -> Tensor:
        if self._autocast is None:
            return self._logits(tokens)
        with torch.autocast(self._autocast[0], dtype=self._autocast[1]):
            return self._logits(tokens)

    def _logits(self, tokens: Tensor) -> Tensor:
        output: Any = self.model(tokens)
        if not isinstance(output, Tensor):
            logits = getattr(output, "logits", None)
            if logits is None and isinstance(output, dict):
                logits = output.get("logits")
            if logits is None and isinstance(output, tuple | list) and output:
                logits = output[0]
            output = logits
        if not isinstance(output, Tensor):
            raise _Unfit("the model's output holds no tensor of logits")
        if output.dim() == 2 and tokens.shape[0] == 1:
            output = output.unsqueeze(0)
        return output


class _Unfit(Exception):
    """A clause about what cannot be captured, with the line that it came from."""

    def __init__(self, clause: str, where: Where | None = None, hint: str = "") -> None:
        super().__init__(clause)
        self.clause, self.where, self.hint = clause, where, hint


# ---------------------------------------------------------------------------------------------------------------------
# Exporting


def _exported(
    forward: _Logits, tokens: Tensor, symbolic: bool, bundle_dir: Path, notes: list[str]
) -> tuple[Any, int | None]:
    """-> ExportedProgram, rows it is for (None: any)."""
    attempts: list[tuple[Any, int | None]] = [(None, tokens.shape[0])]
    if symbolic and tokens.shape[0] > 1:
        attempts.insert(0, (({0: torch.export.Dim.AUTO},), None))
    first: Exception | None = None
    for shapes, batch in attempts:
        try:
            with _sizes_that_depend_on_data():
                exported = torch.export.export(forward, (tokens,), dynamic_shapes=shapes, strict=False)
            if batch is None and not isinstance(_input_value(exported).shape[0], torch.SymInt):
                batch = tokens.shape[0]
            if batch is None and (most := _most_rows(exported)) is not None and most < tokens.shape[0]:
                continue  # it branches on the number of rows: these rows take another way than some fewer
            if first is not None:
                notes.append(f"the program is for exactly {batch} rows: {_clause(first)}")
            return exported, batch
        except Exception as error:
            first = first or error
    assert first is not None
    raise _rejection(first, bundle_dir) from None


def _most_rows(exported: Any) -> int | None:
    """The largest number of rows up to which every number takes the branches that were traced; None: any number."""
    size: Any = _input_value(exported).shape[0]
    symbol = size.node.expr
    guards = [g.expr for g in size.node.shape_env.guards if symbol in g.expr.free_symbols]

    def holds(rows: int) -> bool:
        return all(bool(guard.subs(symbol, rows) == True) for guard in guards)  # noqa: E712 - sympy's truth

    if not guards:
        return None
    good = next((rows - 1 for rows in range(1, _ROWS_TRIED + 1) if not holds(rows)), None)
    if good is not None:
        return good
    low, high = _ROWS_TRIED, 1 << 16
    if holds(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _input_value(exported: Any) -> Tensor:
    node = next(
        n for n in exported.graph.nodes if n.op == "placeholder" and n.name in exported.graph_signature.user_inputs
    )
    return node.meta["val"]  # type: ignore[no-any-return]


@contextlib.contextmanager
def _sizes_that_depend_on_data() -> Iterator[None]:
    """`if rows.numel():` and the like: a SIZE that depends on data, compared with 0 or 1, takes the general branch.

    Not empty and not one: an expert that nobody chose runs on no rows, which changes no value. Only symbols that are
    sizes (of nonzero, a masked select, unique); a branch on a VALUE still fails.
    """
    import sympy
    from torch.fx.experimental import symbolic_shapes

    evaluate = symbolic_shapes.ShapeEnv._evaluate_expr

    def general(self: Any, expression: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            return evaluate(self, expression, *arguments, **keywords)
        except symbolic_shapes.GuardOnDataDependentSymNode:
            symbols: Any = getattr(expression, "free_symbols", ())
            if not symbols or not all(symbol in self.size_like for symbol in symbols):
                raise
            if isinstance(expression, sympy.Eq):
                return sympy.false
            if isinstance(expression, sympy.Ne):
                return sympy.true
            small = getattr(expression, "rhs", None)
            if small is not None and small.is_number and small <= 1:
                if isinstance(expression, sympy.Gt | sympy.Ge):
                    return sympy.true
                if isinstance(expression, sympy.Lt | sympy.Le):
                    return sympy.false
            raise

    setattr(symbolic_shapes.ShapeEnv, "_evaluate_expr", general)  # noqa: B010
    try:
        yield
    finally:
        setattr(symbolic_shapes.ShapeEnv, "_evaluate_expr", evaluate)  # noqa: B010


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter prints whole graphs when it fails: none of it reaches a log. Compiled callables run eagerly."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.export", "torch.fx.experimental.symbolic_shapes")]
    before = [logger.disabled for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stderr(_Nowhere()), contextlib.redirect_stdout(_Nowhere()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.disabled = True
        stance = torch.compiler.set_stance("force_eager")
        try:
            with stance:
                yield
        finally:
            for logger, was in zip(loggers, before, strict=True):
                logger.disabled = was


class _Nowhere:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


@contextlib.contextmanager
def _random_state_kept(device: str) -> Iterator[None]:
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        yield


@contextlib.contextmanager
def _transformers_exportable(model: nn.Module, notes: list[str]) -> Iterator[None]:
    """Transformers' mixtures call a Python operator of their own; its `batched_mm` experts give the same bits."""
    changed = []
    module: Any
    for module in model.modules():
        if hasattr(module, "set_experts_implementation"):
            before = getattr(getattr(module, "config", None), "_experts_implementation", None)
            try:
                module.set_experts_implementation("batched_mm")
            except Exception:
                continue
            if before is not None and before != "batched_mm":
                changed.append((module, before))
    try:
        yield
    finally:
        for module, before in changed:
            with contextlib.suppress(Exception):
                module.set_experts_implementation(before)


# ---------------------------------------------------------------------------------------------------------------------
# Writing the program

# Checks that hold by construction, or that a prediction has no use for.
_DEAD = frozenset(
    f"aten.{name}.default"
    for name in (
        "_assert_async",
        "_assert_scalar",
        "_assert_tensor_metadata",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    )
) | {"aten._assert_async.msg"}
_EMPTY = {
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
}
_RENAMED = {"aten.detach_.default": "aten.alias.default", "aten.lift_fresh.default": "aten.alias.default"}
_PYTHON = {
    operator.add: "py.add",
    operator.sub: "py.sub",
    operator.mul: "py.mul",
    operator.floordiv: "py.floordiv",
    operator.mod: "py.mod",
    operator.neg: "py.neg",
    operator.truediv: "py.truediv",
    operator.eq: "py.eq",
    operator.ne: "py.ne",
    operator.lt: "py.lt",
    operator.le: "py.le",
    operator.gt: "py.gt",
    operator.ge: "py.ge",
    operator.getitem: GETITEM,
    torch.sym_max: "py.max",
    torch.sym_min: "py.min",
    torch.sym_int: "py.int",
    torch.sym_float: "py.float",
}
_GRAD = "wrap_with_set_grad_enabled"
_REGION = "wrap_with_autocast"


@dataclass
class _Building:
    """A graph while it is written: fx node -> value, nodes so far."""

    inputs: int
    values: dict[Any, int] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    regions: dict[int, int] = field(default_factory=dict)

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return self.inputs + len(self.nodes) - 1


class _Writer:
    def __init__(
        self, exported: Any, model: nn.Module, width: int, batch: int | None, device: str, bundle_dir: Path
    ) -> None:
        self.exported, self.model = exported, model
        self.width, self.batch, self.device, self.bundle_dir = width, batch, device, bundle_dir
        self.most = _most_rows(exported) if batch is None else None
        self.state = state_table(model)
        self.constants: dict[str, tuple[int, Tensor]] = {}
        self.graphs: list[Graph | None] = [None]
        value = _input_value(exported).shape[0]
        self.symbol = value.node.expr if isinstance(value, torch.SymInt) else None
        self._sizes: dict[Any, int | Size] = {}
        self._wheres: dict[str, Where | None] = {}
        self.bounds: dict[Any, Any] = {}  # symbol of a size that depends on data -> an expression it never exceeds

    def written(self) -> tuple[Program, bytes]:
        try:
            self._main()
        except _Unfit as unfit:
            reject(unfit.clause, unfit.where, unfit.hint)
        graphs = tuple(graph for graph in self.graphs if graph is not None)
        tensors = sorted(self.constants.values(), key=lambda item: item[0])
        names = {index: name for name, (index, _) in self.constants.items()}
        table = [
            (ConstantTensor(names[index], _dtype_name(tensor.dtype), tuple(tensor.shape)), tensor)
            for index, tensor in tensors
        ]
        program = _without_dead(
            Program(
                self.width, self.batch, self.device, self.state, tuple(entry for entry, _ in table), graphs, self.most
            )
        )
        kept = {entry.name for entry in program.constants}
        data = constants_file([(entry, _bytes_of(tensor)) for entry, tensor in table if entry.name in kept])
        try:
            operators.check(program)
            program = Program.from_bytes(program.to_bytes())
        except ProgramError as error:
            reject(str(error), None, _hint(str(error)))
        return program, data

    def _main(self) -> None:
        building = _Building(1 + len(self.state))
        places = {tensor.name: index for index, tensor in enumerate(self.state)}
        # A tied name is read as the first of its tensor: a write through one is then seen through the other.
        places |= {tensor.name: places[tensor.tied_to] for tensor in self.state if tensor.tied_to is not None}
        specs = iter(self.exported.graph_signature.input_specs)
        for node in self.exported.graph.nodes:
            if node.op != "placeholder":
                break
            spec = next(specs)
            kind, target = spec.kind.name, (spec.target or "").removeprefix("model.")
            if kind in ("PARAMETER", "BUFFER") and target in places:
                building.values[node] = 1 + places[target]
            elif kind in ("BUFFER", "CONSTANT_TENSOR", "PARAMETER"):
                building.values[node] = self._constant(building, target, self._constant_tensor(spec))
            elif kind == "USER_INPUT":
                building.values[node] = 0
            else:
                raise _Unfit("it holds an object that is no tensor, as a torch.Generator is")
        outputs = self._body(building, self.exported.graph_module)
        self._check_output()
        self.graphs[0] = Graph(building.inputs, tuple(building.nodes), tuple(outputs[:1]))

    def _check_output(self) -> None:
        output = next(node for node in self.exported.graph.nodes if node.op == "output").args[0][0]
        logits = output.meta.get("val")
        tokens = _input_value(self.exported)
        fits = isinstance(logits, Tensor) and logits.dim() == 3 and logits.is_floating_point()
        if not fits or str(logits.shape[0]) != str(tokens.shape[0]) or str(logits.shape[1]) != str(self.width):
            rows = "B" if self.batch is None else self.batch
            shape = ", ".join(str(size).replace(str(tokens.shape[0]), str(rows)) for size in logits.shape)
            raise BundleFailed(
                f"the model returned {str(logits.dtype).removeprefix('torch.')} of shape [{shape}]; "
                f"expected float logits of shape [{rows}, {self.width}, V]",
                rule=c.RULE_OUTPUT_SHAPE,
            )

    def _constant_tensor(self, spec: Any) -> Tensor:
        found = self.exported.constants.get(spec.target)
        if found is None:
            found = self.exported.state_dict.get(spec.target)
        if not isinstance(found, Tensor):
            raise _Unfit(f"the model holds {shown(spec.target)}, which is no tensor")
        return found

    def _constant(self, building: _Building, name: str, tensor: Tensor) -> int:
        tensor = tensor.detach()
        dtype = _dtype_name(tensor.dtype)
        spec = TensorSpec(dtype, tuple(tensor.shape))
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise _Unfit(f"the constant {shown(name)} is no dense tensor")
        if tensor.numel() * tensor.element_size() > _UNIFORM_BYTES and _uniform(tensor):
            number: Any = tensor.flatten()[0].item()
            if dtype.startswith("complex"):
                number = complex(number)
            keywords = (("device", Special("device", "")), ("dtype", Special("dtype", dtype)))
            return building.add(Node("aten.full.default", (tuple(tensor.shape), number), keywords, spec))
        if dtype not in SAFETENSORS_DTYPE:
            raise _Unfit(f"the constant {shown(name)} is {dtype}, which safetensors does not know")
        if name not in self.constants:
            self.constants[name] = (len(self.constants), tensor)
        return building.add(Node(CONSTANT, (self.constants[name][0],), (), spec))

    def _body(self, building: _Building, module: Any) -> list[int]:
        """Writes a graph module's nodes -> the values of its outputs."""
        submodules: dict[Any, Any] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                outputs = node.args[0] if isinstance(node.args[0], tuple | list) else [node.args[0]]
                if any(output not in building.values for output in outputs if output is not None):
                    raise _Unfit("the model's output is no tensor")
                return [building.values[output] for output in outputs if output is not None]
            if node.op == "get_attr":
                found = module
                for part in node.target.split("."):
                    found = getattr(found, part)
                if isinstance(found, Tensor):
                    building.values[node] = self._constant(building, node.target, found)
                else:
                    submodules[node] = found
            elif node.op == "call_function":
                self._call(building, node, submodules)
            else:
                raise _Unfit(f"a call of kind {node.op}", self._where(node))
        raise _Unfit("the model returns nothing")

    def _call(self, building: _Building, node: Any, submodules: dict[Any, Any]) -> None:
        where = self._where(node)
        name = self._name(node, where)
        if name in _DEAD:
            return
        if name == _GRAD:  # predictions are made without gradients, whatever the model says
            inner = submodules[node.args[1]]
            given = [building.values[argument] for argument in node.args[2:]]
            building.values[node] = -1 - len(self._inlined)
            self._inlined.append(self._inline(building, inner, given))
            return
        if name == _REGION:
            self._region(building, node, submodules, where)
            return
        if name == GETITEM and building.values.get(node.args[0], 0) < 0:
            building.values[node] = self._inlined[-1 - building.values[node.args[0]]][node.args[1]]
            return
        arguments = tuple(self._argument(building, item, where) for item in node.args)
        keywords = {key: self._argument(building, item, where) for key, item in node.kwargs.items()}
        if name in _EMPTY:
            name = _EMPTY[name]
            if name != "aten.zeros_like.default":
                keywords.pop("memory_format", None)
        name = _RENAMED.get(name, name)
        for key in ("pin_memory", "layout", "device"):
            if key in keywords and (key != "device" and keywords[key] in (None, False, Special("layout", ""))):
                del keywords[key]
        if name == "aten.alias.default" or name == "aten.detach.default":
            arguments, keywords = arguments[:1], {}
        if name in operators.OPERATORS and operators.OPERATORS[name].kind == "selection":
            self._bound(node)
        result = self._result(node.meta.get("val"))
        building.values[node] = building.add(Node(name, arguments, tuple(sorted(keywords.items())), result, where))

    @property
    def _inlined(self) -> list[list[int]]:
        return self.__dict__.setdefault("_inlined_outputs", [])  # type: ignore[no-any-return]

    def _inline(self, building: _Building, module: Any, given: list[int]) -> list[int]:
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        building.values.update(zip(placeholders, given, strict=True))
        return self._body(building, module)

    def _region(self, building: _Building, node: Any, submodules: dict[Any, Any], where: Where | None) -> None:
        device, dtype, enabled, cached, inner, *given = (
            submodules.get(a, a) if isinstance(a, torch.fx.Node) else a for a in node.args
        )
        if str(device).split(":")[0] != self.device:
            # An autocast of another device does nothing to this one's tensors.
            building.values[node] = -1 - len(self._inlined)
            self._inlined.append(self._inline(building, inner, [building.values[argument] for argument in given]))
            return
        number = len(self.graphs)
        self.graphs.append(None)
        body = _Building(len(given))
        outputs = self._inline(body, inner, list(range(len(given))))
        self.graphs[number] = Graph(body.inputs, tuple(body.nodes), tuple(outputs))
        arguments: tuple[Argument, ...] = (
            None if dtype is None else Special("dtype", _dtype_name(dtype)),
            bool(enabled),
            None if cached is None else bool(cached),
            tuple(Value(building.values[argument]) for argument in given),
        )
        building.values[node] = building.add(Node(AUTOCAST, arguments, (), None, where, number))

    def _name(self, node: Any, where: Where | None) -> str:
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            return f"{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"
        if isinstance(target, torch._ops.HigherOrderOperator):
            if target._name in (_GRAD, _REGION):
                return target._name
            raise _Unfit(f"{target._name} is control flow or a higher-order operator", where, _hint(target._name))
        try:
            return _PYTHON[target]
        except (KeyError, TypeError):
            name = str(getattr(target, "__name__", target))
            if "vmap" in name or "lazy_load" in name or "functorch" in str(getattr(target, "__module__", "")):
                raise _Unfit("it uses torch.func.vmap, or FlexAttention, which does", where, _hint("vmap")) from None
            raise _Unfit(f"it calls {shown(name)} while it is traced", where) from None

    def _argument(self, building: _Building, item: Any, where: Where | None) -> Argument:
        if isinstance(item, torch.fx.Node):
            if item not in building.values:
                raise _Unfit("an argument that is no tensor", where)
            return Value(building.values[item])
        if item is None or isinstance(item, bool | int | float | complex | str):
            return item
        if isinstance(item, torch.dtype):
            return Special("dtype", _dtype_name(item))
        if isinstance(item, torch.device):
            return Special("device", "")
        if isinstance(item, torch.memory_format):
            name = str(item).removeprefix("torch.")
            if name in MEMORY_FORMATS:
                return Special("memory_format", name)
        if item is torch.strided:
            return Special("layout", "")
        if isinstance(item, list | tuple):
            return tuple(self._argument(building, inner, where) for inner in item)
        raise _Unfit(f"an argument of type {type(item).__name__}", where)

    # Results as traced

    def _result(self, value: Any) -> Result:
        if isinstance(value, Tensor):
            return TensorSpec(_dtype_name(value.dtype), tuple(self._size(size) for size in value.shape))
        if isinstance(value, tuple | list):
            return tuple(self._result(item) for item in value)
        for kind, types in (
            ("bool", (bool, torch.SymBool)),
            ("int", (int, torch.SymInt)),
            ("float", (float, torch.SymFloat)),
        ):
            if isinstance(value, types):
                return kind
        return None

    def _size(self, size: Any) -> int | Size:
        if not isinstance(size, torch.SymInt):
            return int(size)
        found = size.node.expr
        if found not in self._sizes:
            self._sizes[found] = self._size_of(found)
        return self._sizes[found]

    def _size_of(self, found: Any) -> int | Size:
        if found.is_Integer:
            return int(found)
        coefficients = self._polynomial(found)
        if coefficients is not None:
            return Size(coefficients, True)
        bounded = found.xreplace(self.bounds)
        coefficients = self._polynomial(bounded)
        if coefficients is not None:
            return Size(coefficients, False)
        # Neither: an upper bound from the symbols' own ranges is none; a generous one is said instead.
        return Size((0, max(1, self.width) * 1024), False)

    def _polynomial(self, expression: Any) -> tuple[int, ...] | None:
        import sympy

        symbols = expression.free_symbols - {self.symbol}
        if symbols:
            return None
        if self.symbol is None or not expression.free_symbols:
            return (int(expression),) if expression.is_Integer else None
        try:
            found = sympy.Poly(expression, self.symbol)
        except sympy.PolynomialError:
            return None
        coefficients = list(reversed(found.all_coeffs()))
        if len(coefficients) > 5 or not all(coefficient.is_Integer for coefficient in coefficients):
            return None
        return tuple(int(coefficient) for coefficient in coefficients)

    def _bound(self, node: Any) -> None:
        """A size that depends on data is never more than the elements it was chosen from."""
        source = node.args[0].meta.get("val")
        elements: Any = 1
        for size in source.shape:
            elements = elements * (size.node.expr if isinstance(size, torch.SymInt) else size)
        import sympy

        elements = sympy.sympify(elements).xreplace(self.bounds)
        values = node.meta.get("val")
        for value in values if isinstance(values, tuple | list) else [values]:
            for size in value.shape if isinstance(value, Tensor) else ():
                if isinstance(size, torch.SymInt):
                    for symbol in size.node.expr.free_symbols - {self.symbol}:
                        self.bounds.setdefault(symbol, elements)

    def _where(self, node: Any) -> Where | None:
        trace = str(node.meta.get("stack_trace") or "")
        if trace not in self._wheres:
            self._wheres[trace] = _where_in(trace, self.bundle_dir)
        return self._wheres[trace]


def state_table(model: nn.Module) -> tuple[StateTensor, ...]:
    """Every tensor of the model's state_dict: parameters and persistent buffers, tied ones under each name."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    first: dict[int, str] = {}
    table = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        tied = first.setdefault(id(tensor), name)
        table.append(
            StateTensor(
                name,
                _dtype_name(tensor.dtype),
                tuple(tensor.shape),
                name in parameters,
                None if tied == name else tied,
            )
        )
    return tuple(table)


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise _Unfit(f"a tensor of {name}")
    return name


def _uniform(tensor: Tensor) -> bool:
    flat = tensor.reshape(-1)
    first = flat[0]
    # -0.0 equals 0.0 and is another value.
    return bool((flat == first).all()) and (
        not tensor.is_floating_point() or bool((torch.signbit(flat) == torch.signbit(first)).all())
    )


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _without_dead(program: Program) -> Program:
    """The program without nodes whose value nobody reads and that write into nothing, and without unused constants."""
    graphs = []
    for graph in program.graphs:
        used = set(graph.outputs)
        kept: list[int] = []
        for index in range(len(graph.nodes) - 1, -1, -1):
            node = graph.nodes[index]
            writes = operators.OPERATORS.get(node.operator)
            if (
                graph.inputs + index in used
                or node.operator == AUTOCAST  # its body may write
                or writes is None  # refused later, by name
                or writes.kind == "in place"
            ):
                kept.append(index)
                used.update(node.values())
        kept.reverse()
        numbers = {value: value for value in range(graph.inputs)}
        numbers |= {graph.inputs + old: graph.inputs + new for new, old in enumerate(kept)}
        nodes = tuple(_renumbered(graph.nodes[index], numbers) for index in kept)
        graphs.append(Graph(graph.inputs, nodes, tuple(numbers[value] for value in graph.outputs)))
    wanted = sorted({node.arguments[0] for graph in graphs for node in graph.nodes if node.operator == CONSTANT})
    places = {old: new for new, old in enumerate(wanted)}
    graphs = [
        Graph(
            graph.inputs,
            tuple(
                Node(CONSTANT, (places[node.arguments[0]],), (), node.result, node.where)
                if node.operator == CONSTANT
                else node
                for node in graph.nodes
            ),
            graph.outputs,
        )
        for graph in graphs
    ]
    constants = tuple(program.constants[index] for index in wanted)
    return Program(program.width, program.batch, program.device, program.state, constants, tuple(graphs), program.most)


def _renumbered(node: Node, numbers: dict[int, int]) -> Node:
    def renumber(argument: Argument) -> Argument:
        if type(argument) is Value:
            return Value(numbers[argument.index])
        return tuple(renumber(item) for item in argument) if type(argument) is tuple else argument

    return Node(
        node.operator,
        tuple(renumber(argument) for argument in node.arguments),
        tuple((name, renumber(argument)) for name, argument in node.keywords),
        node.result,
        node.where,
        node.graph,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


def _difference(
    forward: _Logits, program: Program, constants: bytes, model: nn.Module, tokens: Tensor, notes: list[str]
) -> float | None:
    """The largest difference between the program, read from its file, and the live model, on random ids."""
    from prism_fast.program.runnable import Runnable

    try:
        runnable = Runnable(program, constants, tokens.device)
    except ProgramError as error:
        reject(str(error), None, "")
    state = [tensor.detach() for tensor in model.state_dict(keep_vars=True).values() if isinstance(tensor, Tensor)]
    highest = min((t.shape[0] for t in program.state if t.is_parameter and len(t.shape) == 2), default=2)
    highest = max((t.shape[0] for t in program.state if t.name.endswith(_embedding_names(model))), default=highest)
    worst = 0.0
    # Twice with as many rows: a counter kept in an attribute shows only then.
    sizes = [tokens.shape[0], tokens.shape[0], 1] if program.batch is None else [tokens.shape[0]] * 2
    for seed, rows in enumerate(sizes):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, highest, (rows, tokens.shape[1]), generator=generator).to(tokens.device)
        try:
            found = runnable.run(copy.copy(state), ids)
            expected = forward(ids)
        except _Unfit as unfit:
            reject(unfit.clause, unfit.where, unfit.hint)
        except Exception as error:
            notes.append(f"not compared with the model on {rows} rows: {type(error).__name__}")
            return None
        if found.shape != expected.shape:
            notes.append(
                f"the model gives shape {list(expected.shape)} on {rows} rows, the program {list(found.shape)}"
            )
            return math.inf
        gap = (found.double() - expected.double()).abs()
        gap = torch.where(found == expected, 0.0, gap).nan_to_num(math.inf)
        gap = torch.where(found.isnan() & expected.isnan(), 0.0, gap)
        worst = max(worst, float(gap.max()) if gap.numel() else 0.0)
    return worst


def _embedding_names(model: nn.Module) -> tuple[str, ...]:
    """Name of the widest embedding's weight: ids below its length are safe for a random batch."""
    found = [(m.num_embeddings, f"{name}.weight") for name, m in model.named_modules() if isinstance(m, nn.Embedding)]
    return (max(found)[1],) if found else ("\0",)


# ---------------------------------------------------------------------------------------------------------------------
# Refusing

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def _where_in(trace: str, bundle_dir: Path) -> Where | None:
    """The innermost frame inside the bundle; where there is none, the innermost outside torch."""
    fallback = None
    for file, line, function in reversed(_FRAME.findall(trace)):
        path = Path(file)
        found = Where(shown(path.name) or "?", int(line), shown(function))
        if path.is_relative_to(bundle_dir):
            return found
        if fallback is None and path.is_absolute() and not {"torch", "prism_fast"} & set(path.parts):
            fallback = found
    return fallback


def _line_in(trace: str, bundle_dir: Path) -> str:
    """The source line of the innermost frame inside the bundle, as a traceback prints it."""
    lines = trace.splitlines()
    for index in range(len(lines) - 2, -1, -1):
        frame = _FRAME.search(lines[index])
        if frame is not None and Path(frame[1]).is_relative_to(bundle_dir):
            return lines[index + 1].strip()
    return ""


def rejection(clause: str, where: Where | None, hint: str) -> BundleRejected:
    place = "" if where is None else f" ({where})"
    return BundleRejected(
        f"the model cannot be turned into a program: {clause}{place}{'; ' + hint if hint else ''}",
        rule=RULE_NOT_EXPORTABLE,
    )


def reject(clause: str, where: Where | None, hint: str) -> NoReturn:
    raise rejection(clause, where, hint) from None


_HINTS = (
    (
        "randint|bernoulli|multinomial|normal|uniform|rand|dropout",
        "a prediction is made without random numbers: check self.training",
    ),
    (
        "_local_scalar_dense|item",
        "keep the number in a tensor: no .item(), int() or float() of a tensor in the forward",
    ),
    ("vmap|flex_attention", "write it over whole batches; a mask as attn_mask of F.scaled_dot_product_attention"),
    ("cond|while_loop|scan|map_impl", "write both sides with torch.where, or unroll the loop"),
    ("one_hot", "F.one_hot(x, num_classes)"),
    ("repeat_interleave", "gather rows by an index, or give the repeats as one int"),
    ("as_strided", "use view, unfold, expand or slicing"),
    ("bincount|histc", "F.one_hot(x, n).sum(0)"),
    ("triton|custom|autograd", "write it with torch's own operators where self.training is False"),
)


def _hint(text: str) -> str:
    return next((hint for pattern, hint in _HINTS if re.search(pattern, text)), "")


def _clause(error: BaseException) -> str:
    """What went wrong in the exporter, as one bounded clause of ours."""
    name = type(error).__name__
    if isinstance(error, _Unfit):
        return error.clause
    text = " ".join(str(error).split())
    if name == "UnsupportedOperatorException":
        return f"{shown(text.split()[0] if text else name)} cannot be traced"
    if "fake tensor in the exported program constant" in text or "numpy() is not supported" in text:
        return "it goes behind the tracer's back (.data of a parameter, .numpy())"
    if name == "GuardOnDataDependentSymNode":
        return "it branches on a value or size that depends on the tokens"
    if "data-dependent" in text or "DataDependent" in name:
        if "item" in text or "_local_scalar_dense" in text:
            return "it takes a number out of a tensor"
        return "it branches on values of a tensor"
    if name in ("UserError", "TorchRuntimeError") and "Tried to use data" in text:
        return "it takes a number out of a tensor"
    return f"{name}: {shown(text)}" if text else name


def _rejection(error: BaseException, bundle_dir: Path) -> BundleRejected:
    if isinstance(error, _Unfit):
        return rejection(error.clause, error.where, error.hint)
    trace = "".join(traceback.format_exception(error))
    where = _where_in(trace, bundle_dir)
    clause = _clause(error)
    hint = _hint(str(error)[:2000])
    if "branches on" in clause or "takes a number" in clause:
        line = _line_in(trace, bundle_dir)
        if "one_hot" in line or re.search(r"\.item\(|\.tolist\(|\b(int|float)\(", line):
            hint = _hint("one_hot" if "one_hot" in line else "item")
        elif re.search(r"numel|shape|size|len\(", line):
            hint = "an expert without rows may run on no rows: leave out a branch on how many there are"
        else:
            hint = "choose with torch.where or a mask instead of a branch"
    return rejection(clause, where, hint)
