"""The allow-list against torch's own registry: what is not on it is refused, what is on it exists and holds."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from prism_fast.program import operators
from prism_fast.program.format import Graph, Node, Program, ProgramError, Special, Value, Where, constants_file
from prism_fast.program.runnable import Runnable, overload

NONE = constants_file([])


def program_of(*nodes: Node, width: int = 4) -> Program:
    """A program of nothing but `nodes`; value 0 is the tokens."""
    return Program(width, None, "cpu", (), (), (Graph(1, nodes, (len(nodes),)),))


def registry() -> list[str]:
    names = []
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = qualified.partition("::")
        packet, _, which = rest.partition(".")
        names.append(f"{namespace}.{packet}.{which or 'default'}")
    return sorted(set(names))


def test_every_operator_of_torch_that_is_not_on_the_list_is_refused():
    where = Where("architecture.py", 7, "forward")
    refused = 0
    for name in registry():
        if name in operators.OPERATORS:
            continue
        with pytest.raises(ProgramError, match=r"is not an operator that a program may hold \(architecture.py:7\)"):
            operators.check(program_of(Node(name, (Value(0),), where=where)))
        refused += 1
    assert refused > 2000


def test_every_operator_on_the_list_exists_here_and_gives_what_a_program_can_hold():
    aten = [name for name in operators.OPERATORS if name.startswith("aten.")]
    assert 500 < len(aten) < 800
    for name in aten:
        schema = overload(name)._schema
        assert schema.returns, name
        assert all(str(item.type) in ("Tensor", "List[Tensor]", "int") for item in schema.returns), name


@pytest.mark.parametrize(
    "part",
    [
        "as_strided", "empty", "resize", "set_", "from_file", "rand", "bernoulli", "multinomial", "uniform",
        "exponential", "backward", "sparse", "quantiz", "nested", "ctc_loss", "segment_reduce", "data_ptr", "hash",
        "_pack_padded", "embedding_bag", "native_batch_norm", "record_stream", "storage", "_unsafe_index", ".item",
        "_reshape_alias", "_local_scalar_dense", "is_nonzero", "bincount", "_weight_norm", "_cudnn", "mkldnn", "miopen",
    ],
)  # fmt: skip
def test_nothing_on_the_list_is_of_a_kind_that_stays_out(part):
    assert not [name for name in operators.OPERATORS if part in name]


def test_nothing_on_the_list_is_random_or_writes_to_an_out_argument():
    for name in operators.OPERATORS:
        if name.startswith("aten."):
            found = overload(name)
            conditioned = operators.OPERATORS[name].condition is not None
            assert torch.Tag.nondeterministic_seeded not in found.tags or conditioned, name
            assert not any(argument.is_out for argument in found._schema.arguments), name


def test_only_operators_called_in_place_write():
    for name, item in operators.OPERATORS.items():
        if name.startswith("aten."):
            written = [a.name for a in overload(name)._schema.arguments if a.alias_info and a.alias_info.is_write]
            assert (written == ["self"] or written == ["input"]) if item.kind == "in place" else not written, name


F32 = (("dtype", Special("dtype", "float32")),)


def attention(*rest: object) -> tuple[Node, ...]:
    return (
        Node("aten.zeros.default", ((1, 1, 4, 8),), F32),
        Node("aten.scaled_dot_product_attention.default", (Value(1), Value(1), Value(1), *rest)),
    )


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ((Node("aten.dropout.default", (Value(0), 0.5, True)),), "train is True"),
        ((Node("aten.dropout.default", (Value(0), 0.5)),), "train is True"),
        ((Node("aten.dropout.default", (Value(0), 0.5, 0)),), "train is 0"),
        ((Node("aten.dropout.default", (Value(0), 0.5, Value(0))),), "train is"),
        (attention(None, 0.1), "dropout_p is 0.1"),
        ((Node("aten.view.dtype", (Value(0), Special("dtype", "bool"))),), "bytes are not shown as bool"),
        ((Node("aten.one_hot.default", (Value(0),)),), "num_classes"),
        ((Node("aten.one_hot.default", (Value(0), -1)),), "num_classes"),
        (
            (Node("aten.batch_norm.default", (Value(0), None, None, None, None, True, 0.1, 1e-5, False)),),
            "training is True",
        ),
        ((Node("aten.searchsorted.Tensor", (Value(0), Value(0)), (("sorter", Value(0)),)),), "sorter is"),
        ((Node("aten.zeros.default", ((4,),), (("pin_memory", True),)),), "pin_memory"),
        ((Node("aten.lstm.input", (Value(0), (), (), True, 1, 0.0, True, False, True)),), "train is not false"),
    ],
)
def test_a_condition_on_the_arguments_holds(nodes, reason):
    with pytest.raises(ProgramError, match=reason):
        operators.check(program_of(*nodes))


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (Node("aten.add.Tensor", (Value(0),)), "other is missing"),
        (Node("aten.add.Tensor", (Value(0), "text")), "other is not of type Tensor"),
        (Node("aten.add.Tensor", (Value(0), (1, 2))), "other is not of type Tensor"),
        (Node("aten.add.Tensor", (Value(0), 1, 1)), "too many arguments"),
        (Node("aten.add.Tensor", (Value(0), 1), (("beta", 1),)), "beta is no argument"),
        (Node("aten.add.Tensor", (Value(0), 1), (("self", Value(0)),)), "self given twice"),
        (Node("aten.view.default", (Value(0), (1.5,))), "size is not of type"),
        (Node("aten.view.default", (Value(0), (Value(0),))), "size is not of type"),
        (Node("aten.to.dtype", (Value(0), 6)), "dtype is not of type ScalarType"),
        (Node("py.add", (Value(0), 1)), "no number"),
        (Node("py.getitem", (Value(0), 0)), "no list"),
        (Node("aten.softmax.int", (Value(0), Special("device", ""))), "dim is not of type int"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused_when_the_program_is_loaded(node, reason):
    with pytest.raises(ProgramError, match=reason):
        Runnable(program_of(node), NONE)


# Each of these read or wrote what was not theirs in the bare operator.
ZEROS = "aten.zeros.default"
LYING = {
    "attention over more keys than values": (
        Node(ZEROS, ((1, 1, 4, 8),), F32),
        Node(ZEROS, ((1, 1, 4096, 8),), F32),
        Node("aten.scaled_dot_product_attention.default", (Value(1), Value(2), Value(1))),
    ),
    "a recurrent layer with short weights": (
        Node(ZEROS, ((2, 4, 16),), F32),
        Node(ZEROS, ((1, 2, 16),), F32),
        Node(ZEROS, ((1, 1),), F32),
        Node(ZEROS, ((1,),), F32),
        Node(
            "aten.lstm.input",
            (
                Value(1),
                (Value(2), Value(2)),
                (Value(3), Value(3), Value(4), Value(4)),
                True,
                1,
                0.0,
                False,
                False,
                True,
            ),
        ),
        Node("py.getitem", (Value(5), 0)),
    ),
    "a recurrent layer with a short state": (
        Node(ZEROS, ((2, 4, 16),), F32),
        Node(ZEROS, ((1, 1, 16),), F32),
        Node(ZEROS, ((64, 16),), F32),
        Node(ZEROS, ((64,),), F32),
        Node(
            "aten.lstm.input",
            (
                Value(1),
                (Value(2), Value(2)),
                (Value(3), Value(3), Value(4), Value(4)),
                True,
                1,
                0.0,
                False,
                False,
                True,
            ),
        ),
        Node("py.getitem", (Value(5), 0)),
    ),
    "sizes that outgrow 64 bits": (
        Node("aten.sym_size.int", (Value(0), 1)),
        *(Node("py.mul", (Value(index), Value(index))) for index in range(1, 8)),
        Node("aten.full.default", ((Value(8),), 1.0)),
    ),
    "an index past the end": (
        Node("aten.add.Tensor", (Value(0), 1 << 40)),
        Node(ZEROS, ((4, 4),), F32),
        Node("aten.embedding.default", (Value(2), Value(1))),
    ),
}


@pytest.mark.parametrize("case", LYING)
def test_what_reads_foreign_memory_fails_with_its_operator_and_line(case):
    where = Where("architecture.py", 3, "forward")
    nodes = [replace(node, where=where) for node in LYING[case]]
    program = Program.from_bytes(program_of(*nodes).to_bytes())
    runnable = Runnable(program, NONE)
    with pytest.raises(ProgramError, match=r"\(architecture.py:3\) failed on this batch"):
        runnable.run([], torch.ones(2, 4, dtype=torch.int64))


def test_the_referees_half_needs_no_torch():
    code = (
        "import sys, prism_fast.program.format, prism_fast.program.operators, prism_fast.program.sizes, "
        "prism_fast.program.listing; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_executors_half_imports_nothing_of_the_exporter():
    code = (
        "import sys, prism_fast.program.runnable, prism_fast.program.head; "
        "assert not {'torch._dynamo', 'sympy', 'networkx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
