"""Held-out scoring in a process of its own: `python -m prism_fast.harness.evaluator JOB`. Not for people.

Builds the model from architecture.py alone under the forced seed, measures it as it was born (the random-init twin),
adopts the trained weights strictly by name, and measures it again on the same documents. Every document stands by
itself: rows begin with end-of-text, are cut at the sequence length with one token of overlap, and are batched with
rows of like width, so neither batch size nor padding reaches a document's figure.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import orjson

from prism_fast.harness.die_with_parent import die_with_parent
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleFailed, BundleRejected, EngineFault

# Padded tokens of one forward. Part of the measurement (a matrix product's last bits depend on its row count), so
# a change here moves scores in their last digits and must say so.
MICRO_BATCH_TOKENS = 2048


class Documents:
    """A prefix of a split as flat token ids: document d is ids[offsets[d]:offsets[d + 1]], without end-of-text."""

    def __init__(self, ids: np.ndarray, offsets: np.ndarray, utf8_bytes: np.ndarray) -> None:
        self.ids, self.offsets, self.utf8_bytes = ids, offsets, utf8_bytes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def read(cls, corpus_dir: str, split: str, basis: str, byte_budget: int | None) -> Documents:
        """Documents in corpus order until `byte_budget` UTF-8 bytes are reached (None: all). Empty ones count 0."""
        from prism_fast.data.corpus import open_corpus
        from prism_fast.data.tokenizers import reference_tokenizer

        corpus = open_corpus(corpus_dir)
        source = corpus.split(split)
        decode = None
        if basis == "bytes" and source.tokenizer_name != "bytes":
            decode = reference_tokenizer(source.tokenizer_name).decode_bytes
        parts: list[np.ndarray] = []
        sizes: list[int] = []
        total = 0
        for shard in source.open():
            for record in range(len(shard)):
                if byte_budget is not None and total >= byte_budget:
                    break
                tokens = shard[record]
                if decode is not None:
                    tokens = np.frombuffer(decode(tokens), np.uint8)
                parts.append(np.array(tokens))  # a copy in the stored width; the map may go
                sizes.append(int(shard.utf8_bytes[record]))
                total += sizes[-1]
        if not parts:
            raise EngineFault(f"{corpus_dir}: split {split!r} has no documents to score")
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(p) for p in parts], out=offsets[1:])
        return cls(np.concatenate(parts), offsets, np.asarray(sizes, np.int64))

    def rows(self, seq_len: int) -> np.ndarray:
        """int64 [rows, 3]: (document, first scored token, scored tokens) of every row, in document order."""
        lengths = np.diff(self.offsets)
        per_document = -(-lengths // (seq_len - 1))
        document = np.repeat(np.arange(len(self)), per_document)
        first_row = np.cumsum(per_document) - per_document
        start = (np.arange(len(document)) - first_row[document]) * (seq_len - 1)
        return np.stack([document, start, np.minimum(lengths[document] - start, seq_len - 1)], axis=1)


def micro_batches(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Row numbers in batches of like width, at most MICRO_BATCH_TOKENS padded tokens each (one row at least)."""
    order = np.argsort(-rows[:, 2], kind="stable")
    begin = 0
    while begin < len(order):
        width = int(rows[order[begin], 2]) + 1
        count = max(1, MICRO_BATCH_TOKENS // width)
        yield order[begin : begin + count]
        begin += count


def measure(model: Any, documents: Documents, spec: Any, token_bytes: np.ndarray, eot: int) -> dict[str, Any]:
    """-> per-document nats float64 [D], totals, the head's width. Faulty targets are charged 2 ln V."""
    import torch

    from prism_fast.harness.predictor import EvalMode, logits_of
    from prism_fast.kernels import token_nll

    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    forward = EvalMode(model)
    rows = documents.rows(spec.sequence_length)
    row_nats = np.zeros(len(rows))
    faults = tokens = 0
    width = 0
    for batch in micro_batches(rows):
        longest = int(rows[batch[0], 2]) + 1
        inputs = np.full((len(batch), longest), eot, np.int64)
        targets = np.full((len(batch), longest), -100, np.int64)
        for i, (document, start, count) in enumerate(rows[batch].tolist()):
            at = int(documents.offsets[document]) + start
            if start:
                inputs[i, 0] = documents.ids[at - 1]
            inputs[i, 1 : count + 1] = documents.ids[at : at + count]
            targets[i, :count] = documents.ids[at : at + count]
        try:
            output = forward(torch.from_numpy(inputs).to(device))
        except Exception as e:
            raise BundleFailed(
                f"the model's forward failed in held-out scoring on tokens of shape {list(inputs.shape)}: "
                f"{type(e).__name__}: " + " ".join(str(e).split())[:500],
                rule=c.RULE_RUNTIME_ERROR,
            ) from e
        logits = logits_of(output, len(batch), longest, len(token_bytes))
        width = logits.shape[2]
        losses = token_nll(logits, torch.from_numpy(targets).to(device))
        assert isinstance(losses, torch.Tensor)
        nll = losses.cpu().numpy().astype(np.float64)
        scored = targets >= 0
        bad = scored & ~np.isfinite(nll)
        faults += int(bad.sum())
        tokens += int(scored.sum())
        nll[bad] = c.FAULT_CODE_LENGTH_FACTOR * np.log(width)
        nll[~scored] = 0.0
        row_nats[batch] = np.cumsum(nll, axis=1)[:, -1]  # left to right, so padding changes no bit
    nats = np.zeros(len(documents))
    np.add.at(nats, rows[:, 0], row_nats)
    total = 0.0
    for value in nats.tolist():
        total += value
    covered = int(documents.utf8_bytes.sum())
    return {
        "documents": nats,
        "summary": {
            "nats": total,
            "bytes": covered,
            "tokens": tokens,
            "documents": len(documents),
            "rows": len(rows),
            "faults": faults,
            "head_width": width,
        },
    }


def adopt(model: Any, weights_path: str) -> None:
    """Loads the trained state strictly by name and shape. Raises BundleRejected (`prism:model-mismatch`)."""
    from safetensors.torch import load_file

    trained = load_file(weights_path)
    own = model.state_dict()
    for label, names in (
        ("is missing", own.keys() - trained.keys()),
        ("does not know", trained.keys() - own.keys()),
        ("has in another shape", {n for n in own.keys() & trained.keys() if own[n].shape != trained[n].shape}),
    ):
        if names:
            shown = ", ".join(sorted(names)[:3]) + (" ..." if len(names) > 3 else "")
            whose = "the trained state is missing" if label == "is missing" else f"build_model(ctx) {label}"
            raise BundleRejected(
                f"the trained model is not the one build_model(ctx) declares: {whose} {shown}",
                rule=c.RULE_MODEL_MISMATCH,
            )
    model.load_state_dict(trained, strict=True)


def run(job: dict[str, Any]) -> None:
    import torch

    from prism_fast.data.tokenizers import reference_tokenizer
    from prism_fast.harness.context_engine import Engine, import_architecture, make_context
    from prism_fast.harness.runner import resolve_device
    from prism_fast.harness.seeding import seed_everything, set_deterministic
    from prism_fast.protocol.run_spec import RunSpec

    began = perf_counter()
    spec = RunSpec.model_validate(job["spec"])
    device = resolve_device(spec.device, 0)
    set_deterministic(spec.torch_threads, spec.deterministic_algorithms)
    seed_everything(spec.seed)
    tokenizer = reference_tokenizer(spec.tokenizer)
    basis_tokenizer = tokenizer if job["basis"] == "tokens" else reference_tokenizer("bytes")
    val = Documents.read(job["val_corpus_dir"], job["val_split"], job["basis"], spec.val_byte_budget)
    prefix = Documents.read(job["corpus_dir"], "train", job["basis"], int(val.utf8_bytes.sum()))
    architecture = import_architecture(Path(job["bundle_dir"]), spec.seed)
    context = make_context(
        spec,
        Engine(architecture, tokenizer),
        data_dir="",
        artifacts_dir="",
        tokenizer_dir=job["tokenizer_dir"],
        rank=0,
        local_rank=0,
        world_size=1,
        device=str(device),
    )
    model = architecture.build_model(context).to(device)
    results = {}
    with torch.no_grad():
        arguments = (spec, basis_tokenizer.token_bytes, basis_tokenizer.eot)
        results["twin"] = measure(model, val, *arguments)
        adopt(model, job["weights_path"])
        results["trained"] = measure(model, val, *arguments)
        results["train_prefix"] = measure(model, prefix, *arguments)
    np.savez_compressed(
        job["documents_path"],
        utf8_bytes=val.utf8_bytes,
        nats_trained=results["trained"]["documents"],
        nats_twin=results["twin"]["documents"],
    )
    report = {name: r["summary"] for name, r in results.items()}
    report["n_vocab"] = len(basis_tokenizer.token_bytes)
    report["seconds"] = perf_counter() - began
    Path(job["report_path"]).write_bytes(orjson.dumps(report))


def main() -> int:
    die_with_parent()
    job = orjson.loads(Path(sys.argv[1]).read_bytes())
    try:
        run(job)
        return 0
    except BaseException as e:
        from prism_fast.harness.runner import explain

        traceback.print_exc()
        rule, kind, message = explain(e, job)
        Path(job["report_path"]).write_bytes(orjson.dumps({"fault": {"rule": rule, "kind": kind, "message": message}}))
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
