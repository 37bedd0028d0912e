"""Damaged and hostile .zip bundles: every one is loaded or refused in one sentence that names the file."""

from __future__ import annotations

import io
import random
import struct
import tempfile
import zipfile
from pathlib import Path

from prism_fast.harness.bundle.bundle import load_bundle
from prism_fast.protocol.errors import BundleRejected

SCRIPTS = {
    "architecture.py": b"def build_model(ctx):\n    return None\n" + b"# padding\n" * 40,
    "training.py": b"def train(ctx):\n    pass\n" + b"# padding\n" * 40,
}
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
MARKS = (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07")
KINDS = ("cut", "flip", "splice", "header")


def archives() -> list[bytes]:
    """Good ones of every make: each method, in a folder, with a comment, with names that are not ASCII, streamed."""
    made = []
    for method in METHODS:
        for prefix in ("", "mine/", "ünï/", "a\\"):
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w", method) as archive:
                for name, source in SCRIPTS.items():
                    archive.writestr(prefix + name, source)
                archive.comment = b"packed" * (method == zipfile.ZIP_STORED)
            made.append(buffer.getvalue())
    streamed = io.BytesIO()
    with zipfile.ZipFile(streamed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, source in SCRIPTS.items():
            with archive.open(name, "w", force_zip64=True) as entry:
                entry.write(source)
    return [*made, streamed.getvalue()]


def mutated(good: list[bytes], kind: str, source: random.Random) -> bytes:
    data = bytearray(source.choice(good))
    if kind == "cut":
        at = source.randrange(len(data))
        del data[at : at + source.choice((1, 7, source.randrange(1, len(data)), len(data)))]
    elif kind == "flip":
        for _ in range(source.randint(1, 6)):
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    elif kind == "splice":
        other = source.choice(good)
        at, begin = source.randrange(len(data)), source.randrange(len(other))
        data[at : at + source.randrange(80)] = other[begin : begin + source.randrange(400)]
    else:  # a number in one of the archive's own records
        found = [at for mark in MARKS for at in range(len(data)) if data.startswith(mark, at)]
        at = source.choice(found) + 4 + source.randrange(42)
        value = source.choice(
            (0, 1, 8, 9, 12, 14, 93, 99, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, source.getrandbits(32))
        )
        data[at : at + 4] = struct.pack("<I", value)[: source.choice((1, 2, 4))]
    return bytes(data)


def fuzz_zips(inputs: int, seed: int) -> dict[str, int]:
    """Loads `inputs` mutated archives; -> inputs by kind, and how many of all were still good.

    RuntimeError with the input's number at the first that raises anything but BundleRejected, in one line, by name.
    """
    source = random.Random(seed)
    good = archives()
    counts = dict.fromkeys((*KINDS, "loaded"), 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bundle.zip"
        for i in range(inputs):
            kind = KINDS[i % len(KINDS)]
            path.write_bytes(mutated(good, kind, source))
            try:
                bundle = load_bundle(path)
            except BundleRejected as error:
                said = str(error)
                if str(path) not in said or "\n" in said or len(said) > 1000:
                    raise RuntimeError(f"input {i} of seed {seed} ({kind}): says {said!r}") from error
            except Exception as error:
                raise RuntimeError(f"input {i} of seed {seed} ({kind}): {type(error).__name__}: {error}") from error
            else:
                if bundle.scripts != SCRIPTS:
                    raise RuntimeError(f"input {i} of seed {seed} ({kind}): loaded other bytes than were packed")
                counts["loaded"] += 1
            counts[kind] += 1
    return counts
