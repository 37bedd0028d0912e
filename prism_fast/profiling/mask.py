"""The mask probe: which keys attention may really see, and what an explicit mask costs against `is_causal`.

A model that says "sliding window" may still be handed a full mask, or a causal one that right-padding has turned into
an explicit tensor and off the fast path. The probe watches one step of the bundle and looks at the masks themselves.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from time import perf_counter, process_time
from typing import Any

from prism_fast.profiling.bundle_process import BundleJob, run_bundle
from prism_fast.protocol.errors import BundleFailed, UsageError

SCHEMA = "prism_profile_mask.v1"
TIMED_REPEATS = 9


class AttentionWatch:
    """An observer (see `harness.bare`): records every attention call of the first step, then times its shapes."""

    def __init__(self, window: int | None = None, repeats: int = TIMED_REPEATS) -> None:
        self._window, self._repeats = window, repeats
        self._calls: list[dict[str, Any]] = []
        self._watch: Any = None
        self._times: list[dict[str, Any]] = []

    def begin(self, index: int, model: Any, tokens: Any) -> None:
        if index == 0:
            self._watch = _watch(self._calls)
            self._watch.__enter__()

    def end(self, index: int) -> None:
        if index == 0:
            self._watch.__exit__(None, None, None)
            shapes = {(tuple(c["query"]), tuple(c["key"]), c["dtype"]): c for c in self._calls}
            self._times = [time_masks(call, self._window, self._repeats) for call in shapes.values()]

    def result(self) -> dict[str, Any]:
        return {"calls": merge_calls(self._calls), "times": self._times}


def _watch(calls: list[dict[str, Any]]) -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    attention = torch.nn.functional.scaled_dot_product_attention

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is attention and torch.is_grad_enabled():
                calls.append(describe_call(*args, **kwargs))
            return func(*args, **kwargs)

    return Watch()


def describe_call(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> dict[str, Any]:
    """What one call to scaled_dot_product_attention allows. Query [..., L, E], key [..., S, E].

    allowed_max, allowed_min: keys that the most and the least permissive row may attend to. causal: no row sees a key
    after it (rows and keys end together, as with a cache). padded: rows of the batch differ, which an explicit mask
    for right-padding shows.
    """
    length, keys = query.shape[-2], key.shape[-2]
    found = {
        "query": list(query.shape),
        "key": list(key.shape),
        "dtype": str(query.dtype).removeprefix("torch."),
        "device": query.device.type,
        "is_causal": bool(is_causal),
        "mask": None,
        "mask_shape": None,
        "dropout": float(dropout_p),
        "padded": False,
    }
    if attn_mask is None:
        found["allowed_max"] = min(length, keys) if is_causal else keys
        found["allowed_min"] = 1 if is_causal else keys
        found["causal"] = bool(is_causal) or keys == 1
        return found
    import torch

    mask = attn_mask.detach()
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    counts = allowed.expand(*allowed.shape[:-1], keys).sum(-1)
    after = torch.ones(length, keys, dtype=torch.bool, device=mask.device).triu(1 + keys - length)
    found |= {
        "mask": str(mask.dtype).removeprefix("torch."),
        "mask_shape": list(mask.shape),
        "allowed_max": int(counts.max()),
        "allowed_min": int(counts.min()),
        "causal": not bool((allowed & after).any()),
        "padded": allowed.dim() > 2 and allowed.shape[0] > 1 and bool((allowed != allowed[:1]).any()),
    }
    return found


def merge_calls(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Equal calls once, with how often they came (layers), in order of first appearance."""
    merged: list[dict[str, Any]] = []
    for call in calls:
        for other in merged:
            if all(other[name] == call[name] for name in call):
                other["layers"] += 1
                break
        else:
            merged.append({**call, "layers": 1})
    return merged


def time_masks(call: dict[str, Any], window: int | None, repeats: int, *, processor: bool = False) -> dict[str, Any]:
    """Forward and backward of one attention of the call's shapes: is_causal, and the same mask written out.

    Milliseconds: medians of `repeats` runs that take turns; by events on a GPU. The window row bars what lies more
    than `window` keys back, as an explicit mask. `processor`: on the CPU, processor time in place of time gone by.
    """
    import torch
    import torch.nn.functional as F

    device = torch.device(call["device"])
    dtype = getattr(torch, call["dtype"])
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()
        for shape in (call["query"], call["key"], call["key"])
    )
    length, keys = query.shape[-2], key.shape[-2]
    grouped = query.shape[-3] != key.shape[-3] if query.dim() > 2 else False
    rows = torch.arange(length, device=device)[:, None] + (keys - length)
    columns = torch.arange(keys, device=device)
    causal = columns <= rows
    bias = torch.zeros(length, keys, dtype=dtype, device=device).masked_fill(~causal, float("-inf"))
    masks: dict[str, dict[str, Any]] = {
        "is_causal": {"is_causal": True},
        "explicit bool": {"attn_mask": causal},
        f"explicit {call['dtype']}": {"attn_mask": bias},
    }
    if window is not None:
        masks[f"window {window}, bool"] = {"attn_mask": causal & (rows - columns < window)}
    times: dict[str, list[float]] = {name: [] for name in masks}
    for turn in range(repeats + 1):
        for name, mask in masks.items():
            query.grad = key.grad = value.grad = None
            took = _milliseconds(
                lambda mask=mask: (
                    F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, **mask).sum().backward()
                ),
                device.type,
                process_time if processor else perf_counter,
            )
            if turn:
                times[name].append(took)
    typical = {name: statistics.median(values) for name, values in times.items()}
    return {
        "query": call["query"],
        "key": call["key"],
        "dtype": call["dtype"],
        "rows": [
            {"mask": name, "ms": ms, "ratio": ms / typical["is_causal"], "ms_all": times[name]}
            for name, ms in typical.items()
        ],
    }


def _milliseconds(run: Any, device_type: str, now: Any) -> float:
    if device_type != "cuda":
        began = now()
        run()
        return 1e3 * (now() - began)
    import torch

    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def measure_mask(job: BundleJob, window: int | None = None, repeats: int = TIMED_REPEATS) -> dict[str, Any]:
    """-> the probe's document. `window`: the most keys a row of a windowed layer may see.

    With `window`, `window_holds` says whether some layer is windowed by it and none is in between: every call allows
    at most `window` keys, or is fully causal (a global layer). The maximum of each is in `calls`.
    """
    if len(job.widths) != 1:
        raise UsageError(f"widths {','.join(map(str, job.widths))}: the mask probe is of one width")
    if window is not None and not 1 <= window < job.widths[0]:
        raise UsageError(f"--window {window}: expected 1 to {job.widths[0] - 1}, less than the width that is run")
    environment = {"TORCHDYNAMO_DISABLE": "1"}  # a compiled graph calls attention where nobody looks
    observe = {"what": "mask", "window": window, "repeats": repeats}
    found = run_bundle(replace(job, steps=1, observe=observe, environment=environment))[0]
    calls = found["calls"]
    if not calls:
        raise BundleFailed(
            f"{job.bundle}: the step makes no call to torch's scaled_dot_product_attention; the masks of attention "
            "written by hand cannot be seen"
        )
    return {
        "schema": SCHEMA,
        "submission_id": found["submission_id"],
        "machine": found["machine"],
        "device": found["device"],
        "batch_size": found["batch_size"],
        "width": job.widths[0],
        "window": window,
        "calls": calls,
        "times": found["times"],
        "window_holds": None if window is None else window_holds(calls, window),
        "findings": findings(calls, window),
    }


def window_holds(calls: list[dict[str, Any]], window: int) -> bool:
    windowed = [c for c in calls if c["allowed_max"] <= window]
    return bool(windowed) and all(c["causal"] and (c in windowed or c["allowed_max"] == c["key"][-2]) for c in calls)


def findings(calls: list[dict[str, Any]], window: int | None) -> list[str]:
    """What stands out, a sentence each."""
    said = []
    total = sum(c["layers"] for c in calls)
    open_ = sum(c["layers"] for c in calls if not c["causal"])
    if open_:
        said.append(f"{open_} of {total} attention calls let a row see keys after it")
    explicit = sum(c["layers"] for c in calls if c["mask"] is not None and c["allowed_max"] == c["key"][-2])
    if explicit:
        said.append(f"{explicit} of {total} calls are global and take an explicit mask: they miss the is_causal path")
    padded = sum(c["layers"] for c in calls if c["padded"])
    if padded:
        said.append(f"{padded} of {total} calls have a mask that differs between rows: padding pins them to it")
    if window is not None:
        windowed = [c for c in calls if c["allowed_max"] <= window]
        if windowed:
            most = max(c["allowed_max"] for c in windowed)
            said.append(
                f"{sum(c['layers'] for c in windowed)} of {total} calls are windowed: {most} keys a row at most, "
                f"{window} allowed"
            )
        else:
            most = min(c["allowed_max"] for c in calls)
            said.append(f"no call is windowed by {window}: the narrowest lets a row see {most} keys")
    return said
