"""One rank of a job of any size: a model sharded in every way has the state, and takes the steps, of one under DDP."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from prism_fast.harness.trainer.full_state import FullState, hold_all, is_sharded
from prism_fast.harness.trainer.predictor import EvalMode
from prism_fast.harness.trainer.process_groups import keep_process_groups

V, T, STEPS = 64, 16, 4
WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.register_buffer("scale", torch.ones(()))
        self.head = nn.Linear(8, V, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + self.scale * block(x)
        return self.head(x)


def fsdp1(module, **options):
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def nested_fsdp1(model):
    model.blocks[1] = fsdp1(model.blocks[1], use_orig_params=True)
    return fsdp1(model, use_orig_params=True)


def fsdp2(model, nested=False):
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks if nested else ():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh) or model


KINDS = {
    "DDP": DistributedDataParallel,
    "FSDP": lambda m: fsdp1(m, use_orig_params=True),
    "FSDP, flat": fsdp1,
    "FSDP, nested": nested_fsdp1,
    "fully_shard": fsdp2,
    "fully_shard, nested": lambda m: fsdp2(m, nested=True),
}


def trained(wrap):
    """-> (the state at the start, at the end, parameters) of a few steps, each after a prediction."""
    model = wrap(Model())
    state = FullState(model)
    first = [(name, tensor.detach().clone()) for name, tensor in state.tensors()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.randint(0, V, (STEPS, WORLD, 4, T), generator=torch.Generator().manual_seed(1))
    for tokens in batches[:, RANK]:
        EvalMode(model)(tokens)
        state.tensors()
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return first, state, model


def main():
    keep_process_groups(before=hold_all)
    dist.init_process_group("gloo")
    kept = {kind: trained(wrap) for kind, wrap in KINDS.items()}
    dist.destroy_process_group()
    wanted, ddp, model = kept["DDP"]
    assert [name for name, _ in wanted] == list(Model().state_dict())
    final = [(name, tensor.detach().clone()) for name, tensor in ddp.tensors()]
    for kind, (first, state, model) in kept.items():
        assert is_sharded(model) == (kind != "DDP"), kind
        for ours, theirs in ((first, wanted), (state.tensors(), final)):
            assert [name for name, _ in ours] == [name for name, _ in theirs], kind
            for (name, tensor), (_, other) in zip(ours, theirs, strict=True):
                torch.testing.assert_close(tensor.detach(), other, rtol=0, atol=1e-6, msg=f"{kind}: {name}")
        assert state.parameter_count() == sum(p.numel() for p in Model().parameters()), kind
        if RANK == 0:
            print(f"{kind} as DDP")


if __name__ == "__main__":
    main()
