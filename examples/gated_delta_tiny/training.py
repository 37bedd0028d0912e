"""AdamW with warm-up and the fast loss, at any world size; the same loop as fused_loss."""

import torch
import torch.distributed as dist
from architecture import build_model
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from prism_fast import cross_entropy

LEARNING_RATE, WARMUP_STEPS, BATCH_SIZE, CLIP_NORM = 3e-3, 10, 4, 1.0


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    # The logits are not needed again, so their memory takes the gradient: one read and one write of [N, V] in all.
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), inplace_grad=True)


def train(ctx) -> None:
    on_gpu = ctx.device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(ctx.local_rank)
    if ctx.world_size > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    # ctx.iter_train_batches hands rank r every world_size-th batch; the sampler says the same in torch's terms.
    DistributedSampler(range(ctx.world_size), num_replicas=ctx.world_size, rank=ctx.rank)

    model = build_model(ctx).to(ctx.device)
    trained = model
    if ctx.world_size > 1:
        trained = DistributedDataParallel(model, device_ids=[ctx.local_rank] if on_gpu else None)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))

    for batch in ctx.iter_train_batches(model, batch_size=BATCH_SIZE, tokenizer=ctx.reference_tokenizer("gpt2")):
        loss = next_token_loss(trained(batch.tokens), batch.tokens)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), CLIP_NORM)
        optimizer.step()
        warmup.step()

    if ctx.rank == 0 and ctx.artifacts_dir:
        torch.save(model.state_dict(), ctx.artifacts_dir + "/trained_state.pt")
    if ctx.world_size > 1:
        dist.barrier()
        dist.destroy_process_group()
