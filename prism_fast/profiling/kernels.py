"""The kernel table: which kernels a training step spends its time in, by torch.profiler over a few steps.

On a GPU only the device's own rows count, as shares of the time the device was busy. On the CPU the operators' own
times count, and what is left of the step (Python, dispatch) is a row of its own, so that the rows add up to the step.
The profiler runs for `active` steps and no longer: its memory is bounded by them, however long the run. Each rank can
write a Chrome trace of its window.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from prism_fast.profiling import kernel_groups as groups
from prism_fast.profiling.bundle_process import BundleJob, run_bundle
from prism_fast.protocol.errors import UsageError

SCHEMA = "prism_profile_kernels.v1"
WARMUP_STEPS = 3
OLDER_SHARE = 0.05  # of device time in kernels of an older generation: from here on it is worth a warning
MAX_ROWS = 200  # distinct names kept; the rest is folded into one row
NAME_CHARACTERS = 240
OPTIMIZER_RANGE = "Optimizer."  # torch.optim wraps every step in a range named Optimizer.step#<class>.step


@dataclass(frozen=True)
class Row:
    """One kernel or operator: calls and seconds over the whole window. `built_for`: compute capability, or None."""

    name: str
    group: str
    seconds: float
    calls: int
    built_for: int | None = None


class KernelWindow:
    """An observer (see `harness.bare`): profiles steps `warmup` to `warmup + active`, then stops for good."""

    def __init__(
        self, device_type: str, rank: int, warmup: int, active: int, trace_dir: str | None = None, flops: bool = True
    ) -> None:
        self._cuda, self._rank, self._warmup, self._active = device_type == "cuda", rank, warmup, active
        self._trace_dir, self._count_flops = trace_dir, flops
        self._profiler: Any = None
        self._found: dict[str, Any] = {}
        self._step_s: list[float] = []
        self._range: Any = None

    def begin(self, index: int, model: Any, tokens: Any) -> None:
        from torch.profiler import ProfilerActivity, profile, record_function

        if index == 0 and self._count_flops:
            from prism_fast.profiling.flops import StepCounter

            self._counter = StepCounter()
            self._counter.__enter__()
        if index == self._warmup:
            self._synchronize()
            activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._cuda else [])
            self._profiler = profile(activities=activities)
            self._profiler.__enter__()
        if self._profiler is not None:
            self._began = perf_counter()
            self._range = record_function(f"prism::step {index}")
            self._range.__enter__()

    def end(self, index: int) -> None:
        if index == 0 and self._count_flops:
            self._counter.__exit__(None, None, None)
            self._found["flops"] = self._counter.result()
        if self._profiler is None:
            return
        if index == self._warmup + self._active - 1:
            self._synchronize()  # the window closes when the device is done with it
        self._range.__exit__(None, None, None)
        self._step_s.append(perf_counter() - self._began)
        if index == self._warmup + self._active - 1:
            profiler, self._profiler = self._profiler, None
            profiler.__exit__(None, None, None)
            self._read(profiler)

    def result(self) -> dict[str, Any]:
        return self._found

    def _read(self, profiler: Any) -> None:
        rows = rows_on_device(profiler.events()) if self._cuda else rows_on_host(profiler.events())
        self._found |= {
            "window_s": sum(self._step_s),
            "steps": len(self._step_s),
            "rows": [r.__dict__ for r in rows],
            "capability": None,
            "trace": None,
        }
        if self._cuda:
            import torch

            major, minor = torch.cuda.get_device_capability()
            self._found["capability"] = 10 * major + minor
        if self._trace_dir is not None:
            path = Path(self._trace_dir) / f"trace-rank-{self._rank}.json.gz"
            profiler.export_chrome_trace(str(path))
            self._found["trace"] = str(path)

    def _synchronize(self) -> None:
        if self._cuda:
            import torch

            torch.cuda.synchronize()


def rows_on_host(events: Iterable[Any]) -> list[Row]:
    """Operators by their own time, largest first; what a `prism::step` range keeps for itself is the host row.

    An operator inside an optimizer's step is the optimizer's, whatever it computes.
    """
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    for event in events:
        own = event.self_cpu_time_total / 1e6
        ancestors = _ancestors(event)
        if event.name.startswith("prism::step"):
            key = ("outside any operator: Python, dispatch", groups.HOST)
        elif not any(name.startswith("prism::step") for name in ancestors):
            continue
        elif event.name.startswith(OPTIMIZER_RANGE) or any(n.startswith(OPTIMIZER_RANGE) for n in ancestors):
            key = (event.name, groups.OPTIMIZER)
        else:
            key = (event.name, _host_group(event.name, ancestors))
        seconds[key] += own
        calls[key] += 1
    rows = [Row(name, group, s, calls[name, group]) for (name, group), s in seconds.items()]
    return _largest(rows)


def _host_group(name: str, ancestors: list[str]) -> str:
    """By name; an operator that only allocates, views or wraps belongs to what called it."""
    group = groups.group_of(name)
    if group not in (groups.OTHER, groups.COPY, groups.ELEMENTWISE, groups.GEMM):
        return group
    for ancestor in ancestors:
        above = groups.group_of(ancestor)
        if above in (groups.ATTENTION, groups.LOSS):
            return above
        if group == groups.OTHER and above != groups.OTHER:
            return above
    # Views, allocation and autograd's bookkeeping between operators: nobody's in particular.
    return groups.HOST if group == groups.OTHER and _is_wrapper(name) else group


_WRAPPERS = (
    "autograd::engine", "torch::autograd::AccumulateGrad", "aten::view", "aten::empty", "aten::t", "aten::transpose",
    "aten::as_strided", "aten::reshape", "aten::expand", "aten::detach", "detach", "aten::slice", "aten::select",
    "aten::unsqueeze", "aten::squeeze", "aten::permute", "aten::flatten", "aten::chunk", "aten::split", "aten::narrow",
    "aten::alias", "aten::result_type", "aten::resize_", "aten::item", "aten::_local_scalar_dense", "aten::is_nonzero",
    "aten::_unsafe_view", "aten::set_", "aten::resolve_conj", "aten::resolve_neg",
)  # fmt: skip


def _is_wrapper(name: str) -> bool:
    return name.startswith(_WRAPPERS) or name.endswith(("Backward0", "Backward1"))


def rows_on_device(events: Iterable[Any]) -> list[Row]:
    """The device's rows (kernels, copies, fills), largest first.

    A kernel launched inside an optimizer's step is the optimizer's; other groups come from the kernel's name.
    """
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    optimizer: dict[str, tuple[float, int]] = {}
    for event in events:
        if _on_device(event):
            seconds[event.name] += _device_seconds(event)
            calls[event.name] += 1
            continue
        kernels = getattr(event, "kernels", ())
        if kernels and any(n.startswith(OPTIMIZER_RANGE) for n in (event.name, *_ancestors(event))):
            for kernel in kernels:
                s, n = optimizer.get(kernel.name, (0.0, 0))
                optimizer[kernel.name] = (s + kernel.duration / 1e6, n + 1)
    rows = []
    for name, total in seconds.items():
        if name.startswith("prism::step"):
            continue  # the range's shadow on the device's timeline
        s, n = optimizer.get(name, (0.0, 0))
        s, n = min(s, total), min(n, calls[name])
        if n:
            rows.append(Row(name, groups.OPTIMIZER, s, n, groups.built_for(name)))
        if calls[name] > n:
            rows.append(Row(name, groups.group_of(name), total - s, calls[name] - n, groups.built_for(name)))
    return _largest(rows)


def _largest(rows: list[Row]) -> list[Row]:
    rows.sort(key=lambda r: -r.seconds)
    kept = [replace(r, name=r.name[:NAME_CHARACTERS]) for r in rows[:MAX_ROWS]]
    for group in sorted({r.group for r in rows[MAX_ROWS:]}):
        rest = [r for r in rows[MAX_ROWS:] if r.group == group]
        kept.append(
            Row(f"{len(rest)} more, {group}", group, sum(r.seconds for r in rest), sum(r.calls for r in rest), None)
        )
    return kept


def _ancestors(event: Any) -> list[str]:
    names, parent = [], event.cpu_parent
    while parent is not None:
        names.append(parent.name)
        parent = parent.cpu_parent
    return names


def _on_device(event: Any) -> bool:
    return str(getattr(event, "device_type", "")).rpartition(".")[2] in ("CUDA", "PrivateUse1", "XPU")


def _device_seconds(event: Any) -> float:
    for name in ("self_device_time_total", "self_cuda_time_total"):
        if (value := getattr(event, name, None)) is not None:
            return value / 1e6
    return 0.0


# ---------------------------------------------------------------------------------------------------------- the table


def measure_kernels(job: BundleJob, active: int = 3, warmup: int = WARMUP_STEPS, trace_dir: Path | None = None) -> Any:
    """-> the probe's document: groups and rows with their shares, coverage, warnings, FLOPs, one entry a rank."""
    if len(job.widths) != 1:
        raise UsageError(f"widths {','.join(map(str, job.widths))}: the kernel table is of one width")
    if active < 1 or warmup < 1:
        raise UsageError(f"{active} steps after {warmup}: expected 1 or more of both")
    if trace_dir is not None:
        trace_dir.mkdir(parents=True, exist_ok=True)
    observe = {
        "what": "kernels",
        "warmup": warmup,
        "active": active,
        "trace_dir": None if trace_dir is None else str(trace_dir.absolute()),
    }
    found = run_bundle(replace(job, steps=warmup + active, observe=observe))
    first = found[0]
    return {
        "schema": SCHEMA,
        "submission_id": first["submission_id"],
        "machine": first["machine"],
        "device": first["device"],
        "model_params": first["model_params"],
        "batch_size": first["batch_size"],
        "width": job.widths[0],
        "steps": active,
        "ranks": [kernel_table(document) for document in found],
    }


def kernel_table(found: dict[str, Any]) -> dict[str, Any]:
    """The table of one rank's window.

    busy_s: the rows' sum. covered: the rows' time over what they should add up to, the step on the CPU and the busy
    device on a GPU. named: the share of busy_s in a group that says what it is (not "other"). idle_share (GPU): the
    part of the window in which the device had nothing to do, if its kernels do not overlap.
    """
    from prism_fast.profiling.flops import achieved

    on_device = found["device"].startswith("cuda")
    rows, window_s, capability = found["rows"], found["window_s"], found["capability"]
    busy_s = sum(r["seconds"] for r in rows)
    by_group = {
        g: (sum(r["seconds"] for r in rows if r["group"] == g), sum(r["calls"] for r in rows if r["group"] == g))
        for g in groups.GROUPS
    }
    older = sum(
        r["seconds"]
        for r in rows
        if capability is not None and r["built_for"] is not None and groups.is_older(r["built_for"], capability)
    )
    share = older / busy_s if busy_s else 0.0
    return {
        "device": found["device"],
        "capability": capability,
        "window_s": window_s,
        "busy_s": busy_s,
        "covered": 1.0 if on_device else busy_s / window_s,
        "named": 1 - by_group[groups.OTHER][0] / busy_s if busy_s else 0.0,
        "idle_share": max(0.0, 1 - busy_s / window_s) if on_device else None,
        "groups": [
            {"group": g, "seconds": s, "calls": n, "share": s / busy_s}
            for g, (s, n) in sorted(by_group.items(), key=lambda item: -item[1][0])
            if n
        ],
        "rows": [r | {"share": r["seconds"] / busy_s if busy_s else 0.0} for r in rows],
        "older_generation_share": share if capability is not None else None,
        "warnings": generation_warnings(rows, busy_s, capability),
        "flops": achieved(
            found.get("flops"), found["steps"], window_s, found["machine"]["gpus"][:1] if on_device else []
        ),
        "trace": found["trace"],
    }


def generation_warnings(rows: list[dict[str, Any]], busy_s: float, capability: int | None) -> list[str]:
    """One sentence an older generation that takes at least 5 % of device time on a newer card."""
    if capability is None or busy_s <= 0:
        return []
    by_generation: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["built_for"] is not None and groups.is_older(row["built_for"], capability):
            by_generation[groups.generation_name(row["built_for"])].append(row)
    found = []
    for generation, older in by_generation.items():
        share = sum(r["seconds"] for r in older) / busy_s
        if share >= OLDER_SHARE:
            built = sorted({r["built_for"] for r in older})
            found.append(
                f"{share:.1%} of device time is in kernels built for {generation} "
                f"({', '.join(f'sm_{b}' for b in built)}) on an sm_{capability} device "
                f"({groups.generation_name(capability)}); the largest is {older[0]['name'][:80]}"
            )
    return found
