"""A decoder whose MLPs are mixtures of experts: each token is worked on by the 2 of 4 experts its router prefers.

Routing is a choice of each token alone (Shazeer et al. 2017), so it is causal; a router in which experts choose among
the tokens of a row would look ahead and score 0 (`prism:noncausal`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LAYERS, HEADS, EXPERTS, CHOSEN = 64, 2, 4, 4, 2


class Experts(nn.Module):
    """[N, WIDTH] -> [N, WIDTH]. `balance` holds the load-balancing loss of the last forward: 1 when even, up to 4."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False))
            for _ in range(EXPERTS)
        )
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        preference = self.router(x).softmax(dim=-1)
        share, chosen = preference.topk(CHOSEN, dim=-1)
        share = share / share.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            # An expert that nobody chose runs on no rows: its gradient is then 0 and not missing, as DDP needs.
            token, slot = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * share[token, slot, None])
        # Fedus, Zoph and Shazeer 2021, equation 4: share of tokens sent to an expert times its mean preference.
        load = F.one_hot(chosen, EXPERTS).sum(dim=1).to(x.dtype).mean(dim=0) / CHOSEN
        self.balance = EXPERTS * (load * preference.mean(dim=0)).sum()
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_experts = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            t.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for t in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.experts(self.norm_experts(x).flatten(0, 1)).view_as(x)


class MixtureDecoder(nn.Module):
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

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def balance_loss(self) -> Tensor:
        """Mean over layers of the load-balancing loss of the last forward; for training, never part of the score."""
        return torch.stack([block.experts.balance for block in self.blocks]).mean()


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def build_model(ctx) -> nn.Module:
    return MixtureDecoder(ctx.vocab_size, ctx.sequence_length)
