"""A hybrid: layers of recurrent memory and of attention to a short window, in turn.

The memory carries what lies far back, at a cost that does not grow with it; the window copies exactly what lies near
(De et al. 2024, "Griffin"; Ren et al. 2024, "Samba"). The recurrence h_t = a_t h_{t-1} + (1 - a_t) u_t has a decay for
every token and channel group, and is computed as one product per group with the decays' cumulative sums.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, PAIRS, HEADS, GROUPS, WINDOW = 64, 1, 4, 8, 32


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inputs = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.forget = nn.Linear(WIDTH, GROUPS, bias=False)
        self.decay = nn.Parameter(torch.linspace(0.0, 5.0, GROUPS))  # a = sigmoid: time scales 2 to 150 tokens
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm(x)
        values, gate = self.inputs(y).chunk(2, dim=-1)
        logit = self.forget(y) + self.decay
        kept = F.logsigmoid(logit).cumsum(1).transpose(1, 2)  # [B, G, L]
        # What is left at t of what was written at s <= t; masked before its exp, which overflows above the diagonal.
        kernel = (kept[..., :, None] - kept[..., None, :]).tril().exp().tril()
        written = values.view(batch, length, GROUPS, -1) * torch.sigmoid(-logit)[..., None]
        mixed = (kernel @ written.transpose(1, 2)).transpose(1, 2).reshape(batch, length, WIDTH)
        return x + self.out(mixed * F.silu(gate))


class WindowAttention(nn.Module):
    """Attention to the last WINDOW positions. Positions enter as a learned bias by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.distance = nn.Parameter(torch.zeros(HEADS, WINDOW))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            t.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        position = torch.arange(length, device=x.device)
        back = position[:, None] - position[None, :]
        bias = self.distance[:, back.clamp(0, WINDOW - 1)]
        bias = bias.masked_fill((back < 0) | (back >= WINDOW), float("-inf"))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))


class HybridDecoder(nn.Module):
    """tokens int64 [B, L] -> logits [B, L, vocab_size]. Has no position table: any length works."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, WIDTH)
        self.mixers = nn.ModuleList(kind() for _ in range(PAIRS) for kind in (Memory, WindowAttention))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in self.mixers
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        self.apply(_init)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for mixer, mlp in zip(self.mixers, self.mlps, strict=True):
            x = mixer(x)
            x = x + mlp(x)
        return self.head(self.norm(x))


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def build_model(ctx) -> nn.Module:
    return HybridDecoder(ctx.vocab_size)
