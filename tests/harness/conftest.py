"""Bundles as text, and real runs of them: `prism-fast score` in a process of its own, torchrun and all."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

from prism_fast.protocol import constants as c
from prism_fast.protocol.manifest import RunManifest

ROOT = Path(__file__).parents[2]

# A decoder small enough that a run is mostly start-up: one gated causal average between embedding and head.
TINY_ARCHITECTURE = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self, vocab_size, width=8):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab_size)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens):
        x = self.embedding(tokens)
        steps = torch.arange(1, x.shape[1] + 1, device=x.device)[None, :, None]
        return self.head(x + torch.tanh(self.mix(x.cumsum(1) / steps)))

def build_model(ctx):
    return Tiny(ctx.vocab_size)
"""

# A uniform code: no parameter reaches the logits, so every token costs ln V whatever is learned.
UNIFORM_ARCHITECTURE = """
import torch
from torch import nn

class Uniform(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size = vocab_size
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, tokens):
        return (self.unused * 0).expand(*tokens.shape, self.vocab_size)

def build_model(ctx):
    return Uniform(ctx.vocab_size)
"""

TINY_TRAINING = """
import torch
import torch.nn.functional as F
from architecture import build_model

def train(ctx):
    model = build_model(ctx).to(ctx.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokenizer = ctx.reference_tokenizer("gpt2")
    for batch in ctx.iter_train_batches(model, batch_size=4, tokenizer=tokenizer):
        logits = model(batch.tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
"""


def seed_training() -> str:
    """The original engine's example, unmodified: the script below its title line."""
    return (Path(__file__).parent / "original_training.py.txt").read_text()


@dataclass(frozen=True)
class Run:
    code: int
    out: Path
    stdout: str
    stderr: str

    def seed_dir(self, seed: int = c.DEFAULT_SEED) -> Path:
        return self.out / f"seed-{seed}"

    def json(self, name: str, seed: int = c.DEFAULT_SEED) -> dict:
        return orjson.loads((self.seed_dir(seed) / name).read_bytes())

    def manifest(self, seed: int = c.DEFAULT_SEED) -> RunManifest:
        return RunManifest.model_validate(self.json(c.RUN_MANIFEST_FILE, seed))

    def status(self, seed: int = c.DEFAULT_SEED) -> dict:
        return self.json(c.RUN_STATUS_FILE, seed)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> Path:
    """One packed sample corpus for all runs of this worker."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def sample(cache_dir) -> Path:
    """The packed sample corpus' directory."""
    from prism_fast.data.corpus import resolve_data
    from prism_fast.data.tokenizers import reference_tokenizer

    return Path(resolve_data("sample", reference_tokenizer("gpt2"), cache_dir).folder)


def write_bundle(directory: Path, architecture: str = TINY_ARCHITECTURE, training: str = TINY_TRAINING) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "architecture.py").write_text(architecture)
    (directory / "training.py").write_text(training)
    return directory


def score_command(bundle: Path, out: Path, cache_dir: Path, *options: str) -> list[str]:
    """The command line of a short run: 8 steps, 64 tokens a row, a small held-out prefix; later options win."""
    return [
        sys.executable,
        "-m",
        "prism_fast.cli.main",
        "score",
        str(bundle),
        "--data=sample",
        f"--out={out}",
        f"--cache-dir={cache_dir}",
        "--seq-len=64",
        "--step-budget=8",
        "--val-byte-budget=3000",
        "--torch-threads=1",
        "--seal=open",
        *options,
    ]


@pytest.fixture
def score(tmp_path, cache_dir):
    """Writes a bundle and scores it: `score(architecture=..., training=..., options=[...]) -> Run`."""

    def run(
        architecture: str = TINY_ARCHITECTURE,
        training: str = TINY_TRAINING,
        options: tuple[str, ...] = (),
        out: str = "run",
        timeout: float = 240,
        bundle: Path | None = None,
    ) -> Run:
        bundle = bundle or write_bundle(tmp_path / f"bundle-{out}", architecture, training)
        done = subprocess.run(
            score_command(bundle, tmp_path / out, cache_dir, *options),
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "COLUMNS": "200"},
        )
        return Run(done.returncode, tmp_path / out, done.stdout, done.stderr)

    return run
