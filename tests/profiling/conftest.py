"""A bundle small enough that a probe is mostly start-up, with every kind of work that the probes tell apart."""

from __future__ import annotations

from pathlib import Path

import pytest

ARCHITECTURE = """
import torch
import torch.nn.functional as F
from torch import nn

WINDOW = 8

class Decoder(nn.Module):
    def __init__(self, vocab_size, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.head = nn.Linear(width, vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens):
        x = self.embedding(tokens)
        q, k, v = (t.unsqueeze(1) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        i = torch.arange(tokens.shape[1], device=tokens.device)
        near = (i[:, None] >= i) & (i[:, None] - i < WINDOW)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=near).squeeze(1)
        return self.head(x)

def build_model(ctx):
    return Decoder(ctx.vocab_size)
"""

TRAINING = """
import torch
import torch.nn.functional as F
from architecture import build_model

def train(ctx):
    model = build_model(ctx).to(ctx.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in ctx.iter_train_batches(model, batch_size=2, tokenizer=ctx.reference_tokenizer("bytes")):
        logits = model(batch.tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
"""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A packed corpus of bytes, a few hundred KB of text."""
    from prism_fast.data.corpus import Dataset, build_corpus
    from prism_fast.data.tokenizers import reference_tokenizer

    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "train.jsonl"
    lines = (
        f'{{"id": "{i}", "text": "{i} ' + "the quick brown fox jumps over the lazy dog " * 40 + '"}' for i in range(200)
    )
    text.write_text("\n".join(lines) + "\n")
    dataset = Dataset(name="made for the test", licence="public domain")
    build_corpus([text], folder / "packed", reference_tokenizer("bytes"), dataset=dataset)
    return folder / "packed"


@pytest.fixture
def write_bundle(tmp_path):
    def write(architecture: str = ARCHITECTURE, training: str = TRAINING) -> Path:
        folder = tmp_path / "bundle"
        folder.mkdir()
        (folder / "architecture.py").write_text(architecture)
        (folder / "training.py").write_text(training)
        return folder

    return write
