"""Random shapes, strides, dtypes, options and upstream gradients against float64."""

from __future__ import annotations

import reference
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prism_fast import cross_entropy, linear_cross_entropy, token_nll
from prism_fast.kernels import use_backend

SETTINGS = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
BACKENDS = st.sampled_from(["cpp", "torch"])


@st.composite
def logit_rows(draw):
    """Logits [N, V] in some layout, with targets of which some are ignored."""
    rows, vocab = draw(st.integers(1, 6)), draw(st.one_of(st.integers(1, 70), st.sampled_from([509, 4096, 4129, 9001])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype, layout = draw(DTYPES), draw(st.sampled_from(["dense", "padded", "transposed", "every other", "expanded"]))
    shape = {
        "dense": (rows, vocab),
        "padded": (rows, vocab + 3),
        "transposed": (vocab, rows),
        "every other": (rows, 2 * vocab),
        "expanded": (1, vocab),
    }[layout]
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * draw(st.sampled_from([0.1, 3.0, 20.0]))
    values = (values + draw(st.sampled_from([0.0, -50.0, 900.0]))).to(dtype)
    logits = {
        "dense": lambda: values,
        "padded": lambda: values[:, 1 : vocab + 1],
        "transposed": lambda: values.T,
        "every other": lambda: values[:, ::2],
        "expanded": lambda: values.expand(rows, vocab),
    }[layout]()
    target = torch.randint(0, vocab, (rows,), generator=generator)
    ignored = torch.rand(rows, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    target = target.masked_fill(ignored, -100).to(draw(st.sampled_from([torch.int64, torch.int32])))
    return logits, target, generator


@st.composite
def loss_options(draw, generator, vocab):
    return {
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "z_loss": draw(st.sampled_from([0.0, 1e-3])),
        "softcap": draw(st.sampled_from([None, 5.0, 30.0])),
        "weight": torch.rand(vocab, generator=generator) if draw(st.booleans()) else None,
    }


def upstream_of(data, shape, generator):
    """An upstream gradient: 1, another number, or one per loss."""
    if not shape or data.draw(st.booleans()):
        return torch.tensor(data.draw(st.sampled_from([1.0, -0.7, 4.0])), dtype=torch.float64).expand(shape)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@SETTINGS
@given(logit_rows(), BACKENDS)
def test_token_nll_is_as_exact_as_torch(rows, backend):
    logits, target, _ = rows
    kept = target != -100
    with use_backend(backend):
        got = token_nll(logits, target, with_lse=True, with_correct=True, with_entropy=True, with_faults=True)
    accumulator = torch.float64 if logits.dtype == torch.float64 else torch.float32
    exact, wide = logits.double(), logits.to(accumulator)
    reference.assert_as_close_as_torch(
        got.nll, reference.loss_rows(logits, target, dtype=accumulator), reference.loss_rows(logits, target)
    )
    reference.assert_as_close_as_torch(got.lse[kept], wide.logsumexp(1)[kept], exact.logsumexp(1)[kept])

    def entropy(z):
        log_p = z.log_softmax(1)
        return -(log_p.exp() * log_p).sum(1)[kept]

    torch.testing.assert_close(got.entropy[kept].double(), entropy(exact), rtol=2e-6, atol=2e-6)
    assert torch.equal(got.correct[kept], (exact.argmax(1) == target)[kept])
    assert (got.nll >= 0).all() and (got.nll[~kept] == 0).all() and got.faults.item() == 0


@SETTINGS
@given(st.data(), logit_rows(), BACKENDS, st.sampled_from(["none", "mean", "sum"]), st.booleans())
def test_cross_entropy_is_as_exact_as_torch(data, rows, backend, reduction, inplace):
    logits, target, generator = rows
    options = data.draw(loss_options(generator, logits.shape[1]))
    upstream = upstream_of(data, target.shape if reduction == "none" else (), generator)
    accumulator = torch.float64 if logits.dtype == torch.float64 else torch.float32

    def by(function, z):
        z = z.clone(memory_format=torch.preserve_format).requires_grad_()
        loss = function(z)
        loss.backward(upstream.to(loss.dtype))
        return loss, z.grad

    exact = by(lambda z: reference.loss(z, target, reduction=reduction, **options), logits.double())
    plain = by(lambda z: reference.loss(z, target, reduction=reduction, dtype=accumulator, **options), logits)
    with use_backend(backend):
        got = by(
            lambda z: cross_entropy(z.view_as(z), target, reduction=reduction, inplace_grad=inplace, **options), logits
        )
    assert got[0].dtype == accumulator and got[1].dtype == logits.dtype
    # A capped loss is a difference of capped logits, each rounded at the size of the cap.
    reference.assert_as_close_as_torch(got[0], plain[0], exact[0], scale=options["softcap"] or 0.0)
    reference.assert_as_close_as_torch(got[1], plain[1], exact[1], scale=float(upstream.abs().max()))


@SETTINGS
@given(
    st.data(),
    st.integers(0, 40),
    st.sampled_from([1, 17, 300, 2100]),
    st.integers(1, 9),
    BACKENDS,
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.sampled_from(["none", "mean", "sum"]),
    st.sampled_from(["auto", 1, 7]),
    st.booleans(),
)
def test_linear_cross_entropy_is_as_exact_as_torch(
    data, tokens, vocab, width, backend, dtype, reduction, chunk, biased
):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    inputs = [random(tokens, width), random(vocab, width), *([random(vocab)] if biased else [])]
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    target = target.masked_fill(torch.rand(tokens, generator=generator) < 0.2, -100)
    options = data.draw(loss_options(generator, vocab))
    upstream = upstream_of(data, target.shape if reduction == "none" else (), generator)

    def by(function, kind):
        leaves = [value.to(kind).clone().requires_grad_() for value in inputs]
        loss = function(*leaves)
        loss.backward(upstream.to(loss.dtype))
        return loss, *(leaf.grad for leaf in leaves)

    def through_logits(hidden, head, bias=None):
        return reference.loss(
            torch.nn.functional.linear(hidden, head, bias), target, reduction=reduction, dtype=loss_kind, **options
        )

    class_weight = options.pop("weight")
    options["weight"] = class_weight
    loss_kind = torch.float64
    exact = by(through_logits, torch.float64)
    loss_kind = torch.float64 if dtype == torch.float64 else torch.float32
    plain = by(through_logits, dtype)
    del options["weight"]
    with use_backend(backend):
        got = by(
            lambda hidden, head, bias=None: linear_cross_entropy(
                hidden,
                head,
                target,
                bias=bias,
                class_weight=class_weight,
                reduction=reduction,
                chunk_tokens=chunk,
                **options,
            ),
            dtype,
        )
    # Gradients are sums over classes or tokens that cancel each other.
    scale = 4.0 * float(upstream.abs().max() * max(value.abs().max() for value in inputs)) if tokens else 0.0
    for ours, torchs, right in zip(got, plain, exact, strict=True):
        reference.assert_as_close_as_torch(ours, torchs, right, scale=scale)
