"""The JSON Schemas in docs/schemas are those of the models that write the files."""

from pathlib import Path

import orjson
import pytest

from prism_fast.protocol.schemas import MODELS, schema_of

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


@pytest.mark.parametrize("name", sorted(MODELS))
def test_exported_schema_is_current(name):
    """If this fails: python -m prism_fast.protocol.schemas docs/schemas"""
    assert orjson.loads((SCHEMAS / f"{name}.schema.json").read_bytes()) == schema_of(name)
