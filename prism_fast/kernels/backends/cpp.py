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


def token_nll(logits: Tensor, target: Tensor, ignore_index: int, with_correct: bool, with_entropy: bool) -> RowNll:
    rows = logits.shape[0]
    nll = torch.empty(rows, dtype=accumulation_dtype(logits.dtype))
    lse = torch.empty_like(nll)
    correct = torch.empty(rows, dtype=torch.bool) if with_correct else None
    entropy = torch.empty_like(nll) if with_entropy else None
    faults = torch.zeros(1, dtype=torch.int32)
    _core.token_nll(
        _matrix(logits),
        _targets(target, ignore_index),
        nll.data_ptr(),
        lse.data_ptr(),
        0 if correct is None else correct.data_ptr(),
        0 if entropy is None else entropy.data_ptr(),
        faults.data_ptr(),
        torch.get_num_threads(),
    )
    return RowNll(nll, lse, correct, entropy, faults)


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
        torch.get_num_threads(),
    )
    return RowShard(top, total, target_logit)


def _forward(
    logits: Tensor, target: Tensor, options: LossOptions, grad: Tensor | None, grad_loss: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    loss = torch.empty(logits.shape[0], dtype=accumulation_dtype(logits.dtype))
    lse = torch.empty(logits.shape[0], dtype=torch.float64)
    faults = torch.zeros(1, dtype=torch.int32)
    bad_row = _core.cross_entropy(
        _matrix(logits),
        _targets(target, options.ignore_index),
        _options(options),
        loss.data_ptr(),
        lse.data_ptr(),
        faults.data_ptr(),
        None if grad is None else _matrix(grad),
        0 if grad_loss is None else grad_loss.data_ptr(),
        0 if grad_loss is None else grad_loss.stride(0),
        torch.get_num_threads(),
    )
    if bad_row >= 0:
        raise index_error(bad_row, int(target[bad_row]), logits.shape[1], options.ignore_index)
    return loss, lse, faults


def cross_entropy_forward(logits: Tensor, target: Tensor, options: LossOptions) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(logits, target, options, None, None)


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
        torch.get_num_threads(),
    )


def cross_entropy_forward_backward(
    logits: Tensor, target: Tensor, grad_loss: Tensor, options: LossOptions, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(logits, target, options, out, grad_loss)


def scale_rows(rows: Tensor, factor: Tensor) -> None:
    _core.scale_rows(_matrix(rows), factor.data_ptr(), factor.stride(0), torch.get_num_threads())


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
