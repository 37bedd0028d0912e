"""The CPU backend: csrc/cross_entropy on torch's memory and torch's threads, matrix products by torch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import prism_fast
from prism_fast.kernels.backends import LossOptions, RowNll, RowShard
from prism_fast.kernels.backends.torch import accumulation_dtype, index_error

name = "cpp"

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


@functools.cache
def _load() -> tuple[Any, str | None]:
    try:
        from prism_fast import _core
    except ImportError as error:
        return None, f"the compiled core does not load ({error}); run `make install`"
    if _core.__version__ != prism_fast.__version__:
        found = f"is version {_core.__version__}, not {prism_fast.__version__}"
        return None, f"the compiled core {found}; run `make install`"
    return _core, None


_core, _load_error = _load()


def why_not(device: torch.device) -> str | None:
    return _load_error if device.type == "cpu" else f"it runs on CPU tensors, not on {device.type}"


def instruction_set() -> str:
    """The instruction set in use: `avx512bf16`, `avx512`, `avx2` or `portable` (PRISM_FAST_ISA asks for another)."""
    return str(_core.cross_entropy_isa())


def _matrix(logits: Tensor) -> Any:
    return _core.Matrix(logits.data_ptr(), _DTYPE_CODES[logits.dtype], tuple(logits.shape), logits.stride())


def _targets(target: Tensor, ignore_index: int) -> Any:
    return _core.Targets(target.data_ptr(), target.dtype == torch.int64, ignore_index)


def _options(options: LossOptions) -> Any:
    weight = options.class_weight
    return _core.LossOptions(
        options.label_smoothing, options.z_loss, options.softcap or 0.0, 0 if weight is None else weight.data_ptr()
    )


def _threads() -> int:
    return torch.get_num_threads()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _score_buffers(rows: int, dtype: torch.dtype, with_correct: bool, with_entropy: bool) -> RowNll:
    nll = torch.empty(rows, dtype=accumulation_dtype(dtype))
    return RowNll(
        nll,
        torch.empty_like(nll),
        torch.empty(rows, dtype=torch.bool) if with_correct else None,
        torch.empty_like(nll) if with_entropy else None,
        torch.zeros(1, dtype=torch.int32),
    )


def _loss_buffers(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty(rows, dtype=accumulation_dtype(dtype)),
        torch.empty(rows, dtype=torch.float64),
        torch.zeros(1, dtype=torch.int32),
    )


def _check(bad_row: int, target: Tensor, vocab: int, options: LossOptions, first: int = 0) -> None:
    if bad_row >= 0:
        raise index_error(first + bad_row, int(target[bad_row]), vocab, options.ignore_index)


def token_nll(logits: Tensor, target: Tensor, ignore_index: int, with_correct: bool, with_entropy: bool) -> RowNll:
    out = _score_buffers(logits.shape[0], logits.dtype, with_correct, with_entropy)
    _core.token_nll(_matrix(logits), _targets(target, ignore_index), *map(_address, out), _threads())
    return out


def token_nll_shard(logits: Tensor, target: Tensor, ignore_index: int, vocab_start: int) -> RowShard:
    top = torch.empty(logits.shape[0], dtype=accumulation_dtype(logits.dtype))
    total, target_logit = torch.empty_like(top), torch.empty_like(top)
    _core.token_nll_shard(
        _matrix(logits),
        _targets(target, ignore_index),
        vocab_start,
        top.data_ptr(),
        total.data_ptr(),
        target_logit.data_ptr(),
        _threads(),
    )
    return RowShard(top, total, target_logit)


def _forward(
    logits: Tensor,
    target: Tensor,
    options: LossOptions,
    grad: Tensor | None,
    grad_loss: Tensor | None,
    out: tuple[Tensor, Tensor, Tensor],
    first: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fills `out` (loss, lse, faults); `first` is the number of row 0 in messages."""
    bad_row = _core.cross_entropy(
        _matrix(logits),
        _targets(target, options.ignore_index),
        _options(options),
        *map(_address, out),
        None if grad is None else _matrix(grad),
        _address(grad_loss),
        0 if grad_loss is None else grad_loss.stride(0),
        _threads(),
    )
    _check(bad_row, target, logits.shape[1], options, first)
    return out


def cross_entropy_forward(logits: Tensor, target: Tensor, options: LossOptions) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(logits, target, options, None, None, _loss_buffers(logits.shape[0], logits.dtype))


def cross_entropy_backward(
    logits: Tensor, target: Tensor, lse: Tensor, grad_loss: Tensor, options: LossOptions, out: Tensor
) -> None:
    _core.cross_entropy_backward(
        _matrix(logits),
        _targets(target, options.ignore_index),
        _options(options),
        lse.data_ptr(),
        _matrix(out),
        grad_loss.data_ptr(),
        grad_loss.stride(0),
        _threads(),
    )


def cross_entropy_forward_backward(
    logits: Tensor, target: Tensor, grad_loss: Tensor, options: LossOptions, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(logits, target, options, out, grad_loss, _loss_buffers(logits.shape[0], logits.dtype))


# -------------------------------------------------------------------------------------------- from hidden states
# Two ways to never hold [N, V]. Without a gradient: all tokens by a block of classes, whose terms are merged. With one:
# all classes by a chunk of tokens, whose logits turn into their gradient in place and feed the two other products.

_FORWARD_TOKENS = 1024  # tokens by block of classes: enough for the matrix library to reach its full speed
_BLOCK_BYTES = 8 << 20
_CHUNK_SHARE = 20  # a chunk of tokens may hold 1/20 of [N, V]
_CHUNK_TOKENS = (48, 512)  # at least: fewer make the products slow; at most: more make them no faster
_HEAD_CLASSES = 1024  # classes of the head multiplied at a time, so that their logits stay in the second-level cache


def _chunk_tokens(tokens: int, asked: int) -> int:
    if asked > 0:
        return min(asked, tokens)
    share = tokens // _CHUNK_SHARE // 16 * 16
    return min(max(share, _CHUNK_TOKENS[0]), _CHUNK_TOKENS[1], tokens)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = hidden @ weight.T + bias."""
    for begin in range(0, len(weight), _HEAD_CLASSES):
        classes = slice(begin, begin + _HEAD_CLASSES)
        if bias is None:
            torch.mm(hidden, weight[classes].T, out=out[:, classes])
        else:
            torch.addmm(bias[classes], hidden, weight[classes].T, out=out[:, classes])


def _terms(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: LossOptions,
    with_moment: bool,
    chunk_tokens: int,
) -> Tensor:
    """Each token's terms over all classes: float64 [N, ROW_TERMS_DOUBLES], the core's RowTerms."""
    tokens, vocab = len(hidden), len(weight)
    terms = torch.tensor(_core.EMPTY_ROW_TERMS, dtype=torch.float64).repeat(tokens, 1)
    tile = min(tokens, chunk_tokens or _FORWARD_TOKENS)
    share = max(tokens * vocab * hidden.element_size() // _CHUNK_SHARE, _CHUNK_TOKENS[0] * vocab)
    classes = max(64, min(share, _BLOCK_BYTES) // (max(tile, 1) * hidden.element_size()))
    buffer = torch.empty(tile * min(classes, vocab), dtype=hidden.dtype)
    for first in range(0, tokens, max(tile, 1)):
        rows = slice(first, first + tile)
        ids = _targets(target[rows], options.ignore_index)
        for start in range(0, vocab, classes):
            part = weight[start : start + classes]
            logits = buffer[: len(hidden[rows]) * len(part)].view(-1, len(part))
            if bias is None:
                torch.mm(hidden[rows], part.T, out=logits)
            else:
                torch.addmm(bias[start : start + classes], hidden[rows], part.T, out=logits)
            _core.add_terms(
                _matrix(logits), ids, start, _options(options), with_moment, terms[rows].data_ptr(), _threads()
            )
    return terms


def linear_token_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    with_correct: bool,
    with_entropy: bool,
) -> RowNll:
    terms = _terms(hidden, weight, bias, target, LossOptions(), with_entropy, 0)
    out = _score_buffers(len(hidden), hidden.dtype, with_correct, with_entropy)
    _core.score_of_terms(
        terms.data_ptr(),
        _targets(target, ignore_index),
        len(hidden),
        len(weight),
        _DTYPE_CODES[hidden.dtype],
        *map(_address, out),
    )
    return out


def linear_cross_entropy_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: LossOptions,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    terms = _terms(hidden, weight, bias, target, options, False, chunk_tokens)
    loss, lse, faults = _loss_buffers(len(hidden), hidden.dtype)
    bad_row = _core.loss_of_terms(
        terms.data_ptr(),
        _targets(target, options.ignore_index),
        len(hidden),
        len(weight),
        _DTYPE_CODES[hidden.dtype],
        _options(options),
        *map(_address, (loss, lse, faults)),
    )
    _check(bad_row, target, len(weight), options)
    return loss, lse, faults


class _Gradients:
    """The gradients of hidden, weight and bias, gathered chunk by chunk. Those of the head sum in float32 or wider."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool], chunks: int
    ) -> None:
        self.inputs = (hidden, weight, bias)
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        accumulator = accumulation_dtype(weight.dtype)
        # A single chunk has nothing to sum: its product goes straight to the gradient.
        self.narrow = weight.dtype != accumulator and chunks > 1
        self.weight = None
        if needs[1]:
            kind = accumulator if self.narrow else weight.dtype
            self.weight = torch.empty_like(weight, dtype=kind, memory_format=torch.contiguous_format)
            if chunks == 0 or self.narrow:
                self.weight.zero_()
        self.bias = torch.zeros(len(weight), dtype=accumulator) if needs[2] else None
        self.empty = True

    def add(self, rows: slice, grad: Tensor) -> None:
        """Takes the gradient of one chunk's logits."""
        hidden, weight, _ = self.inputs
        if self.hidden is not None:
            torch.mm(grad, weight, out=self.hidden[rows])
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)
        if self.weight is None:
            return
        if self.narrow:
            for begin in range(0, len(weight), _HEAD_CLASSES):
                classes = slice(begin, begin + _HEAD_CLASSES)
                self.weight[classes] += grad[:, classes].T @ hidden[rows]
        else:
            torch.addmm(self.weight, grad.T, hidden[rows], beta=0.0 if self.empty else 1.0, out=self.weight)
        self.empty = False

    def done(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        _, weight, bias = self.inputs
        return (
            self.hidden,
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )


def linear_cross_entropy_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    grad_loss: Tensor,
    options: LossOptions,
    chunk_tokens: int,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    tokens = len(hidden)
    chunk = _chunk_tokens(tokens, chunk_tokens)
    gradients = _Gradients(hidden, weight, bias, needs, -(-tokens // chunk) if chunk else 0)
    buffer = torch.empty(chunk, len(weight), dtype=hidden.dtype)
    for first in range(0, tokens, max(chunk, 1)):
        rows = slice(first, first + chunk)
        logits = buffer[: len(hidden[rows])]
        _logits(hidden[rows], weight, bias, logits)
        cross_entropy_backward(logits, target[rows], lse[rows], grad_loss[rows], options, logits)
        gradients.add(rows, logits)
    return gradients.done()


def linear_cross_entropy_forward_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    grad_loss: Tensor,
    options: LossOptions,
    chunk_tokens: int,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    tokens = len(hidden)
    chunk = _chunk_tokens(tokens, chunk_tokens)
    gradients = _Gradients(hidden, weight, bias, needs, -(-tokens // chunk) if chunk else 0)
    loss, lse, faults = _loss_buffers(tokens, hidden.dtype)
    buffer = torch.empty(chunk, len(weight), dtype=hidden.dtype)
    for first in range(0, tokens, max(chunk, 1)):
        rows = slice(first, first + chunk)
        logits = buffer[: len(hidden[rows])]
        _logits(hidden[rows], weight, bias, logits)
        _forward(logits, target[rows], options, logits, grad_loss[rows], (loss[rows], lse[rows], faults), first)
        gradients.add(rows, logits)
    return loss, lse, faults, *gradients.done()


def scale_rows(rows: Tensor, factor: Tensor) -> None:
    _core.scale_rows(_matrix(rows), factor.data_ptr(), factor.stride(0), _threads())


def sum_rows(values: Tensor) -> Tensor:
    values = values.contiguous()
    total = torch.empty((), dtype=values.dtype)
    _core.sum_rows(values.data_ptr(), values.dtype == torch.float64, len(values), total.data_ptr())
    return total


def batch_code_length(nll: Tensor, target: Tensor, token_bytes: Tensor, fault_nats: float, ignore_index: int) -> Tensor:
    out = torch.empty(6, dtype=torch.float64)
    _core.batch_code_length(
        nll.data_ptr(),
        _targets(target, ignore_index),
        nll.shape[0],
        nll.shape[1],
        token_bytes.data_ptr(),
        len(token_bytes),
        fault_nats,
        out.data_ptr(),
    )
    return out
