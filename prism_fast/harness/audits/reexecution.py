"""Executes a sealed run again from its receipts: program, weights and corpus, and no code of anybody's bundle.

Held-out text is measured under the kept initial and trained weights, and each batch whose weights were kept is
predicted again; the nats must be those that the run states. To the bit on the processor, torch and thread count that it
was made with; to TOLERANCE elsewhere, since matrix products round differently there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from prism_fast.harness.marking.heldout import measure
from prism_fast.harness.process import wire
from prism_fast.harness.process.environment import engine_environment
from prism_fast.harness.process.isolation import Sandbox, resolve_isolation
from prism_fast.harness.process.processes import descendants, end_processes
from prism_fast.harness.process.shared_state import read_safetensors, slots_of
from prism_fast.harness.referee.executing import Executor, StatePredictor
from prism_fast.harness.referee.tracing import Traced, TracedWidth
from prism_fast.profiling.machine import cpu_name
from prism_fast.program import operators
from prism_fast.program.format import Program, ProgramError, check_constants
from prism_fast.protocol import constants as c
from prism_fast.protocol import manifest as m
from prism_fast.protocol.errors import PrismError
from prism_fast.protocol.run_spec import RunSpec

TOLERANCE = 1e-5  # relative, on another machine
ANSWER_SECONDS = 600.0


def reexecute(
    seed_dir: Path,
    manifest: m.RunManifest,
    spec: RunSpec,
    corpus: Any,
    val_corpus: Any,
    train_split: Any,
    *,
    snapshots: list[dict[str, Any]],
    matmul_precision: str,
    same_machine: bool | None = None,
) -> Iterator[str]:
    """Yields one sentence per disagreement. `snapshots`: index, path, autocast of batches whose weights were kept.

    `train_split`: what the run trained on. `same_machine`: whether bits must be equal (None: found out).
    """
    try:
        traced = kept_programs(seed_dir)
    except (PrismError, OSError, ValueError) as error:
        yield str(error)
        return
    if same_machine is None:
        same_machine = _same_machine(seed_dir, manifest)
    keep = set(descendants(os.getpid()))
    executor: Executor | None = None
    try:
        with tempfile.TemporaryDirectory(prefix="prism-verify-") as private:
            executor = Executor(
                spec,
                Sandbox(resolve_isolation("auto")),
                engine_environment(spec),
                Path(private) / c.EXECUTOR_LOG_FILE,
                deadline=lambda: monotonic() + ANSWER_SECONDS,
                probe_share=0.0,
            )
            yield from _with(
                executor, traced, seed_dir, manifest, spec, corpus, val_corpus, train_split, snapshots,
                matmul_precision, same_machine, Path(private),
            )  # fmt: skip
    except (PrismError, OSError) as error:
        yield f"{seed_dir}: could not be executed again: {error}"
    finally:
        if executor is not None:
            executor.close()
        end_processes(None, keep)


def kept_programs(seed_dir: Path) -> Traced:
    """The programs and the initial state that a run kept. Raises ProgramError, DataError or OSError naming the file."""
    programs = []
    for path in sorted((seed_dir / c.PROGRAM_DIR).glob("width-*.json")):
        try:
            program = Program.from_bytes(path.read_bytes())
            operators.check(program)
            constants = path.with_suffix(".safetensors").read_bytes()
            check_constants(constants, program)
        except ProgramError as error:
            raise ProgramError(f"{path}: {error}") from None
        programs.append(TracedWidth(program, constants, None, ()))
    if not programs:
        raise ProgramError(f"{seed_dir / c.PROGRAM_DIR}: no programs; only sealed runs keep them")
    programs.sort(key=lambda each: each.program.width)
    slots = slots_of(programs[0].program.state)
    return Traced(tuple(programs), slots, read_safetensors(seed_dir / c.INITIAL_STATE_FILE, slots))


def _with(
    executor: Executor,
    traced: Traced,
    seed_dir: Path,
    manifest: m.RunManifest,
    spec: RunSpec,
    corpus: Any,
    val_corpus: Any,
    train_split: Any,
    snapshots: list[dict[str, Any]],
    matmul_precision: str,
    same_machine: bool,
    private: Path,
) -> Iterator[str]:
    import orjson

    from prism_fast.data.tokenizers import reference_tokenizer

    engine = manifest.engine
    tokenizer = reference_tokenizer(spec.tokenizer if engine.basis == "tokens" else "bytes")
    executor.load(traced, np.array(tokenizer.token_bytes, np.int32), matmul_precision)

    def differ(one: float, other: float) -> bool:
        return one != other if same_machine else not abs(one - other) <= TOLERANCE * max(abs(other), 1.0)

    if val_corpus is not None and (seed_dir / c.HELDOUT_FILE).is_file():
        stated = orjson.loads((seed_dir / c.HELDOUT_FILE).read_bytes())
        executor.adopt("trained", read_safetensors(seed_dir / c.WEIGHTS_FILE, traced.slots))
        basis = "tokens" if spec.tokenizer == "bytes" else engine.basis
        again = measure(
            StatePredictor(executor, "initial", probe=False),
            lambda: StatePredictor(executor, "trained", probe=False),
            corpus=corpus,
            val_corpus=val_corpus,
            basis=basis,
            basis_tokenizer=tokenizer,
            widths=stated["widths"],
            val_byte_budget=spec.val_byte_budget,
            documents_path=private / c.HELDOUT_DOCUMENTS_FILE,
        )
        for name in ("twin", "trained", "train_prefix"):
            told, found = stated[name]["nats"], again.report[name]["nats"]
            if differ(found, told):
                yield (
                    f"{seed_dir / c.HELDOUT_FILE}: {name} states {told!r} nats; executed again from program and "
                    f"weights it has {found!r}"
                )
    yield from _snapshots(executor, traced, seed_dir, manifest, spec, train_split, snapshots, differ)


def _snapshots(
    executor: Executor,
    traced: Traced,
    seed_dir: Path,
    manifest: m.RunManifest,
    spec: RunSpec,
    train_split: Any,
    snapshots: list[dict[str, Any]],
    differ: Any,
) -> Iterator[str]:
    from prism_fast.data.stream import TokenStream
    from prism_fast.protocol import ledger as layout

    if not snapshots:
        return
    engine = manifest.engine
    records = layout.read_records(seed_dir / c.LEDGER_FILE, layout.LEDGER_MAGIC, layout.LEDGER_DTYPE)
    own = records[records["rank"] == 0]
    for each in snapshots:
        index = int(each["index"])
        executor.adopt("live", read_safetensors(seed_dir / each["path"], traced.slots))
        stream = TokenStream(
            train_split,
            engine.seq_len,
            engine.batch_size,
            basis="bytes" if engine.basis == "bytes" and spec.tokenizer != "bytes" else "tokens",
            rank=0,
            world=spec.world_size,
            prefetch=1,
            start_batch=index,
        )
        try:
            block = next(stream)
            autocast = wire.AUTOCAST.index(each["autocast"])
            record, _ = executor.predict(block.tokens, block.targets, state="live", autocast=autocast, probe=False)
        finally:
            stream.close()
        told = own[own["index"] == index]
        if len(told) != 1 or differ(record.nats, float(told["nats"][0])):
            stated = float(told["nats"][0]) if len(told) == 1 else None
            yield (
                f"{seed_dir / c.LEDGER_FILE}: batch {index} states {stated!r} nats; executed again from program and "
                f"{each['path']} it has {record.nats!r}"
            )


def _same_machine(seed_dir: Path, manifest: m.RunManifest) -> bool:
    from importlib.metadata import version

    try:
        profile = m.ThroughputProfile.model_validate_json((seed_dir / c.THROUGHPUT_PROFILE_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return profile.machine.cpu == cpu_name() and manifest.engine.torch_version == version("torch")
