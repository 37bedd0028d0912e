"""A bundle's own training loop and nothing else: `python -m prism_fast.harness.trainer.bare JOB.json`; not for people.

What the probes of `prism-fast profile` run, in a process of its own: the bundle's `train(ctx)` on real text, with no
prediction, no ledger and no gradient norm. An observer from `prism_fast.profiling` looks at the steps. Under torchrun
every rank writes its own result. Bundle code runs here with this user's rights: profile bundles that you trust.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import orjson

from prism_fast.harness.process.die_with_parent import die_with_parent
from prism_fast.protocol.context import PrismBatch, PrismContext
from prism_fast.protocol.errors import BundleFailed, BundleRejected, UsageError

COUNTER_REPEATS = 2000


class Observer(Protocol):
    """Sees every step; `begin` and `end` lie around the bundle's own work, `result` is its part of the document."""

    def begin(self, index: int, model: Any, tokens: Any) -> None: ...

    def end(self, index: int) -> None: ...

    def result(self) -> dict[str, Any]: ...


class BareLoop:
    """Stands where the instrument stands in a scored run. Width of step k: `widths[k % len(widths)]`."""

    def __init__(self, make_stream: Any, widths: list[int], steps: int, observer: Observer, tokenizer: Any) -> None:
        self._make_stream, self._widths, self._steps = make_stream, widths, steps
        self._observer, self._tokenizer = observer, tokenizer
        self.model: Any = None
        self.batch_size = 0
        self.basis = ""

    def iter_train_batches(
        self, context: PrismContext, model: Any, *, batch_size: int, seq_len: int | None, tokenizer: Any
    ) -> Iterator[PrismBatch]:
        if self.model is not None:
            return
        if tokenizer is not None and tokenizer is not self._tokenizer:
            raise BundleRejected(
                f"iter_train_batches was given a {type(tokenizer).__name__} as tokenizer; expected the object that "
                "ctx.reference_tokenizer returned, or None for the byte basis"
            )
        widest = max(self._widths)
        if seq_len is not None and seq_len < widest:
            raise UsageError(
                f"the bundle asks iter_train_batches for seq_len={seq_len}, and a width of {widest} was asked for; "
                f"name no width over {seq_len}"
            )
        import torch

        self.model, self.batch_size, self.basis = model, batch_size, "tokens" if tokenizer else "bytes"
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        stream = self._make_stream(widest, batch_size, self.basis)
        for index in range(self._steps):
            block = next(stream, None)
            if block is None or len(block.tokens) < batch_size:
                # The corpus again from its start: this is about time, not about learning.
                stream.close()
                stream = self._make_stream(widest, batch_size, self.basis)
                block = next(stream, None)
            if block is None or len(block.tokens) < batch_size:
                raise UsageError(
                    f"the corpus has no full batch of {batch_size} rows of {widest} tokens; use a longer corpus or a "
                    "smaller width"
                )
            width = self._widths[index % len(self._widths)]
            tokens = torch.from_numpy(block.tokens[:, :width].copy()).to(device)
            self._observer.begin(index, model, tokens)
            yield PrismBatch(tokens=tokens, index=index)
            self._observer.end(index)
        stream.close()


def main() -> int:
    die_with_parent()
    job = orjson.loads(Path(sys.argv[1]).read_bytes())
    rank = int(os.environ.get("RANK", "0"))
    out = Path(job["out"]) / f"rank-{rank}.json"
    with tempfile.TemporaryDirectory(prefix="prism-bundle-") as bundle_dir:
        job["bundle_dir"] = bundle_dir
        try:
            document = _run(job, rank)
        except BaseException as error:
            document = {"fault": _fault(error, job)}
            with contextlib.suppress(OSError):
                traceback.print_exc()
    out.write_bytes(orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS))
    return 1 if "fault" in document else 0


def _fault(error: BaseException, job: dict[str, Any]) -> dict[str, Any]:
    from prism_fast.harness.hosting.blame import explain

    rule, kind, message = explain(error, job["bundle_dir"])
    return {"rule": rule, "kind": "usage" if isinstance(error, UsageError) else kind, "message": message}


def _run(job: dict[str, Any], rank: int) -> dict[str, Any]:
    import torch

    from prism_fast.data.corpus import open_corpus
    from prism_fast.data.stream import TokenStream
    from prism_fast.data.tokenizers import reference_tokenizer
    from prism_fast.harness.bundle.bundle import load_bundle
    from prism_fast.harness.hosting.context_engine import Engine, import_bundle, make_context
    from prism_fast.harness.process.devices import resolve_device
    from prism_fast.harness.process.seeding import seed_everything, set_deterministic
    from prism_fast.harness.trainer.rank import stream_basis
    from prism_fast.profiling.machine import describe_machine
    from prism_fast.profiling.observers import make_observer
    from prism_fast.protocol.run_spec import RunSpec

    world, local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    bundle = load_bundle(job["bundle"])
    bundle.write_to(Path(job["bundle_dir"]))
    corpus = open_corpus(job["corpus_dir"])
    tokenizer = reference_tokenizer(job["tokenizer"])
    spec = RunSpec.model_validate(job["spec"] | {"bundle_digest": bundle.digest, "world_size": world})
    device = resolve_device(spec.device, local_rank)
    set_deterministic(spec.torch_threads, spec.deterministic_algorithms)
    seed_everything(spec.seed)
    observer = make_observer(job["observe"], device.type, rank)
    loop = BareLoop(
        lambda seq_len, batch_size, basis: TokenStream(
            corpus.split(job["split"]),
            seq_len,
            batch_size,
            basis=stream_basis(spec, basis),
            rank=rank,
            world=world,
        ),
        job["widths"],
        job["steps"],
        observer,
        tokenizer,
    )
    architecture, training = import_bundle(Path(job["bundle_dir"]), spec.seed)
    train = getattr(training, "train", None)
    if not callable(train):
        raise BundleRejected("training.py does not define `train(ctx)`")
    artifacts = Path(job["bundle_dir"]) / "artifacts"
    artifacts.mkdir()
    context = make_context(
        spec,
        Engine(architecture=architecture, tokenizer=tokenizer, instrument=loop),
        data_dir=str(corpus.folder),
        artifacts_dir=str(artifacts),
        tokenizer_dir="",
        rank=rank,
        local_rank=local_rank,
        world_size=world,
        device=str(device),
    )
    began = perf_counter()
    train(context)
    seconds = perf_counter() - began
    if loop.model is None:
        raise BundleFailed("train(ctx) returned without calling ctx.iter_train_batches")
    from prism_fast.harness.trainer.full_state import plain_model
    from prism_fast.harness.trainer.predictor import parameter_count

    model = plain_model(loop.model)
    found = observer.result()
    return {
        "machine": describe_machine(),
        "device": str(device),
        "submission_id": bundle.submission_id,
        "model_params": parameter_count(model),
        "batch_size": loop.batch_size,
        "basis": loop.basis,
        "widths": job["widths"],
        "train_s": seconds,
        "world_size": world,
        "counters": _counters(spec, model, tokenizer) if job.get("counters") else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        **found,
    }


def _counters(spec: Any, model: Any, tokenizer: Any) -> dict[str, float]:
    """Median seconds that the instrument's own observation of a step takes, without and with a gradient norm."""
    import statistics

    from prism_fast.harness.trainer.instrument import Handed, Instrument

    class Sink:
        def send(self, *_: Any) -> None: ...

    instrument = Instrument(spec, None, Sink(), tokenizer, 0)  # type: ignore[arg-type]
    found = {}
    for name, parameters, repeats in (
        ("observe_s", [], COUNTER_REPEATS),
        ("grad_norm_s", list(model.parameters()), COUNTER_REPEATS // 50),
    ):
        instrument._parameters = parameters
        times = []
        for index in range(repeats):
            began = perf_counter()
            handed = Handed(None, 0.0, 0.0, 0.0, 0.0)  # type: ignore[arg-type]
            instrument._open = (index, perf_counter(), instrument._clock.mark(), handed)
            instrument._close_step()
            times.append(perf_counter() - began)
        found[name] = statistics.median(times)
    found["grad_norm_s"] = max(0.0, found["grad_norm_s"] - found["observe_s"])
    return found


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
