"""Knobs from the environment: `PRISM_SEQUENCE_LENGTH=256` and so on. What is not set keeps the short default."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import UsageError
from prism_fast.protocol.ladder import max_parameters_for_stage

DEFAULT_TRAIN_DATA_DIR = "/data/fineweb-edu/train"
DEFAULT_VAL_DATA_DIR = "/data/fineweb-edu/val"


class PrismSettings(BaseSettings):
    """A validator's knobs, read from `PRISM_*` variables. Sizes in tokens, times in seconds; an empty value is unset.

    Raises pydantic's ValidationError (a ValueError) naming the variable for a value that does not fit.
    """

    model_config = SettingsConfigDict(env_prefix="PRISM_", env_ignore_empty=True, extra="ignore", frozen=True)

    sequence_length: int = Field(default=c.DEFAULT_SEQUENCE_LENGTH, ge=2)
    token_budget: int | None = Field(default=c.DEFAULT_TOKEN_BUDGET, gt=0)
    step_budget: int | None = Field(default=None, gt=0)
    budget_seconds: float = Field(default=c.DEFAULT_BUDGET_SECONDS, gt=0)
    vocab_size: int = Field(default=c.DEFAULT_VOCAB_SIZE, gt=1)
    seed: int = Field(default=c.DEFAULT_SEED, ge=0)
    distributed_contract_policy: Literal["reject", "flag", "off"] | None = None
    execution_mode: Literal["gpu_proxy_eval", "full_scale_eval"] = "gpu_proxy_eval"
    param_ladder_stage: Literal["explore", "promote", "full_scale"] = "explore"
    base_eval_train_data_dir: str = DEFAULT_TRAIN_DATA_DIR
    base_eval_val_data_dir: str = DEFAULT_VAL_DATA_DIR
    base_eval_phase2_data_dir: str | None = None

    @property
    def phase2_data_dir(self) -> str:
        """Where sample-100BT is mounted: as given, else the sibling of the train mount."""
        return self.base_eval_phase2_data_dir or phase2_sibling(self.base_eval_train_data_dir)

    def prism_context_kwargs(self) -> dict[str, Any]:
        """Arguments for `PrismContext`: every knob that a bundle sees, none of them dropped or rounded."""
        return {
            "vocab_size": self.vocab_size,
            "sequence_length": self.sequence_length,
            "token_budget": self.token_budget,
            "step_budget": self.step_budget,
            "budget_seconds": self.budget_seconds,
            "seed": self.seed,
            "param_ladder_stage": self.param_ladder_stage,
            "max_parameters": max_parameters_for_stage(self.param_ladder_stage),
        }


def read_settings() -> PrismSettings:
    """The environment's settings. Raises UsageError naming the variable whose value does not fit."""
    try:
        return PrismSettings()
    except ValidationError as e:
        first = e.errors()[0]
        name = "_".join(map(str, first["loc"])).upper()
        raise UsageError(f"PRISM_{name}={first['input']}: {first['msg']}; correct the variable or unset it") from None


def phase2_sibling(train_data_dir: str) -> str:
    """The sample-100BT mount beside a train mount: `.../fineweb-edu/train` -> `.../fineweb-edu/sample-100BT`."""
    return str(Path(train_data_dir).parent / "sample-100BT")
