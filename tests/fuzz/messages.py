"""What a hostile process can say to the referee, and a hostile tracer leave behind: each ends in a named fault.

The referee's own code takes them: `launch.Trainer` behind a real socket, the sealed session with a frozen program, the
tracer's reader. Only the executor, which no bundle can speak to, is left out.
"""

from __future__ import annotations

import random
import selectors
import socket
import struct
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import torch
from torch import nn

from prism_fast.harness.process import wire
from prism_fast.harness.process.interrupt import StopFlag
from prism_fast.harness.process.isolation import Sandbox
from prism_fast.harness.referee.launch import Trainer
from prism_fast.harness.referee.ledger import Ledger, pack_record
from prism_fast.harness.referee.session import SealedSession
from prism_fast.harness.referee.tracing import Tracer
from prism_fast.program.capture import capture, state_table
from prism_fast.protocol.errors import EngineFault, PrismError
from prism_fast.protocol.run_spec import RunSpec
from tests.program.mutations import mutations

SECRET = "s" * 32
MACHINE = {
    "cpu": "c", "cpu_count": 2, "memory_bytes": 1, "gpus": [], "gpu_memory_bytes": None, "driver": None, "os": "o",
    "python": "3", "torch": "2", "triton": None, "backends": {},
}  # fmt: skip
DOCUMENTS: dict[int, Any] = {
    wire.HELLO: {
        "rank": 0, "pid": 1, "secret": SECRET, "device": "cpu", "machine": MACHINE, "import_s": 0.1, "prepare_s": 0.1,
    },
    wire.STARTED: {"rank": 0, "bundle_import_s": 0.1},
    wire.SHARE: {
        "batch_size": 4, "seq_len": 8, "basis": "tokens", "dtypes": {}, "other_dtypes": {},
        "matmul_precision": "highest",
    },
    wire.MODEL: {
        "rank": 0, "model_params": 5, "head_width": 9, "batch_size": 4, "seq_len": 8, "basis": "tokens",
        "plan": {"corpus_bytes": 1, "corpus_tokens": 1}, "backends": {"token_nll": "cpp"},
    },
    wire.TRAINED: {"rank": 0, "stopped_reason": "token_budget"},
    wire.DONE: {
        "rank": 0, "stopped_reason": "token_budget", "returned": None, "peak_rss_bytes": 1, "peak_vram_bytes": None,
        "peak_vram_reserved_bytes": None, "forward_flops": None, "save_s": 0.1, "heldout": None, "outside_state": None,
        "rank_report": None,
    },
    wire.FAULT: {"kind": "failed", "rule": None, "message": "m", "traceback": "", "rank": 0},
}  # fmt: skip
RECORDS = {
    wire.READY: wire.READY_RECORD.pack(0, 0),
    wire.PREDICTED: pack_record(0, (1.0, 0.0, 4, 4, 0, 0), 32, 1, 0, 4),
    wire.STEPPED: struct.pack("<QdffffffII", 0, *[0.1] * 7, 0, 0),
    wire.MAPPED: b"",
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 4), nn.Linear(4, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


class Executor:
    """Stands where the executor stands: takes what it is given, and has no answer for a batch."""

    device, head_width, rules = "cpu", 20, ()

    def load(self, *given: Any) -> None: ...

    def adopt(self, *given: Any) -> None: ...

    def predict(self, *given: Any, **options: Any) -> Any:
        raise EngineFault("there is no executor here")


def spec_of(seal: str) -> RunSpec:
    return RunSpec(
        engine_version="", bundle_digest="", seal=seal, isolation="none", tokenizer="bytes", tokenizer_fingerprint="",
        corpus_fingerprint="", val_corpus_fingerprint=None, vocab_size=257, sequence_length=8, torch_threads=1,
    )  # fmt: skip


def tracer_files(folder: Path) -> dict[str, bytes]:
    """What an honest tracer leaves."""
    model = Small()
    captured = capture(model, width=8, compare=False)
    (folder / "width-8.json").write_bytes(captured.program.to_bytes())
    (folder / "width-8.safetensors").write_bytes(captured.constants)
    from prism_fast.harness.tracer.main import write_state

    write_state(model, state_table(model), folder / "initial_state.bin")
    told = {"programs": [{"width": 8, "differs": None, "seconds": 0.1, "notes": []}], "import_s": 0.1, "build_s": 0.1}
    (folder / "result.json").write_bytes(orjson.dumps(told))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def reader(folder: Path, spec: RunSpec) -> Tracer:
    """The referee's side of a tracer that has ended."""
    tracer = Tracer.__new__(Tracer)
    tracer._spec, tracer._widths, tracer._dtypes, tracer._out = spec, [8], {}, folder
    tracer._began, tracer._log = 0.0, Path("tracer.log")
    tracer.process = SimpleNamespace(returncode=0)  # type: ignore[assignment]
    return tracer


def session(spec: RunSpec, ledger: Ledger, traced: Any) -> SealedSession:
    """A sealed session whose programs are there, without its processes."""
    made = SealedSession.__new__(SealedSession)
    made.spec, made.ledger, made._run_dir = spec, ledger, Path(".")
    tokenizer = SimpleNamespace(token_bytes=np.ones(20, np.int32), n_vocab=20, name="bytes")
    made.data = SimpleNamespace(basis_tokenizer=lambda basis: tokenizer, split=None, prefetch=1)  # type: ignore[assignment]
    made._deadline, made._on_frozen, made._wanted_snapshots = (lambda: 0.0), (lambda *given: None), 0
    made.stopped_reason, made.model, made.traced, made.trace_s, made.request = None, None, None, 0.0, None
    made.snapshots, made._tokens_seen, made._snapshot_at = [], 0, frozenset()
    made._heldout_widths, made._tracer = (8,), SimpleNamespace()  # type: ignore[assignment]
    made._finish = lambda tracer: traced  # type: ignore[method-assign]
    made._trace = lambda *given: None  # type: ignore[assignment]
    rank = SimpleNamespace(executor=Executor(), region=None, stream=None)
    made._ranks = [rank]  # type: ignore[list-item]
    return made


def conversation(source: random.Random, seal: str, dtypes: dict[str, str]) -> list[bytes]:
    """Frames as a rank sends them, one or more of them not so."""
    order = [wire.HELLO, wire.STARTED]
    order += [wire.SHARE, wire.MAPPED, wire.READY] if seal == "sealed" else [wire.PREDICTED, wire.MODEL]
    order += [wire.STEPPED, wire.TRAINED, wire.DONE]
    if source.random() < 0.3:
        order[source.randrange(len(order))] = source.choice([*DOCUMENTS, *RECORDS, source.randrange(256)])
    hit = source.randrange(len(order))
    frames = []
    for place, kind in enumerate(order):
        if kind in DOCUMENTS:
            document = DOCUMENTS[kind]
            if kind == wire.SHARE:
                document = document | {"dtypes": dtypes}
            body = orjson.dumps(document)
        else:
            body = RECORDS.get(kind, source.randbytes(source.randrange(40)))
        if place == hit:
            body = next(mutations(body, source))
        frame = wire.encode(kind, body)
        if place == hit and source.random() < 0.1:
            frame = source.randbytes(source.randrange(1, 12)) + frame
        frames.append(frame)
    return frames[: hit + 2] if source.random() < 0.5 else frames


def fuzz_messages(inputs: int, seed: int) -> dict[str, int]:
    """`inputs` conversations, open and sealed in turn; -> conversations by how they ended.

    RuntimeError with the input's number where anything but a named fault comes of one.
    """
    source = random.Random(seed)
    counts = {"fault named": 0, "taken": 0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "out").mkdir()
        tracer_files(folder / "out")
        traced = reader(folder / "out", spec_of("sealed"))._read()
        dtypes = {slot.name: slot.dtype for slot in traced.slots}
        run_dir = folder / "run"
        (run_dir / "artifacts").mkdir(parents=True)
        for i in range(inputs):
            seal = ("open", "sealed")[i % 2]
            spec, ledger = spec_of(seal), Ledger(run_dir, 1)
            ledger.bind(bytes(32))
            trainer = Trainer(
                spec, {"artifacts_dir": str(run_dir / "artifacts")}, run_dir, {}, ledger, StopFlag(),
                lambda *seen: None, Sandbox("none"),
            )  # fmt: skip
            trainer._secret = SECRET
            if seal == "sealed":
                trainer.session = session(spec, ledger, traced)
                trainer._start_session = lambda deadline: None  # type: ignore[assignment,return-value]
            ours, theirs = socket.socketpair()
            channel = wire.Channel(ours, descriptors=False)
            try:
                with selectors.DefaultSelector() as selector:
                    trainer._ranks[channel] = None
                    selector.register(channel, selectors.EVENT_READ, channel)
                    for frame in conversation(source, seal, dtypes):
                        theirs.sendall(frame)
                        trainer._receive(channel, selector)
                        if trainer.fault is not None:
                            break
                    else:
                        theirs.close()
                        trainer._receive(channel, selector)
            except Exception as error:
                raise RuntimeError(f"conversation {i} of seed {seed}: {type(error).__name__}: {error}") from error
            finally:
                theirs.close()
                channel.close()
                ledger.close()
            fault = trainer.fault
            if fault is not None and (
                not isinstance(fault, PrismError) or "\n" in str(fault) or len(str(fault)) > 2500
            ):
                raise RuntimeError(f"conversation {i} of seed {seed}: {fault!r}")
            counts["taken" if fault is None else "fault named"] += 1
    return counts


def fuzz_tracers(inputs: int, seed: int) -> dict[str, int]:
    """`inputs` sets of files of a tracer, one of them damaged; -> by outcome. RuntimeError as `fuzz_messages`."""
    source = random.Random(seed)
    counts = {"refused": 0, "taken": 0}
    with tempfile.TemporaryDirectory() as name:
        folder, spec = Path(name), spec_of("sealed")
        good = tracer_files(folder)
        streams = {file: mutations(data, source) for file, data in good.items() if data}
        for i in range(inputs):
            file = source.choice(list(streams))
            (folder / file).write_bytes(next(streams[file]))
            try:
                from prism_fast.harness.process.jobs import handling

                with handling("the tracer"):
                    reader(folder, spec)._read().initial_state.close()
                counts["taken"] += 1
            except PrismError as error:
                if "\n" in str(error) or len(str(error)) > 2500:
                    raise RuntimeError(f"input {i} of seed {seed} ({file}): {error!r}") from error
                counts["refused"] += 1
            except Exception as error:
                raise RuntimeError(f"input {i} of seed {seed} ({file}): {type(error).__name__}: {error}") from error
            (folder / file).write_bytes(good[file])
    return counts
