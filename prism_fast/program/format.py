"""`prism_program.v1`: a captured forward as a JSON file, its constants as safetensors. Needs no torch.

A program is one or more graphs in single-assignment form. Values are numbered: a graph's inputs come first, then one
value a node. The main graph (number 0) has the tokens as value 0 and state tensor i as value i + 1; other graphs are
bodies of autocast regions, each entered by exactly one node of a graph before it, so that nothing can recurse or
multiply.

    {"schema": "prism_program.v1", "width": 64, "batch": null, "most": null, "device": "cpu",
     "state": [[name, dtype, [sizes], is_parameter, index it is tied to or null], ...],
     "constants": [[name, dtype, [sizes]], ...],
     "files": [name, ...], "functions": [name, ...],
     "graphs": [[inputs, [node, ...], [output values]], ...]}
    node     = [operator, [arguments], {keyword: argument}, result, [file, line, function] | null, graph entered | null]
    argument = null | bool | int | float | "string" | [arguments] | {"v": value} | {"d": dtype} | {"m": memory format}
               | {"f": "inf" | "-inf" | "nan"} | {"c": [real, imaginary]} | {"device": 0} | {"layout": 0}
    result   = null | "int" | "float" | "bool" | [dtype, [sizes]] | {"all": [results]}
    size     = int | {"b": [c0, c1, ...]} (c0 + c1 batch + c2 batch^2 ...) | {"max": [c0, c1, ...]} (no more than that)

A file has one byte string: keys sorted, no spaces; anything else is refused, so that its sha256 names it. Results are
what the tracer says; nothing relies on them but estimates of memory and people who read the listing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import orjson

from prism_fast.protocol.canonical import canonical_json, sha256_hex

SCHEMA: Final = "prism_program.v1"
TOKENS: Final = 0  # the main graph's value 0
CONSTANT: Final = "constant"  # a node whose one argument is a constant's index
AUTOCAST: Final = "autocast"  # a node that enters a graph: arguments dtype, enabled, cache enabled, [inputs]
GETITEM: Final = "py.getitem"

# What a file may ask for, checked before anything of that size exists.
MAX_BYTES: Final = 16 << 20
MAX_NODES: Final = 200_000
MAX_GRAPHS: Final = 4096
MAX_GRAPH_DEPTH: Final = 16
MAX_TENSORS: Final = 65_536  # of state, and of constants
MAX_ARGUMENTS: Final = 64  # of one node
MAX_LIST: Final = 65_536
MAX_LIST_DEPTH: Final = 2
MAX_DIMENSIONS: Final = 16
MAX_NAME: Final = 512
MAX_TEXT: Final = 256
MAX_LABEL: Final = 128
MAX_ELEMENTS: Final = 1 << 44  # of one tensor
MAX_BATCH: Final = 1 << 24
MAX_WIDTH: Final = 1 << 24
MAX_CONSTANT_BYTES: Final = 1 << 34
MAX_HEADER_BYTES: Final = 16 << 20
MAX_LINE: Final = 1 << 31
MAX_POWERS: Final = 5  # terms of a size in the batch
INT64: Final = 1 << 63

DTYPE_BYTES: Final = {
    "bfloat16": 2,
    "bool": 1,
    "complex128": 16,
    "complex64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "int8": 1,
    "uint8": 1,
}
SAFETENSORS_DTYPE: Final = {
    "bfloat16": "BF16",
    "bool": "BOOL",
    "complex64": "C64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "int8": "I8",
    "uint8": "U8",
}
MEMORY_FORMATS: Final = frozenset({"channels_last", "channels_last_3d", "contiguous_format", "preserve_format"})
SCALARS: Final = frozenset({"int", "float", "bool"})


class ProgramError(ValueError):
    """A program, its constants or a run of it is not what it has to be. One sentence."""


@dataclass(frozen=True, slots=True)
class Value:
    """An argument that is a value of the graph."""

    index: int


@dataclass(frozen=True, slots=True)
class Special:
    """An argument that is a `dtype`, `memory_format`, `device` or `layout`; `name` is empty for the last two."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Size:
    """A size that depends on the batch: sum of coefficients[i] batch^i, exact or an upper bound."""

    coefficients: tuple[int, ...]
    exact: bool

    def at(self, batch: int) -> int:
        return max(0, sum(coefficient * batch**power for power, coefficient in enumerate(self.coefficients)))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """dtype and shape of a result, as traced."""

    dtype: str
    shape: tuple[int | Size, ...]

    def elements(self, batch: int) -> int:
        return math.prod(size.at(batch) if isinstance(size, Size) else size for size in self.shape)

    def bytes(self, batch: int) -> int:
        return self.elements(batch) * DTYPE_BYTES[self.dtype]


# None | bool | int | float | complex | str | Value | Special | tuple of arguments
Argument = Any
# None | "int" | "float" | "bool" | TensorSpec | tuple of results
Result = Any


@dataclass(frozen=True, slots=True)
class Where:
    """The line of the bundle that a node came from."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Node:
    operator: str
    arguments: tuple[Argument, ...] = ()
    keywords: tuple[tuple[str, Argument], ...] = ()
    result: Result = None
    where: Where | None = None
    graph: int | None = None

    def argument(self, position: int, name: str, default: Argument = None) -> Argument:
        """The argument called `name`, given by position or by keyword."""
        if position < len(self.arguments):
            return self.arguments[position]
        return next((value for keyword, value in self.keywords if keyword == name), default)

    def values(self) -> Iterator[int]:
        """The values this node reads, with repeats."""
        yield from values_in(self.arguments)
        for _, argument in self.keywords:
            yield from values_in(argument)


@dataclass(frozen=True, slots=True)
class Graph:
    inputs: int
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A parameter or persistent buffer under its state_dict name. `tied_to`: the earlier name of the same tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_parameter: bool
    tied_to: str | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ConstantTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Program:
    """`width`: tokens a row. `batch`: rows, None if any number up to `most` (None: any at all). `device`: type it was
    captured on."""

    width: int
    batch: int | None
    device: str
    state: tuple[StateTensor, ...]
    constants: tuple[ConstantTensor, ...]
    graphs: tuple[Graph, ...]
    most: int | None = None

    @staticmethod
    def from_bytes(data: bytes) -> Program:
        """Reads and checks a file. Raises ProgramError, and nothing else, whatever the bytes."""
        program = _Reader(data).program()
        if program.to_bytes() != data:
            raise ProgramError("the program is not in canonical form: keys sorted, no spaces, nothing twice or unused")
        return program

    def to_bytes(self) -> bytes:
        return self._bytes

    @functools.cached_property
    def _bytes(self) -> bytes:
        return canonical_json(_document(self))

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of the file, in hexadecimal."""
        return sha256_hex(self.to_bytes())

    def takes(self, rows: int) -> bool:
        """Whether the program is for batches of `rows` rows."""
        return rows == self.batch if self.batch is not None else self.most is None or rows <= self.most

    @property
    def state_elements(self) -> int:
        """Elements of all distinct state tensors."""
        return sum(tensor.elements for tensor in self.state if tensor.tied_to is None)

    @property
    def parameter_elements(self) -> int:
        """Elements of all distinct parameters."""
        return sum(tensor.elements for tensor in self.state if tensor.tied_to is None and tensor.is_parameter)

    @property
    def constant_elements(self) -> int:
        return sum(tensor.elements for tensor in self.constants)

    @property
    def node_count(self) -> int:
        return sum(len(graph.nodes) for graph in self.graphs)

    def nodes(self) -> Iterator[Node]:
        for graph in self.graphs:
            yield from graph.nodes


def values_in(argument: Argument) -> Iterator[int]:
    if type(argument) is Value:
        yield argument.index
    elif type(argument) is tuple:
        for item in argument:
            yield from values_in(item)


def tensors_in(result: Result) -> Iterator[TensorSpec]:
    if type(result) is TensorSpec:
        yield result
    elif type(result) is tuple:
        for item in result:
            yield from tensors_in(item)


def shown(text: object) -> str:
    """`text` as it may stand in a sentence: short, printable."""
    found = "".join(ch if ch.isprintable() else "?" for ch in str(text)[:81])
    return found if len(found) <= 80 else found[:77] + "..."


# ---------------------------------------------------------------------------------------------------------------------
# One graph instead of several


@dataclass(frozen=True, slots=True)
class Step:
    """A node of the flat program: values are numbered over all graphs.

    `operator` is AUTOCAST with `enters` True or False at a region's two ends; `output` is -1 there.
    """

    operator: str
    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...]
    output: int
    result: Result
    where: Where | None
    enters: bool | None = None


@dataclass(frozen=True, slots=True)
class FlatProgram:
    """Steps in order; `inputs`: tokens, then state; `output`: the logits' value."""

    inputs: int
    steps: tuple[Step, ...]
    output: int


def flatten(program: Program) -> FlatProgram:
    """The program with the bodies of its regions written in place: `enters` marks a region's start and end."""
    steps: list[Step] = []
    counter = program.graphs[0].inputs

    def place(graph: Graph, numbers: list[int]) -> list[int]:
        nonlocal counter
        # A region's value is the tuple of its outputs; only getitem reads it, so it needs no value of its own.
        regions: dict[int, list[int]] = {}

        def renumber(argument: Argument) -> Argument:
            if type(argument) is Value:
                return Value(numbers[argument.index])
            if type(argument) is tuple:
                return tuple(renumber(item) for item in argument)
            return argument

        for node in graph.nodes:
            here = len(numbers)
            if node.operator == AUTOCAST:
                assert node.graph is not None
                given = node.arguments[3]
                steps.append(Step(AUTOCAST, node.arguments[:3], (), -1, None, node.where, True))
                regions[here] = place(program.graphs[node.graph], [numbers[value.index] for value in given])
                steps.append(Step(AUTOCAST, (), (), -1, None, node.where, False))
                numbers.append(-1)
                continue
            if node.operator == GETITEM and node.arguments[0].index in regions:
                numbers.append(regions[node.arguments[0].index][node.arguments[1]])
                continue
            arguments = tuple(renumber(argument) for argument in node.arguments)
            keywords = tuple((name, renumber(argument)) for name, argument in node.keywords)
            steps.append(Step(node.operator, arguments, keywords, counter, node.result, node.where))
            numbers.append(counter)
            counter += 1
        return [numbers[value] for value in graph.outputs]

    outputs = place(program.graphs[0], list(range(counter)))
    return FlatProgram(program.graphs[0].inputs, tuple(steps), outputs[0])


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def _document(program: Program) -> dict[str, Any]:
    wheres = [node.where for node in program.nodes() if node.where is not None]
    files = {name: index for index, name in enumerate(sorted({where.file for where in wheres}))}
    functions = {name: index for index, name in enumerate(sorted({where.function for where in wheres}))}
    names = {tensor.name: index for index, tensor in enumerate(program.state)}

    def node(item: Node) -> list[Any]:
        where = item.where
        return [
            item.operator,
            [_written(argument) for argument in item.arguments],
            {name: _written(argument) for name, argument in item.keywords},
            _written_result(item.result),
            None if where is None else [files[where.file], where.line, functions[where.function]],
            item.graph,
        ]

    return {
        "schema": SCHEMA,
        "width": program.width,
        "batch": program.batch,
        "most": program.most,
        "device": program.device,
        "state": [
            [t.name, t.dtype, list(t.shape), t.is_parameter, None if t.tied_to is None else names[t.tied_to]]
            for t in program.state
        ],
        "constants": [[t.name, t.dtype, list(t.shape)] for t in program.constants],
        "files": list(files),
        "functions": list(functions),
        "graphs": [
            [graph.inputs, [node(item) for item in graph.nodes], list(graph.outputs)] for graph in program.graphs
        ],
    }


def _written(argument: Argument) -> Any:
    kind = type(argument)
    if kind is Value:
        return {"v": argument.index}
    if kind is tuple:
        return [_written(item) for item in argument]
    if kind is Special:
        if argument.kind == "dtype":
            return {"d": argument.name}
        return {"m": argument.name} if argument.kind == "memory_format" else {argument.kind: 0}
    if kind is float and not math.isfinite(argument):
        return {"f": str(argument)}
    if kind is complex:
        return {"c": [_written(argument.real), _written(argument.imag)]}
    return argument


def _written_result(result: Result) -> Any:
    if type(result) is TensorSpec:
        sizes = [
            ({"b" if size.exact else "max": list(size.coefficients)} if isinstance(size, Size) else size)
            for size in result.shape
        ]
        return [result.dtype, sizes]
    if type(result) is tuple:
        return {"all": [_written_result(item) for item in result]}
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def _fail(what: str) -> NoReturn:
    raise ProgramError(f"the program's {what}")


def _integer(item: Any, low: int, high: int, what: str) -> int:
    """`item` if it is an int (no bool) with low <= item < high."""
    if type(item) is not int or not low <= item < high:
        _fail(
            f"{what} is {shown(item) if isinstance(item, int | float) else type(item).__name__}, "
            f"not a number from {low} to {high - 1}"
        )
    return item


def _text(item: Any, longest: int, what: str) -> str:
    if type(item) is not str or not 0 < len(item) <= longest or not item.isprintable():
        _fail(f"{what} is not printable text of 1 to {longest} characters")
    return item


def _list(item: Any, longest: int, what: str, exactly: int | None = None) -> list[Any]:
    if type(item) is not list or len(item) > longest or (exactly is not None and len(item) != exactly):
        _fail(f"{what} is not a list of {f'at most {longest}' if exactly is None else exactly} items")
    return item


def _dtype(item: Any, what: str) -> str:
    if type(item) is not str or item not in DTYPE_BYTES:
        _fail(f"{what} has a dtype that is not one of {', '.join(DTYPE_BYTES)}")
    return item


def _shape(item: Any, what: str) -> tuple[int, ...]:
    sizes = tuple(_integer(size, 0, MAX_ELEMENTS, f"{what}: a size") for size in _list(item, MAX_DIMENSIONS, what))
    if math.prod(max(size, 1) for size in sizes) >= MAX_ELEMENTS:
        _fail(f"{what} has too many elements")
    return sizes


class _Reader:
    def __init__(self, data: bytes) -> None:
        if not isinstance(data, bytes):
            _fail("file is not bytes")
        if len(data) > MAX_BYTES:
            _fail(f"file has {len(data)} bytes; at most {MAX_BYTES} are read")
        try:
            self.document = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise ProgramError("the program is not JSON") from None

    def program(self) -> Program:
        keys = {"schema", "width", "batch", "most", "device", "state", "constants", "files", "functions", "graphs"}
        document = self.document
        if type(document) is not dict or document.keys() != keys:
            _fail(f"top level does not have exactly the keys {', '.join(sorted(keys))}")
        if document["schema"] != SCHEMA:
            _fail(f"schema is not {SCHEMA}")
        width = _integer(document["width"], 1, MAX_WIDTH, "width")
        batch = None if document["batch"] is None else _integer(document["batch"], 1, MAX_BATCH, "batch")
        most = None if document["most"] is None else _integer(document["most"], 1, MAX_BATCH, "most")
        if batch is not None and most is not None:
            _fail("batch and most are both given")
        device = document["device"]
        if device not in ("cpu", "cuda", "mps", "xpu"):
            _fail("device is not cpu, cuda, mps or xpu")
        state = self._state(document["state"])
        constants = self._constants(document["constants"])
        self.files = self._labels(document["files"], "files")
        self.functions = self._labels(document["functions"], "functions")
        self.constant_count = len(constants)
        graphs = self._graphs(document["graphs"], 1 + len(state))
        return Program(width, batch, device, state, constants, graphs, most)

    def _labels(self, item: Any, what: str) -> list[str]:
        labels = [_text(label, MAX_LABEL, f"{what}: a name") for label in _list(item, MAX_LIST, what)]
        if what == "files" and any("/" in label or "\\" in label for label in labels):
            _fail("files: a name is a path")
        return labels

    def _state(self, item: Any) -> tuple[StateTensor, ...]:
        tensors: list[StateTensor] = []
        for index, row in enumerate(_list(item, MAX_TENSORS, "state")):
            name, dtype, shape, is_parameter, tied = _list(row, 5, "state: a tensor", 5)
            name = _text(name, MAX_NAME, "state: a name")
            what = f"state tensor {shown(name)}"
            if type(is_parameter) is not bool:
                _fail(f"{what}: whether it is a parameter is neither true nor false")
            first = None if tied is None else tensors[_integer(tied, 0, index, f"{what}: the tensor it is tied to")]
            tensor = StateTensor(
                name, _dtype(dtype, what), _shape(shape, what), is_parameter, None if first is None else first.name
            )
            if first is not None and (
                first.tied_to is not None or (first.dtype, first.shape) != (tensor.dtype, tensor.shape)
            ):
                _fail(f"{what} is tied to one that is not first, or not of its dtype and shape")
            tensors.append(tensor)
        if len({tensor.name for tensor in tensors}) != len(tensors):
            _fail("state has a name twice")
        return tuple(tensors)

    def _constants(self, item: Any) -> tuple[ConstantTensor, ...]:
        tensors: list[ConstantTensor] = []
        for row in _list(item, MAX_TENSORS, "constants"):
            name, dtype, shape = _list(row, 3, "constants: a tensor", 3)
            name = _text(name, MAX_NAME, "constants: a name")
            what = f"constant {shown(name)}"
            if _dtype(dtype, what) not in SAFETENSORS_DTYPE:
                _fail(f"{what} has a dtype that safetensors does not know")
            tensors.append(ConstantTensor(name, dtype, _shape(shape, what)))
        if len({tensor.name for tensor in tensors} | {"__metadata__"}) != len(tensors) + 1:
            _fail("constants have a name twice, or the name __metadata__")
        if sum(tensor.bytes for tensor in tensors) > MAX_CONSTANT_BYTES:
            _fail(f"constants have more than {MAX_CONSTANT_BYTES} bytes")
        return tuple(tensors)

    def _graphs(self, item: Any, main_inputs: int) -> tuple[Graph, ...]:
        rows = _list(item, MAX_GRAPHS, "graphs")
        if not rows:
            _fail("graphs are missing")
        rows = [_list(row, 3, "graph", 3) for row in rows]
        if sum(len(_list(row[1], MAX_NODES, "nodes")) for row in rows) > MAX_NODES:
            _fail(f"graphs have more than {MAX_NODES} nodes")
        self.graph_count = len(rows)
        self.entered: dict[int, int] = {}  # graph -> inputs that it is given
        self.depth = {0: 0}
        self.outputs_of = [len(_list(row[2], MAX_LIST, "outputs")) for row in rows]
        graphs = []
        for index, (inputs, nodes, outputs) in enumerate(rows):
            expected = main_inputs if index == 0 else self.entered.get(index)
            if expected is None:
                _fail("graphs: one is entered by no node before it")
            if _integer(inputs, 0, MAX_LIST + MAX_TENSORS, "graph's inputs") != expected:
                _fail(f"graph {index} has {inputs} inputs, not {expected}")
            graphs.append(self._graph(index, inputs, nodes, outputs))
        return tuple(graphs)

    def _graph(self, index: int, inputs: int, rows: list[Any], outputs: list[Any]) -> Graph:
        nodes: list[Node] = []
        regions: dict[int, int] = {}  # value -> outputs of the region
        for row in rows:
            value = inputs + len(nodes)
            node = self._node(row, value, index)
            for used in node.values() if regions else ():
                if used in regions and not (
                    node.operator == GETITEM
                    and type(node.arguments[1]) is int
                    and 0 <= node.arguments[1] < regions[used]
                ):
                    _fail("nodes: what a region gives is read by something other than getitem of one of its outputs")
            if node.graph is not None:
                regions[value] = self.outputs_of[node.graph]
            nodes.append(node)
        total = inputs + len(nodes)
        found = tuple(_integer(output, 0, total, "graph's output") for output in outputs)
        if index == 0 and len(found) != 1:
            _fail("main graph does not have exactly one output")
        if any(output in regions for output in found):
            _fail("outputs: one is a region")
        return Graph(inputs, tuple(nodes), found)

    def _node(self, row: Any, value: int, graph_index: int) -> Node:
        operator, arguments, keywords, result, where, graph = _list(row, 6, "nodes: a node", 6)
        operator = _text(operator, MAX_LABEL, "nodes: an operator")
        self.value = value
        read = tuple(self._argument(a, 0) for a in _list(arguments, MAX_ARGUMENTS, f"arguments of {shown(operator)}"))
        if type(keywords) is not dict or len(keywords) > MAX_ARGUMENTS:
            _fail(f"keywords of {shown(operator)} are not at most {MAX_ARGUMENTS} names")
        named = tuple(
            (_text(name, MAX_LABEL, "nodes: a keyword"), self._argument(argument, 0))
            for name, argument in sorted(keywords.items())
        )
        node = Node(operator, read, named, self._result(result, 0), self._where(where), graph)
        if operator == AUTOCAST:
            self._enter(node, graph_index)
        elif graph is not None:
            _fail(f"operator {shown(operator)} enters a graph")
        elif operator == CONSTANT:
            if len(read) != 1 or named:
                _fail("nodes: a constant has one argument")
            _integer(read[0], 0, self.constant_count, "nodes: a constant's index")
        elif operator == GETITEM and (
            len(read) != 2 or named or type(read[0]) is not Value or type(read[1]) is not int
        ):
            _fail("nodes: getitem takes a value and a number")
        return node

    def _enter(self, node: Node, parent: int) -> None:
        graph = _integer(node.graph, parent + 1, self.graph_count, "nodes: the graph entered")
        if graph in self.entered:
            _fail("nodes: a graph is entered twice")
        if self.depth[parent] >= MAX_GRAPH_DEPTH:
            _fail(f"regions are nested more than {MAX_GRAPH_DEPTH} deep")
        given = node.arguments
        if (
            len(given) != 4
            or node.keywords
            or not (given[0] is None or (type(given[0]) is Special and given[0].kind == "dtype"))
            or type(given[1]) is not bool
            or not (given[2] is None or type(given[2]) is bool)
            or type(given[3]) is not tuple
            or any(type(value) is not Value for value in given[3])
        ):
            _fail("nodes: a region is not given dtype, two switches and a list of values")
        self.entered[graph] = len(given[3])
        self.depth[graph] = self.depth[parent] + 1

    def _argument(self, item: Any, depth: int) -> Argument:
        kind = type(item)
        if item is None or kind is bool or kind is float:
            return item
        if kind is int:
            return _integer(item, -INT64, INT64, "arguments: a number")
        if kind is str:
            return _text(item, MAX_TEXT, "arguments: a text") if item else item
        if kind is list:
            if depth >= MAX_LIST_DEPTH:
                _fail(f"arguments: lists are nested more than {MAX_LIST_DEPTH} deep")
            return tuple(self._argument(inner, depth + 1) for inner in _list(item, MAX_LIST, "arguments: a list"))
        if len(item) != 1:
            _fail("arguments: an object does not have exactly one key")
        ((key, inner),) = item.items()
        if key == "v":
            return Value(_integer(inner, 0, self.value, "arguments: a value"))
        if key == "d":
            return Special("dtype", _dtype(inner, "arguments: an argument"))
        if key == "m":
            if type(inner) is not str or inner not in MEMORY_FORMATS:
                _fail(f"arguments: a memory format is not one of {', '.join(sorted(MEMORY_FORMATS))}")
            return Special("memory_format", inner)
        if key == "f":
            if inner not in ("inf", "-inf", "nan"):
                _fail('arguments: a number that is not finite is not "inf", "-inf" or "nan"')
            return float(inner)
        if key == "c":
            parts = [self._argument(part, MAX_LIST_DEPTH) for part in _list(inner, 2, "arguments: a complex number", 2)]
            if any(type(part) is not float for part in parts):
                _fail("arguments: a complex number is not two floats")
            return complex(*parts)
        if key in ("device", "layout"):
            _integer(inner, 0, 1, f"arguments: a {key}")
            return Special(key, "")
        _fail(f"arguments: an object has the key {shown(key)}")

    def _result(self, item: Any, depth: int) -> Result:
        if item is None or (type(item) is str and item in SCALARS):
            return item
        if type(item) is list:
            dtype, sizes = _list(item, 2, "results: a tensor", 2)
            what = "results: a tensor"
            shape = tuple(self._size(size) for size in _list(sizes, MAX_DIMENSIONS, what))
            return TensorSpec(_dtype(dtype, what), shape)
        if type(item) is dict and item.keys() == {"all"} and depth == 0:
            return tuple(self._result(inner, 1) for inner in _list(item["all"], MAX_LIST, "results"))
        _fail("results: one is neither a scalar's kind, a tensor nor a list of those")

    def _size(self, item: Any) -> int | Size:
        if type(item) is int:
            return _integer(item, 0, MAX_ELEMENTS, "results: a size")
        if type(item) is not dict or len(item) != 1 or next(iter(item)) not in ("b", "max"):
            _fail("results: a size is neither a number nor one that depends on the batch")
        ((key, inner),) = item.items()
        coefficients = tuple(
            _integer(coefficient, -MAX_ELEMENTS, MAX_ELEMENTS, "results: a size's factor")
            for coefficient in _list(inner, MAX_POWERS, "results: a size")
        )
        return Size(coefficients, key == "b")

    def _where(self, item: Any) -> Where | None:
        if item is None:
            return None
        file, line, function = _list(item, 3, "nodes: a source line", 3)
        return Where(
            self.files[_integer(file, 0, len(self.files), "nodes: a source file")],
            _integer(line, 0, MAX_LINE, "nodes: a source line"),
            self.functions[_integer(function, 0, len(self.functions), "nodes: a function")],
        )


# ---------------------------------------------------------------------------------------------------------------------
# Constants


def constant_offsets(data: bytes, program: Program) -> dict[str, tuple[int, int]]:
    """Start and end of each constant's bytes in a safetensors file that holds exactly the program's constants.

    Every byte of the file belongs to the header or to exactly one constant. Raises ProgramError otherwise.
    """

    def fail(what: str) -> NoReturn:
        raise ProgramError(f"the program's constants: {what}")

    if not isinstance(data, bytes) or len(data) < 8:
        fail("the file is too short for a header")
    size = int.from_bytes(data[:8], "little")
    if size > min(MAX_HEADER_BYTES, len(data) - 8):
        fail("the header is longer than the file, or than is read")
    expected = sum(tensor.bytes for tensor in program.constants)
    if len(data) - 8 - size != expected:
        fail(f"the file holds {len(data) - 8 - size} bytes of tensors, not {expected}")
    try:
        header = orjson.loads(data[8 : 8 + size])
    except orjson.JSONDecodeError:
        fail("the header is not JSON")
    if type(header) is not dict or header.keys() != {tensor.name for tensor in program.constants}:
        fail("the header does not name exactly the program's constants")
    spans: dict[str, tuple[int, int]] = {}
    for tensor in program.constants:
        entry = header[tensor.name]
        what = f"{shown(tensor.name)} "
        if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
            fail(what + "does not have exactly dtype, shape and data_offsets")
        if entry["dtype"] != SAFETENSORS_DTYPE[tensor.dtype]:
            fail(what + f"is not {tensor.dtype}")
        shape, offsets = entry["shape"], entry["data_offsets"]
        for numbers in (shape, offsets):
            if type(numbers) is not list or any(type(number) is not int for number in numbers):
                fail(what + "has a shape or offsets that are not whole numbers")
        if tuple(shape) != tensor.shape:
            fail(what + f"does not have the shape {list(tensor.shape)}")
        if len(offsets) != 2 or not offsets[0] >= 0 or offsets[1] - offsets[0] != tensor.bytes:
            fail(what + "has offsets that do not fit its size")
        spans[tensor.name] = (8 + size + offsets[0], 8 + size + offsets[1])
    end = 8 + size
    for start, stop in sorted(spans.values()):
        if start != end:
            fail("tensors overlap or leave a gap")
        end = stop
    for tensor in program.constants:
        start, stop = spans[tensor.name]
        # A bool of another byte than 0 and 1 is counted one way and copied another by torch's kernels.
        if tensor.dtype == "bool" and data[start:stop].translate(None, b"\x00\x01"):
            fail(f"{shown(tensor.name)} has bytes that are no bool")
    return spans


def check_constants(data: bytes, program: Program) -> None:
    """Raises ProgramError unless `data` is a safetensors file of exactly the program's constants."""
    constant_offsets(data, program)


def constants_file(tensors: list[tuple[ConstantTensor, bytes]]) -> bytes:
    """A safetensors file of tensors in the order given, each contiguous and little-endian."""
    header: dict[str, Any] = {}
    end = 0
    for tensor, raw in tensors:
        header[tensor.name] = {
            "dtype": SAFETENSORS_DTYPE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + len(raw)],
        }
        end += len(raw)
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(raw for _, raw in tensors)
