"""`prism-fast score`: the main job."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from prism_fast.cli.options import SEEDS, placed, whole_numbers
from prism_fast.protocol import constants as c


class Accounting(StrEnum):
    exact = "exact"
    prism_v2 = "prism-v2"


class Pin(StrEnum):
    p0 = "p0"
    p1 = "p1"
    p2 = "p2"
    p3 = "p3"


class Mode(StrEnum):
    gpu_proxy_eval = "gpu_proxy_eval"
    full_scale_eval = "full_scale_eval"


class Stage(StrEnum):
    explore = "explore"
    promote = "promote"
    full_scale = "full_scale"


class Policy(StrEnum):
    reject = "reject"
    flag = "flag"
    off = "off"


class Seal(StrEnum):
    sealed = "sealed"
    open = "open"


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
    out: Annotated[Path, typer.Option(help="Directory for the results; each seed writes OUT/seed-<seed>/.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="'sample' (bundled text), a packed corpus, or a directory of JSONL, packed on first use "
            "(default: PRISM_BASE_EVAL_TRAIN_DATA_DIR)."
        ),
    ] = None,
    val: Annotated[str | None, typer.Option(help="Corpus whose val split is held out (default: --data's own).")] = None,
    pin: Annotated[
        Pin | None,
        typer.Option(help="Score under a protocol pin: it decides whatever is not given, and refuses what bends it."),
    ] = None,
    mode: Annotated[Mode | None, typer.Option(help="Execution mode (default: the pin's, or gpu_proxy_eval).")] = None,
    phase2: Annotated[
        str | None, typer.Option(help="full_scale_eval: the sample-100BT mount (default: --data's sibling).")
    ] = None,
    stage: Annotated[
        Stage | None, typer.Option(help="Parameter ladder stage, which sets the cap (default: the pin's, or explore).")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="gpt2 or bytes (default: gpt2).")] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="ctx.vocab_size (default: the tokenizer's, padded to a multiple of 64).")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(help=f"Tokens of a row: ctx.sequence_length (default: {c.DEFAULT_SEQUENCE_LENGTH})."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Pins the batch size that the bundle may ask for (default: what it asks for).")
    ] = None,
    token_budget: Annotated[
        int | None, typer.Option(help=f"Tokens to feed the model; 0: no limit (default: {c.DEFAULT_TOKEN_BUDGET}).")
    ] = None,
    step_budget: Annotated[int | None, typer.Option(help="Batches to hand out (default: no limit).")] = None,
    flops_budget: Annotated[
        float | None, typer.Option(help="FLOPs to train for, counted as 6 x parameters x tokens (default: no limit).")
    ] = None,
    budget_seconds: Annotated[
        float | None,
        typer.Option(
            help="Graceful wall-clock budget in seconds; the partial stream is scored "
            f"(default: {c.DEFAULT_BUDGET_SECONDS:.0f})."
        ),
    ] = None,
    watchdog_grace: Annotated[
        float, typer.Option(help="Seconds past the budget after which the run is ended (exit 7).")
    ] = c.WATCHDOG_GRACE_SECONDS,
    artifacts_quota: Annotated[int, typer.Option(help="Bytes of artifacts the bundle may write (exit 8).")] = (
        c.ARTIFACTS_QUOTA_BYTES
    ),
    val_byte_budget: Annotated[
        int | None, typer.Option(help="Score a prefix of the val split of at least this many bytes (default: all).")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help=f"Comma-separated seeds (default: the pin's three, or {c.DEFAULT_SEED}).")
    ] = None,
    only_seeds: Annotated[
        str | None, typer.Option(help="Those of the seeds to score here; the others are scored elsewhere (campaign).")
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Trainer ranks under torchrun, 1 to 8 (default: 1).")] = None,
    policy: Annotated[
        Policy | None,
        typer.Option(
            help="What an unmet distributed contract of training.py means (default: reject with several ranks, flag "
            "with one)."
        ),
    ] = None,
    accounting: Annotated[
        Accounting, typer.Option(help="How bytes and losses are counted; prism-v2: as the original engine did.")
    ] = Accounting.exact,
    seal: Annotated[
        Seal | None, typer.Option(help="Where the bundle is predicted and scored (default: sealed; prism-v2: open).")
    ] = None,
    isolation: Annotated[Isolation, typer.Option(help="Sandbox around bundle code.")] = Isolation.auto,
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.auto,
    torch_threads: Annotated[
        int | None, typer.Option(help="torch's CPU threads, part of the run spec (default: CPUs / nproc).")
    ] = None,
    prefetch: Annotated[int, typer.Option(help="Batches read ahead; never changes a score.")] = 2,
    snapshots: Annotated[
        int,
        typer.Option(help="Batches, secretly chosen, whose weights are kept: `verify --data` predicts them again."),
    ] = 0,
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

    What is not given is the pin's, then that of the PRISM_ variables (PRISM_SEQUENCE_LENGTH ...), then the default.

    Exit codes: 0 scored, 2 usage, 3 bundle rejected, 4 bundle failed, 5 engine, machine or data fault,
    7 wall-clock watchdog, 8 artifacts quota.
    """
    from prism_fast.cli.scoring import score_and_report
    from prism_fast.harness.referee.referee import ScoreRequest
    from prism_fast.profiling.machine import process_age_s
    from prism_fast.protocol.knobs import Given, settle_knobs
    from prism_fast.report.tables import print_summary

    given = Given(
        data=data,
        val=val,
        phase2=phase2,
        mode=mode and mode.value,
        stage=stage and stage.value,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        sequence_length=seq_len,
        batch_size=batch_size,
        token_budget=token_budget,
        step_budget=step_budget,
        flops_budget=flops_budget,
        budget_seconds=budget_seconds,
        val_byte_budget=val_byte_budget,
        seeds=None if seeds is None else _seeds(seeds),
        nproc=nproc,
        accounting=accounting.value,
        seal=seal and seal.value,
    )
    knobs = settle_knobs(given, pin and pin.value)
    request = ScoreRequest(
        bundle=bundle,
        out=out,
        **{**vars(knobs), **{name: placed(name, getattr(knobs, name)) for name in ("data", "val", "phase2")}},
        watchdog_grace_seconds=watchdog_grace,
        artifacts_quota_bytes=artifacts_quota,
        only_seeds=None if only_seeds is None else _seeds(only_seeds, "--only-seeds"),
        policy=policy.value if policy else None,  # type: ignore[arg-type]
        isolation=isolation.value,
        device=device.value,
        torch_threads=torch_threads,
        prefetch=prefetch,
        snapshots=snapshots,
        resume=resume,
        cache_dir=cache_dir,
        command_s=process_age_s(),
    )
    summary = score_and_report(request, as_json=log_format is LogFormat.json, metrics=metrics)
    if json:
        sys.stdout.write(summary.model_dump_json(indent=2) + "\n")
    else:
        print_summary(out, summary)
    raise typer.Exit(summary.exit_code)


def _seeds(text: str, option: str = "--seeds") -> tuple[int, ...]:
    return whole_numbers(option, text, *SEEDS, "1337,2027")
