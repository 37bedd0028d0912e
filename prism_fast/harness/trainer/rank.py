"""One trainer rank, under torchrun where there are several: runs the bundle's `train(ctx)`. Not for people.

Reads its job from the file named by PRISM_RUN_JOB, sets seeds and flags before any bundle code is imported, and
reports to the referee over the job's socket. How it ended travels there too: torchrun makes 1 of every exit code.
"""

from __future__ import annotations

import contextlib
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
from prism_fast.protocol.errors import BundleFailed, BundleRejected  # noqa: E402

FILE_BYTES_OVER_QUOTA = 1 << 26  # the referee ends a run over its quota by name; the limit only bounds how far over


def main() -> int:
    die_with_parent()
    job = orjson.loads(Path(os.environ["PRISM_RUN_JOB"]).read_bytes())
    if job["spec"]["seal"] == "sealed":
        limit_process(FILE_BYTES_OVER_QUOTA + 2 * job["spec"]["artifacts_quota_bytes"])
    rank = int(os.environ.get("RANK", "0"))
    channel = wire.RankChannel(job["socket"])
    try:
        _run(job, rank, channel)
        return 0
    except BaseException as e:
        from prism_fast.harness.hosting.blame import fault_of

        channel.send_json(wire.FAULT, fault_of(e, job["bundle_dir"], rank).model_dump(mode="json"))
        with contextlib.suppress(OSError):  # the log may be what is full
            traceback.print_exc()
        return 1
    finally:
        channel.close()


def _run(job: dict[str, Any], rank: int, channel: wire.RankChannel) -> None:
    import torch
    import torch._dynamo  # every torch optimizer asks for it, for a second or more: not on the bundle's clock

    from prism_fast.data.corpus import open_corpus
    from prism_fast.data.stream import TokenStream
    from prism_fast.data.tokenizers import reference_tokenizer
    from prism_fast.harness.hosting.context_engine import Engine, import_bundle, make_context
    from prism_fast.harness.process.devices import resolve_device
    from prism_fast.harness.process.seeding import seed_everything, set_deterministic
    from prism_fast.harness.trainer.full_state import hold_all
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
        source = OpenSource(
            spec,
            channel,
            make_stream=lambda seq_len, batch_size, basis: TokenStream(
                split,
                seq_len,
                batch_size,
                basis=stream_basis(spec, basis),
                rank=rank,
                world=world,
                prefetch=job["prefetch"],
            ),
            token_bytes={"tokens": tokenizer.token_bytes, "bytes": reference_tokenizer("bytes").token_bytes},
            rank=rank,
        )
    keep_process_groups(before=hold_all)
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
    default_dtype, build_model = torch.get_default_dtype(), architecture.build_model
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
    if instrument.error is not None:
        raise instrument.error
    if instrument.model is None or instrument.state is None:
        raise BundleFailed("train(ctx) returned without calling ctx.iter_train_batches", rule=c.RULE_RUNTIME_ERROR)
    channel.send_json(wire.TRAINED, {"rank": rank, "stopped_reason": instrument.stopped_reason})
    trained_s = perf_counter()
    flops = instrument.forward_flops() if rank == 0 else None
    compare = bool(job.get("compare_state")) and not instrument.state.sharded
    state = instrument.final_state() if spec.seal == "open" or report or compare else {}
    heldout = outside = None
    saved_s = perf_counter()
    if rank == 0 and spec.seal == "open":
        _save_weights(state, job["weights_path"])
        saved_s = perf_counter()
    if rank == 0:
        heldout, outside = _after_training(
            job,
            spec,
            instrument,
            tokenizer,
            lambda: build_model(context),
            device,
            default_dtype,
            state if compare else None,
        )
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
            "save_s": saved_s - trained_s,
            "forward_flops": flops,
            "heldout": heldout,
            "outside_state": outside,
            "rank_report": report.document(state, sharded=instrument.state.sharded) if report else None,
        },
    )


def _after_training(
    job: dict[str, Any],
    spec: Any,
    instrument: Any,
    tokenizer: Any,
    build: Any,
    device: Any,
    default_dtype: Any,
    compared: dict[str, Any] | None,
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """-> (the held-out measurement, what the model depends on outside its state), each None where not asked for.

    `compared`: the state that the live model is compared under."""
    heldout = job.get("heldout")
    if heldout is None and compared is None:
        return None, None
    from safetensors.torch import load_file

    from prism_fast.data.tokenizers import reference_tokenizer
    from prism_fast.harness.trainer.open_heldout import FreshModel, as_before_training, measure_open
    from prism_fast.harness.trainer.outside_state import compare_with_fresh

    basis = stream_basis(spec, instrument.basis)
    basis_tokenizer = tokenizer if basis == "tokens" else reference_tokenizer("bytes")
    found = outside = None
    with as_before_training(spec, default_dtype):
        fresh = FreshModel(spec, build, device)
        if heldout is not None:
            found = measure_open(
                spec,
                heldout,
                fresh,
                lambda: load_file(job["weights_path"]),
                basis=basis,
                basis_tokenizer=basis_tokenizer,
            )
        if compared is not None:
            fresh.load(compared)
            outside = compare_with_fresh(instrument.model, fresh, spec.sequence_length, basis_tokenizer.n_vocab)
    return found, outside


def stream_basis(spec: Any, basis: str) -> Literal["tokens", "bytes"]:
    """A corpus packed as bytes is its own byte basis; any other is decoded to bytes on the fly."""
    return "bytes" if basis == "bytes" and spec.tokenizer != "bytes" else "tokens"


def _machine() -> dict[str, Any]:
    from prism_fast.profiling.machine import describe_machine

    return describe_machine()


def _save_weights(state: dict[str, Any], path: str) -> None:
    from prism_fast.harness.process.weights_file import save_weights

    gc.collect()
    save_weights(state, path)


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
