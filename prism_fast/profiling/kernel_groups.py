"""What a kernel does and which generation it was built for, read from its name.

Rules are tried in order; the first that matches decides. They cover the names that torch.profiler shows for cuBLAS and
cuBLASLt (`nvjet_*`, `sm90_xmma_gemm_*`, `ampere_*gemm*`), CUTLASS, flash and memory-efficient attention, cuDNN, Triton
and Inductor, NCCL and ATen on the GPU, ATen operators on the CPU, and this package's own. A name on no list is
"other": its share is shown, so that a gap in the rules is seen.
"""

from __future__ import annotations

import re

ATTENTION, GEMM, LOSS, OPTIMIZER = "attention", "dense GEMM", "loss", "optimizer"
ELEMENTWISE, EMBEDDING, COPY, COMMUNICATION, OTHER = "norm+elementwise", "embedding", "copy", "communication", "other"
HOST = "host"  # on the CPU: time inside a step that no operator accounts for (Python, dispatch)
GROUPS = (ATTENTION, GEMM, LOSS, OPTIMIZER, ELEMENTWISE, EMBEDDING, COPY, COMMUNICATION, OTHER, HOST)

_RULES: tuple[tuple[str, str], ...] = (
    (COMMUNICATION, r"nccl|rccl|gloo|c10d::|all_?reduce|all_?gather|reduce_?scatter|msccl|symm_mem"),
    (COPY, r"^memcpy|^memset|memcpy\b|copyBuffer|fillBuffer"),
    # Before GEMM: attention kernels are made of CUTLASS and cuDNN too. Before loss: eager attention's softmax.
    (
        ATTENTION,
        r"fmha|flash_?(fwd|bwd|attn|attention)|flash::|\bflash\b|attention|mem_?eff|sdpa|mha_(fwd|bwd)|paged_attn|"
        r"flex_attention|FlashAttn|ck_tile.*fmha",
    ),
    (
        OPTIMIZER,
        r"adam|adagrad|rmsprop|\blamb\b|\blion\b|muon|multi_tensor_apply|_foreach_|optimizer|FusedSgd|_fused_sgd",
    ),
    (
        LOSS,
        r"cross_?entropy|nll_?loss|log_?softmax|logsoftmax|prism_fast::|token_nll|liger_(fused_linear_)?cross|(?:^|[^a-z])cce_|"
        r"^_?(rows_forward|rows_fused|rows_backward|linear_forward|linear_backward|merge_partials|row_sums)|"
        r"\blse_forward|indexed_(neg_)?dot|kl_div|logsumexp|code_length",
    ),
    (EMBEDDING, r"embedding|index_select|indexSelect|\bgather|scatter|index_put|indexing_backward|aten::index"),
    (
        GEMM,
        r"gemm|gemv|cutlass|nvjet|cublas|\bmm\b|addmm|\bbmm\b|baddbmm|aten::(linear|matmul|dot|mv|addmv|einsum)\b|"
        r"_scaled_mm|grouped_mm|mkldnn_linear|splitK|triton_tem_|Cijk_|xmma|tensorop|wgmma|cudnn.*conv|convolution|"
        r"aten::(conv|_conv|slow_conv)|winograd",
    ),
    (
        COPY,
        r"aten::(copy_|_to_copy|to|cat|contiguous|clone|stack|_unsafe_view|pin_memory)$|direct_copy|CatArray|"
        r"copy_kernel|transpose_kernel|\bpad(ding)?_kernel|aten::(fill_|zero_|zeros|zeros_like)$|FillFunctor|fill_kernel",
    ),
    (
        ELEMENTWISE,
        r"elementwise|layer_?norm|rms_?norm|batch_?norm|group_?norm|\bnorm|_norm\b|vectorized|reduce_kernel|reduce_|"
        r"softmax|soft_?max|gelu|silu|relu|sigmoid|tanh|dropout|rotary|rope|triton_(poi|per|red|for)_|cumsum|"
        r"\bscan|sort|topk|arange|random|distribution|philox|where|mask|sum_kernel|"
        r"aten::(add|sub|mul|div|neg|exp|log|log1p|sqrt|rsqrt|pow|abs|sum|mean|max|min|amax|amin|clamp|"
        r"lt|le|gt|ge|eq|ne|logical_\w+|bitwise_\w+|where|masked_fill|reciprocal|addcmul|addcdiv|lerp|lerp_|sin|cos|"
        r"triu|tril|var|var_mean|std|linalg_vector_norm|arange|cumsum|isfinite|isnan|erf|floor|round|maximum|minimum|"
        r"native_\w+|_softmax\w*|threshold_backward|\w+_backward)_?(\.\w+)?$",
    ),
)  # fmt: skip
_COMPILED = tuple((group, re.compile(pattern, re.IGNORECASE)) for group, pattern in _RULES)

# Eager attention's own softmax, told from a loss's by the log it does not take.
_PLAIN_SOFTMAX = re.compile(r"softmax", re.IGNORECASE)
_LOG_SOFTMAX = re.compile(r"log_?softmax", re.IGNORECASE)


def group_of(name: str) -> str:
    """The group of a kernel or an operator, by its name."""
    if _PLAIN_SOFTMAX.search(name):
        return LOSS if _LOG_SOFTMAX.search(name) else ELEMENTWISE
    return next((group for group, pattern in _COMPILED if pattern.search(name)), OTHER)


# ------------------------------------------------------------------------------------------------------ generation

# Compute capability -> generation, in order of age.
_GENERATIONS = (
    ("Volta", (70, 72)),
    ("Turing", (75, 75)),
    ("Ampere", (80, 88)),
    ("Ada", (89, 89)),
    ("Hopper", (90, 99)),
    ("Blackwell", (100, 129)),
)
_SM = re.compile(r"(?:^|[^a-z])(?:sm|compute|cutlass)_?(\d{2,3})(?:a|f)?(?!\d)", re.IGNORECASE)
_BY_WORD = tuple((word, low) for word, low in (("volta", 70), ("turing", 75), ("ampere", 80), ("hopper", 90)))


def built_for(name: str) -> int | None:
    """The compute capability (80, 90, 120 ...) that a kernel's name says it was built for, or None if it says none.

    `cutlass_80_*`, `*_sm80`, `sm90_xmma_*`, `*Sm90*`, `ampere_*`. CUTLASS's own schedule names hold the tile sizes as
    plain numbers; only those behind sm, compute or cutlass count.
    """
    found = [int(m) for m in _SM.findall(name)]
    found = [v for v in found if _generation(v) is not None]
    if found:
        return max(found)
    lowered = name.lower()
    return next((low for word, low in _BY_WORD if lowered.startswith(word) or f"_{word}_" in lowered), None)


def generation_name(capability: int) -> str:
    found = _generation(capability)
    return _GENERATIONS[found][0] if found is not None else f"sm_{capability}"


def is_older(built: int, device: int) -> bool:
    """Whether a kernel built for `built` belongs to an earlier generation than the device. Ampere's on Ada are usual:
    Ada has no instructions of its own for them, so these two count as one."""
    a, b = _generation(built), _generation(device)
    if a is None or b is None:
        return False
    ada = [name for name, _ in _GENERATIONS].index("Ada")
    a, b = (ada - 1 if g == ada else g for g in (a, b))
    return a < b


def _generation(capability: int) -> int | None:
    for i, (_, (low, high)) in enumerate(_GENERATIONS):
        if low <= capability <= high:
            return i
    return None
