"""Mutated files for the reader of programs: whatever the bytes, the outcome is a program or a ProgramError."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import orjson

from prism_fast.program import operators
from prism_fast.program.format import Program, ProgramError, check_constants
from prism_fast.program.listing import listing
from prism_fast.program.sizes import bounds

_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, -0.0, 1e308, "",
    "x", "../x", "\x00", "é" * 300,
    [], [[]], [[[[]]]], {}, {"v": 0}, {"v": 10**9}, {"d": "float32"}, {"d": []}, {"f": "nan"},
    {"c": [1.0, 2.0]}, {"b": [0, 1]},
    {"max": [1] * 9}, {"device": 0}, {"all": [None]}, ["float32", [1 << 43, 1 << 43]],
    "aten.add.Tensor", "autocast", "constant",
]  # fmt: skip


def mutations(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """Endless mutations of a file: of bytes, and of the JSON document that it holds."""
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        document = None
    while True:
        if document is None or rng.random() < 0.3:
            yield _bytes_changed(data, rng)
        else:
            changed = copy.deepcopy(document)
            for _ in range(rng.choice((1, 1, 1, 2, 5))):
                changed = _document_changed(changed, rng)
            yield json.dumps(changed, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
                "utf-8", "replace"
            )


def _bytes_changed(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 2, 8))):
        where = rng.randrange(len(changed) + 1) if changed else 0
        match rng.randrange(4):
            case 0:
                changed[where : where + 1] = bytes([rng.randrange(256)])
            case 1:
                del changed[where : where + rng.choice((1, 4, 100))]
            case 2:
                changed[where:where] = rng.choice((b"[" * 5000, b'{"a":', b"9" * 400, b"\xff", b"]}", b"null", b"-"))
            case _:
                changed[where:where] = changed[where : where + rng.randrange(64)]
    return bytes(changed)


def _document_changed(document: Any, rng: random.Random) -> Any:
    """One place of the document, chosen at random, replaced, removed, doubled or swapped."""
    holder, key = None, None
    found = document
    while isinstance(found, list | dict) and found and (holder is None or rng.random() < 0.85):
        holder = found
        key = rng.choice(list(found)) if isinstance(found, dict) else rng.randrange(len(found))
        found = holder[key]
    if holder is None:
        return rng.choice(_VALUES)
    match rng.randrange(5):
        case 0 | 1:
            holder[key] = copy.deepcopy(rng.choice(_VALUES))
        case 2:
            del holder[key]
        case 3 if isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(found))
        case _:
            if isinstance(found, int) and not isinstance(found, bool):
                holder[key] = found + rng.choice((-1, 1, 1 << 20))
            elif isinstance(holder, dict):
                holder[rng.choice(("zzz", "v", "d", "schema", "self"))] = copy.deepcopy(found)
    return document


def survives(data: bytes, constants: bytes) -> bool:
    """Reads a program as a referee does -> True if it was let in. Raises whatever is not a ProgramError."""
    try:
        program = Program.from_bytes(data)
        operators.check(program)
        check_constants(constants, program)
    except ProgramError as error:
        assert len(str(error)) < 600 and str(error).isprintable()
        return False
    assert program.to_bytes() == data
    bounds(program, 8)
    listing(program)
    return True
