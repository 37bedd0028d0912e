"""Compiles the Triton kernels for GPUs that are not here, and keeps what each one takes of a multiprocessor.

    python -m benchmarks.triton_registers [--targets sm_90 gfx942] [--check]

Every case is launched as the backend would launch it on that GPU, with the launches recorded instead of made
(`launch.record`); each launch is then compiled by Triton's own assembler. One line a kernel: registers a thread, bytes
of stack and local memory (a spill, which no kernel may have), shared memory, bytes of the widest load.
tests/kernels/test_triton_compiled.py holds the figures written here: a kernel may use fewer registers, not more.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from prism_fast.kernels.backends import LossOptions
from prism_fast.kernels.backends import triton as backend
from prism_fast.kernels.backends.triton import launch

RESULT = Path(__file__).parent / "results" / "triton_registers.json"

TARGETS = {
    name: GPUTarget("cuda", device.arch, 32) if device.kind == "cuda" else GPUTarget("hip", device.arch, 64)
    for name, device in launch.KNOWN_DEVICES.items()
}
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}
_TRITON_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Compiled:
    """What one kernel takes. Registers are vector registers on ROCm, where scalar ones that do not fit are kept in
    lanes of those (`sgpr_spill`): not in memory, as `stack` = 0 shows."""

    kernel: str
    registers: int
    stack: int
    shared: int
    num_warps: int
    widest_load: int
    wide_loads: int
    wide_stores: int
    narrow_loads: int
    sgpr_spill: int = 0


def cases(everything: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and call. The shapes are those of a training step (8192 tokens) and of a small scoring batch (64)."""
    for name, dtype in DTYPES.items():
        yield from _logits_cases(name, dtype, everything)
    yield from _hidden_cases("bf16", torch.bfloat16, everything)
    if everything:
        yield from _hidden_cases("f16", torch.float16, everything)
    nll, target = _on_meta(64, 4096), _on_meta(64, 4096, dtype=torch.int64)
    yield "sums", lambda: backend.sum_rows(_on_meta(8192))
    table = _on_meta(50304, dtype=torch.int32)
    yield "code length", lambda: backend.batch_code_length(nll, target, table, 21.7, -100)
    yield "scale", lambda: backend.scale_rows(_on_meta(8192, 50257, dtype=torch.bfloat16), _on_meta(1).expand(8192))


def _on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without memory: a launch is recorded from shapes, strides and alignment."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _options(vocab: int, accumulator: torch.dtype) -> dict[str, LossOptions]:
    weight = _on_meta(vocab, dtype=accumulator)
    return {
        "plain": LossOptions(),
        "softcap": LossOptions(softcap=30.0),
        "smoothing": LossOptions(label_smoothing=0.1, z_loss=1e-4),
        "weight": LossOptions(class_weight=weight),
        "all": LossOptions(label_smoothing=0.1, z_loss=1e-4, softcap=30.0, class_weight=weight),
    }


def _logits_cases(name: str, dtype: torch.dtype, everything: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    for n, vocab in ((8192, 50257), (64, 50304)):
        logits, target = _on_meta(n, vocab, dtype=dtype), _on_meta(n, dtype=torch.int64)
        lse, upstream = _on_meta(n, dtype=torch.float64), _on_meta(1, dtype=accumulator).expand(n)
        tag = f"{name} {n}x{vocab}"
        yield f"score {tag}", lambda x=logits, t=target: backend.token_nll(x, t, -100, False, False)
        if name == "bf16":
            yield f"score+ {tag}", lambda x=logits, t=target: backend.token_nll(x, t, -100, True, True)
        for chosen, options in _options(vocab, accumulator).items():
            if chosen != "plain" and (name != "bf16" or n == 64) and not (everything and chosen == "all"):
                continue
            if chosen not in ("plain", "all") and not everything:
                continue
            if chosen != "plain":
                yield (
                    f"forward {chosen} {tag}",
                    lambda x=logits, t=target, o=options: backend.cross_entropy_forward(x, t, o),
                )
            yield (
                f"backward {chosen} {tag}",
                lambda x=logits, t=target, s=lse, g=upstream, o=options: backend.cross_entropy_backward(
                    x, t, s, g, o, x
                ),
            )
            if n > 64:
                yield (
                    f"fused {chosen} {tag}",
                    lambda x=logits, t=target, g=upstream, o=options: backend.cross_entropy_forward_backward(
                        x, t, g, o, x
                    ),
                )
    across = _on_meta(50304, 64, dtype=dtype).t()
    if name == "bf16" or everything:
        yield f"score {name} 64x50304 transposed", lambda: backend.token_nll(across, target, -100, False, False)
    if everything:
        heaviest = _options(50304, accumulator)["all"]
        yield (
            f"fused all {name} 64x50304 transposed",
            lambda: backend.cross_entropy_forward_backward(across, target, upstream, heaviest, across),
        )
    if name == "bf16":
        yield "shard bf16 64x50304", lambda: backend.token_nll_shard(logits, target, -100, 50304)
        yield (
            "backward plain bf16 64x50304 to a padded buffer",
            lambda: backend.cross_entropy_backward(
                logits, target, lse, upstream, LossOptions(), _on_meta(64, 50305, dtype=dtype)[:, :50304]
            ),
        )


def _hidden_cases(name: str, dtype: torch.dtype, everything: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    n, size, vocab = 8192, 4096, 128256
    hidden, weight, bias = (_on_meta(*shape, dtype=dtype) for shape in ((n, size), (vocab, size), (vocab,)))
    target, lse, upstream = _on_meta(n, dtype=torch.int64), _on_meta(n, dtype=torch.float64), _on_meta(1).expand(n)
    for chosen, options in _options(vocab, torch.float32).items():
        if chosen != "plain" and not everything:
            continue
        head_bias = None if chosen == "plain" else bias
        yield (
            f"linear forward {chosen} {name}",
            lambda o=options, b=head_bias: backend.linear_cross_entropy_forward(hidden, weight, b, target, o, 0),
        )
        # One range of classes: every range is the same kernel.
        yield (
            f"linear backward {chosen} {name}",
            lambda o=options, b=head_bias: backend.linear_cross_entropy_backward(
                hidden, weight, b, target, lse, upstream, o, n, (False, False, False)
            ),
        )
    if everything:
        yield f"linear score+ {name}", lambda: backend.linear_token_nll(hidden, weight, None, target, -100, True, True)


def source_of(call: launch.Call) -> ASTSource:
    """The specialisation that a launch with these arguments compiles: what Triton's own launcher derives."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    divisible: list[list[Any]] = [["tt.divisibility", 16]]
    for parameter in call.kernel.params:
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", call.constants[name]
            continue
        value = call.args[name]
        if isinstance(value, Tensor):
            signature[name] = "*" + _TRITON_TYPES[value.dtype]
            # As an allocation is aligned, so is a view by its offset.
            if value.storage_offset() * value.element_size() % 16 == 0:
                attributes[(parameter.num,)] = divisible
        elif parameter.annotation_type:
            signature[name] = parameter.annotation_type
        elif value == 1 and not parameter.do_not_specialize:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(parameter.num,)] = divisible
    return ASTSource(call.kernel, signature, constexprs=constants, attrs=attributes)


def compile_call(call: launch.Call, target: str) -> Compiled:
    kernel = triton.compile(source_of(call), target=TARGETS[target], options=call.options)
    name, shared, num_warps = call.kernel.fn.__name__, kernel.metadata.shared, call.options["num_warps"]
    if target.startswith("gfx"):
        text = kernel.asm["amdgcn"]
        figures = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)\s*$", text, re.MULTILINE)}
        spilled = 4 * figures["vgpr_spill_count"]
        return Compiled(
            kernel=name,
            registers=figures["vgpr_count"],
            stack=figures["private_segment_fixed_size"] + spilled,
            shared=shared,
            num_warps=num_warps,
            sgpr_spill=figures["sgpr_spill_count"],
            **_widths(
                [4 * int(width or 1) for width in re.findall(r"(?:global|buffer)_load_dword(?:x(\d))?\b", text)],
                [4 * int(width or 1) for width in re.findall(r"(?:global|buffer)_store_dword(?:x(\d))?\b", text)],
                len(re.findall(r"(?:global|buffer)_load_u?short", text)),
            ),
        )
    ptx = kernel.asm["ptx"]
    registers, stack = _resources(kernel.asm["cubin"])
    loads = [_bytes(width, bits) for width, bits in re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)]
    loads += [int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x[0-9a-f]+),", ptx)]
    stores = [_bytes(width, bits) for width, bits in re.findall(r"st\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)]
    narrow = len(re.findall(r"ld\.global[\w.:]*?\.[bu]16\b", ptx))
    return Compiled(name, registers, stack, shared, num_warps, **_widths(loads, stores, narrow))


def _bytes(vector: str, bits: str) -> int:
    return int(vector or 1) * int(bits) // 8


def _widths(loads: list[int], stores: list[int], narrow: int) -> dict[str, int]:
    return {
        "widest_load": max(loads, default=0),
        "wide_loads": sum(size >= 16 for size in loads),
        "wide_stores": sum(size >= 16 for size in stores),
        "narrow_loads": narrow,
    }


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread; bytes of stack and local memory."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    figures = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return figures["REG"], figures["STACK"] + figures["LOCAL"]


def may_spill(key: str) -> bool:
    """Float64 is for reference; with every option at once its tanh alone fills the 255 registers of a thread."""
    return "all f64" in key


def compile_case(job: tuple[str, str, bool]) -> list[tuple[str, Compiled]]:
    """(target, case, whether it is one of the full set) -> each kernel that the case launches, under its key."""
    target, name, everything = job
    call_case = dict(cases(everything))[name]
    with launch.record(launch.KNOWN_DEVICES[target]) as calls:
        call_case()
    results = {}
    for call in calls:
        results[f"{target} / {name} / {call.kernel.fn.__name__}"] = compile_call(call, target)
    return list(results.items())


def compile_jobs(jobs: list[tuple[str, str, bool]], workers: int = 2) -> dict[str, Compiled]:
    """In processes of their own, side by side: compiling holds the interpreter's lock."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return {key: value for found in pool.map(compile_case, jobs, chunksize=4) for key, value in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    arguments = parser.parse_args()
    compiled = compile_jobs([(target, name, True) for target in arguments.targets for name, _ in cases(True)])
    for key, kernel in compiled.items():
        spill = f"  STACK {kernel.stack}" if kernel.stack else ""
        print(f"{kernel.registers:4d} registers {kernel.shared // 1024:4d} KiB shared  {key}{spill}")
    spilled = [key for key, kernel in compiled.items() if kernel.stack]
    excused = [key for key in spilled if may_spill(key)]
    print(
        f"{len(compiled)} kernels, {len(spilled)} with stack, {len(excused)} of them float64 with every option at once;"
    )
    print(f"triton {triton.__version__}")
    if not arguments.check:
        rows = json.loads(RESULT.read_text())["kernels"] if RESULT.exists() else {}
        rows = {key: row for key, row in rows.items() if key.split(" / ")[0] not in arguments.targets}
        rows |= {key: asdict(kernel) for key, kernel in compiled.items()}
        versions = {"triton": triton.__version__, "torch": torch.__version__.split("+")[0]}
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(rows.items()))
        RESULT.write_text(f'{{"versions": {json.dumps(versions)}, "kernels": {{\n{lines}\n}}}}\n')
        print(f"written to benchmarks/results/{RESULT.name}")
    return 1 if len(spilled) > len(excused) else 0


if __name__ == "__main__":
    sys.exit(main())
