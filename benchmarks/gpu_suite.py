"""Everything that needs a GPU, in one script of at most 8 minutes: checked against float64, timed beside its peers.

    python -m benchmarks.gpu_suite [--minutes 8] [--out benchmarks/results/gpu_suite.json]
    python -m benchmarks.gpu_suite --dry-run

Builds nothing (Triton compiles its kernels at first use). Order: what the machine is and what its memory copies and
its bfloat16 products reach here and now; the checks; the times; launch parameters other than the rules'. What does not
fit into the minutes is left out and said to be. One table comes last; all rows go to the JSON file.

GB/s count what the work must move: the logits once when scoring, logits and gradient once when training. `of copy` is
that over the bandwidth of a device-to-device copy (bytes read and written) measured in this run. Peers run where they
import; F.cross_entropy takes the same bfloat16 logits.

Without a GPU it measures nothing and exits with 2. --dry-run goes through every line on tiny shapes under Triton's
interpreter: it shows that the script works, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NO_GPU = "no GPU that Triton runs on: nothing measured. --dry-run goes through the script under the interpreter."


class Suite:
    """The clock, the device and the rows."""

    def __init__(self, minutes: float, dry: bool) -> None:
        import torch

        self.torch = torch
        self.started = time.monotonic()
        self.deadline = self.started + 60 * minutes
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.checks: list[Row] = []
        self.times: list[Row] = []
        self.skipped: list[str] = []
        self.said: list[str] = []  # sentences for the end of the table
        self.profiles: list[Row] = []  # whole documents of `prism-fast profile`
        self.copy_gb_per_s = math.nan
        self.product_tflops = math.nan

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def sizes(self, full: Sequence[int], tiny: Sequence[int]) -> Sequence[int]:
        return tiny if self.dry else full

    def random(self, *shape: int, dtype: Any, seed: int = 0, scale: float = 1.0) -> Any:
        generator = self.torch.Generator(self.device).manual_seed(seed)
        values = self.torch.empty(shape, dtype=dtype, device=self.device)
        # A few rows at a time: no second copy of a tensor of gigabytes.
        for rows in values.split(max(1, 2**26 // max(1, math.prod(shape[1:])))):
            rows.copy_(self.torch.randn(rows.shape, generator=generator, device=self.device) * scale)
        return values

    def targets(self, n: int, vocab: int, seed: int = 1) -> Any:
        generator = self.torch.Generator(self.device).manual_seed(seed)
        return self.torch.randint(0, vocab, (n,), generator=generator, device=self.device)

    def synchronize(self) -> None:
        if not self.dry:
            self.torch.cuda.synchronize()

    # --- time ---------------------------------------------------------------------------------------------------------

    def milliseconds(self, run: Callable[[], object], seconds: float = 0.6) -> list[float]:
        """Of single calls, by device events, after two to warm up; L2 is filled with other numbers before each."""
        if self.dry:
            start = time.perf_counter()
            run()
            return [1e3 * (time.perf_counter() - start)]
        torch = self.torch
        run()
        run()
        flush = torch.empty(256 << 20, dtype=torch.int8, device=self.device)
        measured: list[float] = []
        spent = 0.0
        while len(measured) < 5 or (spent < seconds and len(measured) < 100):
            flush.zero_()
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            run()
            after.record()
            after.synchronize()
            measured.append(before.elapsed_time(after))
            spent += measured[-1] / 1e3 + 1e-4
        return measured

    def time(self, work: str, who: str, run: Callable[[], object], *, gigabytes: float = 0, tflop: float = 0) -> None:
        """One row; a peer that fails says why and fails nothing else."""
        if self.left() < 5:
            self.skipped.append(f"{work}: {who}")
            return
        row: Row = {"work": work, "who": who}
        try:
            measured = self.milliseconds(run)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            if who.startswith("prism_fast"):
                self.checks.append({"check": f"runs: {work} ({who})", "passed": False, "detail": row["failed"]})
        else:
            row["ms"] = statistics.median(measured)
            row["ms_all"] = [round(value, 5) for value in measured]
            if gigabytes:
                row["gb_per_s"] = gigabytes / row["ms"] * 1e3
                row["of_copy"] = row["gb_per_s"] / self.copy_gb_per_s
            if tflop:
                row["tflop_per_s"] = tflop / row["ms"] * 1e3
        finally:
            if not self.dry:
                self.torch.cuda.empty_cache()
        self.times.append(row)

    # --- checks -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[Row]:
        """A row that passes unless its block raises; what the block puts into the row is kept."""
        row: Row = {"check": name, "passed": True}
        if self.left() < 5:
            self.skipped.append(f"check: {name}")
            self.checks.append({"check": name, "passed": None, "detail": "out of time"})
            yield row
            return
        try:
            yield row
            self.synchronize()
        except Exception as error:
            row["passed"] = False
            row["detail"] = f"{type(error).__name__}: {str(error)[:300]}"
        self.checks.append(row)

    def close(self, row: Row, what: str, ours: Any, exact: Any, torchs: Any, floor: float) -> None:
        """Error within 4x of what torch commits in float32 from the same numbers, or `floor` of the largest value."""
        scale = float(exact.abs().max())
        error = float((ours.double() - exact).abs().max())
        bound = 4 * float((torchs.double() - exact).abs().max()) + floor * scale
        row[what] = {"error": error, "bound": bound}
        if not error <= bound:
            raise AssertionError(f"{what}: error {error:.3g} over {bound:.3g} (values up to {scale:.3g})")

    def equal_bits(self, what: str, a: Any, b: Any) -> None:
        mine, others = (tensor.reshape(-1).contiguous().view(self.torch.uint8) for tensor in (a, b))
        if a.dtype != b.dtype or a.shape != b.shape or not self.torch.equal(mine, others):
            raise AssertionError(f"{what}: bits differ")


# --- what the machine is ----------------------------------------------------------------------------------------------


def environment(suite: Suite) -> Row:
    import triton

    torch = suite.torch
    peers = {}
    for name in ("liger_kernel", "cut_cross_entropy", "quack"):
        try:
            module = importlib.import_module(name)
            peers[name] = str(getattr(module, "__version__", "unknown version"))
        except Exception as error:
            peers[name] = f"not here ({type(error).__name__})"
    found: Row = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "peers": peers,
        "commit": _commit(),
        "command": " ".join(["python", "-m", "benchmarks.gpu_suite", *sys.argv[1:]]),
        "dry_run": suite.dry,
    }
    if not suite.dry:
        properties = torch.cuda.get_device_properties(suite.device)
        found |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_mib": properties.L2_cache_size >> 20,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda or torch.version.hip,
            "driver": _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        }
    return found


def _first_line(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return "unknown"


def _commit() -> str:
    return _first_line(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"])


def ceilings(suite: Suite) -> None:
    """Bandwidth of a copy and rate of a bfloat16 product on random numbers: what the times are measured against."""
    torch = suite.torch
    (numbers,) = suite.sizes([2**31], [2**12])
    source = suite.random(numbers // 2**10, 2**10, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    suite.copy_gb_per_s = math.inf
    suite.time("copy", "device to device", lambda: target.copy_(source), gigabytes=4e-9 * numbers)
    suite.copy_gb_per_s = suite.times[-1]["gb_per_s"]
    suite.times[-1]["of_copy"] = 1.0
    (side,) = suite.sizes([8192], [32])
    a, b = (suite.random(side, side, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    suite.time("bf16 product", "torch.mm", lambda: a @ b, tflop=2e-12 * side**3)
    suite.product_tflops = suite.times[-1]["tflop_per_s"]


# --- checks against float64 -------------------------------------------------------------------------------------------


def reference(torch: Any, logits: Any, target: Any, options: Any, dtype: Any) -> Any:
    """The formula of prism_fast.kernels.backends, with torch's own operations."""
    z = logits.to(dtype)
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    weight = torch.ones(z.shape[1], device=z.device) if options.class_weight is None else options.class_weight
    weight = weight.to(dtype)
    kept = target != options.ignore_index
    at = target.where(kept, 0)
    log_p = torch.log_softmax(z, -1)
    loss = -(1 - options.label_smoothing) * weight[at] * log_p.gather(1, at[:, None])[:, 0]
    if options.label_smoothing:
        loss = loss - options.label_smoothing / z.shape[1] * (weight * log_p).sum(-1)
    return (loss + options.z_loss * torch.logsumexp(z, -1) ** 2).where(kept, 0.0)


def check_logits(suite: Suite) -> None:
    from prism_fast.kernels.backends import LossOptions
    from prism_fast.kernels.backends import triton as backend
    from prism_fast.kernels.backends.triton import launch

    torch = suite.torch
    n, vocab = suite.sizes([257, 50257], [5, 1100])
    weight = torch.rand(vocab, device=suite.device)
    options_of = {
        "plain": LossOptions(),
        "softcap": LossOptions(softcap=30.0),
        "all options": LossOptions(label_smoothing=0.125, z_loss=2**-10, softcap=30.0, class_weight=weight),
    }
    target = suite.targets(n, vocab)
    target[1] = -100
    upstream = torch.linspace(-2, 2, n, device=suite.device)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        logits = suite.random(n, vocab, dtype=dtype, scale=4.0)
        accumulator = torch.float64 if dtype == torch.float64 else torch.float32
        floor = 1e-11 if dtype == torch.float64 else 2**-21
        kind = str(dtype).removeprefix("torch.")
        for chosen, options in options_of.items():
            if options.class_weight is not None:
                options = LossOptions(**{**vars(options), "class_weight": weight.to(accumulator)})
            with suite.check(f"loss and gradient, {kind}, {chosen}") as row:
                loss, lse, faults = backend.cross_entropy_forward(logits, target, options)
                gradient = torch.full((n, vocab), math.nan, dtype=accumulator, device=suite.device)
                backend.cross_entropy_backward(logits, target, lse, upstream.to(accumulator), options, gradient)
                stored = torch.full_like(logits, math.nan)
                backend.cross_entropy_backward(logits, target, lse, upstream.to(accumulator), options, stored)
                answers = []
                for precision in (torch.float64, accumulator):
                    leaf = logits.detach().to(precision).requires_grad_()
                    values = reference(torch, leaf, target, options, precision)
                    answers.append((values.detach(), torch.autograd.grad(values, leaf, upstream.to(precision))[0]))
                (exact, exact_gradient), (torchs, torchs_gradient) = answers
                suite.close(row, "loss", loss, exact, torchs, floor)
                suite.close(row, "gradient", gradient, exact_gradient, torchs_gradient, floor)
                rounded = gradient.to(dtype).double()
                suite.close(row, "stored", stored, rounded, rounded, 2 * torch.finfo(dtype).eps)
                assert faults.item() == 0
                fused = logits.clone()
                again, _, _ = backend.cross_entropy_forward_backward(
                    fused, target, upstream.to(accumulator), options, fused
                )
                suite.equal_bits("loss in one read", again, loss)
                suite.close(row, "in one read", fused, rounded, rounded, 2 * torch.finfo(dtype).eps)
        with suite.check(f"scores, {kind}") as row:
            scores = backend.token_nll(logits, target, -100, True, True)
            log_p = torch.log_softmax(logits.double(), -1)
            kept = target != -100
            suite.close(row, "nll", scores.nll, reference(torch, logits, target, LossOptions(), torch.float64),
                        reference(torch, logits, target, LossOptions(), accumulator), floor)  # fmt: skip
            entropy = -(log_p.exp() * log_p).sum(-1)
            suite.close(row, "entropy", scores.entropy[kept], entropy[kept], entropy[kept], 4 * floor)
            assert torch.equal(scores.correct, (logits.double().argmax(-1) == target) & kept), "correct"
        with suite.check(f"bits do not depend on sharing, storage or repetition, {kind}"):
            every = (backend.token_nll(logits, target, -100, True, True) for _ in range(2))
            for repeated in every:
                for a, b in zip(scores[:4], repeated[:4], strict=True):
                    suite.equal_bits("repeated", a, b)
            room = torch.empty((n, vocab + 13), dtype=dtype, device=suite.device)
            shifted = room[:, 3 : 3 + vocab]
            shifted.copy_(logits)
            for segments in (1, 1000):
                with launch.override("rows_forward", segments=segments):
                    for view in (logits, shifted, logits.t().contiguous().t()):
                        for a, b in zip(scores[:4], backend.token_nll(view, target, -100, True, True)[:4], strict=True):
                            suite.equal_bits(f"{segments} segments a program", a, b)


def check_edges(suite: Suite) -> None:
    import prism_fast
    from prism_fast.kernels import merge_shards, token_nll_shard
    from prism_fast.kernels.backends import triton as backend

    torch = suite.torch
    with suite.check("masked vocabulary, targets out of range, NaN and -inf rows"):
        logits = torch.zeros(6, 65536, device=suite.device)
        logits[0, :40000] = -math.inf
        logits[1] = -math.inf
        logits[1, 50000] = 3.0
        logits[3] = -math.inf
        logits[4, 7] = math.nan
        target = torch.tensor([65535, 50000, 65536, 1, 1, -100], device=suite.device)
        scores = backend.token_nll(logits, target, -100, False, False)
        nll = scores.nll.tolist()
        assert abs(nll[0] - math.log(25536)) < 1e-5 and nll[1] == 0.0 and nll[5] == 0.0, nll
        assert all(math.isnan(value) for value in nll[2:5]) and scores.faults.item() == 3, nll
    with suite.check("vocabulary in shards"):
        n, vocab = suite.sizes([512, 50257], [4, 1100])
        logits, target = suite.random(n, vocab, dtype=torch.bfloat16, scale=4.0), suite.targets(n, vocab)
        cuts = [0, vocab // 3, vocab // 2 + 1, vocab]
        parts = [token_nll_shard(logits[:, a:b], target, vocab_start=a) for a, b in itertools.pairwise(cuts)]
        whole = backend.token_nll(logits, target, -100, False, False)
        torch.testing.assert_close(merge_shards(parts, target)[0], whole.nll, rtol=2e-6, atol=2e-6)
    with suite.check("more than 2**31 logits: the last row equals itself alone"):
        n, vocab = suite.sizes([18423, 131072], [9, 1040])
        logits = suite.random(n, vocab, dtype=torch.bfloat16)
        target = suite.targets(n, vocab)
        nll = prism_fast.token_nll(logits, target)
        suite.equal_bits("last row", nll[-1:], prism_fast.token_nll(logits[-1:].clone(), target[-1:]))
        last = logits[-1:].clone()
        backend.cross_entropy_forward_backward(logits, target, torch.ones_like(nll), _plain(), logits)
        alone = torch.empty_like(last)
        backend.cross_entropy_forward_backward(last, target[-1:], torch.ones_like(nll[:1]), _plain(), alone)
        suite.equal_bits("its gradient", logits[-1:], alone)
        del logits
    with suite.check("under torch.compile, no graph break: the bits of eager"):
        n, vocab = suite.sizes([256, 50257], [3, 600])
        logits, target = suite.random(n, vocab, dtype=torch.bfloat16, scale=4.0), suite.targets(n, vocab)
        answers = []
        backend_name = "aot_eager" if suite.dry else "inductor"
        for run in (_softcapped, torch.compile(_softcapped, fullgraph=True, backend=backend_name)):
            leaf = logits.clone().requires_grad_()
            loss = run(leaf, target)
            answers += [loss.detach(), *torch.autograd.grad(loss, leaf)]
        suite.equal_bits("loss", answers[0], answers[2])
        suite.equal_bits("gradient", answers[1], answers[3])
    if not suite.dry and torch.cuda.device_count() > 1:
        with suite.check("tensors on another device than the current one"):
            logits, target = suite.random(64, 50257, dtype=torch.bfloat16), suite.targets(64, 50257)
            there = prism_fast.token_nll(logits.to("cuda:1"), target.to("cuda:1"))
            suite.equal_bits("nll", prism_fast.token_nll(logits, target), there.to(suite.device))
    with suite.check("in a CUDA graph; nothing synchronises"):
        n, vocab = suite.sizes([256, 50304], [3, 600])
        logits, target = suite.random(n, vocab, dtype=torch.bfloat16), suite.targets(n, vocab)
        eager = prism_fast.cross_entropy(logits, target)
        if not suite.dry:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = prism_fast.cross_entropy(logits, target)
            captured.zero_()
            graph.replay()
            suite.equal_bits("replayed", captured, eager)


def _softcapped(logits: Any, target: Any) -> Any:
    import prism_fast

    return prism_fast.cross_entropy(logits, target, softcap=30.0)


def _plain() -> Any:
    from prism_fast.kernels.backends import LossOptions

    return LossOptions()


def check_hidden(suite: Suite) -> None:
    from prism_fast.kernels.backends import LossOptions
    from prism_fast.kernels.backends import triton as backend

    torch = suite.torch
    n, size, vocab = suite.sizes([515, 1024, 32003], [9, 24, 70])
    target = suite.targets(n, vocab)
    target[2] = -100
    upstream = torch.linspace(-1, 1, n, device=suite.device)
    weights = torch.rand(vocab, device=suite.device)
    for dtype in (torch.bfloat16, torch.float32):
        hidden = suite.random(n, size, dtype=dtype)
        head, bias = suite.random(vocab, size, dtype=dtype, seed=3, scale=size**-0.5), suite.random(vocab, dtype=dtype)
        kind = str(dtype).removeprefix("torch.")
        for chosen, options in (
            ("plain", LossOptions()),
            ("all options", LossOptions(-100, 0.1, 1e-3, 30.0, weights)),
        ):
            with suite.check(f"from hidden states, {kind}, {chosen}") as row:
                loss, _, faults, *grads = backend.linear_cross_entropy_forward_backward(
                    hidden, head, bias, target, upstream, options, 0, (True, True, True)
                )
                leaves = [tensor.double().requires_grad_() for tensor in (hidden, head, bias)]
                values = reference(torch, leaves[0] @ leaves[1].T + leaves[2], target, options, torch.float64)
                exact = torch.autograd.grad(values, leaves, upstream.double())
                assert faults.item() == 0
                suite.close(row, "loss", loss, values.detach(), values.detach(), 2**-17)
                for name, grad, exact_grad in zip(("hidden", "weight", "bias"), grads, exact, strict=True):
                    unit = 4 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 2**-16
                    suite.close(row, name, grad, exact_grad, exact_grad, unit)


# --- times ------------------------------------------------------------------------------------------------------------


def time_logits(suite: Suite) -> None:
    import torch.nn.functional as F

    import prism_fast

    torch = suite.torch
    compiled = (lambda *a, **k: F.cross_entropy(*a, **k)) if suite.dry else torch.compile(F.cross_entropy)
    shapes = [(8192, 50304), (8192, 50257), (8192, 128256), (512, 50304), (64, 50257)]
    for n, vocab in [(3, 600)] if suite.dry else shapes:
        logits, target = suite.random(n, vocab, dtype=torch.bfloat16), suite.targets(n, vocab)
        once = 2e-9 * n * vocab
        work = f"score bf16 {n}x{vocab}"
        suite.time(work, "prism_fast.token_nll", lambda x=logits, t=target: prism_fast.token_nll(x, t), gigabytes=once)
        suite.time(
            work,
            "prism_fast.token_nll, with_correct, with_entropy",
            lambda x=logits, t=target: prism_fast.token_nll(x, t, with_correct=True, with_entropy=True),
            gigabytes=once,
        )
        for who, peer in (("F.cross_entropy", F.cross_entropy), ("torch.compile", compiled)):
            suite.time(
                work,
                who,
                lambda x=logits, t=target, peer=peer: peer(x.detach(), t, reduction="none"),
                gigabytes=once,
            )
        work = f"train bf16 {n}x{vocab}"
        leaf = logits.requires_grad_()
        suite.time(
            work,
            "prism_fast.cross_entropy",
            lambda x=leaf, t=target: _train(prism_fast.cross_entropy, x, t),
            gigabytes=2 * once,
        )
        for who, peer in _logits_peers(suite, F.cross_entropy, compiled):
            suite.time(work, who, lambda x=leaf, t=target, peer=peer: _train(peer, x, t), gigabytes=2 * once)
        # Last: it leaves gradients where the logits were.
        suite.time(
            work,
            "prism_fast.cross_entropy, inplace_grad",
            lambda x=leaf, t=target: _train(prism_fast.cross_entropy, x, t, inplace_grad=True),
            gigabytes=2 * once,
        )
        del logits, leaf
    n, vocab = suite.sizes([8192, 50304], [3, 600])
    logits, target = suite.random(n, vocab, dtype=torch.bfloat16), suite.targets(n, vocab)
    meter = prism_fast.BitsPerByte(torch.full((vocab,), 4, dtype=torch.int32, device=suite.device))
    suite.time(
        f"score and count bf16 {n}x{vocab}",
        "prism_fast.token_nll + BitsPerByte.update",
        lambda: meter.update(prism_fast.token_nll(logits, target).view(1, -1), target.view(1, -1)),
        gigabytes=2e-9 * n * vocab,
    )


def _train(loss_of: Callable[..., Any], logits: Any, target: Any, **options: Any) -> None:
    logits.grad = None
    loss_of(logits, target, **options).backward()


def _logits_peers(suite: Suite, eager: Any, compiled: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "F.cross_entropy", eager
    yield "torch.compile", compiled
    with contextlib.suppress(Exception):
        from liger_kernel.transformers import LigerCrossEntropyLoss

        yield "Liger", LigerCrossEntropyLoss()
    with contextlib.suppress(Exception):
        from quack.cross_entropy import cross_entropy as quack_cross_entropy

        yield "quack", lambda x, t: quack_cross_entropy(x, t).mean()


def time_hidden(suite: Suite) -> None:
    import torch.nn.functional as F

    import prism_fast

    torch = suite.torch
    for n, size, vocab in [(9, 24, 70)] if suite.dry else [(8192, 4096, 128256), (8192, 2048, 50304)]:
        hidden = suite.random(n, size, dtype=torch.bfloat16)
        head = suite.random(vocab, size, dtype=torch.bfloat16, seed=3, scale=size**-0.5)
        target = suite.targets(n, vocab)
        product = 2e-12 * n * size * vocab
        shape = f"N={n} H={size} V={vocab}"
        work = f"score from hidden states, {shape}"
        suite.time(
            work,
            "prism_fast.token_nll",
            lambda h=hidden, w=head, t=target: prism_fast.token_nll(h, t, weight=w),
            tflop=product,
        )
        suite.time(
            work,
            "product + F.cross_entropy",
            lambda h=hidden, w=head, t=target: F.cross_entropy(F.linear(h, w), t, reduction="none"),
            tflop=product,
        )
        hidden.requires_grad_()
        head.requires_grad_()
        work = f"train from hidden states, {shape}"
        for who, peer in _hidden_peers(F, prism_fast):
            suite.time(work, who, lambda h=hidden, w=head, t=target, p=peer: _train_head(p, h, w, t), tflop=3 * product)
        del hidden, head


def _train_head(loss_of: Callable[..., Any], hidden: Any, head: Any, target: Any) -> None:
    hidden.grad = head.grad = None
    loss_of(hidden, head, target).backward()


def _hidden_peers(F: Any, prism_fast: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "prism_fast.linear_cross_entropy", prism_fast.linear_cross_entropy
    yield "product + F.cross_entropy", lambda h, w, t: F.cross_entropy(F.linear(h, w), t)
    if hasattr(F, "linear_cross_entropy"):
        yield "F.linear_cross_entropy", lambda h, w, t: F.linear_cross_entropy(h, w, t)
    with contextlib.suppress(Exception):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        yield "Liger", lambda h, w, t: LigerFusedLinearCrossEntropyLoss()(w, h, t)
    with contextlib.suppress(Exception):
        from cut_cross_entropy import linear_cross_entropy as cce

        yield "CCE", lambda h, w, t: cce(h, w, t)
    with contextlib.suppress(Exception):
        from quack.linear_cross_entropy import chunked_linear_cross_entropy as quack_linear

        yield "quack", lambda h, w, t: quack_linear(h, w, t)


def time_rules(suite: Suite) -> None:
    """The launch rules against other parameters, each kernel alone: is the rule's choice the best?"""
    from prism_fast.kernels.backends import triton as backend
    from prism_fast.kernels.backends.triton import launch

    torch = suite.torch
    n, vocab = suite.sizes([8192, 50304], [3, 600])
    logits, target = suite.random(n, vocab, dtype=torch.bfloat16), suite.targets(n, vocab)
    ones = torch.ones(1, device=suite.device).expand(n)
    out = torch.empty_like(logits)
    once = 2e-9 * n * vocab
    kernels: list[tuple[str, Callable[[], object], float, list[dict[str, int]]]] = [
        (
            "rows_forward",
            lambda: backend.token_nll(logits, target, -100, False, False),
            once,
            [{}, {"stages": 1}, {"stages": 2}, {"stages": 4}, {"segments": 4}, {"stages": 1, "max_registers": 96}],
        ),
        (
            "rows_fused",
            lambda: backend.cross_entropy_forward_backward(logits, target, ones, _plain(), out),
            2 * once,
            [{}, *({"abreast": a, "num_warps": 4 * a, "stages": s} for a in (1, 2, 4) for s in (2, 3))],
        ),
        (
            "rows_backward",
            lambda: backend.cross_entropy_backward(
                logits, target, torch.full((n,), 11.0, dtype=torch.float64, device=suite.device), ones, _plain(), out
            ),
            2 * once,
            [{}, {"places": 2048, "num_warps": 4}, {"places": 8192, "num_warps": 8}],
        ),
    ]
    for kernel, run, gigabytes, choices in kernels:
        for choice in choices:
            name = ", ".join(f"{key}={value}" for key, value in choice.items()) or "the rule"
            with launch.override(kernel, **choice):
                suite.time(f"{kernel} bf16 {n}x{vocab}", name, run, gigabytes=gigabytes)
    n, size, vocab = suite.sizes([8192, 4096, 32768], [9, 24, 70])
    hidden, head = suite.random(n, size, dtype=torch.bfloat16), suite.random(vocab, size, dtype=torch.bfloat16)
    target = suite.targets(n, vocab)
    tiles = [{}, {"group": 8}, {"group": 64}, {"columns": 128, "num_warps": 8, "num_stages": 4, "span_tiles": 16}]
    for choice in [{}] if suite.dry else tiles:
        name = ", ".join(f"{key}={value}" for key, value in choice.items()) or "the rule"
        with launch.override("linear", **choice):
            suite.time(
                f"linear_forward N={n} H={size} V={vocab}",
                name,
                lambda: backend.linear_token_nll(hidden, head, None, target, -100, False, False),
                tflop=2e-12 * n * size * vocab,
            )


def time_attention(suite: Suite) -> None:
    """What an explicit mask costs against is_causal, at a fixed width (`prism-fast profile mask`)."""
    from prism_fast.profiling.mask import time_masks

    shape = [1, 2, 16, 8] if suite.dry else [2, 16, 4096, 128]
    call = {"query": shape, "key": shape, "dtype": "float32" if suite.dry else "bfloat16", "device": suite.device.type}
    work = f"attention forward+backward {'x'.join(map(str, shape))}"
    for row in time_masks(call, window=shape[2] // 4, repeats=1 if suite.dry else 9)["rows"]:
        suite.times.append({"work": work, "who": row["mask"], "ms": row["ms"], "ms_all": row["ms_all"]})


def time_steps(suite: Suite) -> None:
    """The example decoder: how its step grows with the width, and in which kernels it goes (`prism-fast profile`)."""
    from prism_fast.profiling.bundle_process import BundleJob
    from prism_fast.profiling.kernels import measure_kernels
    from prism_fast.profiling.scaling import measure_scaling

    if suite.left() < 90 and not suite.dry:
        suite.skipped.append("steps of the example decoder")
        return
    bundle = Path(__file__).parent.parent / "examples" / "transformer_tiny"
    widths = (8, 16, 32) if suite.dry else (256, 512, 1024, 2048)
    job = BundleJob(bundle, widths, 0, {}, device=suite.device.type, environment={"TRITON_INTERPRET": "0"})
    scaling = measure_scaling(job, repeats=1 if suite.dry else 8)
    for point in scaling["points"]:
        work = f"step of {bundle.name}, width {point['width']}"
        suite.times.append({"work": work, "who": "measured", "ms": 1e3 * point["measured_s"]})
        suite.times.append({"work": work, "who": "fitted", "ms": 1e3 * point["fitted_s"]})
    kernels = measure_kernels(dataclasses.replace(job, widths=widths[-1:]))
    rank = kernels["ranks"][0]
    for group in rank["groups"]:
        work = f"kernels of a step of {bundle.name}, width {widths[-1]}"
        suite.times.append({"work": work, "who": group["group"], "ms": 1e3 * group["seconds"] / kernels["steps"]})
    suite.said += [scaling["verdict"], *rank["warnings"]]
    suite.profiles += [scaling, kernels]


# --- report -----------------------------------------------------------------------------------------------------------


def table(suite: Suite) -> str:
    """Every time beside the first of its work, which is ours; failed checks above it."""
    lines = []
    passed = sum(row["passed"] is True for row in suite.checks)
    lines.append(f"checks against float64: {passed} of {len(suite.checks)} passed")
    lines += [f"  FAILED {row['check']}: {row['detail']}" for row in suite.checks if row["passed"] is False]
    lines += [f"  left out, no time: {name}" for name in suite.skipped]
    lines.append(f"{'work':<52} {'who':<50} {'ms':>9} {'GB/s':>7} {'of copy':>7} {'TFLOP/s':>8} {'x ours':>7}")
    ours: dict[str, float] = {}
    for row in suite.times:
        head = f"{row['work']:<52} {row['who']:<50}"
        if "failed" in row:
            lines.append(f"{head} did not run: {row['failed']}")
            continue
        first = ours.setdefault(row["work"], row["ms"])
        cells = [f"{row['ms']:9.3f}"]
        cells.append(f"{row['gb_per_s']:7.0f} {row['of_copy']:7.2f}" if "gb_per_s" in row else " " * 15)
        cells.append(f"{row['tflop_per_s']:8.0f}" if "tflop_per_s" in row else " " * 8)
        cells.append(f"{row['ms'] / first:7.2f}")
        lines.append(f"{head} {' '.join(cells)}")
    lines += suite.said
    if suite.dry:
        lines.append("DRY RUN under the interpreter: these times say nothing about any machine")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    default = Path(__file__).parent / "results" / "gpu_suite.json"
    parser.add_argument("--out", type=Path, help="[default: results/gpu_suite.json; of a dry run: nowhere]")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if arguments.dry_run:
        # Before any kernel is defined: Triton looks at it then.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not arguments.dry_run and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    from prism_fast.kernels import use_backend

    suite = Suite(arguments.minutes, arguments.dry_run)
    found = environment(suite)
    print(json.dumps(found), flush=True)
    with use_backend("triton"):
        checks = (ceilings, check_logits, check_edges, check_hidden)
        for part in (*checks, time_logits, time_hidden, time_rules, time_attention, time_steps):
            before = time.monotonic()
            part(suite)
            suite.synchronize()
            if not suite.dry:
                torch.cuda.empty_cache()
            print(f"{part.__name__}: {time.monotonic() - before:.1f} s", flush=True)
    document = {
        "benchmark": "gpu_suite",
        "environment": found,
        "copy_gb_per_s": suite.copy_gb_per_s,
        "product_tflop_per_s": suite.product_tflops,
        "checks": suite.checks,
        "times": suite.times,
        "left_out": suite.skipped,
        "profiles": suite.profiles,
        "seconds": round(time.monotonic() - suite.started, 1),
    }
    out = arguments.out or (None if suite.dry else default)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")
        print(f"rows written to {out.name}")
    print(table(suite))
    return 1 if any(row["passed"] is False for row in suite.checks) else 0


if __name__ == "__main__":
    sys.exit(main())
