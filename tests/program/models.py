"""Models for the tests of programs: the examples, bundles in many styles, small transformers."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from prism_fast.program.capture import Captured, capture, unwrapped
from prism_fast.program.runnable import Runnable

HERE = Path(__file__).parent
EXAMPLES = sorted((HERE.parent.parent / "examples").glob("*/"))
BUNDLES = sorted((HERE / "bundles").glob("*/"))
VOCAB = 300


def built(bundle: Path, width: int = 64) -> nn.Module:
    """What the bundle's build_model gives, from seed 0."""
    name = f"architecture_of_{bundle.name}"
    spec = importlib.util.spec_from_file_location(name, bundle / "architecture.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    ctx = SimpleNamespace(vocab_size=VOCAB, sequence_length=width, max_seq_len=width, seed=0)
    return module.build_model(ctx)


def state_of(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in unwrapped(model).state_dict(keep_vars=True).values()]


def eager(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output = unwrapped(model).eval()(tokens)
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, dict):
        return output["logits"]
    return output.logits if hasattr(output, "logits") else output[0]


def captured(model: nn.Module, width: int = 16, **options: object) -> tuple[Captured, Runnable]:
    found = capture(model, width=width, **options)
    return found, Runnable(found.program, found.constants)


def ids(rows: int, width: int, vocab: int = VOCAB, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, width), generator=torch.Generator().manual_seed(seed))
