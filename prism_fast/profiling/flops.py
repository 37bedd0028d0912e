"""Floating-point operations of a step, and the share of a device's peak that they reach (MFU).

Two counts. 6ND: six operations a parameter and token, forward and backward (Kaplan et al. 2020, arXiv 2001.08361); no
attention. The attention-aware count is of the model itself: `torch.utils.flop_counter` watches one real step and counts
every product, forward and backward, the pairs of attention included (as 6ND + 12 L H Q T does by hand, Chowdhery et al.
2022, arXiv 2204.02311, appendix B). It counts causal attention as if all pairs were computed, as that formula does.
"""

from __future__ import annotations

import re
from typing import Any

# Dense bfloat16 with float32 accumulation, no sparsity, TFLOP/s, from the makers' data sheets. A name is matched from
# its most particular form down; a device on no line has no peak, and its MFU is null rather than a guess.
PEAKS: tuple[tuple[str, float, str], ...] = (
    (r"\bGB300\b", 2500.0, "NVIDIA GB300 NVL72 data sheet: 360 PFLOP/s sparse bf16 over 72 GPUs, half of it dense"),
    (r"\bB300\b", 2250.0, "NVIDIA HGX B300 data sheet: 36 PFLOP/s sparse bf16 over 8 GPUs, half of it dense"),
    (r"\bGB200\b", 2500.0, "NVIDIA GB200 NVL72 data sheet: 360 PFLOP/s sparse bf16 over 72 GPUs, half of it dense"),
    (r"\bB200\b", 2250.0, "NVIDIA HGX B200 data sheet: 36 PFLOP/s sparse bf16 over 8 GPUs, half of it dense"),
    (r"\bH200 NVL\b", 835.5, "NVIDIA H200 data sheet, NVL: 1,671 TFLOP/s sparse bf16, half of it dense"),
    (r"\bH200\b|\bGH200\b", 989.5, "NVIDIA H200 data sheet, SXM: 1,979 TFLOP/s sparse bf16, half of it dense"),
    (r"\bH100 NVL\b", 835.5, "NVIDIA H100 data sheet, NVL: 1,671 TFLOP/s sparse bf16, half of it dense"),
    (r"\bH100 PCIe\b", 756.5, "NVIDIA H100 PCIe product brief: 1,513 TFLOP/s sparse bf16, half of it dense"),
    (r"\bH100\b", 989.5, "NVIDIA H100 data sheet, SXM: 1,979 TFLOP/s sparse bf16, half of it dense"),
    (r"\bH20\b", 148.0, "NVIDIA H20 data sheet: bf16 dense"),
    (r"\bA100\b|\bA800\b", 312.0, "NVIDIA A100 data sheet: bf16 dense"),
    (r"\bA30\b", 165.0, "NVIDIA A30 data sheet: bf16 dense"),
    (r"\bA10G\b", 70.0, "NVIDIA A10G data sheet: bf16 dense, half of the sparse 140"),
    (r"\bA10\b", 125.0, "NVIDIA A10 data sheet: bf16 dense"),
    (r"\bA40\b", 149.7, "NVIDIA A40 data sheet: bf16 dense"),
    (r"\bRTX A6000\b", 154.8, "NVIDIA RTX A6000 data sheet: half of 309.7 sparse"),
    (r"\bL40S\b", 362.05, "NVIDIA L40S data sheet: 733 TFLOP/s sparse bf16 quoted, 362.05 dense"),
    (r"\bL40\b", 181.05, "NVIDIA L40 data sheet: bf16 dense"),
    (r"\bL4\b", 121.0, "NVIDIA L4 data sheet: 242 TFLOP/s sparse bf16, half of it dense"),
    (r"\bRTX 5090\b", 209.5, "NVIDIA RTX Blackwell whitepaper: bf16 with fp32 accumulate, dense"),
    (r"\bRTX 4090\b", 165.2, "NVIDIA Ada whitepaper: bf16 with fp32 accumulate, dense"),
    (r"\bRTX 3090\b", 71.0, "NVIDIA GA102 whitepaper: bf16 with fp32 accumulate, dense"),
    (r"\bMI300X\b", 1307.4, "AMD Instinct MI300X data sheet: bf16 dense"),
    (r"\bMI325X\b", 1307.4, "AMD Instinct MI325X data sheet: bf16 dense"),
    (r"\bMI250X\b", 191.5, "AMD Instinct MI250X data sheet: 383 bf16 dense over the two dies that torch sees apart"),
)


# Operators of ours that read and write and multiply no matrices.
NO_PRODUCTS = {
    f"prism_fast.{name}"
    for name in (
        "cross_entropy", "cross_entropy_backward", "sum_rows", "token_nll", "token_nll_shard", "batch_code_length",
    )
}  # fmt: skip


def peak_flops(device_name: str) -> tuple[float | None, str | None]:
    """-> (dense bf16 FLOP/s, source), or (None, None) for a device that is on no line of the table."""
    for pattern, tera, source in PEAKS:
        if re.search(pattern, device_name):
            return tera * 1e12, source
    return None, None


def six_nd(parameters: int, tokens: int) -> float:
    return 6.0 * parameters * tokens


def mfu(flops: float, seconds: float, device_names: list[str]) -> tuple[float | None, float | None, str | None]:
    """-> (share of the peak, peak FLOP/s of all devices, source); nulls where a device's peak is not known."""
    found = [peak_flops(name) for name in device_names]
    peaks = [peak for peak, _ in found if peak is not None]
    if not peaks or len(peaks) < len(found) or seconds <= 0:
        return None, None, None
    total = sum(peaks)
    return flops / seconds / total, total, found[0][1]


class StepCounter:
    """Counts the products of what runs inside: a context manager around one training step.

    The optimizer and everything elementwise count nothing, as in every MFU. Custom kernels that torch knows no formula
    for count nothing either: `unknown` names them, so that a low count is not taken for a cheap model.
    """

    def __enter__(self) -> StepCounter:
        from torch.utils.flop_counter import FlopCounterMode

        formulas = _formulas()
        self._known = {str(operator) for operator in formulas} | NO_PRODUCTS
        self._mode = FlopCounterMode(display=False, custom_mapping=formulas)
        self._names = _operator_names()
        self._names.__enter__()
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._names.__exit__(*error)

    def result(self) -> dict[str, Any]:
        by_operator = {str(op): int(n) for op, n in self._mode.get_flop_counts().get("Global", {}).items()}
        attention = sum(n for name, n in by_operator.items() if "attention" in name)
        return {
            "step": int(self._mode.get_total_flops()),
            "attention": attention,
            "by_operator": by_operator,
            "unknown": sorted(self._names.custom - {n.replace(".", "::", 1) for n in self._known}),
        }


def _formulas() -> dict[Any, Any]:
    """Operators that torch counts nothing for: attention on the CPU, and our own losses from hidden states.

    A backward pass that makes the logits again counts them once: MFU is of the model's work, not of the kernel's.
    """
    import torch
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    import prism_fast.kernels.from_hidden
    import prism_fast.kernels.scoring  # noqa: F401 - registers the operators

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(query, key, value)

    def attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_backward_flop_count(grad, query, key, value)

    def product(hidden: Any, weight: Any) -> int:
        return 2 * hidden[0] * hidden[1] * weight[0]

    def forward(hidden: Any, weight: Any, *_: Any, **__: Any) -> int:
        return product(hidden, weight)

    def backward(hidden: Any, weight: Any, *rest: Any, **__: Any) -> int:
        needs_hidden, needs_weight, _ = rest[-3:]
        return product(hidden, weight) * (bool(needs_hidden) + bool(needs_weight))

    def fused(hidden: Any, weight: Any, *rest: Any, **named: Any) -> int:
        return product(hidden, weight) + backward(hidden, weight, *rest, **named)

    ours = torch.ops.prism_fast
    found: dict[Any, Any] = {
        ours.linear_cross_entropy: forward,
        ours.linear_cross_entropy_backward: backward,
        ours.linear_cross_entropy_fused: fused,
        ours.linear_token_nll: forward,
    }
    for name, formula in (
        ("_scaled_dot_product_flash_attention_for_cpu", attention),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", attention_backward),
    ):
        if (operator := getattr(torch.ops.aten, name, None)) is not None:
            found[operator] = formula
    return found


def _operator_names() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        """Remembers operators outside torch's own namespaces."""

        def __init__(self) -> None:
            super().__init__()
            self.custom: set[str] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace not in ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional"):
                self.custom.add(str(func.overloadpacket).replace(".", "::", 1))
            return func(*args, **(kwargs or {}))

    return Names()


def forward_flops(model: Any, rows: int, width: int) -> int | None:
    """Products of one forward over `rows` x `width` tokens, or None where the model cannot be run on fake tensors.

    Nothing is computed and nothing of the model is touched: it is copied into fake tensors, which have shapes and no
    memory. A training step is three times this (the backward pass makes two products for each).
    """
    import copy
    import warnings

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    counter = StepCounter()
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            # The copy's parameters and buffers are fake from the start; other tensors it may hold are copied.
            tensors = [*model.parameters(), *model.buffers()]
            copied = copy.deepcopy(model, {id(t): fake.from_tensor(t) for t in tensors})
        with fake, torch.no_grad():
            tokens = torch.zeros((rows, width), dtype=torch.int64, device=device)
            with counter:
                copied(tokens)
    except Exception:  # a bundle's model may do anything; a figure that is only looked at must not end its run
        return None
    return counter.result()["step"] or None


def achieved(
    counted: dict[str, Any] | None, steps: int, seconds: float, device_names: list[str]
) -> dict[str, Any] | None:
    """FLOP/s of a window of `steps` steps, beside what the device can do."""
    if counted is None:
        return None
    total = float(counted["step"]) * steps
    share, peak, source = mfu(total, seconds, device_names)
    return {**counted, "per_second": total / seconds, "mfu": share, "peak_flops": peak, "peak_source": source}
