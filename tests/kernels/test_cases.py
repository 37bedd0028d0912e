"""Every case of the losses' case list, by its number: bugs that loss kernels elsewhere have had."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from torch.nn import functional as F

from prism_fast import BitsPerByte, cross_entropy, linear_cross_entropy, token_nll
from prism_fast.kernels import merge_shards, nn, token_nll_shard, use_backend


def gradients(function, *inputs, upstream=None):
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    loss = function(*leaves)
    loss.backward(torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype))
    return loss.detach(), *(leaf.grad for leaf in leaves)


def test_k1_upstream_gradient_per_token_with_an_ignored_one(backend):
    hidden, head = torch.randn(5, 10), torch.randn(15, 10)
    target = torch.tensor([-100, 3, 14, 0, 7])
    upstream = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    _, _, got = gradients(
        lambda h, w: linear_cross_entropy(h, w, target, reduction="none"), hidden, head, upstream=upstream
    )
    p = (hidden.double() @ head.double().T).softmax(1)
    want = torch.zeros(15, 10, dtype=torch.float64)
    for i in range(1, 5):
        want += upstream[i] * torch.outer(p[i] - F.one_hot(target[i], 15), hidden[i].double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_k2_compiled_equals_eager_even_in_memory_full_of_nan(fused):
    hidden, head = torch.randn(256, 32), torch.randn(4096, 32)
    target = torch.randint(0, 4096, (256,))
    target[torch.randperm(256)[:64]] = -100

    def loss(h, w):
        return linear_cross_entropy(h, w, target)

    eager = gradients(loss, hidden, head)
    compiled = gradients(torch.compile(loss, fullgraph=True, backend="aot_eager"), hidden, head)
    torch.use_deterministic_algorithms(True)  # with this, torch.empty is filled with NaN
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
        on_nan = gradients(loss, hidden, head)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, two, three in zip(eager, compiled, on_nan, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


def test_k3_bf16_gradient_where_the_target_leads_by_ten(backend):
    logits = torch.randn(8, 4096).bfloat16()
    target = torch.randint(0, 4096, (8,))
    logits[torch.arange(8), target] = logits.amax(1) + 10
    _, got = gradients(lambda z: cross_entropy(z, target), logits)
    _, by_torch = gradients(lambda z: F.cross_entropy(z, target), logits)
    _, exact = gradients(lambda z: F.cross_entropy(z, target), logits.double())
    reference.assert_as_close_as_torch(got, by_torch, exact)
    at_target = (got.double() - exact)[torch.arange(8), target].abs() / exact[torch.arange(8), target].abs()
    assert at_target.max() <= 2.0**-8  # 1 - p keeps its digits: one rounding to bfloat16


def test_k4_softcap_compiles_to_the_same_bits(fused):
    logits, target = torch.randn(64, 32000) * 20, torch.randint(0, 32000, (64,))

    def loss(z):
        return cross_entropy(z, target, softcap=30.0)

    eager = gradients(loss, logits)
    compiled = gradients(torch.compile(loss, fullgraph=True, backend="aot_eager"), logits)
    assert all(torch.equal(one, two) for one, two in zip(eager, compiled, strict=True))


def test_k5_error_of_the_head_gradient_does_not_grow_with_chunks(backend):
    hidden, head = torch.randn(8192, 128).bfloat16(), torch.randn(32, 128).bfloat16()
    target = torch.randint(0, 32, (8192,))
    *_, exact = gradients(
        lambda h, w: F.cross_entropy(h @ w.T, target, reduction="sum"), hidden.double(), head.double()
    )
    errors = []
    for chunks in (1, 4, 16, 64):
        *_, got = gradients(
            lambda h, w, chunk=8192 // chunks: linear_cross_entropy(h, w, target, reduction="sum", chunk_tokens=chunk),
            hidden,
            head,
        )
        errors.append(float((got.double() - exact).norm() / exact.norm()))
    assert max(errors) <= 1.5 * errors[0], errors


def test_k7_scoring_leaves_logits_alone(backend):
    logits = torch.randn(4, 300)
    before = logits.clone()
    target = torch.tensor([1, -100, 2, -100])
    with torch.no_grad():
        token_nll(logits, target)
        cross_entropy(logits, target, inplace_grad=True)
    assert torch.equal(logits, before)
    cross_entropy(logits.requires_grad_(), target).backward()
    assert torch.equal(logits.detach(), before)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_k8_frozen_hidden_still_gives_the_head_its_gradient(backend, reduction):
    hidden, head, target = torch.randn(20, 8), torch.randn(50, 8), torch.randint(0, 50, (20,))
    leaf = head.clone().requires_grad_()
    linear_cross_entropy(hidden, leaf, target, reduction=reduction).sum().backward()
    *_, exact = gradients(
        lambda w: F.cross_entropy(hidden.double() @ w.T, target, reduction=reduction).sum(), head.double()
    )
    torch.testing.assert_close(leaf.grad.double(), exact, rtol=1e-5, atol=1e-6)
    leaf = hidden.clone().requires_grad_()
    linear_cross_entropy(leaf, head, target, reduction=reduction).sum().backward()
    assert leaf.grad is not None


def test_k10_masked_vocabulary(backend):
    logits = torch.zeros(4, 65536)
    logits[:, :40000] = -torch.inf
    logits[1] = -torch.inf
    logits[1, 50000] = 1.0  # the one finite logit is the target
    logits[3] = -torch.inf
    got = token_nll(logits, torch.tensor([60000, 50000, 3, 5]), with_faults=True)
    assert got.nll[0].item() == pytest.approx(math.log(25536), rel=1e-7)
    assert got.nll[1].item() == 0.0
    assert got.nll[2].item() == math.inf
    assert math.isnan(got.nll[3].item())
    assert got.faults.tolist() == [1]


@pytest.mark.parametrize("begin", [0, 1, 4090, 30000])
def test_k10_masked_region_anywhere_has_gradient_zero(backend, begin):
    logits, target = torch.randn(2, 50000), torch.tensor([49999, 49998])
    logits[:, begin : begin + 9000] = -torch.inf
    loss, grad = gradients(lambda z: cross_entropy(z, target), logits)
    exact = gradients(lambda z: F.cross_entropy(z, target), logits.double())
    torch.testing.assert_close(loss.double(), exact[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.double(), exact[1], rtol=1e-5, atol=1e-9)
    assert (grad[:, begin : begin + 9000] == 0).all()


def test_k12_every_target_ignored(backend):
    target = torch.full((6,), -100)
    logits, hidden, head = torch.randn(6, 20), torch.randn(6, 4), torch.randn(20, 4)
    for inplace in (False, True):
        for reduction in ("none", "sum", "mean"):
            loss, grad = gradients(
                lambda z, r=reduction, i=inplace: cross_entropy(z * 1, target, reduction=r, inplace_grad=i), logits
            )
            assert loss.isnan().all() if reduction == "mean" else (loss == 0).all()
            assert (grad == 0).all()
    for reduction in ("none", "sum", "mean"):
        loss, dh, dw = gradients(
            lambda h, w, r=reduction: linear_cross_entropy(h, w, target, reduction=r), hidden, head
        )
        assert loss.isnan().all() if reduction == "mean" else (loss == 0).all()
        assert (dh == 0).all() and (dw == 0).all()


def test_k13_no_tokens_and_no_classes(backend):
    nothing = torch.zeros(0, dtype=torch.long)
    assert token_nll(torch.zeros(0, 7), nothing).shape == (0,)
    assert cross_entropy(torch.zeros(0, 7), nothing, reduction="sum").item() == 0.0
    for reduction in ("none", "sum"):
        loss, dh, dw = gradients(
            lambda h, w, r=reduction: linear_cross_entropy(h, w, nothing, reduction=r),
            torch.zeros(0, 4),
            torch.randn(7, 4),
        )
        assert loss.numel() == (0 if reduction == "none" else 1) and dh.shape == (0, 4) and (dw == 0).all()
    with pytest.raises(ValueError, match="no classes"):
        cross_entropy(torch.zeros(3, 0), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="no classes"):
        token_nll(torch.zeros(3, 0), torch.zeros(3, dtype=torch.long))


def test_k14_more_than_two_to_the_31_numbers(fused):
    """The rows between are ignored, so never read: their 4.8 GB are addresses, not memory."""
    rows, vocab = 18423, 131072
    logits = torch.empty(rows, vocab, dtype=torch.bfloat16)
    target = torch.full((rows,), -100)
    for row in (0, 16384, rows - 1):
        logits[row] = torch.randn(vocab)
        target[row] = 5 + row
    nll = token_nll(logits, target)
    for row in (0, 16384, rows - 1):
        assert nll[row] == token_nll(logits[row : row + 1], target[row : row + 1])
    assert nll.count_nonzero() == 3


def test_k16_bias(backend):
    hidden, head, target = torch.randn(40, 512), torch.randn(300, 512), torch.randint(0, 300, (40,))
    bias = torch.randn(300)
    exact = F.cross_entropy(hidden.double() @ head.double().T + bias.double(), target, reduction="none")
    got = token_nll(hidden, target, weight=head, bias=bias)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=2e-5)
    plain = token_nll(hidden, target, weight=head)
    for shift in (-300.0, 1000.0):
        moved = token_nll(hidden, target, weight=head, bias=torch.full((300,), shift))
        torch.testing.assert_close(moved, plain, rtol=1e-5, atol=3e-4)  # logits near 1000 are 6e-5 apart
        assert (moved >= 0).all()


def test_k17_vocabulary_shards_merge(backend):
    logits = torch.randn(8, 509)
    logits[6] = -torch.inf
    logits[6, 300] = 2.0
    target = torch.tensor([0, 254, 255, 508, 17, -100, 300, 400])
    shards = [token_nll_shard(logits[:, begin:end], target, vocab_start=begin) for begin, end in ((0, 255), (255, 509))]
    nll, lse = merge_shards(shards, target)
    whole = token_nll(logits, target, with_lse=True)
    torch.testing.assert_close(nll, whole.nll, rtol=5e-7, atol=0)
    torch.testing.assert_close(lse, whole.lse, rtol=5e-7, atol=0)
    assert nll[6] == 0.0 and (nll >= 0).all()


def test_k17_a_small_loss_survives_the_merge(backend):
    logits = torch.zeros(1, 509)
    logits[0, 300] = 28.0
    shards = [
        token_nll_shard(part, torch.tensor([300]), vocab_start=begin)
        for begin, part in ((0, logits[:, :255]), (255, logits[:, 255:]))
    ]
    nll, _ = merge_shards(shards, torch.tensor([300]))
    assert nll.item() == pytest.approx(508 * math.exp(-28.0), rel=1e-6)


def test_k19_class_weights_smoothing_and_an_ignored_row(backend):
    logits, target, weight = torch.randn(2, 2), torch.tensor([-100, 1]), torch.tensor([0.2, 0.3])
    for reduction in ("none", "mean", "sum"):
        got = gradients(
            lambda z, r=reduction: cross_entropy(z, target, weight, label_smoothing=0.1, reduction=r), logits
        )
        exact = gradients(
            lambda z, r=reduction: F.cross_entropy(z, target, weight.double(), label_smoothing=0.1, reduction=r),
            logits.double(),
        )
        for one, two in zip(got, exact, strict=True):
            torch.testing.assert_close(one.double(), two, rtol=1e-6, atol=1e-7)
        assert (got[1][0] == 0).all()


@pytest.mark.parametrize("biased", [False, True])
def test_k22_float32_parameters_under_autocast(backend, biased):
    inputs = [torch.randn(12, 16), torch.randn(40, 16), *([torch.randn(40)] if biased else [])]
    target = torch.randint(0, 40, (12,))
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(lambda h, w, b=None: linear_cross_entropy(h, w, target, bias=b), *inputs)
        by_torch = gradients(lambda h, w, b=None: F.cross_entropy(F.linear(h, w, b).float(), target), *inputs)
        scores = token_nll(inputs[0], target, weight=inputs[1])
    exact = gradients(
        lambda h, w, b=None: F.cross_entropy(F.linear(h, w, b), target), *(value.double() for value in inputs)
    )
    assert scores.dtype == torch.float32 and got[0].dtype == torch.float32
    for one, two, three in zip(got, by_torch, exact, strict=True):
        assert one.dtype == torch.float32
        reference.assert_as_close_as_torch(one, two, three)


def test_k23_a_head_that_is_not_whole_is_one_clear_error():
    hidden, target = torch.randn(3, 4), torch.zeros(3, dtype=torch.long)
    for head in (torch.randn(28), torch.empty(0), torch.empty(0, 4)):
        for call in (
            lambda head=head: linear_cross_entropy(hidden, head, target),
            lambda head=head: token_nll(hidden, target, weight=head),
        ):
            with pytest.raises(ValueError, match="whole"):
                call()


def test_k23_a_distributed_head_is_one_clear_error():
    from torch import distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        head = distribute_tensor(torch.randn(7, 4), mesh, [Shard(0)])
        with pytest.raises(ValueError, match="full_tensor"):
            linear_cross_entropy(torch.randn(3, 4), head, torch.zeros(3, dtype=torch.long))
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_k24_tensors_on_another_device_than_the_current():
    logits, target = torch.randn(4, 300), torch.randint(0, 300, (4,))
    got = token_nll(logits.to("cuda:1"), target.to("cuda:1"))
    assert got.device == torch.device("cuda:1")
    torch.testing.assert_close(got.cpu(), token_nll(logits, target))


def test_k26_a_saturated_softcap_is_finite_with_gradient_zero(backend):
    logits = torch.zeros(1, 10)
    logits[0, 3] = 2000.0
    for target in (3, 4):
        loss, grad = gradients(lambda z, t=target: cross_entropy(z, torch.tensor([t]), softcap=30.0), logits)
        assert loss.isfinite() and grad[0, 3] == 0.0


def test_k28_one_mask_for_loss_and_bytes(backend):
    # Three tokens of one character each spell part of it: 1, 2 and 1 bytes. Token 3 is special: 0 bytes.
    table = torch.tensor([1, 2, 1, 0])
    meter = BitsPerByte(table)
    meter.update(torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0]]), torch.tensor([[0, 1, 2, 3, -100]]))
    total = meter.compute()
    assert (total.nats, total.special_nll_nats, total.bytes, total.tokens, total.special_tokens) == (7.0, 8.0, 4, 3, 1)
    assert total.bpb == 7.0 / math.log(2.0) / 4


def test_modules_are_the_functions():
    logits, hidden, head = torch.randn(5, 9), torch.randn(5, 3), torch.randn(9, 3)
    bias, target, weight = torch.randn(9), torch.randint(0, 9, (5,)), torch.rand(9)
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "reduction": "sum"}
    assert torch.equal(
        nn.CrossEntropyLoss(weight, **options)(logits, target), cross_entropy(logits, target, weight, **options)
    )
    assert torch.equal(
        nn.LinearCrossEntropyLoss(weight, chunk_tokens=2, **options)(hidden, head, target, bias),
        linear_cross_entropy(hidden, head, target, bias=bias, class_weight=weight, chunk_tokens=2, **options),
    )


def test_second_derivative_of_a_fused_loss_raises_and_the_reference_has_one():
    logits, target = torch.randn(3, 7, dtype=torch.float64, requires_grad=True), torch.tensor([1, -100, 6])
    with use_backend("cpp"):
        (grad,) = torch.autograd.grad(cross_entropy(logits, target), logits, create_graph=True)
        with pytest.raises(RuntimeError, match="use_backend"):
            grad.square().sum().backward()
    with use_backend("torch"):
        assert torch.autograd.gradgradcheck(
            lambda z: cross_entropy(z, target, label_smoothing=0.1, z_loss=0.01, softcap=5.0), (logits,)
        )
