"""The executor: nothing of others is written, memory is let go of, errors name the line, long programs load fast."""

import contextlib
import itertools
import sys
import types
import unittest

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prism_fast.program import operators
from prism_fast.program import runnable as r
from prism_fast.program.format import Graph, Node, Program, ProgramError, StateTensor, Value, Where, constants_file
from prism_fast.program.runnable import Runnable, Sharing, flatten, kinds_of
from tests.program.models import BUNDLES, EXAMPLES, built, captured, ids, state_of

NONE = constants_file([])
STATE = (StateTensor("w", "float32", (300, 8), True),)


def program_of(*nodes: Node, output: int | None = None, state=STATE) -> Program:
    first = 1 + len(state)
    return Program(4, None, "cpu", state, (), (Graph(first, nodes, (output or first + len(nodes) - 1,)),))


@pytest.mark.parametrize(
    "writes",
    [
        (Node("aten.mul_.Scalar", (Value(1), 2.0)),),
        (Node("aten.view.default", (Value(1), (8, 300))), Node("aten.zero_.default", (Value(2),))),
        (Node("aten.dropout.default", (Value(1), 0.5, False)), Node("aten.neg_.default", (Value(2),))),
        (Node("aten.unsafe_split.Tensor", (Value(1), 100)), Node("py.getitem", (Value(2), 0)),
         Node("aten.exp_.default", (Value(3),))),
        (Node("aten.meshgrid.default", ((Value(1),),)), Node("py.getitem", (Value(2), 0)),
         Node("aten.fill_.Scalar", (Value(3), 1.0))),
        (Node("aten.einsum.default", ("ij->ji", (Value(1),))), Node("aten.zero_.default", (Value(2),))),
        (Node("aten.type_as.default", (Value(1), Value(1))), Node("aten.zero_.default", (Value(2),))),
    ],
)  # fmt: skip
def test_state_is_never_written_whatever_may_share_its_memory(writes):
    last = 2 + len(writes)
    logits = Node("aten.embedding.default", (Value(1), Value(0)))
    runnable = Runnable(program_of(*writes, logits, output=last), NONE)
    weight = torch.randn(300, 8)
    before = weight.clone()
    try:
        runnable.run([weight], ids(2, 4))
    except ProgramError:
        assert writes[0].operator == "aten.meshgrid.default"
    assert torch.equal(weight, before)


def test_tokens_are_never_written():
    nodes = (Node("aten.zero_.default", (Value(0),)), Node("aten.embedding.default", (Value(1), Value(0))))
    tokens = ids(2, 4)
    weight = torch.randn(300, 8)
    found = Runnable(program_of(*nodes), NONE).run([weight], tokens)
    assert torch.equal(tokens, ids(2, 4)) and torch.equal(found, weight[torch.zeros_like(tokens)])


@pytest.mark.long
def test_no_operator_that_is_taken_to_make_fresh_tensors_shares_memory():
    """torch's own samples of its operators, with eyes on what really shares a storage."""
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # torch's own tests use it
    op_db = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db
    wrong, seen = set(), set()

    def pointers(item: object) -> set[int]:
        if isinstance(item, torch.Tensor):
            return {item.untyped_storage().data_ptr()} - {0} if item.layout is torch.strided else set()
        return {p for inner in item for p in pointers(inner)} if isinstance(item, tuple | list) else set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            schema = function._schema
            name = f"{function.namespace}.{schema.name.split('::')[1]}.{function._overloadname}"
            if name in operators.OPERATORS and not any(item.alias_info for item in schema.returns):
                seen.add(name)
                if not r.may_share(name) and pointers(result) & pointers((args, tuple((kwargs or {}).values()))):
                    wrong.add(name)
            return result

    for info in op_db:
        if torch.float32 not in info.dtypes:
            continue
        for sample in itertools.islice(info.sample_inputs("cpu", torch.float32), 30):
            with contextlib.suppress(Exception), torch.no_grad(), Watch():
                info.op(sample.input, *sample.args, **sample.kwargs)
    assert not wrong
    assert len(seen) > 250


@pytest.mark.parametrize("bundle", [*EXAMPLES, *BUNDLES], ids=lambda path: path.name)
def test_values_that_share_memory_are_known_to(bundle):
    if bundle.name == "nanogpt_lasttoken":
        pytest.skip("no program")
    model = built(bundle)
    found, runnable = captured(model, bundle_dir=bundle, compare=False)
    flat = flatten(found.program)
    sharing = Sharing(flat, kinds_of(flat))
    makers = [step.output for step in flat.steps if step.output >= 0]
    wanted = [value for value in makers if kinds_of(flat)[value] == "tensor"]
    function = r.Function(flat, wanted, runnable.constants, runnable.device)
    given = [ids(2, 16), *(tensor.clone() for tensor in state_of(model))]
    copied = [value for value in range(flat.inputs) if sharing.written(value)]
    storages: dict[int, set[int]] = {}
    for value, tensor in zip(wanted, function(given), strict=True):
        storages.setdefault(tensor.untyped_storage().data_ptr(), set()).add(sharing.root(value))
    for value, tensor in enumerate(given):
        if value not in copied:
            storages.setdefault(tensor.untyped_storage().data_ptr(), set()).add(sharing.root(value))
    ties = {t.name for t in found.program.state if t.tied_to}
    assert ties or all(len(roots) == 1 for pointer, roots in storages.items() if pointer)


def test_a_failure_names_operator_and_line_and_keeps_torchs_text_to_itself():
    where = Where("architecture.py", 9, "forward")
    node = Node("aten.view.default", (Value(0), (7, 7)), (), None, where)
    with pytest.raises(ProgramError) as caught:
        Runnable(program_of(node), NONE).run([torch.zeros(300, 8)], ids(2, 4))
    assert str(caught.value) == "aten.view.default (architecture.py:9) failed on this batch: RuntimeError"


def test_autocast_is_left_when_an_operator_fails_inside_it():
    region = Node("autocast", (None, True, None, (Value(0),)), (), None, None, 1)
    body = Graph(1, (Node("aten.view.default", (Value(0), (7, 7))),), (1,))
    main = Graph(1, (region, Node("py.getitem", (Value(1), 0))), (2,))
    runnable = Runnable(Program(4, None, "cpu", (), (), (main, body)), NONE)
    with pytest.raises(ProgramError):
        runnable.run([], ids(2, 4))
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("length", [10, r.STEPS_PER_FUNCTION, r.STEPS_PER_FUNCTION + 1, 3 * r.STEPS_PER_FUNCTION + 7])
def test_a_long_program_is_several_functions_that_hold_nothing_they_are_done_with(length):
    first = Node("aten.embedding.default", (Value(1), Value(0)))
    nodes = [first, *(Node("aten.add.Tensor", (Value(2 + index), 1.0)) for index in range(length - 1))]
    runnable = Runnable(program_of(*nodes), NONE)
    alive: list[int] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            import gc

            if len(alive) < 3 or len(alive) % 997 == 0:
                mine = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (2, 4, 8)]
                alive.append(len(mine))
            else:
                alive.append(0)
            return function(*args, **(kwargs or {}))

    weight = torch.zeros(300, 8)
    with Count():
        found = runnable.run([weight], ids(2, 4))
    assert torch.equal(found, torch.full((2, 4, 8), float(length - 1)))
    assert max(alive) <= 3


def test_a_bool_of_another_byte_than_0_and_1_is_made_one():
    state = (StateTensor("mask", "bool", (4,), False),)
    nodes = (
        Node("aten.masked_select.default", (Value(0), Value(1))),
        Node("aten.to.dtype", (Value(2), r.Special("dtype", "float32"))),
        Node("aten.view.default", (Value(3), (2, 4, 1))),
    )
    mask = torch.full((4,), 255, dtype=torch.uint8).view(torch.bool)
    found = Runnable(program_of(*nodes, state=state), NONE).run([mask], ids(2, 4))
    assert torch.equal(found.flatten(), ids(2, 4).flatten().float())
