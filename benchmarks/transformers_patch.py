"""How much memory does `prism_fast.integrations.transformers.patch` save a training step?

    python -m benchmarks.transformers_patch [--tokens 512]

Tiny bodies under real vocabularies, randomly initialised, nothing downloaded: the logits are then most of what a step
holds. Memory is what VmHWM grows by over one step (forward and backward) in a fresh process. What the loss costs in
time is the question of `losses.py`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.measure import save
from prism_fast.harness.process.commands import SEARCH_PATH, child_command, child_environment

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
    command = child_command("benchmarks.transformers_patch", "--memory", family, "--tokens", str(tokens))
    environment = child_environment(changes={SEARCH_PATH: str(Path(__file__).parents[1])})
    done = subprocess.run(
        [*command, *["--patched"] * patched], capture_output=True, text=True, check=True, env=environment
    )
    return int(done.stdout)


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
    parser.add_argument("--memory", choices=FAMILIES)
    parser.add_argument("--patched", action="store_true")
    options = parser.parse_args(arguments or [])
    if options.memory:
        return measure_memory(options.memory, options.tokens, options.patched)
    rows = []
    print(f"{'family':8}{'vocabulary':>12}{'memory of a step':>28}{'of plain':>10}")
    for family, vocab in FAMILIES.items():
        plain, patched = (memory_of_a_step(family, options.tokens, on) for on in (False, True))
        row = {
            "family": family,
            "vocabulary": vocab,
            "tokens": ROWS * options.tokens,
            "memory_plain_mib": plain / 2**20,
            "memory_patched_mib": patched / 2**20,
            "memory_share": patched / plain,
        }
        rows.append(row)
        shown = f"{row['memory_plain_mib']:,.0f} -> {row['memory_patched_mib']:,.0f} MiB"
        print(f"{family:8}{vocab:12,}{shown:>28}{row['memory_share']:10.0%}", flush=True)
    save("transformers_patch", {name: version(name) for name in ("torch", "transformers")}, rows)
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
