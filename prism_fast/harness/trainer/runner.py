"""One trainer rank, under torchrun where there are several: runs the bundle's `train(ctx)`. Not for people.

Reads its job from the file named by PRISM_RUN_JOB, sets seeds and flags before any bundle code is imported, and
reports to the referee over the job's socket. How it ended travels there too: torchrun makes 1 of every exit code.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import sys
import traceback
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

PROCESS_STARTED = perf_counter()

import orjson  # noqa: E402

from prism_fast.harness.process import wire  # noqa: E402
from prism_fast.harness.process.die_with_parent import die_with_parent  # noqa: E402
from prism_fast.harness.process.limits import limit_process  # noqa: E402
from prism_fast.protocol import constants as c  # noqa: E402
from prism_fast.protocol.errors import BundleFailed, BundleRejected, PrismError  # noqa: E402

PACKAGE = Path(__file__).parents[2]
# An error raised in these files, and not in bundle code that they called, is ours.
ENGINE_FILES = tuple(
    str(PACKAGE / p)
    for p in (
        "data",
        "harness/trainer/instrument.py",
        "harness/trainer/open_source.py",
        "harness/trainer/predictor.py",
        "harness/trainer/prism_v2.py",
        "harness/process/weights_file.py",
    )
)

FILE_BYTES_OVER_QUOTA = 1 << 26  # the referee ends a run over its quota by name; the limit only bounds how far over


def main() -> int:
    die_with_parent()
    job = orjson.loads(Path(os.environ["PRISM_RUN_JOB"]).read_bytes())
    if job["spec"]["seal"] == "sealed":
        limit_process(FILE_BYTES_OVER_QUOTA + 2 * job["spec"]["artifacts_quota_bytes"])
    rank = int(os.environ.get("RANK", "0"))
    channel = wire.RunnerChannel(job["socket"])
    try:
        _run(job, rank, channel)
        return 0
    except BaseException as e:
        rule, kind, message = explain(e, job)
        channel.send_json(
            wire.FAULT,
            {"rank": rank, "rule": rule, "kind": kind, "message": message, "traceback": traceback.format_exc()},
        )
        with contextlib.suppress(OSError):  # the log may be what is full
            traceback.print_exc()
        return 1
    finally:
        channel.close()


def _run(job: dict[str, Any], rank: int, channel: wire.RunnerChannel) -> None:
    import torch
    import torch._dynamo  # every torch optimizer asks for it, for a second or more: not on the bundle's clock

    from prism_fast.data.corpus import open_corpus
    from prism_fast.data.stream import TokenStream
    from prism_fast.data.tokenizers import reference_tokenizer
    from prism_fast.harness.hosting.context_engine import Engine, import_bundle, make_context
    from prism_fast.harness.process.seeding import seed_everything, set_deterministic
    from prism_fast.harness.trainer.instrument import Instrument
    from prism_fast.harness.trainer.open_source import OpenSource
    from prism_fast.harness.trainer.process_groups import keep_process_groups
    from prism_fast.harness.trainer.sealed_source import SealedSource
    from prism_fast.protocol.run_spec import RunSpec

    imported = perf_counter()
    spec = RunSpec.model_validate(job["spec"])
    local_rank, world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = resolve_device(spec.device, local_rank)
    set_deterministic(spec.torch_threads, spec.deterministic_algorithms)
    seed_everything(spec.seed)

    tokenizer = reference_tokenizer(spec.tokenizer)
    source: OpenSource | SealedSource
    if spec.seal == "sealed":
        source = SealedSource(spec, channel)
    elif not spec.exact:
        from prism_fast.data.contiguous import ContiguousStream
        from prism_fast.harness.trainer.prism_v2 import PrismV2Source

        source = PrismV2Source(
            spec,
            channel,
            make_stream=lambda seq_len, batch_size, basis: ContiguousStream(
                job["train_shards"], seq_len, batch_size, basis=basis, token_budget=spec.token_budget
            ),
            token_bytes={},
            rank=rank,
        )
    else:
        split = job.get("train_shards") or open_corpus(job["corpus_dir"]).split("train")
        kind = OpenSource
        if spec.capture == "fused":
            from prism_fast.harness.trainer.fused_source import FusedSource as kind  # type: ignore[assignment]
        source = kind(
            spec,
            channel,
            make_stream=lambda seq_len, batch_size, basis: TokenStream(
                split,
                seq_len,
                batch_size,
                basis=_stream_basis(spec, basis),
                rank=rank,
                world=world,
                prefetch=job["prefetch"],
            ),
            token_bytes={"tokens": tokenizer.token_bytes, "bytes": reference_tokenizer("bytes").token_bytes},
            rank=rank,
        )
    if world > 1:
        keep_process_groups()
    report = None
    if job.get("rank_report"):
        from prism_fast.harness.trainer.rank_report import RankReport

        report = RankReport()
        report.install()
    watched = report.watch(source) if report else source
    instrument = Instrument(spec, watched, channel, tokenizer, rank)
    instrument.grad_norm.install()
    channel.send_json(
        wire.HELLO,
        {
            "rank": rank,
            "pid": os.getpid(),
            "secret": job["secret"],
            "device": str(device),
            "machine": _machine(),
            "import_s": imported - PROCESS_STARTED,
            "prepare_s": perf_counter() - imported,
        },
    )

    bundle_began = perf_counter()
    architecture, training = import_bundle(Path(job["bundle_dir"]), spec.seed)
    engine = Engine(architecture=architecture, tokenizer=tokenizer, instrument=instrument)
    context = make_context(
        spec,
        engine,
        data_dir=job["data_dir"],
        artifacts_dir=report.artifacts_dir(job["artifacts_dir"], rank) if report else job["artifacts_dir"],
        tokenizer_dir=job["tokenizer_dir"],
        rank=rank,
        local_rank=local_rank,
        world_size=world,
        device=str(device),
    )
    train = getattr(training, "train", None)
    if not callable(train):
        raise BundleRejected("training.py does not define `train(ctx)`", rule=c.RULE_BUNDLE_SHAPE)
    channel.send_json(wire.STARTED, {"rank": rank, "bundle_import_s": perf_counter() - bundle_began})
    instrument.begin()
    returned = train(context)
    instrument.finish()
    trained_s = perf_counter()
    if instrument.error is not None:
        raise instrument.error
    if instrument.model is None:
        raise BundleFailed("train(ctx) returned without calling ctx.iter_train_batches", rule=c.RULE_RUNTIME_ERROR)
    if rank == 0 and spec.seal == "open":
        _save_weights(instrument.model, job["weights_path"])
    cuda = device.type == "cuda"
    channel.send_json(
        wire.DONE,
        {
            "rank": rank,
            "stopped_reason": instrument.stopped_reason,
            "returned": None if returned is None else repr(returned)[:1000],
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "peak_vram_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
            "peak_vram_reserved_bytes": torch.cuda.max_memory_reserved(device) if cuda else None,
            "save_s": perf_counter() - trained_s,
            "forward_flops": instrument.forward_flops() if rank == 0 else None,
            "head": source.head_document() if isinstance(source, OpenSource) and spec.exact else None,
            "rank_report": report.document(instrument.model) if report else None,
        },
    )


def _stream_basis(spec: Any, basis: str) -> Literal["tokens", "bytes"]:
    """A corpus packed as bytes is its own byte basis; any other is decoded to bytes on the fly."""
    return "bytes" if basis == "bytes" and spec.tokenizer != "bytes" else "tokens"


def resolve_device(requested: str, local_rank: int) -> Any:
    import torch

    if requested == "cuda" and not torch.cuda.is_available():
        from prism_fast.protocol.errors import EngineFault

        raise EngineFault("--device cuda was asked for, but torch sees no CUDA device")
    if requested != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _machine() -> dict[str, Any]:
    from prism_fast.profiling.machine import describe_machine

    return describe_machine()


def _save_weights(model: Any, path: str) -> None:
    from prism_fast.harness.process.weights_file import save_weights

    gc.collect()
    save_weights({name: value for name, value in model.state_dict().items() if hasattr(value, "detach")}, path)


def explain(error: BaseException, job: dict[str, Any]) -> tuple[str | None, str, str]:
    """-> (rule, kind, one sentence). Kind: rejected, failed, quota or engine (evaluator_client.reported_fault)."""
    import torch

    if isinstance(error, BundleRejected):
        return error.rule, "rejected", str(error)
    if isinstance(error, BundleFailed):
        return error.rule, "failed", str(error)
    if isinstance(error, PrismError):
        return error.rule, "engine", str(error)
    frames = traceback.extract_tb(error.__traceback__)
    bundle_frames = [f for f in frames if f.filename.startswith(job["bundle_dir"])]
    where = f"{Path(bundle_frames[-1].filename).name} line {bundle_frames[-1].lineno}: " if bundle_frames else ""
    text = " ".join(str(error).split())[:500]
    message = f"{where}{type(error).__name__}: {text}" if text else f"{where}{type(error).__name__}"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return c.RULE_ARTIFACTS_QUOTA, "quota", f"{message} ({c.MARKER_ARTIFACTS_QUOTA})"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        return c.RULE_RESOURCE_OOM, "failed", message
    if isinstance(error, SystemExit):
        return c.RULE_RUNTIME_ERROR, "failed", f"{where}the bundle called sys.exit({error.code!r})"
    ours = [f for f in frames if f.filename.startswith(ENGINE_FILES)]
    if ours and (not bundle_frames or frames.index(ours[-1]) > frames.index(bundle_frames[-1])):
        return None, "engine", message
    return c.RULE_RUNTIME_ERROR, "failed", message


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
