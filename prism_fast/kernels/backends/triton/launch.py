"""Where a kernel runs and with what parameters: one documented rule a kernel, nothing is tuned at first use.

The rules follow from counting, per multiprocessor: bytes in flight to cover memory latency (about 24 KiB at 4 TB/s over
132 multiprocessors), registers a thread (65,536 in all), shared memory. `tests/kernels/test_triton_compiled.py`
compiles every kernel with them for every architecture and holds the register counts. None of them reaches a result's
bits: those depend on `fold.geometry` alone.

`override("rows_forward", num_warps=16)` replaces a rule's choice within a `with` block.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Device:
    """What the rules need to know of a device. `arch` is 80, 90, 100, 120 on CUDA, "gfx942" on ROCm."""

    kind: str  # "cuda", "hip", "xpu" or "interpreter"
    arch: int | str
    multiprocessors: int
    l2_bytes: int
    shared_bytes: int  # a program's limit

    @property
    def warp_size(self) -> int:
        return 64 if self.kind == "hip" else 32


# Published figures, for compiling without the device.
KNOWN_DEVICES = {
    "sm_80": Device("cuda", 80, 108, 40 << 20, 163 << 10),
    "sm_90": Device("cuda", 90, 132, 50 << 20, 227 << 10),
    "sm_100": Device("cuda", 100, 148, 126 << 20, 227 << 10),
    "sm_120": Device("cuda", 120, 170, 96 << 20, 99 << 10),
    "gfx942": Device("hip", "gfx942", 304, 4 << 20, 64 << 10),
}
_INTERPRETER = Device("interpreter", "none", 4, 1 << 20, 1 << 30)


@functools.cache
def _describe(device: torch.device) -> Device:
    if device.type == "cpu":
        return _INTERPRETER
    if device.type == "xpu":
        xpu: Any = torch.xpu.get_device_properties(device)
        return Device("xpu", "xpu", xpu.gpu_subslice_count, 16 << 20, 64 << 10)
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        arch = properties.gcnArchName.split(":")[0]
        return Device("hip", arch, properties.multi_processor_count, properties.L2_cache_size, 64 << 10)
    arch = 10 * properties.major + properties.minor
    shared = properties.shared_memory_per_block_optin
    return Device("cuda", arch, properties.multi_processor_count, properties.L2_cache_size, shared)


def interpreting() -> bool:
    """True where Triton was told to run kernels on the CPU (its own switch, read when kernels are defined)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@dataclass(frozen=True)
class Call:
    """One launch: everything `kernel[grid](**args, **constants, **options)` takes."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]


@dataclass
class _Recorder:
    device: Device
    calls: list[Call] = field(default_factory=list)


_recorder: _Recorder | None = None
_overrides: dict[str, dict[str, int]] = {}


def device_of(tensor: torch.Tensor) -> Device:
    return _recorder.device if _recorder is not None else _describe(tensor.device)


@contextlib.contextmanager
def record(device: Device) -> Iterator[list[Call]]:
    """Collects launches, as they would be made on `device`, in place of making them: for compiling ahead of time."""
    global _recorder
    _recorder = _Recorder(device)
    try:
        yield _recorder.calls
    finally:
        _recorder = None


@contextlib.contextmanager
def override(kernel: str, **parameters: int) -> Iterator[None]:
    """Replaces parameters that the rules choose for `kernel`, by its name in this file, within the block."""
    before = _overrides.get(kernel)
    _overrides[kernel] = {**(before or {}), **parameters}
    try:
        yield
    finally:
        if before is None:
            del _overrides[kernel]
        else:
            _overrides[kernel] = before


def run(
    kernel: Any, grid: tuple[int, ...], args: dict[str, Any], constants: dict[str, Any], options: dict[str, int]
) -> None:
    """Launches on the device of the tensors (whichever is current) unless launches are being recorded."""
    if _recorder is not None:
        _recorder.calls.append(Call(kernel, grid, args, constants, options))
        return
    device = next(value.device for value in args.values() if isinstance(value, torch.Tensor))
    with _current(device):
        kernel[grid](**args, **constants, **options)


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type == "cuda":
        return torch.cuda.device(device)
    if device.type == "xpu":
        return torch.xpu.device(device)
    return contextlib.nullcontext()


# --- the rules --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowsForward:
    num_warps: int
    programs: int  # a row
    segments: int  # a program
    stages: int  # windows being loaded ahead
    max_registers: int  # a thread; 0: as the compiler likes


@dataclass(frozen=True)
class Load:
    """What the options ask of a kernel over logits."""

    itemsize: int
    plain: bool  # no class weights, no smoothing, no softcap, no entropy
    heavy: bool  # a class weight to load for every logit
    apart: bool = False  # neighbours of a row are not neighbours in memory: every logit has an address of its own


def _power_of_2(x: int, at_least: int = 32) -> int:
    return max(at_least, 1 << (x - 1).bit_length())


def _warps(places: int, itemsize: int, device: Device, at_most: int) -> int:
    """One 16-byte access a thread over `places` elements, up to `at_most` threads."""
    threads = min(at_most, places * itemsize // 16)
    return max(1, threads // device.warp_size)


def _window_warps(lanes: int, load: Load, device: Device) -> int:
    """Warps that fold one window. A class weight or an address for every logit doubles what a thread keeps: half as
    many a thread."""
    return _warps(lanes, max(4, load.itemsize) if load.heavy or load.apart else load.itemsize, device, 256)


def _registers(load: Load) -> int:
    """128 keep 16 warps resident. Where that spills, as many as there are: left alone, the assembler would spill."""
    return 128 if load.plain and load.itemsize <= 4 else 255


def rows_forward(device: Device, lanes: int, segments: int, load: Load, rows: int) -> RowsForward:
    """128 threads (half precision) or 256, at most 128 registers: 16 warps resident, two windows of 8 or 16 KiB in
    flight for each program while it folds a third: 64 KiB a multiprocessor.

    A row is shared by several programs while there are fewer than 8 waves of them, so that the last, partly filled
    wave costs at most an eighth.
    """
    slots = 8 * 4 * device.multiprocessors
    choice = {
        "num_warps": _window_warps(lanes, load, device),
        "segments": min(segments, max(1, rows * segments // slots)),
        "stages": 3,
        "max_registers": _registers(load),
        **_overrides.get("rows_forward", {}),
    }
    choice["segments"] = min(choice["segments"], segments)
    return RowsForward(programs=-(-segments // choice["segments"]), **choice)


@dataclass(frozen=True)
class RowsBackward:
    num_warps: int
    places: int  # a program
    max_registers: int = 0


def rows_backward(device: Device, vocab: int, itemsize: int) -> RowsBackward:
    """256 threads a program, 2 loads of 16 bytes each: nothing is kept, so occupancy alone covers the latency.

    Left alone, the assembler would spill to reach 80 registers; about 100 are wanted.
    """
    places = min(256 * 2 * 16 // itemsize, _power_of_2(vocab + 15))
    choice = {"num_warps": _warps(places // 2, itemsize, device, 256), "places": places, "max_registers": 128}
    return RowsBackward(**{**choice, **_overrides.get("rows_backward", {})})


@dataclass(frozen=True)
class RowsFused:
    num_warps: int
    abreast: int  # segments at a time
    stages: int  # windows being loaded ahead, and the one in use
    places: int  # of a row written at a time
    max_registers: int


def rows_fused(device: Device, lanes: int, tiles: int, segments: int, vocab: int, load: Load) -> RowsFused:
    """512 threads a multiprocessor: one program if two rows each would overfill half of L2, else two.

    Half, because what is being written needs room as well. With options 512 threads would spill: 256, whatever L2. And
    no more segments at a time than the shared memory holds twice, one set loading while the other is in use.
    """
    overfull = 2 * device.multiprocessors * vocab * load.itemsize > device.l2_bytes // 2
    window = _window_warps(lanes, load, device)
    widest = max(1, (512 if overfull and load.plain else 256) // device.warp_size // window)
    held = device.shared_bytes // (2 * lanes * tiles * load.itemsize)
    fitting = 1 << max(0, held.bit_length() - 1)
    abreast = min(widest, fitting, _power_of_2(segments, at_least=1))
    choice = {
        "num_warps": window * abreast,
        "abreast": abreast,
        "stages": 3,
        "places": min(window * abreast * device.warp_size * 16 // load.itemsize, _power_of_2(vocab + 15)),
        "max_registers": _registers(load),
        **_overrides.get("rows_fused", {}),
    }
    return RowsFused(**choice)


@dataclass(frozen=True)
class Linear:
    """A tile of logits: `rows` x `columns`, `depth` of the hidden size at a time, `stages` of them in shared memory."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    span_tiles: int  # a program of the forward pass
    group: int  # row tiles that run together


_LINEAR: dict[int | str, tuple[int, int, int, int, int]] = {
    # One program a multiprocessor: 3 stages of 48 KiB; 64 accumulators a thread leave as many for what follows.
    90: (128, 256, 64, 16, 3),
    # Tensor memory is read by 4 or 8 warps. Two programs of 96 KiB: one multiplies while the other sums.
    100: (128, 128, 64, 8, 3),
    # 3 stages of 32 KiB of 163.
    80: (128, 128, 64, 8, 3),
    # 4 stages of 16 KiB: 99 KiB are all there is.
    120: (128, 128, 32, 8, 4),
    # 64 KiB of LDS hold one stage of 32 KiB; the next waits in registers.
    "gfx942": (128, 128, 64, 4, 2),
    # Several tiles of small tests.
    "none": (16, 32, 16, 4, 1),
}


def linear(device: Device, hidden_size: int, load: Load) -> Linear:
    """Large tiles, and as many row tiles at a time as keep their hidden states within half of L2.

    Options keep more beside each accumulator, and class weights under smoothing most: half and a quarter of the
    columns then, or registers would spill.
    """
    known = device.arch if device.arch in _LINEAR else 80 if device.kind == "cuda" else "gfx942"
    rows, columns, depth, num_warps, num_stages = _LINEAR[known]
    if device.kind != "interpreter":
        if not load.plain:
            columns, num_warps = columns // 2, min(num_warps, 8)
        if load.heavy:
            columns //= 2
    fit = max(1, device.l2_bytes // 2 // (rows * hidden_size * load.itemsize))
    choice = {
        "rows": rows,
        "columns": columns,
        "depth": depth,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "span_tiles": 2048 // columns if columns >= 64 else 3,
        "group": max(8, min(64, 1 << (fit.bit_length() - 1))),
        **_overrides.get("linear", {}),
    }
    return Linear(**choice)


# Parts of the arithmetic, like `fold.geometry`: how many running sums a sum of rows has.
SUM_LINE = 2048
CODE_LENGTH_LINE = 512


def rows_scale(device: Device, columns: int, itemsize: int) -> RowsBackward:
    """256 threads, 16 bytes each: a copy."""
    places = min(256 * 16 // itemsize, _power_of_2(columns))
    return RowsBackward(num_warps=_warps(places, itemsize, device, 256), places=places)


def options(device: Device, num_warps: int, max_registers: int = 0, **more: int) -> dict[str, int]:
    """Triton's launch options; the register limit exists on CUDA alone."""
    if max_registers and device.kind == "cuda":
        more["maxnreg"] = max_registers
    return {"num_warps": num_warps, **more}
