"""Does a run slow down or grow as it gets longer, and how big are the files of a very long one?

    python -m benchmarks.growth [--quick] [--json]

run: one sealed run of 10 million tokens (a million with --quick) of a model so small that the engine is most of the
step; tokens/s, memory of every process (its own and what it shares, not mapped files) and bytes of record files from
1e5 tokens on. simulated: the ledger, the observations and the official documents of a run of 1e10 tokens (1e8 with
--quick), written by the referee's own code from made-up records, at 8,192 tokens a batch; record files grow by a fixed
number of bytes a batch.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import tempfile
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Table, parser_for
from prism_fast.harness.process.commands import child_command, child_environment

ROWS, LENGTH = 8, 128
TOKENS_A_BATCH = 8192  # simulated
SAMPLE_S = 0.25
COLUMNS = {
    "what": "9", "tokens": "9.2g", "tokens_per_s": ".0f", "referee_mib": ".0f", "trainer_mib": ".0f",
    "executor_mib": ".0f", "bytes_a_batch": ".0f", "manifest_bytes": ",", "side_bytes": "11,", "documents_s": ".1f",
}  # fmt: skip
ARCHITECTURE = """
import torch
from torch import nn
class Tiny(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embedding = nn.Embedding(vocab, 8)
        self.head = nn.Linear(8, vocab)
    def forward(self, tokens):
        return self.head(torch.tanh(self.embedding(tokens)))
def build_model(ctx):
    return Tiny(ctx.vocab_size)
"""
TRAINING = f"""
import torch
import torch.nn.functional as F
from architecture import build_model
def train(ctx):
    model = build_model(ctx).to(ctx.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in ctx.iter_train_batches(model, batch_size={ROWS}, tokenizer=ctx.reference_tokenizer("bytes")):
        loss = F.cross_entropy(model(batch.tokens)[:, :-1].flatten(0, 1), batch.tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


# ------------------------------------------------------------------------------------------------------- one long run


def write_text(path: Path, size: int) -> None:
    """At least `size` bytes of words, a document a line."""
    drawn = random.Random(1)
    words = ["".join(drawn.choices("etaoinshrdlu", k=drawn.randrange(2, 9))) for _ in range(5000)]
    with path.open("w") as f:
        written = 0
        while written < size:
            text = " ".join(drawn.choices(words, k=400))
            written += len(text)
            f.write(json.dumps({"text": text}) + "\n")


class Sampler(threading.Thread):
    """Resident MiB of a run's processes by role, beside the tokens recorded so far, until `stop`."""

    def __init__(self, referee: int, run: Path) -> None:
        super().__init__(daemon=True)
        self.referee, self.run_dir, self.done = referee, run, threading.Event()
        self.samples: list[dict[str, float]] = []

    def run(self) -> None:
        from prism_fast.harness.process.processes import descendants
        from prism_fast.protocol import constants as c
        from prism_fast.protocol import ledger as layout

        began = perf_counter()
        while not self.done.wait(SAMPLE_S):
            try:
                size = (self.run_dir / c.LEDGER_FILE).stat().st_size - layout.HEADER_BYTES
            except OSError:
                continue
            sample = {"seconds": perf_counter() - began, "referee": resident_mib(self.referee)}
            for pid in descendants(self.referee):
                if (role := role_of(pid)) is not None:
                    sample[role] = sample.get(role, 0.0) + resident_mib(pid)
            sample["tokens"] = size // layout.LEDGER_DTYPE.itemsize * ROWS * LENGTH
            sample["file_bytes"] = size + (self.run_dir / c.OBSERVATIONS_FILE).stat().st_size
            self.samples.append(sample)


def role_of(pid: int) -> str | None:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    if "python" not in Path(command.split(b"\0")[0].decode(errors="replace")).name:
        return None
    names = {b"prism_fast.harness.process.torchrun": None, b"prism_fast.harness.trainer.rank": "trainer"}
    names[b"prism_fast.harness.executor.main"] = "executor"
    return next((role for name, role in names.items() if name in command), None)


def resident_mib(pid: int) -> float:
    """Memory of the process's own and what it shares; pages of mapped files are the system's to take back."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def long_run(tokens: int) -> list[dict[str, Any]]:
    """One row a mark (1e5, 3e5, 1e6 ...): tokens/s since the mark before, MiB and bytes at the mark."""
    with tempfile.TemporaryDirectory(prefix="prism-growth-") as folder:
        place = Path(folder)
        (place / "bundle").mkdir()
        (place / "bundle" / "architecture.py").write_text(ARCHITECTURE)
        (place / "bundle" / "training.py").write_text(TRAINING)
        (place / "text").mkdir()
        write_text(place / "text" / "text.jsonl", tokens + tokens // 4)  # some become the val split
        arguments = [
            "score", str(place / "bundle"), f"--data={place / 'text'}",
            f"--out={place / 'run'}", f"--cache-dir={place / 'cache'}", "--tokenizer=bytes", f"--seq-len={LENGTH}",
            f"--token-budget={tokens}", "--budget-seconds=7200", "--val-byte-budget=1000", "--torch-threads=1",
        ]  # fmt: skip
        process = subprocess.Popen(
            child_command("prism_fast.cli.main", *arguments),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        sampler = Sampler(process.pid, place / "run" / "seed-1337")
        sampler.start()
        said = process.communicate()[1]
        sampler.done.set()
        sampler.join()
        if process.returncode:
            raise RuntimeError(f"the run failed: {said.strip().splitlines()[-1:]}")
    training = [s for s in sampler.samples if s["tokens"] and "trainer" in s]
    marks = [m for m in (10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7) if m <= tokens]
    rows: list[dict[str, Any]] = []
    before = training[0]
    for mark in marks:
        at = next((s for s in training if s["tokens"] >= mark), training[-1])
        if at is before:
            continue
        rows.append(
            {
                "what": "run",
                "tokens": at["tokens"],
                "tokens_per_s": (at["tokens"] - before["tokens"]) / (at["seconds"] - before["seconds"]),
                **{f"{role}_mib": at.get(role, 0.0) for role in ("referee", "trainer", "executor")},
                "record_bytes": at["file_bytes"],
                "bytes_a_batch": at["file_bytes"] / (at["tokens"] / (ROWS * LENGTH)),
            }
        )
        before = at
    return rows


# ----------------------------------------------------------------------------------------------------- files simulated


def simulate(run_dir: Path, batches: int, tokens_a_batch: int = TOKENS_A_BATCH) -> dict[str, Any]:
    """The files of a run of `batches` batches in `run_dir` -> a row, its sizes in bytes."""
    from prism_fast.harness.process import jobs
    from prism_fast.harness.referee.ledger import Ledger, pack_record
    from prism_fast.harness.referee.results import RunFacts, write_documents
    from prism_fast.harness.trainer.instrument import OBSERVATION_RECORD
    from prism_fast.profiling.machine import describe_machine
    from prism_fast.protocol import constants as c
    from prism_fast.protocol import receipts
    from prism_fast.protocol.run_spec import RunSpec
    from prism_fast.protocol.score import CodeLength, HeldOut

    (run_dir / c.ARTIFACTS_DIR).mkdir(exist_ok=True)
    (run_dir / c.WEIGHTS_FILE).write_bytes(b"")
    spec = RunSpec(
        engine_version="0", bundle_digest="0" * 64, seal="sealed", isolation="bwrap", tokenizer="gpt2",
        tokenizer_fingerprint="0" * 64, corpus_fingerprint="0" * 64, val_corpus_fingerprint=None, vocab_size=50304,
        torch_threads=1, token_budget=batches * tokens_a_batch,
    )  # fmt: skip
    genesis = receipts.Genesis(
        run_spec_sha256=spec.hash, submission_id="simulated", run_id="simulated",
        script_sha256={"architecture.py": "0" * 64, "training.py": "0" * 64}, data_dir="", data_source="made up",
        shard_count=1, available_bytes=batches * tokens_a_batch * 4, programs=[], initial_state_sha256=None, pin=None,
        distributed_contract=None,
    )  # fmt: skip
    ledger, drawn = Ledger(run_dir, 1), np.random.default_rng(0)
    ledger.bind(hashlib.sha256(receipts.document_bytes(genesis)).digest())
    began = perf_counter()
    for first in range(0, batches, 1 << 14):
        count = min(1 << 14, batches - first)
        noise = drawn.random((count, 2)).tolist()
        for index, (a, b) in enumerate(noise, first):
            sums = (tokens_a_batch * (3.0 + a), 0.0, tokens_a_batch * 4, tokens_a_batch, 0, 0)
            ledger.add(0, pack_record(index, sums, tokens_a_batch, 8, 0, 8))
            times = (index * 0.05, 1e-4, 0.01 + 0.01 * b, 1e-3, 1e-4, 0.03)
            ledger.observe(0, OBSERVATION_RECORD.pack(index, *times, 0.5 + b, 0, 0))
    ledger.close()
    record_s = perf_counter() - began
    code = CodeLength(nats=3.0e6, bytes=4_000_000, tokens=1_000_000)
    facts = RunFacts(
        spec=spec, genesis=genesis, run_dir=run_dir,
        hello=jobs.Hello(
            rank=0, pid=1, secret="", device="cpu", machine=describe_machine(), import_s=1.0, prepare_s=1.0
        ),
        done={
            0: jobs.Done(
                rank=0, stopped_reason=c.STOP_TOKEN_BUDGET, returned=None, peak_rss_bytes=1, peak_vram_bytes=None,
                peak_vram_reserved_bytes=None, forward_flops=None, save_s=1.0,
            )
        },
        model={
            "model_params": 10**8, "head_width": 50304, "batch_size": 8, "seq_len": 1024, "basis": "tokens",
            "backends": {}, "plan": {"corpus_bytes": ledger.bytes, "corpus_tokens": ledger.scored_tokens},
        },
        stopped_reason=c.STOP_TOKEN_BUDGET,
        heldout=HeldOut(trained=code, twin=code, train_prefix=code, n_vocab=50257), startup_s={},
        train_s=batches * 0.05, wall_s=batches * 0.05, heldout_s=1.0,
    )  # fmt: skip
    began = perf_counter()
    write_documents(facts, ledger)
    document_s = perf_counter() - began

    def size(*names: str) -> int:
        return sum((run_dir / name).stat().st_size for name in names)

    records = size(c.LEDGER_FILE, c.OBSERVATIONS_FILE, c.LEDGER_CHAIN_FILE)
    return {
        "what": "simulated",
        "tokens": batches * tokens_a_batch,
        "batches": batches,
        "manifest_bytes": size(c.RUN_MANIFEST_FILE),
        "side_bytes": records + size(c.TRAIN_SERIES_FILE, c.THROUGHPUT_PROFILE_FILE, c.RECEIPT_FILE),
        "series_bytes": size(c.TRAIN_SERIES_FILE),
        "bytes_a_batch": records / batches,
        "ledger_microseconds_a_batch": 1e6 * record_s / batches,
        "documents_s": document_s,
    }


def main() -> None:
    arguments = parser_for(__doc__, quick="a million tokens run, 1e8 simulated").parse_args()
    table = Table("growth", {"torch": torch.__version__}, COLUMNS, arguments)
    for row in long_run(10**6 if arguments.quick else 10**7):
        table.add(row)
    with tempfile.TemporaryDirectory(prefix="prism-growth-") as folder:
        table.add(simulate(Path(folder), (10**8 if arguments.quick else 10**10) // TOKENS_A_BATCH))
    table.finish()


if __name__ == "__main__":
    main()
