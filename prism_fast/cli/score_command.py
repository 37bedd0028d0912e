"""`prism-fast score`: the main job."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import UsageError


class Accounting(StrEnum):
    exact = "exact"
    prism_v2 = "prism-v2"


class Seal(StrEnum):
    sealed = "sealed"
    open = "open"


class Capture(StrEnum):
    strict = "strict"
    fused = "fused"


class Isolation(StrEnum):
    auto = "auto"
    bwrap = "bwrap"
    none = "none"


class LogFormat(StrEnum):
    text = "text"
    json = "json"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def register(app: typer.Typer) -> None:
    app.command("score")(score)


def score(
    bundle: Annotated[Path, typer.Argument(help="Directory or .zip holding architecture.py and training.py.")],
    data: Annotated[
        str,
        typer.Option(help="'sample' (bundled text), a packed corpus, or a directory of JSONL, packed on first use."),
    ],
    out: Annotated[Path, typer.Option(help="Directory for the results; each seed writes OUT/seed-<seed>/.")],
    val: Annotated[str | None, typer.Option(help="Corpus whose val split is held out (default: --data's own).")] = None,
    tokenizer: Annotated[str, typer.Option(help="gpt2 or bytes.")] = "gpt2",
    seq_len: Annotated[int, typer.Option(help="Sequence length in tokens: ctx.sequence_length.")] = (
        c.DEFAULT_SEQUENCE_LENGTH
    ),
    batch_size: Annotated[
        int | None, typer.Option(help="Pins the batch size that the bundle may ask for (default: what it asks for).")
    ] = None,
    token_budget: Annotated[int, typer.Option(help="Tokens to feed the model; 0: no limit.")] = c.DEFAULT_TOKEN_BUDGET,
    step_budget: Annotated[int | None, typer.Option(help="Batches to hand out (default: no limit).")] = None,
    budget_seconds: Annotated[
        float, typer.Option(help="Graceful wall-clock budget in seconds; the partial stream is scored.")
    ] = c.DEFAULT_BUDGET_SECONDS,
    watchdog_grace: Annotated[
        float, typer.Option(help="Seconds past the budget after which the run is ended (exit 7).")
    ] = c.WATCHDOG_GRACE_SECONDS,
    artifacts_quota: Annotated[int, typer.Option(help="Bytes of artifacts the bundle may write (exit 8).")] = (
        c.ARTIFACTS_QUOTA_BYTES
    ),
    val_byte_budget: Annotated[
        int | None, typer.Option(help="Score a prefix of the val split of at least this many bytes (default: all).")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = str(c.DEFAULT_SEED),
    nproc: Annotated[int, typer.Option(help="Trainer ranks under torchrun, 1 to 8.")] = 1,
    accounting: Annotated[Accounting, typer.Option(help="How bytes and losses are counted.")] = Accounting.exact,
    seal: Annotated[Seal, typer.Option(help="Where the bundle is predicted and scored.")] = Seal.sealed,
    capture: Annotated[Capture, typer.Option(help="How a prediction is taken.")] = Capture.strict,
    isolation: Annotated[Isolation, typer.Option(help="Sandbox around bundle code.")] = Isolation.auto,
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.auto,
    torch_threads: Annotated[
        int | None, typer.Option(help="torch's CPU threads, part of the run spec (default: CPUs / nproc).")
    ] = None,
    scorer_threads: Annotated[
        int | None, typer.Option(help="Threads that score; never change a score (default: all CPUs).")
    ] = None,
    prefetch: Annotated[int, typer.Option(help="Batches read ahead; never changes a score.")] = 2,
    resume: Annotated[bool, typer.Option("--resume", help="Skip seeds already scored with the same spec.")] = False,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Where packed text is cached (default: the user's cache directory).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
    log_format: Annotated[LogFormat, typer.Option(help="How stderr speaks: to a person, or in JSON lines.")] = (
        LogFormat.text
    ),
    metrics: Annotated[
        Path | None, typer.Option(help="Prometheus text file to keep up to date (node_exporter's textfile collector).")
    ] = None,
) -> None:
    """Score a bundle: train it from a forced random init on locked text, predicting every batch before training on it.

    Exit codes: 0 scored, 2 usage, 3 bundle rejected, 4 bundle failed, 5 engine, machine or data fault,
    7 wall-clock watchdog, 8 artifacts quota.
    """
    from prism_fast.cli.scoring import score_and_report
    from prism_fast.harness.referee import ScoreRequest
    from prism_fast.report.tables import print_summary

    request = ScoreRequest(
        bundle=bundle,
        data=data,
        out=out,
        val=val,
        tokenizer=tokenizer,
        sequence_length=seq_len,
        batch_size=batch_size,
        token_budget=token_budget if token_budget != 0 else None,
        step_budget=step_budget,
        budget_seconds=budget_seconds,
        watchdog_grace_seconds=watchdog_grace,
        artifacts_quota_bytes=artifacts_quota,
        val_byte_budget=val_byte_budget,
        seeds=_seeds(seeds),
        nproc=nproc,
        accounting=accounting.value,
        seal=seal.value,
        capture=capture.value,
        isolation=isolation.value,
        device=device.value,
        torch_threads=torch_threads,
        scorer_threads=scorer_threads,
        prefetch=prefetch,
        resume=resume,
        cache_dir=cache_dir,
    )
    summary = score_and_report(request, as_json=log_format is LogFormat.json, metrics=metrics)
    if json:
        sys.stdout.write(summary.model_dump_json(indent=2) + "\n")
    else:
        print_summary(out, summary)
    raise typer.Exit(summary.exit_code)


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--seeds {text}: expected whole numbers with commas between, for example 1337,2027") from None
