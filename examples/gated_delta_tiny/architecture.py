"""A gated delta network in pure torch: a matrix memory per head that forgets and overwrites, computed chunk by chunk.

The state S [K, V] follows S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T (Yang, Kautz and Hatamizadeh 2024,
"Gated Delta Networks"): a_t forgets, b_t says how far the value stored under k_t is replaced. It is also
S_t = a_t S_{t-1} + k_t u_t^T with u_t = b_t (v_t - a_t k_t^T S_{t-1}), and the u of a chunk solve one unit triangular
system: a chunk costs a few matrix products, and only the chunks are walked one after another.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LAYERS, HEADS, CHUNK = 64, 2, 4, 32
HEAD_WIDTH = WIDTH // HEADS


def gated_delta(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, b: Tensor) -> Tensor:
    """q, k, v [B, H, L, D] with unit keys; log_a <= 0 and b in (0, 1), [B, H, L] -> [B, H, L, D], causal."""
    state = q.new_zeros(*q.shape[:2], HEAD_WIDTH, HEAD_WIDTH)
    read = []
    for q_c, k_c, v_c, log_a_c, b_c in zip(*(t.split(CHUNK, dim=2) for t in (q, k, v, log_a, b)), strict=True):
        kept = log_a_c.cumsum(-1)  # log of what is left of the state at the chunk's start
        # decay[t, i]: what is left at t of what was written at i <= t; the difference is masked before its exp.
        decay = (kept[..., :, None] - kept[..., None, :]).tril().exp().tril()
        from_start = kept.exp()[..., None]
        system = ((k_c @ k_c.mT) * decay * b_c[..., None]).tril(-1)
        wanted = b_c[..., None] * (v_c - from_start * (k_c @ state))
        u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        read.append(from_start * (q_c @ state) + ((q_c @ k_c.mT) * decay) @ u)
        to_end = (kept[..., -1:] - kept).exp()[..., None]
        state = kept[..., -1:, None].exp() * state + (k_c * to_end).mT @ u
    return torch.cat(read, dim=2)


class DeltaMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.gates = nn.Linear(WIDTH, 2 * HEADS, bias=False)
        self.forget_bias = nn.Parameter(torch.linspace(1.0, 5.0, HEADS))  # a = sigmoid: time scales 4 to 150 tokens
        self.head_norm = nn.LayerNorm(HEAD_WIDTH)
        self.gate_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm(x)
        q, k, v = (t.view(batch, length, HEADS, HEAD_WIDTH).transpose(1, 2) for t in self.qkv(y).chunk(3, dim=-1))
        forget, write = (t.transpose(1, 2) for t in self.gates(y).chunk(2, dim=-1))
        log_a = F.logsigmoid(forget + self.forget_bias[:, None])
        read = gated_delta(F.normalize(q, dim=-1), F.normalize(F.silu(k), dim=-1), v, log_a, write.sigmoid())
        read = self.head_norm(read).transpose(1, 2).reshape(batch, length, WIDTH)
        return x + self.out(read * F.silu(self.gate_out(y)))


class GatedDeltaNetwork(nn.Module):
    """tokens int64 [B, L] -> logits [B, L, vocab_size]. Has no position table: any length works."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, WIDTH)
        self.memories = nn.ModuleList(DeltaMemory() for _ in range(LAYERS))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        self.apply(_init)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for memory, mlp in zip(self.memories, self.mlps, strict=True):
            x = memory(x)
            x = x + mlp(x)
        return self.head(self.norm(x))


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def build_model(ctx) -> nn.Module:
    return GatedDeltaNetwork(ctx.vocab_size)
