"""A decoder of one block that is applied four times: depth without parameters.

The block sees the embeddings again in every loop, mixed with what it has so far (Dehghani et al. 2018, "Universal
Transformers"; Geiping et al. 2025 on why the input is injected), and a learned vector tells it which loop it is in.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LOOPS, HEADS = 64, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            t.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for t in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class LoopedDecoder(nn.Module):
    """tokens int64 [B, L] -> logits [B, L, vocab_size]."""

    def __init__(self, vocab_size: int, max_length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, WIDTH)
        self.positions = nn.Embedding(max_length, WIDTH)
        self.loops = nn.Embedding(LOOPS, WIDTH)
        self.inject = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.block = Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        self.apply(_init)
        with torch.no_grad():  # at first a loop adds the embeddings to what it has
            self.inject.weight.copy_(torch.eye(WIDTH).repeat(1, 2))
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = torch.zeros_like(embedded)
        for loop in self.loops.weight:
            x = self.block(self.inject(torch.cat([x, embedded + loop], dim=-1)))
        return self.head(self.norm(x))


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def build_model(ctx) -> nn.Module:
    return LoopedDecoder(ctx.vocab_size, ctx.sequence_length)
