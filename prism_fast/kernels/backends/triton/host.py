"""Backend functions: outputs made, flags derived from options in one place, kernels launched. Nothing synchronises."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import LossOptions, RowNll, RowShard
from . import launch
from .fold import Geometry, geometry
from .rows import rows_finish, rows_finish_shard, rows_forward
from .rows_backward import rows_backward


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Rows:
    """A [N, V] tensor as the kernels address it: from a 16-byte boundary, when columns are neighbours."""

    def __init__(self, tensor: Tensor) -> None:
        self.unit_stride = tensor.stride(1) == 1 or tensor.shape[1] == 1
        self.granule = 16 // tensor.element_size() if self.unit_stride else 1
        self.row_stride = tensor.stride(0)
        self.column_stride = 1 if self.unit_stride else tensor.stride(1)
        # A view may start between boundaries; its storage never does, so the boundary below belongs to it.
        phase = tensor.data_ptr() // tensor.element_size() % self.granule
        self.phase = phase if phase <= tensor.storage_offset() else 0
        self.base = tensor
        if self.phase:
            start = tensor.storage_offset() - self.phase
            self.base = tensor.as_strided(tensor.shape, tensor.stride(), start)

    def same_layout(self, other: _Rows) -> bool:
        if not (self.unit_stride and other.unit_stride and self.granule == other.granule):
            return False
        return self.phase == other.phase and (self.row_stride - other.row_stride) % self.granule == 0


def _flags(options: LossOptions) -> dict[str, Any]:
    return {
        "WEIGHTED": options.class_weight is not None,
        "SMOOTHED": options.label_smoothing != 0.0,
        "Z_LOSS": options.z_loss != 0.0,
    }


def _class_weight(options: LossOptions, unused: Tensor) -> dict[str, Tensor]:
    weight = options.class_weight
    if weight is None:
        return {"class_weight": unused, "class_weight_sum": unused}
    weight = weight.contiguous()
    # Only smoothing needs the sum, and only of the classes it smooths over.
    total = weight.sum(dtype=torch.float64) if options.label_smoothing != 0.0 else unused
    return {"class_weight": weight, "class_weight_sum": total}


def _fold_rows(
    logits: Tensor, target: Tensor, options: LossOptions, out: dict[str, Tensor], *, correct: bool, entropy: bool,
    shard: RowShard | None = None, vocab_start: int = 0,
) -> None:  # fmt: skip
    """One read of the logits; fills `out` (loss, lse, correct, entropy, faults), or `shard`."""
    n, vocab = logits.shape
    if n == 0:
        return
    device = launch.device_of(logits)
    shape: Geometry = geometry(vocab)
    segments = shape.segments(vocab)
    rows = _Rows(logits)
    flags = {**_flags(options), "CORRECT": correct, "ENTROPY": entropy}
    plain = not (any(flags.values()) or options.softcap is not None)
    rule = launch.rows_forward(device, shape.lanes, segments, logits.element_size(), n, plain)
    split = rule.programs > 1 or shard is not None
    accumulator = _accumulator(logits.dtype)
    unused = target
    parts, target_logit = unused, unused
    if split:
        parts = torch.empty((5, n, segments), dtype=accumulator, device=logits.device)
        target_logit = torch.empty(n, dtype=accumulator, device=logits.device)
    finish: dict[str, Any] = {
        "target": target,
        "target_stride": target.stride(0),
        "parts": parts,
        "part_stride": n * segments,
        "target_logit": target_logit,
        "ignore_index": options.ignore_index,
    }
    results = {
        **_class_weight(options, unused),
        **{f"{key}_out": out.get(key, unused) for key in ("loss", "lse", "correct", "entropy")},
        "faults": out.get("faults", unused),
        "label_smoothing": options.label_smoothing,
        "z_loss": options.z_loss,
        "V": vocab,
    }
    launch.run(
        rows_forward,
        (n, rule.programs),
        {
            **finish,
            **results,
            "logits": rows.base,
            "phase": rows.phase,
            "row_stride": rows.row_stride,
            "column_stride": rows.column_stride,
            "vocab_start": vocab_start,
            "segments_per_program": rule.segments,
            "softcap": options.softcap or 0.0,
        },
        {
            **flags,
            "ACC": tl.float64 if accumulator == torch.float64 else tl.float32,
            "LANES": shape.lanes,
            "TILES": shape.tiles,
            "ROUNDS": triton.next_power_of_2(rule.segments),
            "GRANULE": rows.granule,
            "UNIT_STRIDE": rows.unit_stride,
            "SPLIT": split,
            "SOFTCAP": options.softcap is not None,
        },
        launch.options(device, rule.num_warps, rule.max_registers),
    )
    constants = {"PARTS": triton.next_power_of_2(segments)}
    if shard is not None:
        outputs = {"max_out": shard.max, "sum_out": shard.sum, "target_out": shard.target_logit}
        arguments = {**finish, **outputs, "segments": segments}
        launch.run(rows_finish_shard, (n,), arguments, constants, launch.options(device, 1))
    elif split:
        arguments = {**finish, **results, "segments": segments}
        launch.run(rows_finish, (n,), arguments, {**constants, **flags}, launch.options(device, 1))


def token_nll(logits: Tensor, target: Tensor, ignore_index: int, with_correct: bool, with_entropy: bool) -> RowNll:
    n = logits.shape[0]
    accumulator = _accumulator(logits.dtype)
    device = logits.device
    result = RowNll(
        nll=torch.empty(n, dtype=accumulator, device=device),
        lse=torch.empty(n, dtype=accumulator, device=device),
        correct=torch.empty(n, dtype=torch.bool, device=device) if with_correct else None,
        entropy=torch.empty(n, dtype=accumulator, device=device) if with_entropy else None,
        faults=torch.zeros(1, dtype=torch.int32, device=device),
    )
    out = {key: value for key, value in zip(("loss", *RowNll._fields[1:]), result, strict=True) if value is not None}
    options = LossOptions(ignore_index=ignore_index)
    _fold_rows(logits, target, options, out, correct=with_correct, entropy=with_entropy)
    return result


def token_nll_shard(logits: Tensor, target: Tensor, ignore_index: int, vocab_start: int) -> RowShard:
    shard = RowShard(*(torch.empty(len(logits), dtype=_accumulator(logits.dtype), device=logits.device) for _ in "123"))
    options = LossOptions(ignore_index=ignore_index)
    _fold_rows(logits, target, options, {}, correct=False, entropy=False, shard=shard, vocab_start=vocab_start)
    return shard


def cross_entropy_forward(logits: Tensor, target: Tensor, options: LossOptions) -> tuple[Tensor, Tensor, Tensor]:
    """lse is float64: the gradient subtracts it, and float32 would cost digits where logits are large."""
    n = logits.shape[0]
    out = {
        "loss": torch.empty(n, dtype=_accumulator(logits.dtype), device=logits.device),
        "lse": torch.empty(n, dtype=torch.float64, device=logits.device),
        "faults": torch.zeros(1, dtype=torch.int32, device=logits.device),
    }
    _fold_rows(logits, target, options, out, correct=False, entropy=False)
    return out["loss"], out["lse"], out["faults"]


def cross_entropy_backward(
    logits: Tensor, target: Tensor, lse: Tensor, grad_loss: Tensor, options: LossOptions, out: Tensor
) -> None:
    n, vocab = logits.shape
    if n == 0:
        return
    device = launch.device_of(logits)
    rows, written = _Rows(logits), _Rows(out)
    rule = launch.rows_backward(device, vocab, logits.element_size())
    launch.run(
        rows_backward,
        (n, -(-(vocab + rows.granule - 1) // rule.places)),
        {
            "logits": rows.base,
            "target": target,
            **_class_weight(options, target),
            "lse": lse,
            "grad_loss": grad_loss,
            "out": written.base,
            "V": vocab,
            "phase": rows.phase,
            "out_phase": written.phase,
            "row_stride": rows.row_stride,
            "column_stride": rows.column_stride,
            "target_stride": target.stride(0),
            "grad_loss_stride": grad_loss.stride(0),
            "out_row_stride": written.row_stride,
            "out_column_stride": written.column_stride,
            "ignore_index": options.ignore_index,
            "label_smoothing": options.label_smoothing,
            "z_loss": options.z_loss,
            "softcap": options.softcap or 0.0,
        },
        {
            **_flags(options),
            "ACC": tl.float64 if logits.dtype == torch.float64 else tl.float32,
            "PLACES": rule.places,
            "GRANULE": rows.granule,
            "UNIT_STRIDE": rows.unit_stride,
            "SAME_LAYOUT": rows.same_layout(written),
            "SOFTCAP": options.softcap is not None,
        },
        launch.options(device, rule.num_warps),
    )
