"""What does `prism_fast.integrations.transformers.patch` save a training step in memory, and what does it cost in time?

    python -m benchmarks.transformers_patch [--tokens 512] [--repeats 5]

Tiny bodies under real vocabularies, randomly initialised, nothing downloaded: the loss is then most of the step, which
is where the two differ most. Time is the processor's, of all threads, for forward and backward, alternating in one
process: a loaded machine moves it least. Memory is what VmHWM grows by over one step in a fresh process.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.measure import median, save

# family -> vocabulary, as released
FAMILIES = {"gpt2": 50257, "llama": 32000, "qwen2": 151936}
ROWS, WIDTH, LAYERS, HEADS = 2, 256, 2, 4


def a_model(family: str, tokens: int) -> Any:
    import torch
    import transformers as t

    torch.manual_seed(0)
    vocab = FAMILIES[family]
    if family == "gpt2":
        config: Any = t.GPT2Config(vocab_size=vocab, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=tokens)
    else:
        make = {"llama": t.LlamaConfig, "qwen2": t.Qwen2Config}[family]
        config = make(
            vocab_size=vocab,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
        )
    return t.AutoModelForCausalLM.from_config(config).train()


def a_step(model: Any, tokens: int) -> Callable[[], None]:
    import torch

    batch = torch.randint(model.config.vocab_size, (ROWS, tokens), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()

    return step


def peak_bytes() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def memory_of_a_step(family: str, tokens: int, patched: bool) -> int:
    """Bytes by which the peak of a fresh process grows over one step."""
    command = [sys.executable, "-m", "benchmarks.transformers_patch", "--memory", family, "--tokens", str(tokens)]
    done = subprocess.run([*command, *["--patched"] * patched], capture_output=True, text=True, check=True)
    return int(done.stdout)


def processor_seconds(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Processor seconds of each step, `repeats` times after a warm-up, in turn."""
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            began = time.process_time()
            step()
            seconds[name].append(time.process_time() - began)
    return seconds


def measure_memory(family: str, tokens: int, patched: bool) -> None:
    from prism_fast.integrations.transformers import patch

    model = a_model(family, tokens)
    a_step(patch(model) if patched else model, 8)()  # libraries load and buffers form before, not within
    before = peak_bytes()
    a_step(model, tokens)()
    print(peak_bytes() - before)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", choices=FAMILIES)
    parser.add_argument("--patched", action="store_true")
    options = parser.parse_args(arguments or [])
    if options.memory:
        return measure_memory(options.memory, options.tokens, options.patched)
    from prism_fast.integrations.transformers import patch

    rows = []
    print(f"{'family':8}{'vocabulary':>12}{'memory of a step':>28}{'of plain':>10}{'time, plain over patched':>28}")
    for family, vocab in FAMILIES.items():
        plain = a_model(family, options.tokens)
        steps = {
            "plain": a_step(plain, options.tokens),
            "patched": a_step(patch(copy.deepcopy(plain)), options.tokens),
        }
        seconds = processor_seconds(steps, options.repeats)
        memory = {name: memory_of_a_step(family, options.tokens, name == "patched") for name in steps}
        row = {
            "family": family,
            "vocabulary": vocab,
            "tokens": ROWS * options.tokens,
            "memory_plain_mib": memory["plain"] / 2**20,
            "memory_patched_mib": memory["patched"] / 2**20,
            "memory_share": memory["patched"] / memory["plain"],
            "time_plain_over_patched": median(seconds["plain"]) / median(seconds["patched"]),
            "seconds": seconds,
        }
        rows.append(row)
        shown = f"{row['memory_plain_mib']:,.0f} -> {row['memory_patched_mib']:,.0f} MiB"
        print(f"{family:8}{vocab:12,}{shown:>28}{row['memory_share']:10.0%}{row['time_plain_over_patched']:28.2f}")
    save("transformers_patch", {name: version(name) for name in ("torch", "transformers")}, rows)
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
