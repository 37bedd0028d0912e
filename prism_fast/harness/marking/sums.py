"""From logits to sums: checked, marked, a faulty target charged, in one place for every way of scoring."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from prism_fast.harness.marking.heldout import Marks
from prism_fast.kernels import batch_code_length, token_nll
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleFailed, BundleRejected


class BatchSums(NamedTuple):
    """What a batch costs, as the ledger keeps it: nats of scored targets, nats of special ones, UTF-8 bytes of the
    scored, their count, the special ones' count, faults."""

    nats: float
    special_nats: float
    bytes: float
    scored_tokens: float
    special_tokens: float
    faults: float


def first_output(output: Any) -> Any:
    """What stands for the logits in a model's output: itself, `.logits`, `["logits"]`, or the first of a tuple."""
    if isinstance(output, dict) and "logits" in output:
        return output["logits"]
    if hasattr(output, "logits"):
        return output.logits
    if isinstance(output, list | tuple) and output:
        return output[0]
    return output


def logits_of(output: Any, batch: int, width: int, n_vocab: int) -> Tensor:
    """The logits [B, L, V] in a model's output: a tensor, `.logits`, or the first of a tuple.

    Raises BundleFailed (`prism:output-shape`) for anything else and BundleRejected (`prism:vocab-mismatch`) when V is
    below the tokenizer's vocabulary.
    """
    logits = first_output(output)
    expected = f"float logits of shape [{batch}, {width}, V]"
    if not isinstance(logits, Tensor):
        raise BundleFailed(f"the model returned {type(output).__name__}; expected {expected}", rule=c.RULE_OUTPUT_SHAPE)
    if type(logits) is not Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            logits = logits.as_subclass(Tensor)
    if logits.dim() == 2 and batch == 1:
        logits = logits.unsqueeze(0)
    if logits.dim() != 3 or logits.shape[0] != batch or logits.shape[1] != width or not logits.is_floating_point():
        raise BundleFailed(
            f"the model returned {str(logits.dtype).removeprefix('torch.')} of shape {list(logits.shape)}; "
            f"expected {expected}",
            rule=c.RULE_OUTPUT_SHAPE,
        )
    check_width(logits.shape[2], n_vocab)
    return logits


def check_width(head_width: int, n_vocab: int) -> None:
    """Raises BundleRejected (`prism:vocab-mismatch`) for a head narrower than the tokenizer's ids."""
    if head_width < n_vocab:
        raise BundleRejected(
            f"the model's logits are {head_width} wide; the tokenizer has {n_vocab} ids and each needs its own",
            rule=c.RULE_VOCAB_MISMATCH,
        )


def nll_of(logits: Tensor, targets: Tensor) -> Tensor:
    """`kernels.token_nll`: float32 nats [rows, width] (of float64 logits too: sums are kept in float64 anyway)."""
    with torch.no_grad():
        nll = token_nll(logits, targets)
    assert isinstance(nll, Tensor)
    return nll.float()


def fault_nats(head_width: int) -> float:
    """What a target whose loss is not finite is charged: 2 ln V."""
    return c.FAULT_CODE_LENGTH_FACTOR * math.log(head_width)


def batch_sums(nll: Tensor, targets: Tensor, token_bytes: Tensor, head_width: int) -> Tensor:
    """float64 [6] on the losses' device, as BatchSums. `token_bytes`: int32 [n_vocab], 0 of special ids."""
    with torch.no_grad():
        return batch_code_length(nll, targets, token_bytes, fault_nats(head_width))


def row_marks(nll: Tensor, targets: np.ndarray, head_width: int) -> Marks:
    """Held-out marks of a batch; each row is summed left to right in float64."""
    nats = nll.cpu().numpy().astype(np.float64)
    scored = targets >= 0
    bad = scored & ~np.isfinite(nats)
    nats[bad] = fault_nats(head_width)
    nats[~scored] = 0.0
    return Marks(np.cumsum(nats, axis=1)[:, -1], int(scored.sum()), int(bad.sum()), head_width)
