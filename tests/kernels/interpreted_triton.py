"""The Triton kernels under Triton's interpreter, against float64. Run by test_triton_interpreted.py, which says how.

Bounds are multiples of the error that torch commits in the accumulator's type (float32) from the same logits, so no
result is excused by bfloat16 rounding.
"""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch
from torch import Tensor

from prism_fast.kernels.backends import LossOptions
from prism_fast.kernels.backends import triton as backend
from prism_fast.kernels.backends.triton import fold, launch

assert os.environ.get("TRITON_INTERPRET") == "1", "run me through test_triton_interpreted.py"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Two segments and a bit of a row that is not a multiple of 16 bytes; the other vocabulary fits in one window.
LONG, SHORT = 2 * fold.geometry(50257).segment + 61, 131


def reference(logits: Tensor, target: Tensor, options: LossOptions, dtype: torch.dtype = torch.float64) -> Tensor:
    """The formula of prism_fast.kernels.backends, row by row, in `dtype`."""
    z = logits.to(dtype)
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    weight = torch.ones(z.shape[1]) if options.class_weight is None else options.class_weight
    weight = weight.to(dtype)
    kept = target != options.ignore_index
    at = target.long().where(kept, 0)
    log_p = torch.log_softmax(z, -1)
    lse = torch.logsumexp(z, -1)
    loss = -(1 - options.label_smoothing) * weight[at] * log_p.gather(1, at[:, None])[:, 0]
    if options.label_smoothing:
        loss = loss - options.label_smoothing / z.shape[1] * (weight * log_p).sum(-1)
    return (loss + options.z_loss * lse**2).where(kept, 0.0)


def reference_gradient(logits: Tensor, target: Tensor, grad_loss: Tensor, options: LossOptions, dtype=torch.float64):
    leaf = logits.detach().to(dtype).requires_grad_()
    (gradient,) = torch.autograd.grad(reference(leaf, target, options, dtype), leaf, grad_loss.to(dtype))
    return gradient


def assert_as_good_as_torch(ours: Tensor, exact: Tensor, torchs: Tensor, floor: float) -> None:
    """Error within 4x of torch's own, or `floor` (relative to the largest value) where torch happened to be exact."""
    bound = 4 * (torchs.double() - exact).abs().max() + floor * exact.abs().max()
    assert (ours.double() - exact).abs().max() <= bound


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def make_logits(n: int, vocab: int, dtype: torch.dtype, seed: int = 0, scale: float = 4.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, vocab, generator=generator) * scale).to(dtype)


def loss_and_gradient(
    logits: Tensor, target: Tensor, options: LossOptions, grad_loss: Tensor, out: Tensor | None = None
):
    """The gradient of half-precision logits in float32, unless `out` says otherwise: the interpreter cuts a bfloat16
    off where hardware rounds it."""
    loss, lse, faults = backend.cross_entropy_forward(logits, target, options)
    accumulator = torch.float64 if logits.dtype == torch.float64 else torch.float32
    out = torch.full(logits.shape, math.nan, dtype=accumulator) if out is None else out
    backend.cross_entropy_backward(logits, target, lse, grad_loss, options, out)
    return loss, out, faults


OPTIONS = [
    {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap, "weighted": weighted}
    for smoothing, z_loss, softcap, weighted in itertools.product((0.0, 0.125), (0.0, 2**-8), (None, 30.0), (0, 1))
]


# Half precision and float64 take different code; float32 and float16 share it with them: the corners will do.
CORNERS = [OPTIONS[0], OPTIONS[2], OPTIONS[-1]]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(dtype, options) for dtype in (torch.bfloat16, torch.float64) for options in OPTIONS]
    + [(dtype, options) for dtype in (torch.float32, torch.float16) for options in CORNERS],
)
def test_loss_and_gradient_equal_float64(dtype, options):
    """Every combination of options in every dtype, on an odd row length, with a per-row upstream gradient."""
    vocab = SHORT
    weighted = options["weighted"]
    options = {key: value for key, value in options.items() if key != "weighted"}
    weight = torch.rand(vocab, generator=torch.Generator().manual_seed(1)) if weighted else None
    options = LossOptions(class_weight=weight, **options)
    logits, target = make_logits(6, vocab, dtype), torch.tensor([5, -100, vocab - 1, 0, 77, 130])
    grad_loss = torch.tensor([1.0, 3.0, 0.5, -2.0, 0.0, 1e-3])
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32

    loss, gradient, faults = loss_and_gradient(logits, target, options, grad_loss)

    floor = 2e-12 if dtype == torch.float64 else 2**-22
    exact = reference(logits, target, options)
    assert loss.dtype == accumulator and faults.item() == 0
    assert_as_good_as_torch(loss, exact, reference(logits, target, options, accumulator), floor)
    exact = reference_gradient(logits, target, grad_loss, options)
    torchs = reference_gradient(logits, target, grad_loss, options, accumulator)
    assert_as_good_as_torch(gradient, exact, torchs, floor)
    assert not bits(loss[1:2]).any() and not bits(gradient[1]).any(), "an ignored row is exactly 0"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_rows_equal_float64(dtype):
    """Several segments: a partial last one, the target in the first, the last and a middle one."""
    options = LossOptions(label_smoothing=0.125, z_loss=2**-10)
    logits, target = make_logits(3, LONG, dtype), torch.tensor([3, LONG - 1, 5000])
    grad_loss = torch.ones(1).expand(3)

    loss, gradient, _ = loss_and_gradient(logits, target, options, grad_loss)

    exact = reference(logits, target, options)
    assert_as_good_as_torch(loss, exact, reference(logits, target, options, torch.float32), 2**-22)
    exact = reference_gradient(logits, target, grad_loss, options)
    torchs = reference_gradient(logits, target, grad_loss, options, torch.float32)
    assert_as_good_as_torch(gradient, exact, torchs, 2**-22)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vocab", [1, 2, 7, SHORT, 1016, 1017, LONG])
def test_scores_equal_float64(dtype, vocab):
    """NLL, log-sum-exp, hits and entropy; vocabularies around the sizes where the cutting changes."""
    logits = make_logits(4, vocab, dtype)
    target = torch.tensor([0, vocab - 1, -100, vocab // 2], dtype=torch.int32)
    scores = backend.token_nll(logits, target, -100, True, True)

    kept = target != -100
    log_p = torch.log_softmax(logits.double(), -1)
    exact = reference(logits, target, LossOptions())
    entropy = -(log_p.exp() * log_p).sum(-1)
    tolerance = {"rtol": 1e-12, "atol": 2e-12} if dtype == torch.float64 else {"rtol": 1e-6, "atol": 2e-6}
    torch.testing.assert_close(scores.nll.double(), exact, **tolerance)
    torch.testing.assert_close(scores.lse[kept].double(), torch.logsumexp(logits.double(), -1)[kept], **tolerance)
    torch.testing.assert_close(scores.entropy[kept].double(), entropy[kept], **tolerance)
    assert torch.equal(scores.correct, (logits.double().argmax(-1) == target) & kept)
    assert (scores.nll >= 0).all() and scores.faults.item() == 0
    assert scores.entropy[2] == 0 and scores.lse[2] == 0 and scores.nll[2] == 0
    if vocab == 1:
        assert not bits(scores.nll).any(), "one class is certain"


def scores_of(logits: Tensor, target: Tensor, segments: int) -> list[Tensor]:
    with launch.override("rows_forward", segments=segments):
        scores = backend.token_nll(logits, target, -100, True, True)
    return [scores.nll, scores.lse, scores.correct, scores.entropy]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_do_not_depend_on_how_a_row_is_stored_or_shared(dtype):
    """Whole rows, rows shared by programs, any 16-byte phase, transposed and strided storage: the same bits."""
    vocab = LONG
    logits, target = make_logits(2, vocab, dtype), torch.tensor([4321, vocab - 2])
    weight = torch.rand(vocab, generator=torch.Generator().manual_seed(1))
    options = LossOptions(label_smoothing=0.125, z_loss=2**-10, softcap=30.0, class_weight=weight)
    whole = scores_of(logits, target, segments=3)
    loss, gradient, _ = loss_and_gradient(logits, target, options, torch.tensor([1.0, -0.5]), torch.empty_like(logits))

    stored = {"transposed": logits.t().contiguous().t(), "every second": torch.empty(2, vocab, 2, dtype=dtype)[..., 1]}
    stored["every second"].copy_(logits)
    for phase in (1, 6):
        stored[f"phase {phase}"] = torch.full((2, vocab + 11), math.nan, dtype=dtype)[:, phase : phase + vocab]
        stored[f"phase {phase}"].copy_(logits)
    for name, view in stored.items():
        assert all(map(same_bits, whole, scores_of(view, target, segments=1))), name
        again = loss_and_gradient(view, target, options, torch.tensor([1.0, -0.5]), out=torch.empty_like(view))
        assert same_bits(again[0], loss) and same_bits(again[1], gradient), name
    assert all(map(same_bits, whole, scores_of(stored["phase 1"], target, segments=3)))
    with launch.override("rows_forward", segments=2):
        assert all(map(same_bits, whole, scores_of(logits, target, segments=2)))
        assert same_bits(backend.cross_entropy_forward(logits, target, options)[0], loss)


def test_float64_bits_do_not_depend_on_the_launch():
    """Float64 shows what float32 rounds away: the unit that parts are counted in must come from V alone."""
    logits, target = make_logits(1, LONG, torch.float64), torch.tensor([4321])
    whole = scores_of(logits, target, segments=1000)
    assert all(map(same_bits, whole, scores_of(logits, target, segments=1)))
    loss = backend.cross_entropy_forward(logits, target, LossOptions())[0]
    for abreast in (1, 4):
        with launch.override("rows_fused", abreast=abreast):
            out = torch.empty_like(logits)
            fused = backend.cross_entropy_forward_backward(logits, target, torch.ones(1), LossOptions(), out)
        assert same_bits(fused[0], loss) and same_bits(whole[0], loss)


def test_a_row_does_not_depend_on_its_neighbours():
    """The last of 9 odd rows (so at another phase, in another program) equals itself scored alone."""
    logits, target = make_logits(9, SHORT, torch.bfloat16), torch.arange(9)
    together = backend.token_nll(logits, target, -100, True, True)
    for row in range(9):
        alone = backend.token_nll(logits[row : row + 1].clone(), target[row : row + 1], -100, True, True)
        assert all(same_bits(a[row : row + 1], b) for a, b in zip(together[:4], alone[:4], strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [7, SHORT, 4200])
def test_gradient_in_place_and_between_layouts_writes_its_rows_only(dtype, vocab):
    """In place, or into storage of another phase or stride; what lies between rows keeps its bits."""
    options = LossOptions()
    target, grad_loss = torch.tensor([1, -100, 6]), torch.tensor([1.0, 1.0, 2.0])
    room = torch.full((3, vocab + 9), 77.0, dtype=dtype)
    logits = room[:, 3 : 3 + vocab]
    logits.copy_(make_logits(3, vocab, dtype))
    _, lse, _ = backend.cross_entropy_forward(logits, target, options)
    elsewhere = {
        "dense": torch.full((3, vocab), math.nan, dtype=dtype),
        "transposed": torch.full((vocab, 3), math.nan, dtype=dtype).t(),
        "phase 5": torch.full((3, vocab + 9), 55.0, dtype=dtype)[:, 5 : 5 + vocab],
    }
    for out in elsewhere.values():
        backend.cross_entropy_backward(logits, target, lse, grad_loss, options, out)
    backend.cross_entropy_backward(logits, target, lse, grad_loss, options, logits)
    assert all(same_bits(out, logits) for out in elsewhere.values())
    assert (room[:, :3] == 77).all() and (room[:, 3 + vocab :] == 77).all()
    base = elsewhere["phase 5"]._base
    assert (base[:, :5] == 55).all() and (base[:, 5 + vocab :] == 55).all()


def test_targets_out_of_range_and_broken_rows_give_nan_and_are_counted():
    """Faulty rows are NaN and counted once; their neighbours keep their bits; nothing is read out of bounds."""
    clean = make_logits(8, SHORT, torch.float32)
    target = torch.tensor([1, SHORT, -1, 4, 5, 6, 2**40, 8])
    broken = clean.clone()
    broken[3] = -math.inf
    broken[4, 100] = math.nan
    broken[5, 6] = math.nan
    scores = backend.token_nll(broken, target, -100, True, True)
    faulty = torch.tensor([False, True, True, True, True, True, True, False])
    assert torch.equal(scores.nll.isnan(), faulty) and scores.faults.item() == 6
    assert not scores.correct[faulty].any()
    sound = backend.token_nll(clean, torch.arange(1, 9), -100, True, True)
    for a, b in zip(scores[:4], sound[:4], strict=True):
        assert same_bits(a[[0, 7]], b[[0, 7]])
    loss, gradient, faults = loss_and_gradient(broken, target, LossOptions(), torch.ones(8))
    assert torch.equal(loss.isnan(), faulty) and faults.item() == 6
    assert torch.equal(gradient.isnan().any(-1), faulty)


def test_ignored_rows_are_not_read():
    """NaN in an ignored row is harmless, in scoring, loss and gradient; logits stay as they are (K7, K12, K19)."""
    logits, target = make_logits(4, SHORT, torch.float32), torch.tensor([-100, 1, -100, 2])
    logits[0], logits[2] = math.nan, -math.inf
    before = logits.clone()
    weight = torch.rand(SHORT)
    options = LossOptions(label_smoothing=0.125, z_loss=2**-8, class_weight=weight)
    scores = backend.token_nll(logits, target, -100, True, True)
    loss, gradient, faults = loss_and_gradient(logits, target, options, torch.full((4,), math.inf))
    assert scores.faults.item() == 0 and faults.item() == 0 and same_bits(logits, before)
    for tensor in (scores.nll, scores.lse, scores.entropy, loss, gradient):
        assert not bits(tensor[[0, 2]]).any()
    nothing = backend.cross_entropy_forward(logits, torch.full((4,), -100), options)
    assert not bits(nothing[0]).any() and nothing[2].item() == 0


def test_first_of_equal_maxima_is_the_prediction():
    logits = torch.zeros(4, LONG)
    logits[:, [7, 4500, LONG - 1]] = 1.0
    scores = backend.token_nll(logits, torch.tensor([7, 4500, LONG - 1, 8]), -100, True, False)
    assert scores.correct.tolist() == [True, False, False, False]


def test_masked_vocabulary():
    """K10: large -inf regions anywhere, the one finite logit, a target at -inf."""
    vocab = 65536
    logits = torch.zeros(4, vocab)
    logits[0, :40000] = -math.inf
    logits[1] = -math.inf
    logits[1, 50000] = 3.0
    logits[2, 1:] = -math.inf
    logits[3, :40000] = -math.inf
    target = torch.tensor([65535, 50000, 0, 1])
    scores = backend.token_nll(logits, target, -100, True, True)
    assert scores.nll[0].item() == pytest.approx(10.147845, abs=1e-6)
    assert scores.nll.tolist()[1:] == [0.0, 0.0, math.inf] and scores.faults.item() == 0
    assert scores.entropy.tolist()[1:3] == [0.0, 0.0]
    assert scores.entropy[0].item() == pytest.approx(math.log(25536), abs=1e-5)


def test_small_losses_keep_their_digits():
    """The target far above the rest: loss is e**-gap times V - 1, never rounded to 0, never negative."""
    for gap in (10.0, 20.0, 40.0, 80.0):
        logits = torch.zeros(1, SHORT)
        logits[0, 3] = gap
        nll = backend.token_nll(logits, torch.tensor([3]), -100, False, False).nll.item()
        assert nll == pytest.approx(math.log1p((SHORT - 1) * math.exp(-gap)), rel=2e-6)


def test_loss_does_not_move_with_a_constant_added():
    """K16: NLL is made of differences of logits: 1,000 more on every one changes no bit."""
    logits = torch.randint(-8, 8, (3, SHORT)).float()
    target = torch.tensor([1, 2, 3])
    plain = backend.token_nll(logits, target, -100, False, True)
    moved = backend.token_nll(logits + 1000.0, target, -100, False, True)
    assert same_bits(plain.nll, moved.nll) and same_bits(plain.entropy, moved.entropy)
    out = [torch.empty_like(logits), torch.empty_like(logits)]
    for z, gradient in zip((logits, logits + 1000.0), out, strict=True):
        _, lse, _ = backend.cross_entropy_forward(z, target, LossOptions())
        backend.cross_entropy_backward(z, target, lse, torch.ones(3), LossOptions(), gradient)
    torch.testing.assert_close(out[0], out[1], rtol=1e-5, atol=0)


def test_confident_bfloat16_gradient():
    """K3: target logit = max + 10; the gradient errs no more than torch's own."""
    logits = make_logits(8, 4096, torch.bfloat16, scale=1.0)
    target = torch.arange(8) * 500
    logits[range(8), target] = logits.max(-1).values + 10
    _, gradient, _ = loss_and_gradient(logits, target, LossOptions(), torch.ones(8))
    exact = reference_gradient(logits, target, torch.ones(8), LossOptions())
    torchs = reference_gradient(logits, target, torch.ones(8), LossOptions(), torch.bfloat16)
    assert_as_good_as_torch(gradient, exact, torchs, 0.0)
    _, stored, _ = loss_and_gradient(logits, target, LossOptions(), torch.ones(8), out=torch.empty_like(logits))
    torch.testing.assert_close(stored.float(), gradient, rtol=2**-7, atol=1e-30)


def test_softcap_of_a_huge_logit():
    """K26: logit 2000, softcap 30: finite, gradient 0 there."""
    logits = torch.zeros(1, SHORT)
    logits[0, 5] = 2000.0
    loss, gradient, _ = loss_and_gradient(logits, torch.tensor([4]), LossOptions(softcap=30.0), torch.ones(1))
    assert loss.item() == pytest.approx(30.0, rel=1e-6) and gradient.isfinite().all() and gradient[0, 5] == 0


def test_class_weights_are_not_read_at_the_ignored_index():
    """K19: two classes, weights (.2, .3), smoothing .1, targets (-100, 1)."""
    options = LossOptions(label_smoothing=0.1, class_weight=torch.tensor([0.2, 0.3]))
    logits, target = make_logits(2, 2, torch.float32), torch.tensor([-100, 1])
    loss, gradient, faults = loss_and_gradient(logits, target, options, torch.ones(2))
    torch.testing.assert_close(loss.double(), reference(logits, target, options), rtol=1e-6, atol=1e-6)
    assert faults.item() == 0 and not bits(gradient[0]).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_shards_merge_to_the_whole_row(dtype):
    """K17: V = 509 in 255 and 254, targets on the shard edges; an all -inf shard; an ignored row."""
    logits = make_logits(6, 509, dtype)
    logits[5, 255:] = -math.inf
    target = torch.tensor([0, 254, 255, 508, -100, 3])
    parts = [
        backend.token_nll_shard(logits[:, begin:end], target, -100, begin) for begin, end in ((0, 255), (255, 509))
    ]
    # Parts leave the target out: its logit comes apart, so that small losses survive the merge.
    largest = torch.maximum(parts[0].max, parts[1].max)
    total = sum(part.sum * (part.max - largest).exp() for part in parts)
    z_target = torch.maximum(parts[0].target_logit, parts[1].target_logit)
    nll = torch.logaddexp(largest - z_target + total.log(), torch.zeros((), dtype=total.dtype))
    whole = backend.token_nll(logits, target, -100, False, False).nll
    kept = target != -100
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(nll[kept], whole[kept], rtol=tolerance, atol=tolerance)
    assert torch.isneginf(parts[1].target_logit[[0, 1, 5]]).all()
    assert torch.isneginf(parts[0].target_logit[[2, 3]]).all()
    assert all(torch.stack(part)[:, 4].tolist() == [-math.inf, 0.0, -math.inf] for part in parts)


def test_no_rows():
    """K13: nothing in, nothing out."""
    logits, target = torch.empty(0, SHORT), torch.empty(0, dtype=torch.int64)
    scores = backend.token_nll(logits, target, -100, True, True)
    loss, gradient, faults = loss_and_gradient(logits, target, LossOptions(), torch.empty(0))
    assert scores.nll.shape == loss.shape == (0,) and gradient.shape == (0, SHORT) and faults.item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [SHORT, 4200])
def test_loss_and_gradient_in_one_read_equal_the_two_passes(dtype, vocab):
    """Bit for bit, with and without options, beside the logits and over them; segments one or two at a time."""
    logits, target = make_logits(4, vocab, dtype), torch.tensor([1, -100, vocab, vocab - 1])
    grad_loss = torch.tensor([1.0, 1.0, 1.0, -3.0])
    every = LossOptions(label_smoothing=0.125, z_loss=2**-8, softcap=30.0, class_weight=torch.rand(vocab))
    # The long rows take seconds each here: the dtypes share the options between them.
    for options in (LossOptions(), every) if vocab == SHORT else (every if dtype == torch.bfloat16 else LossOptions(),):
        loss, gradient, _ = loss_and_gradient(logits, target, options, grad_loss, torch.empty_like(logits))
        kept = target != vocab  # NaN, but not always the same NaN
        for abreast, given, out in (
            (1, logits, torch.full_like(logits, math.nan)),
            (2, in_place := logits.clone(), in_place),
        ):
            with launch.override("rows_fused", abreast=abreast):
                fused, _, faults = backend.cross_entropy_forward_backward(given, target, grad_loss, options, out)
            assert faults.item() == 1 and fused[2].isnan() and out[2].isnan().all()
            assert same_bits(fused[kept], loss[kept]) and same_bits(out[kept], gradient[kept])


def make_head(n: int, size: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((n, size), (vocab, size), (vocab,))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def linear_reference(inputs: list[Tensor], target: Tensor, grad_loss: Tensor, options: LossOptions, dtype):
    hidden, weight, bias = (tensor.clone().to(dtype).requires_grad_() for tensor in inputs)
    loss = reference(hidden @ weight.T + bias, target, options, dtype)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias), grad_loss.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("chosen", ["plain", "softcap", "all"])
def test_loss_and_gradients_from_hidden_states_equal_float64(dtype, chosen):
    """Several tiles each way, ragged ones at every edge; upstream gradients of every sign (K1)."""
    # float32 and float64 fold rows one at a time: fewer of them.
    n = 21 if dtype in (torch.bfloat16, torch.float16) else 5
    size, vocab = 24, 300
    inputs = make_head(n, size, vocab, dtype)
    target = torch.arange(n) * 14
    target[3], target[n - 1] = -100, vocab - 1
    grad_loss = torch.linspace(-1.5, 1.5, n)
    options = {
        "plain": LossOptions(),
        "softcap": LossOptions(softcap=30.0),
        "all": LossOptions(label_smoothing=0.125, z_loss=2**-8, softcap=30.0, class_weight=torch.rand(vocab)),
    }[chosen]
    loss, lse, faults, *grads = backend.linear_cross_entropy_forward_backward(
        *inputs, target, grad_loss, options, 2, (True, True, True)
    )
    exact, *exact_grads = linear_reference(inputs, target, grad_loss, options, torch.float64)
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    torchs = linear_reference(inputs, target, grad_loss, options, accumulator)[0]
    assert_as_good_as_torch(loss, exact, torchs, 1e-12 if dtype == torch.float64 else 2**-21)
    assert faults.item() == 0 and loss[3] == 0
    # What is stored in half precision is rounded twice: the logits' gradient, then the product.
    unit = {torch.float64: 1e-12, torch.float32: 2**-20, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    for grad, exact_grad in zip(grads, exact_grads, strict=True):
        assert grad.dtype == dtype
        assert (grad.double() - exact_grad).abs().max() <= 2 * unit * exact_grad.abs().max()
    assert not grads[0][3].any(), "an ignored row has no gradient"
    again = backend.linear_cross_entropy_backward(*inputs, target, lse, grad_loss, options, 2, (False, True, False))
    assert again[0] is None and again[2] is None and same_bits(again[1], grads[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_from_hidden_states(dtype):
    hidden, weight, bias = make_head(19, 24, 270, dtype)
    target = torch.arange(19) * 15
    target[4], target[5], target[18] = -100, 270, 3
    hidden[6] = math.nan
    scores = backend.linear_token_nll(hidden, weight, bias, target, -100, True, True)
    logits = hidden.float() @ weight.float().T + bias.float()
    whole = backend.token_nll(logits, target, -100, True, True)
    assert scores.faults.item() == whole.faults.item() == 2
    for a, b in zip(scores[:4], whole[:4], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_head_gradient_does_not_degrade_with_chunks():
    """K5: the error of dW does not grow from 1 chunk to many; in fact no bit of it changes."""
    hidden, weight, bias = make_head(64, 32, 96, torch.bfloat16)
    target, grad_loss, options = torch.arange(64), torch.ones(1).expand(64), LossOptions()
    _, lse, _ = backend.linear_cross_entropy_forward(hidden, weight, bias, target, options, 0)
    first, *others = (
        backend.linear_cross_entropy_backward(
            hidden, weight, bias, target, lse, grad_loss, options, chunk, (False, True, True)
        )
        for chunk in (64, 32, 16)
    )
    for other in others:
        assert same_bits(first[1], other[1]) and same_bits(first[2], other[2])


def test_constant_bias_changes_nothing():
    """K16: a constant on every logit; NLL unchanged and never negative."""
    hidden, weight, _ = make_head(16, 32, 200, torch.bfloat16)
    target = torch.arange(16)
    plain = backend.linear_token_nll(hidden, weight, None, target, -100, False, False).nll
    moved = backend.linear_token_nll(
        hidden, weight, torch.full((200,), 8.0, dtype=torch.bfloat16), target, -100, False, False
    ).nll
    torch.testing.assert_close(plain, moved, rtol=2e-6, atol=2e-6)
    assert (plain >= 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_rows_from_hidden_states(dtype):
    """K13: no loss, no fault, gradients of zeros."""
    hidden, weight, bias = make_head(0, 8, 16, dtype)
    target, nothing = torch.empty(0, dtype=torch.int64), torch.empty(0)
    loss, _, faults, *grads = backend.linear_cross_entropy_forward_backward(
        hidden, weight, bias, target, nothing, LossOptions(), 0, (True, True, True)
    )
    assert loss.shape == (0,) and faults.item() == 0
    assert [tuple(grad.shape) for grad in grads] == [(0, 8), (16, 8), (16,)] and not any(g.any() for g in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_scaled_where_the_factor_is_not_one(dtype):
    """A row times 1 is not touched (it may hold NaN patterns), the rest is; padding between rows keeps its bits."""
    room = make_logits(4, 150, dtype)
    before = room.clone()
    backend.scale_rows(room[:, 7:138], torch.tensor([1.0, 0.5, -2.0, 0.0]))
    for row, factor in ((1, 0.5), (2, -2.0), (3, 0.0)):
        before[row, 7:138] *= factor
    assert torch.equal(room, before) and same_bits(room[0], before[0])


@pytest.mark.parametrize("n", [0, 1, 5000])
def test_sum_of_rows_is_exact_to_its_last_rounding(n):
    values = make_logits(1, max(n, 1), torch.float32)[0, :n]
    assert backend.sum_rows(values).item() == values.double().sum().float().item()


def test_code_length_of_a_batch():
    """K28: one mask for loss and bytes; special, ignored, unknown and broken targets, each in its own column."""
    generator = torch.Generator().manual_seed(0)
    token_bytes = torch.randint(0, 6, (50,), generator=generator, dtype=torch.int32)
    nll = torch.rand(3, 700, generator=generator) * 10
    target = torch.randint(0, 50, (3, 700), generator=generator)
    target[0, 5], target[1, 6], target[2, 7], nll[0, 9], nll[1, 10] = -100, 50, -3, math.nan, math.inf
    sums = backend.batch_code_length(nll, target, token_bytes, 7.5, -100).tolist()
    expected = [0.0] * 6
    for loss, t in zip(nll.flatten().tolist(), target.flatten().tolist(), strict=True):
        if t == -100:
            continue
        if not 0 <= t < 50:
            expected[5] += 1
            continue
        if not math.isfinite(loss):
            loss, expected[5] = 7.5, expected[5] + 1
        text = token_bytes[t].item() > 0
        expected[0 if text else 1] += loss
        expected[2] += token_bytes[t].item()
        expected[3 if text else 4] += 1
    assert sums[2:] == expected[2:] and sums[:2] == pytest.approx(expected[:2], rel=1e-14)
    wide = torch.nn.functional.pad(nll, (0, 400)), torch.nn.functional.pad(target, (0, 400), value=-100)
    assert backend.batch_code_length(*wide, token_bytes, 7.5, -100).tolist() == sums, "padding changes no bit"
