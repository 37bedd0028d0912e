"""The file: what is refused, that nothing but ProgramError is raised, and what a program says of itself."""

import itertools
import random

import orjson
import pytest

from prism_fast.program import format as f
from prism_fast.program.format import (
    AUTOCAST,
    ConstantTensor,
    Graph,
    Node,
    Program,
    ProgramError,
    Size,
    Special,
    StateTensor,
    TensorSpec,
    Value,
    Where,
    check_constants,
    constants_file,
    flatten,
)
from prism_fast.program.listing import listing
from prism_fast.program.sizes import bounds
from tests.program.mutations import mutations, survives

WHERE = Where("architecture.py", 12, "forward")
ROWS = Size((0, 1), True)


def example() -> tuple[Program, bytes]:
    """An embedding, a region of autocast with a linear layer in it, a constant, a tied name, odd literals."""
    hidden = TensorSpec("float32", (ROWS, 4, 2))
    table = ConstantTensor("table", "float32", (2,))
    body = Graph(
        2, (Node("aten.linear.default", (Value(0), Value(1)), (), TensorSpec("bfloat16", (ROWS, 4, 9))),), (2,)
    )
    main = Graph(
        3,
        (
            Node("aten.embedding.default", (Value(1), Value(0)), (), hidden, WHERE),
            Node("constant", (0,), (), TensorSpec("float32", (2,))),
            Node("aten.mul.Tensor", (Value(3), Value(4)), (), hidden, WHERE),
            Node("aten.clamp.default", (Value(5), float("-inf")), (("max", 1e300),), hidden, WHERE),
            Node(AUTOCAST, (Special("dtype", "bfloat16"), True, None, (Value(6), Value(1))), (), None, WHERE, 1),
            Node("py.getitem", (Value(7), 0), (), TensorSpec("bfloat16", (ROWS, 4, 9))),
        ),
        (8,),
    )
    state = (StateTensor("wte", "float32", (9, 2), True), StateTensor("head", "float32", (9, 2), True, "wte"))
    program = Program(4, None, "cpu", state, (table,), (main, body))
    return program, constants_file([(table, b"\0" * 8)])


def test_a_program_is_one_byte_string_and_says_how_large_it_is():
    program, constants = example()
    assert Program.from_bytes(program.to_bytes()) == program
    assert survives(program.to_bytes(), constants)
    assert (program.state_elements, program.constant_elements, program.node_count) == (18, 2, 7)
    flat = flatten(program)
    assert [step.operator for step in flat.steps][-3:] == [AUTOCAST, "aten.linear.default", AUTOCAST]
    assert bounds(program, 5).largest == 5 * 4 * 9 * 2
    assert bounds(program, 5).peak == 5 * 4 * 2 * 4 + 5 * 4 * 9 * 2  # the last hidden states and the logits
    text = listing(program)
    assert "# architecture.py:12, forward" in text and "with autocast(bfloat16):" in text
    assert "bf16[B, 4, 9]" in text and text.endswith("return v7\n")


def test_a_file_in_another_spelling_is_refused():
    program, _ = example()
    for data in (
        program.to_bytes() + b" ",
        orjson.dumps(orjson.loads(program.to_bytes()), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS),
    ):
        with pytest.raises(ProgramError, match="canonical"):
            Program.from_bytes(data)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (["schema"], "prism_program.v2", "schema is not prism_program.v1"),
        (["width"], 0, "width is 0"),
        (["width"], True, "width is True"),
        (["device"], "tpu", "device is not"),
        (["batch"], 1 << 40, "batch is"),
        (["state", 0, 0], "x" * 513, "name is not printable text"),
        (["state", 0, 0], "head", "a name twice"),
        (["state", 0, 1], "float8", "dtype"),
        (["state", 0, 2], [1 << 30, 1 << 30], "too many elements"),
        (["state", 0, 2], [1] * 17, "at most 16 items"),
        (["state", 1, 2], [9, 3], "tied to one that is not"),
        (["state", 0, 4], 0, "tied to"),
        (["constants", 0, 1], "complex128", "safetensors"),
        (["files", 0], "/etc/passwd", "a path"),
        (["graphs", 0, 1, 0, 1, 0, "v"], 3, "a value is 3"),
        (["graphs", 0, 1, 1, 1, 0], 1, "constant's index"),
        (["graphs", 0, 1, 4, 5], 0, "graph entered is 0"),
        (["graphs", 0, 1, 4, 5], None, "graph entered"),
        (["graphs", 0, 1, 5, 1, 1], 1, "other than getitem of one of its outputs"),
        (["graphs", 0, 1, 5, 0], "aten.neg.default", "other than getitem"),
        (["graphs", 0, 2], [7], "one is a region"),
        (["graphs", 0, 2], [1, 2], "exactly one output"),
        (["graphs", 1, 0], 3, "3 inputs, not 2"),
        (["graphs", 0, 1, 0, 1], [[[[1]]]], "nested more than 2 deep"),
        (["graphs", 0, 1, 0, 1], [{"f": "1"}], "not finite"),
        (["graphs", 0, 1, 0, 1], ["a" * 257], "printable text"),
        (["graphs", 0, 1, 0, 1], [2**63], "a number is"),
    ],
)  # fmt: skip
def test_a_field_that_does_not_fit_is_named(path, value, reason):
    document = orjson.loads(example()[0].to_bytes())
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with pytest.raises(ProgramError, match=reason):
        Program.from_bytes(orjson.dumps(document, option=orjson.OPT_SORT_KEYS))


def test_a_graph_is_entered_once_and_never_deep():
    def nested(depth: int) -> Program:
        enter = (Special("dtype", "bfloat16"), True, None, (Value(0),))
        graphs = [
            Graph(1, (Node(AUTOCAST, enter, (), None, None, index + 1), Node("py.getitem", (Value(1), 0))), (2,))
            for index in range(depth)
        ]
        return Program(4, None, "cpu", (), (), (*graphs, Graph(1, (), (0,))))

    assert Program.from_bytes(nested(f.MAX_GRAPH_DEPTH).to_bytes())
    with pytest.raises(ProgramError, match="nested more than"):
        Program.from_bytes(nested(f.MAX_GRAPH_DEPTH + 1).to_bytes())
    enter = Node(AUTOCAST, (None, True, None, (Value(0),)), (), None, None, 1)
    twice = Program(4, None, "cpu", (), (), (Graph(1, (enter, enter), (0,)), Graph(1, (), (0,))))
    with pytest.raises(ProgramError, match="entered twice"):
        Program.from_bytes(twice.to_bytes())


def test_more_than_is_read_is_refused_before_it_is_read():
    with pytest.raises(ProgramError, match="bytes; at most"):
        Program.from_bytes(b" " * (f.MAX_BYTES + 1))
    with pytest.raises(ProgramError, match="not JSON"):
        Program.from_bytes(b"[" * 1_000_000)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d[:-1], "bytes of tensors, not 12"),
        (lambda d: d + b"\0", "bytes of tensors, not 12"),
        (lambda d: b"", "too short"),
        (lambda d: b"\xff" * 8 + d[8:], "header is longer"),
        (lambda d: d.replace(b'"F32"', b'"I32"'), "is not float32"),
        (lambda d: d.replace(b'"b"', b'"c"'), "name exactly"),
        (lambda d: d.replace(b'"shape":[2]', b'"shape":[3]'), "does not have the shape"),
        (lambda d: d.replace(b"[8,12]", b"[4,08]").replace(b"08", b"8 "), "overlap"),
        (lambda d: d.replace(b"[8,12]", b"[8,99]"), "offsets that do not fit"),
        (lambda d: d.replace(b'{"a"', b'{"a":{},"a"').replace(b"  ", b"", 1), "."),
        (lambda d: d[:-1] + b"\x02", "no bool"),
    ],
)
def test_constants_that_are_not_the_programs_own_are_refused(change, reason):
    tensors = [
        (ConstantTensor("a", "float32", (2,)), b"\0" * 8),
        (ConstantTensor("b", "bool", (4,)), b"\0\1\0\1"),
    ]
    program = Program(4, None, "cpu", (), tuple(tensor for tensor, _ in tensors), (Graph(1, (), (0,)),))
    data = constants_file(tensors)
    check_constants(data, program)
    with pytest.raises(ProgramError, match=reason):
        check_constants(change(data), program)


def test_safetensors_itself_reads_the_constants():
    safetensors = pytest.importorskip("safetensors.torch")
    _, data = example()
    assert safetensors.load(data)["table"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("seed", range(4))
def test_mutated_files_give_a_program_or_a_sentence(seed):
    program, constants = example()
    rng = random.Random(seed)
    for data in itertools.islice(mutations(program.to_bytes(), rng), 1500):
        survives(data, constants)
    for data in itertools.islice(mutations(constants, rng), 500):
        survives(program.to_bytes(), data)
