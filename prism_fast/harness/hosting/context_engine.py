"""Gives a bundle its context: imports the scripts under forced seeds and answers the context's calls."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from prism_fast.harness.hosting.shim import install_interface_shim
from prism_fast.harness.process.seeding import seed_everything, seeded_builder
from prism_fast.protocol import PrismBatch, PrismContext
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleRejected
from prism_fast.protocol.run_spec import RunSpec


def import_architecture(bundle_dir: Path, seed: int) -> ModuleType:
    """Imports architecture.py and makes its `build_model` start from the forced seed, however it is reached."""
    install_interface_shim()
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(bundle_dir))
    seed_everything(seed)
    architecture = importlib.import_module("architecture")
    build_model = getattr(architecture, "build_model", None)
    if not callable(build_model):
        raise BundleRejected("architecture.py does not define `build_model(ctx)`", rule=c.RULE_BUNDLE_SHAPE)
    architecture.build_model = seeded_builder(build_model, seed)  # type: ignore[attr-defined]
    return architecture


def import_bundle(bundle_dir: Path, seed: int) -> tuple[ModuleType, ModuleType]:
    """-> (architecture, training). `from architecture import build_model` in training.py gets the seeded one."""
    architecture = import_architecture(bundle_dir, seed)
    seed_everything(seed)
    training = importlib.import_module("training")
    seed_everything(seed)
    return architecture, training


class Engine:
    """What stands behind a context. `instrument` is None where there is nothing to train on (held-out scoring)."""

    def __init__(self, architecture: ModuleType, tokenizer: Any, instrument: Any = None) -> None:
        self._architecture, self._tokenizer, self._instrument = architecture, tokenizer, instrument

    def build_model(self, context: PrismContext, *args: Any, **kwargs: Any) -> Any:
        return self._architecture.build_model(context, *args, **kwargs)

    def reference_tokenizer(self, context: PrismContext, name: str) -> Any:
        if name != self._tokenizer.name:
            raise BundleRejected(
                f"ctx.reference_tokenizer({name!r}) was called; this run's tokenizer is {self._tokenizer.name!r}",
                rule=c.RULE_TOKENIZER,
            )
        return self._tokenizer

    def iter_train_batches(self, context: PrismContext, model: Any, **request: Any) -> Iterator[PrismBatch]:
        if self._instrument is None:
            raise BundleRejected("there is nothing to train on in held-out scoring", rule=c.RULE_BATCH_REQUEST)
        return self._instrument.iter_train_batches(context, model, **request)


def make_context(
    spec: RunSpec,
    engine: Engine,
    *,
    data_dir: str,
    artifacts_dir: str,
    tokenizer_dir: str,
    rank: int,
    local_rank: int,
    world_size: int,
    device: str,
) -> PrismContext:
    return PrismContext(
        vocab_size=spec.vocab_size,
        sequence_length=spec.sequence_length,
        max_layers=spec.max_layers,
        max_parameters=spec.max_parameters,
        param_ladder_stage=spec.param_ladder_stage,
        seed=spec.seed,
        data_dir=data_dir,
        artifacts_dir=artifacts_dir,
        reference_tokenizer_dir=tokenizer_dir,
        token_budget=spec.token_budget,
        step_budget=spec.step_budget,
        budget_seconds=spec.budget_seconds,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        distributed_backend="nccl" if device.startswith("cuda") else "gloo",
        device=device,
        engine=engine,
    )
