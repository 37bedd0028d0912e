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
from .rows_fused import rows_fused


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


def _load(logits: Tensor, options: LossOptions, entropy: bool) -> launch.Load:
    smoothed, weighted = options.label_smoothing != 0.0, options.class_weight is not None
    plain = not (smoothed or weighted or entropy or options.softcap is not None)
    return launch.Load(logits.element_size(), plain=plain, heavy=smoothed and weighted)


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
    rule = launch.rows_forward(device, shape.lanes, segments, _load(logits, options, entropy), n)
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
            "STAGES": rule.stages,
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
    loss, lse, faults = _loss_outputs(logits)
    out = {"loss": loss, "lse": lse, "faults": faults}
    _fold_rows(logits, target, options, out, correct=False, entropy=False)
    return loss, lse, faults


def _loss_outputs(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, device = logits.shape[0], logits.device
    loss = torch.empty(n, dtype=_accumulator(logits.dtype), device=device)
    return loss, torch.empty(n, dtype=torch.float64, device=device), torch.zeros(1, dtype=torch.int32, device=device)


def _gradient_arguments(
    logits: Tensor, target: Tensor, grad_loss: Tensor, options: LossOptions, out: Tensor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments and constants of the kernels that write a gradient."""
    rows, written = _Rows(logits), _Rows(out)
    arguments = {
        "logits": rows.base,
        "target": target,
        **_class_weight(options, target),
        "grad_loss": grad_loss,
        "out": written.base,
        "V": logits.shape[1],
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
    }
    constants = {
        **_flags(options),
        "ACC": tl.float64 if logits.dtype == torch.float64 else tl.float32,
        "GRANULE": rows.granule,
        "UNIT_STRIDE": rows.unit_stride,
        "SAME_LAYOUT": rows.same_layout(written),
        "SOFTCAP": options.softcap is not None,
    }
    return arguments, constants


def cross_entropy_backward(
    logits: Tensor, target: Tensor, lse: Tensor, grad_loss: Tensor, options: LossOptions, out: Tensor
) -> None:
    n, vocab = logits.shape
    if n == 0:
        return
    device = launch.device_of(logits)
    rule = launch.rows_backward(device, vocab, logits.element_size())
    arguments, constants = _gradient_arguments(logits, target, grad_loss, options, out)
    launch.run(
        rows_backward,
        (n, -(-(vocab + constants["GRANULE"] - 1) // rule.places)),
        {**arguments, "lse": lse},
        {**constants, "PLACES": rule.places},
        launch.options(device, rule.num_warps),
    )


def cross_entropy_with_gradient(
    logits: Tensor, target: Tensor, grad_loss: Tensor, options: LossOptions, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`cross_entropy_forward` and `cross_entropy_backward` in one read of the logits; `out` may be the logits."""
    n, vocab = logits.shape
    results = _loss_outputs(logits)
    if n == 0:
        return results
    device = launch.device_of(logits)
    shape = geometry(vocab)
    segments = shape.segments(vocab)
    arguments, constants = _gradient_arguments(logits, target, grad_loss, options, out)
    rule = launch.rows_fused(device, shape.lanes, segments, vocab, _load(logits, options, False))
    loss, lse, faults = results
    launch.run(
        rows_fused,
        (n,),
        {**arguments, "loss_out": loss, "lse_out": lse, "faults": faults},
        {
            **constants,
            "LANES": shape.lanes,
            "TILES": shape.tiles,
            "ABREAST": rule.abreast,
            "ROUNDS": triton.next_power_of_2(-(-segments // rule.abreast)),
            "STAGES": rule.stages,
            "PLACES": rule.places,
        },
        launch.options(device, rule.num_warps, rule.max_registers),
    )
    return results
