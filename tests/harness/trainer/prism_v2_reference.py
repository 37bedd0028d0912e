"""The original engine's rules in plain Python and torch, token by token: what `--accounting prism-v2` must reproduce.

One is mended: held-out text ends at its byte budget, and what is left after the last whole batch is rows of the
sequence length and what remains of one, not one row of any width, which a table of positions cannot take.

`python prism_v2_reference.py JOB.json` runs a bundle in this process and prints its figures as JSON. It shares no code
with the engine but the tokenizer's ranks.
"""

import json
import math
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as F

LN2 = math.log(2.0)


def documents(folder, split):
    for shard in sorted(Path(folder).glob(f"{split}-*.jsonl")):
        for line in shard.read_text().splitlines():
            if line.strip() and json.loads(line)["text"]:
                yield json.loads(line)["text"]


def loss_of(model, tokens):
    with torch.no_grad():
        logits = model(tokens)
    vocabulary = logits.shape[-1]
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocabulary), tokens[:, 1:].reshape(-1) % vocabulary).item()


def rows_of(ids, rows, width):
    """A whole batch as rows; anything else as one row."""
    whole = len(ids) == rows * width
    return torch.tensor(ids).view(rows if whole else 1, width if whole else len(ids))


class Original:
    """The context and the loss capture in one."""

    max_layers, max_parameters, param_ladder_stage, world_size, rank, local_rank = 96, 124_000_000, "explore", 1, 0, 0
    device, artifacts_dir = "cpu", ""

    def __init__(self, job):
        self.job, self.vocab_size, self.seed = job, job["vocab_size"], job["seed"]
        self.sequence_length = self.max_seq_len = job["sequence_length"]
        self.losses, self.nats, self.predicted, self.bytes, self.consumed = [], 0.0, 0, 0.0, 0
        self.stopped, self.encoding = None, None

    def reference_tokenizer(self, name):
        from prism_fast.data.tokenizers import reference_tokenizer

        return reference_tokenizer(name).encoding

    def iter_train_batches(self, model, *, batch_size=8, seq_len=None, tokenizer=None):
        self.model, width = model, seq_len or self.sequence_length
        budget, waiting = self.job["token_budget"], []
        for text in documents(self.job["data"], "train"):
            raw = text.encode()
            ids = list(raw) if tokenizer is None else tokenizer.encode(text)
            for token in ids:
                if budget is not None and self.consumed >= budget:
                    self.stopped = "token_budget"
                    return
                waiting.append((token, len(raw) / len(ids)))
                self.consumed += 1
                if len(waiting) == batch_size * width:
                    yield self.predict(model, waiting, batch_size, width)
                    waiting = []
        if len(waiting) >= 2:
            yield self.predict(model, waiting, batch_size, width)
        self.stopped = "data_exhausted"

    def predict(self, model, waiting, batch_size, width):
        tokens = rows_of([token % self.vocab_size for token, _ in waiting], batch_size, width)
        predicted = tokens.shape[0] * (tokens.shape[1] - 1)
        self.losses.append(loss_of(model, tokens))
        self.nats += self.losses[-1] * predicted
        self.predicted += predicted
        self.bytes += sum(share for _, share in waiting)
        return SimpleNamespace(tokens=tokens)

    def held_out(self, model, split):
        model.eval()
        text = b""
        for document in documents(self.job["data"], split):
            text += document.encode()
            if len(text) >= self.job["held_out_bytes"]:
                break
        ids = [b % self.vocab_size for b in text[: self.job["held_out_bytes"]]]
        nats, covered, width = 0.0, 0, self.sequence_length
        whole = len(ids) // width * width
        cuts = [(begin, min(begin + 8 * width, whole)) for begin in range(0, whole, 8 * width)] + [(whole, len(ids))]
        for begin, end in cuts:
            tokens = rows_of(ids[begin:end], max(1, (end - begin) // width), width)
            if tokens.numel() >= 2:
                nats += loss_of(model, tokens) * tokens.shape[0] * (tokens.shape[1] - 1)
                covered += tokens.numel()
        return nats / LN2 / covered


def main(job):
    torch.set_num_threads(1)
    sys.path.insert(0, job["bundle"])
    for name in ("prism_challenge", "prism_challenge.evaluator", "prism_challenge.evaluator.interface"):
        sys.modules[name] = ModuleType(name)
    sys.modules[name].PrismContext = Original

    def force(seed):
        random.seed(seed)
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True, warn_only=True)

    force(job["seed"])
    import architecture
    import training

    ctx = Original(job)
    force(job["seed"])
    training.train(ctx)
    state = {name: value.detach().clone() for name, value in ctx.model.state_dict().items()}
    bpb = ctx.nats / LN2 / round(ctx.bytes)
    torch.manual_seed(job["seed"])
    twin = ctx.held_out(architecture.build_model(ctx), "val")
    trained = architecture.build_model(ctx)
    trained.load_state_dict(state)
    val = ctx.held_out(trained, "val")
    return {
        "prequential_bpb": bpb,
        "covered_bytes": round(ctx.bytes),
        "predicted_tokens": ctx.predicted,
        "batches": len(ctx.losses),
        "step0_loss": ctx.losses[0],
        "online_loss": ctx.nats / ctx.predicted,
        "stopped_reason": ctx.stopped,
        "val_bpb_trained": val,
        "val_bpb_random_init": twin,
        "heldout_delta": twin - val,
        "train_bpb_converged": ctx.held_out(trained, "train"),
        "final_score": 100 + twin - val + min(1e-3, 0.5 * 5e-3) / (1 + bpb),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
