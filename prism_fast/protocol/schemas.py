"""JSON Schemas of the files a run writes: `python -m prism_fast.protocol.schemas docs/schemas` exports them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from prism_fast.protocol.canonical import write_json
from prism_fast.protocol.manifest import FILE_MODELS
from prism_fast.protocol.receipts import GENESIS_SCHEMA, RECEIPT_SCHEMA, Genesis, Receipt
from prism_fast.protocol.run_spec import RunSpec

MODELS: dict[str, type[BaseModel]] = {
    **FILE_MODELS,
    "prism_run_spec.v1": RunSpec,
    GENESIS_SCHEMA: Genesis,
    RECEIPT_SCHEMA: Receipt,
}


def schema_of(name: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one file, as written (aliases, defaults present)."""
    schema = MODELS[name].model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": name, **schema}


def export(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        write_json(directory / f"{name}.schema.json", schema_of(name))


if __name__ == "__main__":
    export(Path(sys.argv[1]))
