"""The padding probe: what length bucketing would save on a corpus, as a document beside the other probes'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prism_fast.protocol.errors import DataError, UsageError

SCHEMA = "prism_profile_padding.v1"


def cost_of(text: str | None) -> tuple[tuple[float, float] | None, int | None]:
    """-> ((A, B), rows they were fitted on) of "A,B" or of a scaling probe's JSON file; nulls for None.

    Raises UsageError for what is neither, DataError for a file that is no scaling document.
    """
    if text is None:
        return None, None
    if Path(text).is_file():
        import orjson

        try:
            document = orjson.loads(Path(text).read_bytes())
            if document["schema"] != "prism_profile_scaling.v1":
                raise KeyError(document["schema"])
            return (float(document["A"]), float(document["B"])), int(document["batch_size"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{text}: not a document of `prism-fast profile scaling --out`: {error}") from error
    try:
        linear, quadratic = (float(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"--cost {text}: expected two numbers A,B, or a scaling.json") from None
    return (linear, quadratic), None


def measure_padding(corpus: str, result: Any, cost: tuple[float, float] | None) -> dict[str, Any]:
    """`result`: a `data.plan.PlanResult`. Rows are `prism-fast plan --json`'s, file order first."""
    rows = result.reports
    best = min(rows[1:] or rows, key=lambda row: row["padded_tokens"])
    return {
        "schema": SCHEMA,
        "corpus": corpus,
        "cost": list(cost) if cost is not None else None,
        "truncation": result.truncation,
        "rows": rows,
        "best_bucket": best["bucket"],
        "verdict": (
            f"{rows[0]['waste']:.1%} of what file order feeds the model is padding, with bucket {best['bucket']} "
            f"{best['waste']:.1%}: {best['saved_padded_tokens']:.1%} fewer tokens"
            + (f", {best['saved_time']:.1%} less predicted time" if best["saved_time"] is not None else "")
        ),
    }
