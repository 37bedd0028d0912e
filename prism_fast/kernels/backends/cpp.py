"""The CPU backend: csrc/cross_entropy on torch's memory and torch's threads, matrix products by torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import prism_fast
from prism_fast.kernels.backends import LossOptions, RowNll, RowShard
from prism_fast.kernels.backends.recycled import empty
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
    """The instruction set in use: avx512bf16, avx512, avx2, neon or portable (PRISM_FAST_ISA asks for another)."""
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
# Products of few tokens are slow, but the gradient of the head, [V, H], is idle until the first tokens are added to it:
# it lends its memory to the logits of the first H.

_FORWARD_TOKENS = 1024  # tokens by block of classes: enough for the matrix library to reach its full speed
_BLOCK_BYTES = 8 << 20
_CHUNK_SHARE = 24  # a chunk of tokens may hold 1/24 of [N, V]: with the matrix library's own buffers, below 1/20
_CHUNK_TOKENS = (32, 512)  # at least: fewer make the products slow; at most: more make them no faster
_TILE_CLASSES = 2048  # classes of the head multiplied at a time where the product then changes its layout


def _chunk_tokens(tokens: int, asked: int) -> int:
    if asked > 0:
        return min(asked, tokens)
    share = tokens // _CHUNK_SHARE // 4 * 4
    return min(max(share, _CHUNK_TOKENS[0]), _CHUNK_TOKENS[1], tokens)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [N, V] = hidden @ weight.T + bias for few tokens. By the matrix library as [V, N], which it does faster."""
    rows_in_one_piece = hidden.stride(1) == weight.stride(1) == 1
    if hidden.dtype == torch.float32 and len(hidden) <= _core.FEW_TOKENS and rows_in_one_piece:
        _core.few_tokens_logits(_matrix(hidden), _matrix(weight), _address(bias), _matrix(out), _threads())
        return
    tile = torch.empty(min(_TILE_CLASSES, len(weight)), len(hidden), dtype=hidden.dtype)
    for begin in range(0, len(weight), _TILE_CLASSES):
        classes = slice(begin, begin + _TILE_CLASSES)
        part = tile[: len(weight[classes])]
        _transposed_logits(hidden, weight[classes], None if bias is None else bias[classes], part)
        _copy(part.T, out[:, classes])


def _transposed_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [V, N] = weight @ hidden.T + bias."""
    if bias is None:
        torch.mm(weight, hidden.T, out=out)
    else:
        torch.addmm(bias[:, None], weight, hidden.T, out=out)


def _copy(source: Tensor, sink: Tensor) -> None:
    _core.copy_matrix(_matrix(source), _matrix(sink), _threads())


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
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: tuple[bool, bool, bool],
        chunk: int,
        lend: bool,
    ) -> None:
        """`chunk`: tokens at a time; `lend`: the head's gradient may lend its memory to the first ones."""
        self.inputs = (hidden, weight, bias)
        self.chunk = chunk
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        accumulator = accumulation_dtype(weight.dtype)
        # A single chunk has nothing to sum: its product goes straight to the gradient.
        self.narrow = weight.dtype != accumulator and len(hidden) > chunk
        self.weight = empty(weight.shape, accumulator if self.narrow else weight.dtype) if needs[1] else None
        self.bias = torch.zeros(len(weight), dtype=accumulator) if needs[2] else None
        self.empty = True
        self.lent: Tensor | None = None
        if lend and self.weight is not None and len(hidden) > chunk:
            memory = self.weight.view(hidden.dtype)
            self.lent = memory[:, : min(len(hidden), memory.shape[1])]

    def make(
        self, differentiate: Callable[[slice, Tensor], None]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """`differentiate(rows, logits)` turns the logits [n, V] of the tokens `rows` into their gradient, in place."""
        hidden, weight, bias = self.inputs
        buffer = torch.empty(self.chunk, len(weight), dtype=hidden.dtype)
        first = 0
        if self.lent is not None:
            first = self.lent.shape[1]
            _transposed_logits(hidden[:first], weight, bias, self.lent)
            for begin in range(0, first, self.chunk):
                rows = slice(begin, min(begin + self.chunk, first))
                lent, logits = self.lent[:, rows].T, buffer[: rows.stop - begin]
                _copy(lent, logits)
                differentiate(rows, logits)
                _copy(logits, lent)
            self._add(slice(0, first), self.lent.T, buffer)
        for begin in range(first, len(hidden), max(self.chunk, 1)):
            rows = slice(begin, min(begin + self.chunk, len(hidden)))
            logits = buffer[: rows.stop - begin]
            _logits(hidden[rows], weight, bias, logits)
            differentiate(rows, logits)
            self._add(rows, logits, None)
        if self.weight is not None and self.empty:
            self.weight.zero_()
        return (
            self.hidden,
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )

    def _add(self, rows: slice, grad: Tensor, spare: Tensor | None) -> None:
        """Takes the gradient [n, V] of some tokens' logits; with `spare` memory if it lies where the head's will."""
        _, weight, _ = self.inputs
        if self.hidden is not None:
            torch.mm(grad, weight, out=self.hidden[rows])
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)
        if self.weight is None:
            return
        if spare is not None:
            step = max(spare.numel() // len(grad), 1)
            for begin in range(0, len(weight), step):
                classes = slice(begin, begin + step)
                lent = grad[:, classes].T
                part = spare.view(-1)[: lent.numel()].view(lent.shape).copy_(lent)
                self._product(classes, part, rows)
        elif self.narrow:
            for begin in range(0, len(weight), _TILE_CLASSES):
                classes = slice(begin, begin + _TILE_CLASSES)
                self._product(classes, grad[:, classes].T, rows)
        else:
            self._product(slice(None), grad.T, rows)
        self.empty = False

    def _product(self, classes: slice, grad: Tensor, rows: slice) -> None:
        """Adds `grad` [classes, n] @ hidden [n, H] to the gradient of the head, or begins it."""
        assert self.weight is not None
        hidden, out = self.inputs[0][rows], self.weight[classes]
        if not self.narrow:
            torch.addmm(out, grad, hidden, beta=0.0 if self.empty else 1.0, out=out)
        elif self.empty:
            out.copy_(grad @ hidden)
        else:
            out += grad @ hidden


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
    def differentiate(rows: slice, logits: Tensor) -> None:
        cross_entropy_backward(logits, target[rows], lse[rows], grad_loss[rows], options, logits)

    chunk = _chunk_tokens(len(hidden), chunk_tokens)
    return _Gradients(hidden, weight, bias, needs, chunk, lend=chunk_tokens == 0).make(differentiate)


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
    loss, lse, faults = _loss_buffers(len(hidden), hidden.dtype)

    def differentiate(rows: slice, logits: Tensor) -> None:
        out = (loss[rows], lse[rows], faults)
        _forward(logits, target[rows], options, logits, grad_loss[rows], out, rows.start)

    chunk = _chunk_tokens(len(hidden), chunk_tokens)
    grads = _Gradients(hidden, weight, bias, needs, chunk, lend=chunk_tokens == 0).make(differentiate)
    return loss, lse, faults, *grads


def gradient_like(tensor: Tensor) -> Tensor:
    return empty(tensor.shape, tensor.dtype) if tensor.is_contiguous() else torch.empty_like(tensor)


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
