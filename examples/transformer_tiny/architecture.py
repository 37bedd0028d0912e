"""A small pre-norm decoder with tied embeddings: the reference example."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LAYERS, HEADS = 64, 2, 4


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


class Decoder(nn.Module):
    """tokens int64 [B, L] -> logits [B, L, vocab_size]."""

    def __init__(self, vocab_size: int, max_length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, WIDTH)
        self.positions = nn.Embedding(max_length, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        self.apply(_init)
        self.head.weight = self.tokens.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        """The head's input, [B, L, WIDTH]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def build_model(ctx) -> nn.Module:
    return Decoder(ctx.vocab_size, ctx.sequence_length)
