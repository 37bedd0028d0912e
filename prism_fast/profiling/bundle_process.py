"""Starts a bundle's bare loop in a process of its own, one a rank, and reads what its observer found."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

import prism_fast
from prism_fast.harness.process.commands import child_command, child_environment
from prism_fast.profiling.machine import THREADS_WAIT, usable_cpus
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleFailed, BundleRejected, EngineFault, PrismError, UsageError
from prism_fast.protocol.run_spec import RunSpec

FAULTS: dict[str, type[PrismError]] = {"rejected": BundleRejected, "failed": BundleFailed, "usage": UsageError}
LOG_TAIL_LINES = 3


@dataclass(frozen=True)
class BundleJob:
    """A bundle and what it trains on. `widths` in tokens a row, `steps` in all, `observe` as in `make_observer`."""

    bundle: Path
    widths: tuple[int, ...]
    steps: int
    observe: dict[str, Any]
    data: str = "sample"
    tokenizer: str = "gpt2"
    split: str = "train"
    vocab_size: int | None = None
    device: str = "auto"
    torch_threads: int | None = None
    seed: int = c.DEFAULT_SEED
    nproc: int = 1
    cache_dir: Path | None = None
    counters: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def run_bundle(job: BundleJob) -> list[dict[str, Any]]:
    """Runs `train(ctx)` of the bundle to its end. -> one document a rank, in rank order.

    Raises UsageError, BundleRejected, BundleFailed or EngineFault with the bundle's own sentence.
    """
    from prism_fast.data.corpus import resolve_data
    from prism_fast.data.tokenizers import reference_tokenizer

    _check(job)
    tokenizer = reference_tokenizer(job.tokenizer)
    corpus = resolve_data(job.data, tokenizer, job.cache_dir)
    if job.split not in corpus.splits:
        raise UsageError(f"{job.data}: no {job.split} split; splits: {', '.join(corpus.splits) or 'none'}")
    threads = job.torch_threads or max(1, usable_cpus() // job.nproc)
    spec = RunSpec(
        engine_version=prism_fast.__version__,
        bundle_digest="",
        seed=job.seed,
        seal="open",
        isolation="none",
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        corpus_fingerprint="",
        val_corpus_fingerprint=None,
        vocab_size=job.vocab_size or -(-tokenizer.n_vocab // 64) * 64,
        sequence_length=max(job.widths),
        token_budget=None,
        step_budget=job.steps,
        device=job.device,  # type: ignore[arg-type]
        torch_threads=threads,
    )
    with tempfile.TemporaryDirectory(prefix="prism-profile-") as out:
        document = {
            "bundle": str(job.bundle.absolute()),
            "corpus_dir": str(corpus.folder),
            "tokenizer": job.tokenizer,
            "split": job.split,
            "spec": spec.model_dump(mode="json"),
            "widths": list(job.widths),
            "steps": job.steps,
            "observe": job.observe,
            "counters": job.counters,
            "out": out,
        }
        path = Path(out) / "job.json"
        path.write_bytes(orjson.dumps(document))
        log = Path(out) / "log"
        code = _start(job, path, log, threads)
        return _collect(job, Path(out), code, log)


def _check(job: BundleJob) -> None:
    if not job.widths or min(job.widths) < 2:
        raise UsageError(f"widths {','.join(map(str, job.widths)) or 'none'}: expected whole numbers of 2 or more")
    if len(set(job.widths)) != len(job.widths):
        raise UsageError(f"widths {','.join(map(str, job.widths))}: expected each once")
    if not 1 <= job.nproc <= c.MAX_NPROC:
        raise UsageError(f"--nproc {job.nproc}: expected 1 to {c.MAX_NPROC}")
    if job.torch_threads is not None and job.torch_threads < 1:
        raise UsageError(f"--torch-threads {job.torch_threads}: expected 1 or more")


def _start(job: BundleJob, path: Path, log: Path, threads: int) -> int:
    rank = ["prism_fast.harness.trainer.bare", str(path)]
    ranks = ["--standalone", "--nnodes=1", f"--nproc-per-node={job.nproc}", "-m", *rank]
    command = child_command(*rank) if job.nproc == 1 else child_command("torch.distributed.run", *ranks)
    changes = {
        # As a scored run sets them, so that the two can be compared.
        "HF_HUB_OFFLINE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": str(threads),
        **THREADS_WAIT,
        **job.environment,
    }
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env=child_environment(changes=changes), start_new_session=True
        )
        try:
            return process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            raise


def _collect(job: BundleJob, out: Path, code: int, log: Path) -> list[dict[str, Any]]:
    ranks = [out / f"rank-{rank}.json" for rank in range(job.nproc)]
    documents = [orjson.loads(path.read_bytes()) for path in ranks if path.is_file()]
    for document in documents:
        if (fault := document.get("fault")) is not None:
            raise FAULTS.get(fault["kind"], EngineFault)(fault["message"], rule=fault["rule"])
    if len(documents) < job.nproc:
        said = " / ".join(log.read_text(errors="replace").strip().splitlines()[-LOG_TAIL_LINES:])
        raise BundleFailed(
            f"{job.bundle}: {job.nproc - len(documents)} of {job.nproc} processes ended without a result "
            f"(exit code {code}): {said or 'nothing was printed'}"
        )
    return documents
