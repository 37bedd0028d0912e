"""Are our losses faster than what people use today, how close to the memory's speed, and how exact?

Every comparison takes turns inside one process. Inputs are rotated, so that no cache answers for memory. Peers that do
not import are not run, and rows that need a GPU are listed as unmeasured where there is none.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measure import machine, median, median_seconds, save
from prism_fast import cross_entropy, linear_cross_entropy, token_nll
from prism_fast.harness.process.commands import child_environment, python_command
from prism_fast.kernels import backend_report

TOKENS, VOCAB = 2048, 50304
HIDDEN_TOKENS, WIDTH = 1024, 512
UNMEASURED = (
    "GPU token_nll bf16 8192x128256",
    "GPU cross_entropy forward+backward bf16 8192x50304",
    "GPU cross_entropy forward+backward bf16 8192x128256",
    "GPU linear_cross_entropy BT=8192 H=4096 V=128256",
)


class Report:
    """Rows, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        shown = {k: v for k, v in row.items() if k != "seconds"}
        print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown.items()), flush=True)


def interleaved(calls: Mapping[str, Callable[[], object]], repeats: int = 7) -> dict[str, list[float]]:
    return median_seconds(calls, repeats)


def ratio(times: Mapping[str, list[float]], slow: str, fast: str) -> float:
    """How many times faster `fast` is than `slow`: the median over turns of their ratio."""
    return median([s / f for s, f in zip(times[slow], times[fast], strict=True)])


def main() -> None:
    print(machine())
    report = Report()
    run(report)
    save("losses", {"torch": torch.__version__}, report.rows)


def run(report: Report) -> None:
    for name, text in backend_report().items():
        report.add(backend=name, state=text)
    bandwidth = copy_bandwidth(report)
    for dtype in (torch.float32, torch.bfloat16):
        scoring(report, dtype, bandwidth)
    training(report)
    from_hidden(report)
    for work in UNMEASURED:
        report.add(work=work, state="unmeasured: needs a GPU")


def copy_bandwidth(report: Report) -> float:
    """Bytes read and written a second by torch's copy of one set of logits."""
    source = torch.randn(TOKENS, VOCAB)
    sink = torch.zeros_like(source)
    best = min(interleaved({"copy": lambda: sink.copy_(source)})["copy"])
    bandwidth = 2 * source.nbytes / best
    report.add(work="copy", gb_s=bandwidth / 1e9)
    return bandwidth


def worst_error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).abs().max())


def scoring(report: Report, dtype: torch.dtype, bandwidth: float) -> None:
    sets = [torch.randn(TOKENS, VOCAB).to(dtype) for _ in range(2)]
    target = torch.randint(0, VOCAB, (TOKENS,))
    few = sets[0][:64]
    exact = F.cross_entropy(few.double(), target[:64], reduction="none")
    compiled = torch.compile(lambda z, t: F.cross_entropy(z, t, reduction="none"))
    peers: dict[str, Callable[[Tensor], Tensor]] = {
        "F.cross_entropy": lambda z: F.cross_entropy(z, target[: len(z)], reduction="none"),
        "torch.compile": lambda z: compiled(z, target[: len(z)]),
        "prism_fast": lambda z: token_nll(z, target[: len(z)]),
    }
    turns = {name: cycle(sets) for name in peers}
    times = interleaved({name: lambda n=name: peers[n](next(turns[n])) for name in peers})
    for name in peers:
        gb_s = sets[0].nbytes / min(times[name]) / 1e9
        report.add(
            work=f"token_nll {TOKENS}x{VOCAB} {dtype}",
            who=name,
            times_faster=ratio(times, name, "prism_fast"),
            gb_s=gb_s,
            of_copy=gb_s * 1e9 / bandwidth,
            error=worst_error(peers[name](few), exact),
            seconds=times[name],
        )


def gradients(loss: Callable[..., Tensor], inputs: list[Tensor], target: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    # cloned: a leaf cannot be overwritten by its gradient
    return torch.autograd.grad(loss(*(leaf.clone() for leaf in leaves), target), leaves)


def training(report: Report) -> None:
    logits = torch.randn(TOKENS, VOCAB, requires_grad=True)
    target = torch.randint(0, VOCAB, (TOKENS,))
    compiled = torch.compile(F.cross_entropy)

    few = torch.randn(64, VOCAB)
    (exact,) = gradients(F.cross_entropy, [few.double()], target[:64])
    losses: dict[str, Callable[..., Tensor]] = {
        "F.cross_entropy": F.cross_entropy,
        "torch.compile": compiled,
        "prism_fast": cross_entropy,
        "prism_fast, in place": lambda z, t: cross_entropy(z, t, inplace_grad=True),
    }
    errors = {name: worst_error(gradients(loss, [few], target[:64])[0], exact) for name, loss in losses.items()}

    def step(loss: Callable[..., Tensor]) -> Callable[[], None]:
        def call() -> None:
            loss(logits, target).backward()
            logits.grad = None  # here: who comes next must not pay for giving this memory back

        return call

    # In place last: it leaves its gradient where the logits were, which costs all of them the same afterwards.
    calls = {name: step(loss) for name, loss in losses.items()}
    times = interleaved(calls, repeats=5)
    for name in calls:
        report.add(
            work=f"cross_entropy forward+backward {TOKENS}x{VOCAB} float32",
            who=name,
            peer_over_this=ratio(times, "F.cross_entropy", name),
            gradient_error=errors[name],
            seconds=times[name],
        )


# Peak resident memory of a fresh process over what it held before and what it returned, over the bytes of [N, V]. A
# small call first, so that neither the matrix library's own buffers nor its code count.
MEMORY = """
import sys
import torch
from torch.nn import functional as F
from prism_fast import linear_cross_entropy
tokens, width, vocab = map(int, sys.argv[2:])
loss = F.linear_cross_entropy if sys.argv[1] == "F.linear_cross_entropy" else linear_cross_entropy

def resident(key):
    return int(open("/proc/self/status").read().split(key + ":")[1].split()[0]) * 1024

hidden = torch.randn(tokens, width, requires_grad=True)
head = (torch.randn(vocab, width) * 0.05).requires_grad_()
target = torch.randint(0, vocab, (tokens,))
loss(hidden[:64], head[:4096], target[:64] % 4096).backward()
hidden.grad = head.grad = None
before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts again from here
loss(hidden, head, target).backward()
print((resident("VmHWM") - before - hidden.grad.nbytes - head.grad.nbytes) / (tokens * vocab * 4))
"""


def extra_memory(name: str) -> float:
    command = python_command("-c", MEMORY, name, *map(str, (HIDDEN_TOKENS, WIDTH, VOCAB)))
    return float(subprocess.run(command, capture_output=True, text=True, check=True, env=child_environment()).stdout)


def from_hidden(report: Report) -> None:
    hidden = torch.randn(HIDDEN_TOKENS, WIDTH, requires_grad=True)
    head = (torch.randn(VOCAB, WIDTH) * 0.05).requires_grad_()
    target = torch.randint(0, VOCAB, (HIDDEN_TOKENS,))
    inputs, weights = hidden.detach(), head.detach()

    def step(loss: Callable[..., Tensor]) -> Callable[[], None]:
        def call() -> None:
            loss(hidden, head, target).backward()
            hidden.grad = head.grad = None

        return call

    def products() -> None:
        logits = inputs @ weights.T
        logits @ weights
        logits.T @ inputs

    calls = {
        "three products": products,
        "F.linear_cross_entropy": step(F.linear_cross_entropy),
        "prism_fast": step(linear_cross_entropy),
    }
    few = [inputs[:64].clone(), weights]
    exact = gradients(F.linear_cross_entropy, [tensor.double() for tensor in few], target[:64])
    times = interleaved(calls, repeats=5)
    for name in calls:
        loss = {"F.linear_cross_entropy": F.linear_cross_entropy, "prism_fast": linear_cross_entropy}.get(name)
        found = gradients(loss, few, target[:64]) if loss else ()
        errors = {
            f"{what}_gradient_error": worst_error(got, want)
            for what, got, want in zip(("hidden", "head"), found, exact, strict=False)
        }
        report.add(
            work=f"linear_cross_entropy forward+backward {HIDDEN_TOKENS}x{WIDTH}x{VOCAB} float32",
            who=name,
            over_prism_fast=ratio(times, name, "prism_fast"),
            extra_memory_of_logits=extra_memory(name) if loss else None,
            **errors,
            seconds=times[name],
        )

    scores = {
        "one product": lambda: inputs @ weights.T,
        "matmul + F.cross_entropy": lambda: F.cross_entropy(inputs @ weights.T, target, reduction="none"),
        "prism_fast": lambda: token_nll(inputs, target, weight=weights),
    }
    times = interleaved(scores, repeats=5)
    for name in scores:
        report.add(
            work=f"token_nll from hidden {HIDDEN_TOKENS}x{WIDTH}x{VOCAB} float32",
            who=name,
            over_prism_fast=ratio(times, name, "prism_fast"),
            seconds=times[name],
        )


if __name__ == "__main__":
    main()
