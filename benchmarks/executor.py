"""What does a prediction by the model's program cost, against the model's own eager forward?

    python -m benchmarks.executor [--quick] [--json] [--repeats N]

The seven examples under 4,096 ids, a decoder of about 30 million parameters under 50,304, and an LSTM written out step
by step, over 4,000 operators; 4 rows of 128 tokens. Each model is captured in a fresh process, as a tracer does it,
then timed in another: program and eager forward in turn, the same state and the same ids, whose logits must have the
same bits. Memory is what predicting and marking 16 rows adds to a process of its own: eager, by the program, and by the
program stopped before its head, whose logits exist for 512 positions at a time.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import Table, median, median_seconds, parser_for
from benchmarks.overhead import write_decoder
from prism_fast.harness.process.commands import SEARCH_PATH, child_command, child_environment
from prism_fast.profiling.machine import THREADS_WAIT

EXAMPLES = Path(__file__).parents[1] / "examples"
LARGE, RECURRENT = "30M decoder", "lstm unrolled"
ROWS, LENGTH, VOCAB, LARGE_VOCAB = 4, 128, 4096, 50304
MEMORY_ROWS = 16  # 2,048 positions, a batch of held-out text
WARM_ROWS = 1  # of a prediction before the one whose memory is measured: libraries load, buffers form
COLUMNS = {
    "model": "16", "nodes": ",", "eager_us": "9,.0f", "program_us": "9,.0f", "us_a_node_over_eager": ".2f",
    "ratio": ".3f", "load_ms": ".1f", "capture_s": ".1f", "next_width_s": ".1f", "eager_mib": ".0f",
    "program_mib": ".0f", "no_logits_mib": ".0f", "program_bytes": "9,", "constants_bytes": "9,",
}  # fmt: skip


class Unrolled(nn.Module):
    """Two LSTM layers with a cell written out: about 17 operators a token and layer."""

    def __init__(self, vocab: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.inside = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.across = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for inside, across in zip(self.inside, self.across, strict=True):
            hidden = cell = torch.zeros_like(x[:, 0])
            given, outputs = inside(x), []
            for t in range(x.shape[1]):
                enter, forget, update, leave = (given[:, t] + across(hidden)).chunk(4, dim=-1)
                cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(update)
                hidden = torch.sigmoid(leave) * torch.tanh(cell)
                outputs.append(hidden)
            x = x + torch.stack(outputs, dim=1)
        return self.head(x)


def names(quick: bool) -> list[str]:
    examples = sorted(path.parent.name for path in EXAMPLES.glob("*/architecture.py"))
    return ["transformer_tiny", RECURRENT] if quick else [*examples, LARGE, RECURRENT]


def built(name: str, folder: Path) -> nn.Module:
    """The model in evaluation mode, from seed 0."""
    torch.manual_seed(0)
    if name == RECURRENT:
        return Unrolled(VOCAB).eval()
    bundle, vocab = EXAMPLES / name, VOCAB
    if name == LARGE:
        bundle, vocab = folder / f"30M-{LARGE_VOCAB}", LARGE_VOCAB
        if not bundle.exists():
            write_decoder(folder, "30M", LARGE_VOCAB)
    spec = importlib.util.spec_from_file_location("architecture", bundle / "architecture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = module.build_model(SimpleNamespace(vocab_size=vocab, sequence_length=LENGTH, max_seq_len=LENGTH))
    return model.eval()


def ids(rows: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, VOCAB, (2, rows, LENGTH), generator=torch.Generator().manual_seed(1))
    return drawn[0], drawn[1]


# ------------------------------------------------------------------------------------------------- in a child process


def capture_program(name: str, folder: Path, _: int) -> dict[str, Any]:
    """Leaves program.json and constants.safetensors; seconds for this width, and for half of it right after."""
    from prism_fast.program.capture import capture

    model = built(name, folder)
    seconds = []
    for width in (LENGTH, LENGTH // 2):
        began = perf_counter()
        found = capture(model, width=width, compare=False)
        seconds.append(perf_counter() - began)
        if width == LENGTH:
            (folder / "program.json").write_bytes(found.program.to_bytes())
            (folder / "constants.safetensors").write_bytes(found.constants)
            program, constants = found.program, found.constants
    return {
        "nodes": program.node_count,
        "any_rows": program.batch is None,
        "capture_s": seconds[0],
        "next_width_s": seconds[1],
        "program_bytes": len(program.to_bytes()),
        "constants_bytes": sum(constant.bytes for constant in program.constants),
        "constants_file_bytes": len(constants),
    }


def loaded(folder: Path) -> Any:
    from prism_fast.program.format import Program
    from prism_fast.program.runnable import Runnable

    program = Program.from_bytes((folder / "program.json").read_bytes())
    return Runnable(program, (folder / "constants.safetensors").read_bytes())


def state_of(model: nn.Module) -> list[Tensor]:
    return [tensor.detach() for tensor in model.state_dict(keep_vars=True).values()]


def time_both(name: str, folder: Path, repeats: int) -> dict[str, Any]:
    model = built(name, folder)
    loads = []
    for _ in range(3):
        began = perf_counter()
        runnable = loaded(folder)
        loads.append(perf_counter() - began)
    state, (tokens, _) = state_of(model), ids(ROWS if runnable.program.batch is None else runnable.program.batch)

    def eager() -> Tensor:
        with torch.no_grad():
            output: Tensor = model(tokens)
        return output

    def program() -> Tensor:
        return runnable.run(state, tokens)  # type: ignore[no-any-return]

    equal = torch.equal(eager(), program())
    seconds = median_seconds({"eager": eager, "program": program}, repeats)
    of_eager, of_program = (median(values) for values in seconds.values())
    over = 1e6 * (of_program - of_eager)
    return {
        "eager_us": 1e6 * of_eager,
        "program_us": 1e6 * of_program,
        "us_a_node_over_eager": over / runnable.program.node_count,
        "ratio": of_program / of_eager,
        "load_ms": 1e3 * median(loads),
        "same_bits": equal,
        "rows": len(tokens),
        "threads": torch.get_num_threads(),
    }


def memory_of(way: str) -> Callable[[str, Path, int], dict[str, Any]]:
    """MiB that predicting and marking one batch adds to the process at its peak."""

    def measure(name: str, folder: Path, _: int) -> dict[str, Any]:
        from prism_fast.harness.executor.main import HEAD_ROWS
        from prism_fast.harness.marking.sums import nll_of

        model = built(name, folder)
        runnable = loaded(folder) if way != "eager" else None
        state = state_of(model)

        def mark(tokens: Tensor, targets: Tensor) -> None:
            with torch.no_grad():
                if runnable is None:
                    nll_of(model(tokens), targets)
                elif way == "program":
                    nll_of(runnable.run(state, tokens), targets)
                else:
                    hidden = runnable.run_hidden(state, tokens)
                    flat, wanted = hidden.hidden.flatten(0, 1), targets.reshape(-1)
                    for begin in range(0, len(wanted), HEAD_ROWS):
                        rows = slice(begin, begin + HEAD_ROWS)
                        logits = nn.functional.linear(flat[rows], hidden.weight, hidden.bias)
                        nll_of(hidden.tail(logits), wanted[rows])

        if way == "no_logits" and not runnable.has_head:
            return {f"{way}_mib": None}
        fixed = runnable.program.batch if runnable is not None else None
        mark(*ids(fixed or WARM_ROWS))
        batch = ids(fixed or MEMORY_ROWS)
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
        before = status_bytes("VmRSS")
        mark(*batch)
        return {f"{way}_mib": (status_bytes("VmHWM") - before) / 2**20}

    return measure


def status_bytes(what: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{what}:")[1].split()[0]) * 1024


ROLES: dict[str, Callable[[str, Path, int], dict[str, Any]]] = {
    "capture": capture_program,
    "time": time_both,
    **{way: memory_of(way) for way in ("eager", "program", "no_logits")},
}


def in_child(role: str, name: str, folder: Path, repeats: int) -> dict[str, Any]:
    """What a role finds in a process of its own, whose threads wait as those of a run do."""
    command = child_command("benchmarks.executor", f"--child={role}", f"--model={name}", f"--folder={folder}")
    changes = {**THREADS_WAIT, SEARCH_PATH: str(Path(__file__).parents[1])}
    done = subprocess.run(
        [*command, f"--repeats={repeats}"],
        capture_output=True,
        text=True,
        env=child_environment(os.environ, changes),
    )
    if done.returncode:
        raise RuntimeError(f"{role} of {name}: {done.stderr.strip().splitlines()[-1:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = parser_for(__doc__, quick="two models, few repeats")
    parser.add_argument("--repeats", type=int, default=101)
    parser.add_argument("--child", choices=tuple(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(ROLES[arguments.child](arguments.model, arguments.folder, arguments.repeats)))
        return
    table = Table("executor", {"torch": torch.__version__}, COLUMNS, arguments)
    for name in names(arguments.quick):
        with tempfile.TemporaryDirectory(prefix="prism-executor-bench-") as folder:
            row: dict[str, Any] = {"model": name}
            for role in ROLES:
                row |= in_child(role, name, Path(folder), 11 if arguments.quick else arguments.repeats)
            table.add(row)
    table.finish()


if __name__ == "__main__":
    main()
