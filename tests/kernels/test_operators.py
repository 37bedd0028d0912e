"""What torch's own machinery asks of the registered operators."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from prism_fast import cross_entropy, linear_cross_entropy, token_nll
from prism_fast.kernels import available_backends, backend_for, backend_report, batch_code_length, use_backend

OPS = torch.ops.prism_fast
NO_OPTIONS = (None, -100, 0.0, 0.0, None)


def operator_calls():
    torch.manual_seed(0)
    logits, hidden, head, bias = torch.randn(6, 50), torch.randn(6, 8), torch.randn(50, 8), torch.randn(50)
    target, lse = torch.tensor([3, 49, -100, 0, 7, 7]), logits.double().logsumexp(1)
    options = (torch.rand(50), -100, 0.1, 1e-3, 5.0)
    expected = torch.tensor(0.2)

    def leaf(tensor):
        return tensor.clone().requires_grad_()

    return {
        "token_nll": (logits, target, -100, True, True),
        "token_nll_shard": (logits, target, -100, 0),
        "linear_token_nll": (hidden, head, bias, target, -100, True, False),
        "cross_entropy": (leaf(logits), target, *options),
        "cross_entropy_backward": (logits, target, lse, torch.randn(6), *options),
        "linear_cross_entropy": (leaf(hidden), leaf(head), leaf(bias), target, *options, 0),
        "linear_cross_entropy_backward": (
            hidden, head, bias, target, lse, torch.randn(6), *options, 0, True, True, True,
        ),
        "linear_cross_entropy_fused": (
            leaf(hidden), leaf(head), leaf(bias), target, expected, *options, 0, True, True, True,
        ),
        "sum_rows": (leaf(torch.randn(7)),),
        "batch_code_length": (torch.rand(2, 3), target.view(2, 3), torch.ones(50, dtype=torch.int32), 3.0, -100),
    }  # fmt: skip


CALLS = operator_calls()


def test_every_registered_operator_is_checked_here():
    registered = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "prism_fast::" in name
    }
    assert registered == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name, fused):
    torch.library.opcheck(getattr(OPS, name).default, CALLS[name])


def run(function, *inputs):
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    loss = function(*leaves)
    loss.sum().backward()
    return loss.detach(), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_compiled_losses_equal_eager_bit_for_bit(fused, reduction):
    logits, hidden, head, bias, weight = (
        torch.randn(12, 50), torch.randn(12, 8), torch.randn(50, 8), torch.randn(50), torch.rand(50),
    )  # fmt: skip
    target = torch.randint(0, 50, (12,))
    target[4] = -100
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "reduction": reduction}
    for function, inputs in (
        (lambda z: cross_entropy(z * 1.5, target, weight, **options), (logits,)),
        (lambda z: cross_entropy(z * 1.5, target, inplace_grad=True, **options), (logits,)),
        (lambda h, w, b: linear_cross_entropy(h, w, target, bias=b, class_weight=weight, **options),
         (hidden, head, bias)),
    ):  # fmt: skip
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for one, two in zip(run(function, *inputs), run(compiled, *inputs), strict=True):
            assert torch.equal(one, two)


def test_inductor_compiles_a_training_step_whole(fused):
    hidden, head, target = torch.randn(12, 8), torch.randn(50, 8), torch.randint(0, 50, (12,))

    def step(h, w):
        return cross_entropy(h @ w.T, target) + linear_cross_entropy(h, w, target) + token_nll(h @ w.T, target).sum()

    for one, two in zip(run(step, hidden, head), run(torch.compile(step, fullgraph=True), hidden, head), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def test_export_with_a_dynamic_batch(fused):
    class Score(torch.nn.Module):
        def forward(self, hidden, head, target):
            return linear_cross_entropy(hidden, head, target), token_nll(hidden @ head.T, target)

    hidden, head, target = torch.randn(12, 8), torch.randn(50, 8), torch.randint(0, 50, (12,))
    tokens = torch.export.Dim("tokens")
    program = torch.export.export(
        Score(), (hidden, head, target), dynamic_shapes=({0: tokens}, None, {0: tokens})
    ).module()
    hidden, target = torch.randn(20, 8), torch.randint(0, 50, (20,))
    for one, two in zip(program(hidden, head, target), Score()(hidden, head, target), strict=True):
        assert torch.equal(one, two)


def test_fake_tensors_need_no_numbers():
    """No value is looked at on the way: nothing to synchronise with, nothing to break a graph capture."""
    with FakeTensorMode():
        target = torch.zeros(6, dtype=torch.long)
        logits, hidden, head = (torch.randn(shape, requires_grad=True) for shape in ((6, 50), (6, 8), (50, 8)))
        for options in ({}, {"reduction": "none"}, {"inplace_grad": True, "weight": torch.rand(50)}):
            cross_entropy(logits * 1, target, **options).sum().backward()
        linear_cross_entropy(hidden, head, target).backward()
        linear_cross_entropy(hidden, head, target, reduction="none").sum().backward()
        assert (logits.grad.shape, hidden.grad.shape, head.grad.shape) == ((6, 50), (6, 8), (50, 8))
        nll = token_nll(logits, target)
        table = torch.ones(50, dtype=torch.int32)
        assert batch_code_length(nll.view(2, 3), target.view(2, 3), table, 3.0).shape == (6,)


def test_torch_func_transforms_work():
    logits, target = torch.randn(6, 50), torch.randint(0, 50, (6,))
    got = torch.func.grad(lambda z: cross_entropy(z, target))(logits)
    torch.testing.assert_close(got, run(lambda z: cross_entropy(z, target), logits)[1])


def test_float16_gradient_is_rounded_after_the_loss_scale(backend):
    """1/1024 of a probability of 1/40000 is below what float16 can hold; 65536 times that is not."""
    logits, target = torch.zeros(1024, 40000, dtype=torch.float16), torch.zeros(1024, dtype=torch.long)
    leaf = logits.requires_grad_()
    (cross_entropy(leaf, target) * 65536.0).backward()
    assert leaf.grad[0, 1].item() == pytest.approx(65536 / 1024 / 40000, rel=1e-3)


def test_in_place_gradient_is_seen_by_whoever_saved_the_logits(fused):
    logits = torch.randn(3, 11, requires_grad=True)
    doubled = logits * 2
    squared = doubled.square()  # saves `doubled` for its backward
    loss = cross_entropy(doubled, torch.tensor([1, 2, 3]), inplace_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + squared.sum()).backward()


def test_retained_graph_gives_the_same_gradient_twice(fused):
    hidden, head, target = torch.randn(12, 8), torch.randn(50, 8), torch.randint(0, 50, (12,))
    for loss_of in (
        lambda h, w: cross_entropy(h @ w.T, target),
        lambda h, w: linear_cross_entropy(h, w, target),
        lambda h, w: linear_cross_entropy(h, w, target, reduction="none").sum(),
    ):
        leaves = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        loss = loss_of(*leaves)
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        kept = [grad.clone() for grad in first]
        for grad in first:
            grad.zero_()  # the caller may do as it likes with what it was given
        for one, two in zip(kept, torch.autograd.grad(loss, leaves), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-8)


def test_backends_are_chosen_by_call_and_by_block():
    cpu = torch.device("cpu")
    assert backend_for(cpu).name == "cpp"
    with use_backend("torch"):
        assert backend_for(cpu).name == "torch"
        assert "in use on cpu" in available_backends()["torch"]
    assert backend_for(cpu).name == "cpp"
    use_backend("torch")
    try:
        assert backend_for(cpu).name == "torch"
    finally:
        use_backend(None)
    assert set(backend_report()) == {"cpp", "torch", "triton"}
    with pytest.raises(ValueError, match="expected one of"):
        use_backend("cuda")


def test_importing_the_package_does_not_import_torch():
    code = (
        "import sys, prism_fast; assert 'torch' not in sys.modules; dir(prism_fast); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cross_entropy(torch.zeros(2, 3), torch.zeros(2)), TypeError, "class probabilities"),
        (lambda: cross_entropy(torch.zeros(2, 3).long(), torch.zeros(2).long()), TypeError, "logits must be"),
        (lambda: cross_entropy(torch.zeros(2, 3), torch.zeros(3).long()), ValueError, "do not fit"),
        (lambda: cross_entropy(torch.zeros(2, 3), torch.zeros(2).long(), torch.ones(4)), ValueError, "3 class weights"),
        (lambda: cross_entropy(torch.zeros(2, 3), torch.zeros(2).long(), reduction="avg"), ValueError, "'none', 'm"),
        (lambda: cross_entropy(torch.zeros(2, 3), torch.zeros(2).long(), label_smoothing=2), ValueError, "between 0"),
        (lambda: cross_entropy(torch.zeros(2, 3), torch.zeros(2).long(), softcap=0.0), ValueError, "softcap"),
        (lambda: token_nll(torch.zeros(2, 3), torch.zeros(2).long(), bias=torch.ones(3)), ValueError, "without weight"),
        (
            lambda: linear_cross_entropy(torch.zeros(2, 3), torch.zeros(5, 3).half(), torch.zeros(2).long()),
            TypeError,
            "one dtype",
        ),
        (
            lambda: linear_cross_entropy(torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2).long(), chunk_tokens=0),
            ValueError,
            "chunk_tokens",
        ),
        (lambda: cross_entropy(torch.zeros(2, 3), torch.zeros(2, device="meta").long()), ValueError, "one device"),
    ],
)
def test_misuse_is_one_clear_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call()
