"""Backend functions on logits: outputs made, flags derived from options in one place, kernels launched.

Nothing here synchronises with the device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism_fast.kernels.backends import LossOptions, RowNll, RowShard
from prism_fast.kernels.backends.torch import accumulation_dtype
from prism_fast.kernels.backends.triton import launch, sums
from prism_fast.kernels.backends.triton.fold import geometry
from prism_fast.kernels.backends.triton.rows import rows_finish, rows_finish_shard, rows_forward
from prism_fast.kernels.backends.triton.rows_backward import rows_backward
from prism_fast.kernels.backends.triton.rows_fused import rows_fused
from prism_fast.kernels.backends.triton.rows_scale import rows_scale


class Rows:
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
            self.base = tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - self.phase)

    def same_layout(self, other: Rows) -> bool:
        if not (self.unit_stride and other.unit_stride and self.granule == other.granule):
            return False
        return self.phase == other.phase and (self.row_stride - other.row_stride) % self.granule == 0


class Scores:
    """Per-row outputs of a forward pass, and the parts that programs leave for them."""

    def __init__(self, like: Tensor, n: int, *, lse: torch.dtype, correct: bool = False, entropy: bool = False) -> None:
        self.accumulator = accumulation_dtype(like.dtype)
        self._device = like.device
        self.loss = torch.empty(n, dtype=self.accumulator, device=like.device)
        self.lse = torch.empty(n, dtype=lse, device=like.device)
        self.correct = torch.empty(n, dtype=torch.bool, device=like.device) if correct else None
        self.entropy = torch.empty_like(self.loss) if entropy else None
        self.faults = torch.zeros(1, dtype=torch.int32, device=like.device)

    def row_nll(self) -> RowNll:
        return RowNll(self.loss, self.lse, self.correct, self.entropy, self.faults)

    def arguments(self, target: Tensor, options: LossOptions, vocab: int) -> dict[str, Any]:
        """What `finish_row` takes, but the parts."""
        return {
            "target": target,
            **class_weight(options, target),
            "loss_out": self.loss,
            "lse_out": self.lse,
            "correct_out": target if self.correct is None else self.correct,
            "entropy_out": target if self.entropy is None else self.entropy,
            "faults": self.faults,
            "V": vocab,
            "ignore_index": options.ignore_index,
            "label_smoothing": options.label_smoothing,
            "z_loss": options.z_loss,
        }

    def constants(self, options: LossOptions) -> dict[str, Any]:
        return {**flags(options), "CORRECT": self.correct is not None, "ENTROPY": self.entropy is not None}


class Parts:
    """Scratch of rows that several programs share: [5, N, segments] and the target's logit [N]."""

    def __init__(self, like: Tensor, n: int, segments: int) -> None:
        accumulator = accumulation_dtype(like.dtype)
        self.segments = segments
        self.table = torch.empty((5, n, segments), dtype=accumulator, device=like.device)
        self.target_logit = torch.empty(n, dtype=accumulator, device=like.device)

    def arguments(self, first: int = 0) -> dict[str, Any]:
        return {
            "parts": self.table[:, :, first:] if first else self.table,
            "part_stride": self.table.stride(0),
            "target_logit": self.target_logit,
        }

    def finish(self, scores: Scores, target: Tensor, options: LossOptions, vocab: int, *, relative: bool) -> None:
        launch.run(
            rows_finish,
            (len(target),),
            {**scores.arguments(target, options, vocab), **self.arguments(), "segments": self.segments},
            {
                **scores.constants(options),
                "PARTS": triton.next_power_of_2(self.segments),
                "RELATIVE": relative,
            },
            launch.options(launch.device_of(target), 1),
        )

    def finish_shard(self, shard: RowShard, target: Tensor, ignore_index: int) -> None:
        launch.run(
            rows_finish_shard,
            (len(target),),
            {
                **self.arguments(),
                "target": target,
                "max_out": shard.max,
                "sum_out": shard.sum,
                "target_out": shard.target_logit,
                "segments": self.segments,
                "ignore_index": ignore_index,
            },
            {"PARTS": triton.next_power_of_2(self.segments)},
            launch.options(launch.device_of(target), 1),
        )


def flags(options: LossOptions) -> dict[str, bool]:
    return {
        "WEIGHTED": options.class_weight is not None,
        "SMOOTHED": options.label_smoothing != 0.0,
        "Z_LOSS": options.z_loss != 0.0,
    }


def class_weight(options: LossOptions, unused: Tensor) -> dict[str, Tensor]:
    weight = options.class_weight
    if weight is None:
        return {"class_weight": unused, "class_weight_sum": unused}
    # Only smoothing needs the sum, and only of the classes it smooths over.
    total = weight.sum(dtype=torch.float64) if options.label_smoothing != 0.0 else unused
    return {"class_weight": weight, "class_weight_sum": total}


def accumulator_type(tensor: Tensor) -> tl.dtype:
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32


def load(numbers: Tensor, options: LossOptions, *, extras: bool = False) -> launch.Load:
    """`extras`: results beside the loss that cost registers."""
    smoothed, weighted = options.label_smoothing != 0.0, options.class_weight is not None
    plain = not (smoothed or weighted or extras or options.softcap is not None)
    apart = numbers.stride(-1) != 1
    return launch.Load(numbers.element_size(), plain=plain, heavy=smoothed and weighted, apart=apart)


def fold_rows(
    logits: Tensor,
    target: Tensor,
    options: LossOptions,
    scores: Scores,
    *,
    parts: Parts | None = None,
    first_part: int = 0,
    vocab_start: int = 0,
    fresh: bool = True,
    relative: bool = True,
) -> None:
    """One read of the logits. Fills `scores`; or, with `parts`, those segments of them only."""
    n, vocab = logits.shape
    device = launch.device_of(logits)
    shape = geometry(vocab)
    segments = shape.segments(vocab)
    rows = Rows(logits)
    rule = launch.rows_forward(
        device, shape.lanes, segments, load(logits, options, extras=scores.entropy is not None), n
    )
    own = Parts(logits, n, segments) if parts is None and rule.programs > 1 else None
    used = parts or own
    nothing = {"parts": scores.loss, "part_stride": 0, "target_logit": scores.loss}
    arguments = scores.arguments(target, options, vocab)
    if options.class_weight is not None:
        arguments["class_weight"] = options.class_weight[vocab_start:]
    launch.run(
        rows_forward,
        (n, rule.programs),
        {
            **arguments,
            **(nothing if used is None else used.arguments(first_part)),
            "part_row_stride": 0 if used is None else used.segments,
            "logits": rows.base,
            "phase": rows.phase,
            "row_stride": rows.row_stride,
            "column_stride": rows.column_stride,
            "vocab_start": vocab_start,
            "fresh": int(fresh),
            "segments_per_program": rule.segments,
            "softcap": options.softcap or 0.0,
        },
        {
            **scores.constants(options),
            "ACC": accumulator_type(logits),
            "LANES": shape.lanes,
            "TILES": shape.tiles,
            "ROUNDS": triton.next_power_of_2(rule.segments),
            "PARTS": triton.next_power_of_2(segments if used is None else used.segments),
            "GRANULE": rows.granule,
            "UNIT_STRIDE": rows.unit_stride,
            "SPLIT": used is not None,
            "RELATIVE": relative,
            "STAGES": rule.stages,
            "SOFTCAP": options.softcap is not None,
        },
        launch.options(device, rule.num_warps, rule.max_registers),
    )
    if own is not None:
        own.finish(scores, target, options, vocab, relative=relative)


def token_nll(logits: Tensor, target: Tensor, ignore_index: int, with_correct: bool, with_entropy: bool) -> RowNll:
    lse = accumulation_dtype(logits.dtype)
    scores = Scores(logits, len(logits), lse=lse, correct=with_correct, entropy=with_entropy)
    if len(logits):
        fold_rows(logits, target, LossOptions(ignore_index=ignore_index), scores)
    return scores.row_nll()


def token_nll_shard(logits: Tensor, target: Tensor, ignore_index: int, vocab_start: int) -> RowShard:
    n, vocab = logits.shape
    options = LossOptions(ignore_index=ignore_index)
    scores = Scores(logits, n, lse=torch.float64)
    shard = RowShard(scores.loss, torch.empty_like(scores.loss), torch.empty_like(scores.loss))
    if n:
        parts = Parts(logits, n, geometry(vocab).segments(vocab))
        fold_rows(logits, target, options, scores, parts=parts, vocab_start=vocab_start)
        parts.finish_shard(shard, target, ignore_index)
    return shard


def cross_entropy_forward(logits: Tensor, target: Tensor, options: LossOptions) -> tuple[Tensor, Tensor, Tensor]:
    scores = Scores(logits, len(logits), lse=torch.float64)
    if len(logits):
        fold_rows(logits, target, options, scores)
    return scores.loss, scores.lse, scores.faults


def _gradient_arguments(
    logits: Tensor, target: Tensor, grad_loss: Tensor, options: LossOptions, out: Tensor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments and constants of the kernels that write a gradient."""
    rows, written = Rows(logits), Rows(out)
    arguments = {
        "logits": rows.base,
        "target": target,
        **class_weight(options, target),
        "grad_loss": grad_loss,
        "out": written.base,
        "V": logits.shape[1],
        "phase": rows.phase,
        "out_phase": written.phase,
        "row_stride": rows.row_stride,
        "column_stride": rows.column_stride,
        "grad_loss_stride": grad_loss.stride(0),
        "out_row_stride": written.row_stride,
        "out_column_stride": written.column_stride,
        "ignore_index": options.ignore_index,
        "label_smoothing": options.label_smoothing,
        "z_loss": options.z_loss,
        "softcap": options.softcap or 0.0,
    }
    constants = {
        **flags(options),
        "ACC": accumulator_type(logits),
        "GRANULE": rows.granule,
        "UNIT_STRIDE": rows.unit_stride,
        "SAME_LAYOUT": rows.same_layout(written),
        "SOFTCAP": options.softcap is not None,
    }
    return arguments, constants


def write_gradient(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    grad_loss: Tensor,
    options: LossOptions,
    out: Tensor,
    vocab: int,
    vocab_start: int,
) -> None:
    """`cross_entropy_backward` for classes vocab_start, vocab_start + 1, ... of `vocab`."""
    n, classes = logits.shape
    device = launch.device_of(logits)
    rule = launch.rows_backward(device, classes, logits.element_size())
    arguments, constants = _gradient_arguments(logits, target, grad_loss, options, out)
    launch.run(
        rows_backward,
        (n, -(-(classes + constants["GRANULE"] - 1) // rule.places)),
        {**arguments, "lse": lse, "vocab": vocab, "vocab_start": vocab_start},
        {**constants, "PLACES": rule.places},
        launch.options(device, rule.num_warps, rule.max_registers),
    )


def cross_entropy_backward(
    logits: Tensor, target: Tensor, lse: Tensor, grad_loss: Tensor, options: LossOptions, out: Tensor
) -> None:
    if len(logits):
        write_gradient(logits, target, lse, grad_loss, options, out, logits.shape[1], 0)


def cross_entropy_forward_backward(
    logits: Tensor, target: Tensor, grad_loss: Tensor, options: LossOptions, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    n, vocab = logits.shape
    scores = Scores(logits, n, lse=torch.float64)
    if n == 0:
        return scores.loss, scores.lse, scores.faults
    device = launch.device_of(logits)
    shape = geometry(vocab)
    segments = shape.segments(vocab)
    arguments, constants = _gradient_arguments(logits, target, grad_loss, options, out)
    rule = launch.rows_fused(device, shape.lanes, shape.tiles, segments, vocab, load(logits, options))
    launch.run(
        rows_fused,
        (n,),
        {**arguments, "loss_out": scores.loss, "lse_out": scores.lse, "faults": scores.faults},
        {
            **constants,
            "LANES": shape.lanes,
            "TILES": shape.tiles,
            "ABREAST": rule.abreast,
            "ROUNDS": triton.next_power_of_2(-(-segments // rule.abreast)),
            "PARTS": triton.next_power_of_2(segments),
            "STAGES": rule.stages,
            "PLACES": rule.places,
        },
        launch.options(device, rule.num_warps, rule.max_registers),
    )
    return scores.loss, scores.lse, scores.faults


def gradient_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


def scale_rows(rows: Tensor, factor: Tensor) -> None:
    n, columns = rows.shape
    if n == 0:
        return
    rule = launch.rows_scale(launch.device_of(rows), columns, rows.element_size())
    launch.run(
        rows_scale,
        (n,),
        {
            "rows": rows,
            "factor": factor,
            "V": columns,
            "row_stride": rows.stride(0),
            "column_stride": rows.stride(1),
            "factor_stride": factor.stride(0),
        },
        {"PLACES": rule.places},
        launch.options(launch.device_of(rows), rule.num_warps),
    )


def sum_rows(values: Tensor) -> Tensor:
    out = torch.empty((), dtype=values.dtype, device=values.device)
    launch.run(
        sums.sum_rows,
        (1,),
        {"values": values, "out": out, "N": len(values), "stride": values.stride(0)},
        {"LINE": launch.SUM_LINE},
        launch.options(launch.device_of(values), launch.SUM_LINE // 256),
    )
    return out


def batch_code_length(nll: Tensor, target: Tensor, token_bytes: Tensor, fault_nats: float, ignore_index: int) -> Tensor:
    lines, width = nll.shape
    device = launch.device_of(nll)
    parts = torch.empty((lines, 8), dtype=torch.float64, device=nll.device)
    out = torch.empty(6, dtype=torch.float64, device=nll.device)
    if lines:
        launch.run(
            sums.code_length_rows,
            (lines,),
            {
                "nll": nll,
                "target": target,
                "token_bytes": token_bytes,
                "parts": parts,
                "L": width,
                "T": len(token_bytes),
                "ignore_index": ignore_index,
                "fault_nats": fault_nats,
            },
            {"LINE": launch.CODE_LENGTH_LINE},
            launch.options(device, launch.CODE_LENGTH_LINE // 128),
        )
    launch.run(sums.code_length_finish, (1,), {"parts": parts, "out": out, "B": lines}, {}, launch.options(device, 1))
    return out
