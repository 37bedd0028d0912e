"""A diagonal state-space model in pure torch: an exponential moving memory per channel, computed in closed form.

h_t = a * h_{t-1} + (1 - a) * u_t is a causal convolution with the kernel (1 - a) a^k. Over a block of length T the
kernel matrix is [T, T] per channel group, so one batched product replaces the scan; decays are shared by groups of
channels to keep that matrix small.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LAYERS, GROUPS = 64, 2, 8


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inputs = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.decay = nn.Parameter(torch.linspace(0.0, 5.0, GROUPS))  # a = sigmoid(decay): time scales 2 to 150 tokens

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        values, gate = self.inputs(self.norm(x)).chunk(2, dim=-1)
        lag = torch.arange(length, device=x.device)
        lag = lag[:, None] - lag[None, :]
        log_a = F.logsigmoid(self.decay)[:, None, None]
        kernel = torch.exp(log_a * lag.clamp(min=0)) * (lag >= 0) * torch.sigmoid(-self.decay)[:, None, None]
        grouped = values.view(batch, length, GROUPS, WIDTH // GROUPS)
        mixed = torch.einsum("gts,bsgc->btgc", kernel, grouped).reshape(batch, length, WIDTH)
        return x + self.out(mixed * F.silu(gate))


class StateSpaceModel(nn.Module):
    """tokens int64 [B, L] -> logits [B, L, vocab_size]. Has no position table: any length works."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, WIDTH)
        self.memories = nn.ModuleList(Memory() for _ in range(LAYERS))
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
    return StateSpaceModel(ctx.vocab_size)
