"""The model of a run, or of a bundle, as code that a person can read: what `prism-fast program` prints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import prism_fast
from prism_fast.harness.bundle.bundle import Bundle, load_bundle
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import DataError, UsageError
from prism_fast.protocol.run_spec import RunSpec

TRACING_SECONDS = 300.0


def listings(
    place: Path, *, width: int | None = None, tokenizer: str = "gpt2", isolation: str = "auto"
) -> Iterator[tuple[str, str]]:
    """(where it is from, the program's text) of each program of `place`, none twice.

    `place`: a seed's directory, a run's, or a bundle, which is traced now: `build_model` runs, in a sandbox where
    `isolation` has one. `width`: the program for rows of so many tokens alone; of a bundle, `c.DEFAULT_SEQUENCE_LENGTH`
    when None. Raises UsageError where nothing of the kind is there, DataError for a damaged program, and what tracing
    raises.
    """
    kept = kept_programs(place)
    if not kept and any((folder / c.RUN_STATUS_FILE).is_file() for folder in (place, *place.glob("seed-*"))):
        raise UsageError(f"{place}: a run that kept no program; only sealed runs do")
    if kept:
        yield from _of_run(place, kept, width)
    else:
        yield from _of_bundle(load_bundle(place), width or c.DEFAULT_SEQUENCE_LENGTH, tokenizer, isolation)


def kept_programs(place: Path) -> list[Path]:
    """Program files of a seed's or a run's directory, by seed and width."""
    pattern = f"{c.PROGRAM_DIR}/width-*.json"
    found = [*place.glob(pattern), *place.glob(f"seed-*/{pattern}")]
    return sorted(found, key=lambda path: (str(path.parent), _width(path)))


def _width(path: Path) -> int:
    digits = path.stem.removeprefix("width-")
    return int(digits) if digits.isdecimal() and len(digits) < 20 else -1


def _of_run(place: Path, kept: list[Path], width: int | None) -> Iterator[tuple[str, str]]:
    from prism_fast.program.format import Program, ProgramError
    from prism_fast.program.listing import listing

    wanted = [path for path in kept if width is None or _width(path) == width]
    if not wanted:
        widths = sorted({_width(path) for path in kept})
        raise UsageError(f"--width {width}: {place} has programs of width {', '.join(map(str, widths))}")
    seen = set()
    for path in wanted:
        try:
            program = Program.from_bytes(path.read_bytes())
        except ProgramError as error:
            raise DataError(f"{path}: not a program: {error}") from error
        if program.digest not in seen:
            seen.add(program.digest)
            yield str(path), _printable(listing(program))


def _of_bundle(bundle: Bundle, width: int, tokenizer: str, isolation: str) -> Iterator[tuple[str, str]]:
    from prism_fast.data.tokenizers import reference_tokenizer
    from prism_fast.harness.process.isolation import Sandbox, resolve_isolation
    from prism_fast.harness.referee.seed_run import engine_environment
    from prism_fast.harness.referee.tracing import trace_bundle
    from prism_fast.program.listing import listing

    known = reference_tokenizer(tokenizer)
    kind = resolve_isolation(isolation)
    spec = RunSpec(
        engine_version=prism_fast.__version__,
        bundle_digest=bundle.digest,
        seal="sealed",
        isolation=kind,  # type: ignore[arg-type]
        tokenizer=known.name,
        tokenizer_fingerprint=known.fingerprint,
        corpus_fingerprint="",
        val_corpus_fingerprint=None,
        vocab_size=-(-known.n_vocab // 64) * 64,
        sequence_length=width,
        device="cpu",
        torch_threads=1,
    )
    traced = trace_bundle(bundle, spec, Sandbox(kind), engine_environment(spec), (width,), TRACING_SECONDS)
    for each in traced.programs:
        yield (
            f"{bundle.submission_id}, traced for rows of {each.program.width} tokens",
            _printable(listing(each.program)),
        )


def _printable(text: str) -> str:
    """Names in a program are a stranger's: on a terminal they are text and nothing else."""
    return "".join(ch if ch.isprintable() or ch == "\n" else f"\\x{ord(ch):02x}" for ch in text)
