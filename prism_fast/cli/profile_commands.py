"""`prism-fast profile`: where step time goes. Each probe prints a table, and keeps its raw JSON and a chart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prism_fast.cli.options import MOST_POSITIONS, Commands, whole_numbers
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import UsageError

if TYPE_CHECKING:
    from prism_fast.profiling.bundle_process import BundleJob

profile = Commands(
    help="Find where step time goes. Probes run the bundle outside any sandbox: profile what you trust.",
    no_args_is_help=True,
)

BundleArgument = Annotated[Path, typer.Argument(help="Directory or .zip holding architecture.py and training.py.")]
Data = Annotated[str, typer.Option(help="Text to train on: 'sample', a packed corpus, or text packed on first use.")]
Tokenizer = Annotated[str, typer.Option(help="gpt2 or bytes.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Threads = Annotated[int | None, typer.Option("--torch-threads", help="torch's CPU threads (default: CPUs / nproc).")]
CacheDir = Annotated[Path | None, typer.Option(help="Where packed text is cached (default: the user's cache).")]
Out = Annotated[Path | None, typer.Option(help="Folder for the raw JSON and the chart (SVG).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the raw JSON on stdout in place of the table.")]


def register(app: typer.Typer) -> None:
    app.add_typer(profile, name="profile")


@profile.command("scaling")
def scaling(
    bundle: BundleArgument,
    widths: Annotated[str, typer.Option(help="Tokens a row, with commas between; three or more.")] = "64,128,256,512",
    repeats: Annotated[int, typer.Option(help="Timed steps of each width, after two to warm up.")] = 12,
    clock: Annotated[
        str, typer.Option(help="wall, or processor: CPU time, on a machine that others load; with --torch-threads 1.")
    ] = "wall",
    data: Data = "sample",
    tokenizer: Tokenizer = "gpt2",
    device: DeviceOption = "auto",
    torch_threads: Threads = None,
    cache_dir: CacheDir = None,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Time a step at several widths and fit t(w) = A w + B w^2, with a constant where one is needed."""
    from prism_fast.profiling.scaling import measure_scaling

    job = _job(
        bundle,
        whole_numbers("--widths", widths, 2, MOST_POSITIONS, "128,256,512"),
        data,
        tokenizer,
        device,
        torch_threads,
        cache_dir,
    )
    if clock not in ("wall", "processor"):
        raise UsageError(f"--clock {clock}: expected wall or processor")
    _show(measure_scaling(job, repeats, processor=clock == "processor"), out, json)


@profile.command("kernels")
def kernels(
    bundle: BundleArgument,
    seq_len: Annotated[int, typer.Option(help="Tokens a row.")] = c.DEFAULT_SEQUENCE_LENGTH,
    steps: Annotated[int, typer.Option(help="Steps that are profiled; memory is bounded by them.")] = 3,
    warmup: Annotated[int, typer.Option(help="Steps before them.")] = 3,
    trace: Annotated[
        Path | None, typer.Option(help="Folder for a Chrome trace of the window, one a rank (chrome://tracing).")
    ] = None,
    nproc: Annotated[int, typer.Option(help="Ranks under torchrun, 1 to 8.")] = 1,
    data: Data = "sample",
    tokenizer: Tokenizer = "gpt2",
    device: DeviceOption = "auto",
    torch_threads: Threads = None,
    cache_dir: CacheDir = None,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Show which kernels a step spends its time in, by kind, and warn of kernels built for an older generation."""
    from prism_fast.profiling.kernels import measure_kernels

    job = _job(bundle, (seq_len,), data, tokenizer, device, torch_threads, cache_dir, nproc)
    _show(measure_kernels(job, active=steps, warmup=warmup, trace_dir=trace), out, json)


@profile.command("padding")
def padding(
    corpus: Annotated[str, typer.Argument(help="A packed corpus, text, a token file, or 'sample'.")],
    micro_batch: Annotated[int, typer.Option(help="Records a micro-batch.")] = 2,
    bucket: Annotated[
        str | None, typer.Option(help="Bucket sizes in records; 'width' mixes no two lengths. [default: as in plan]")
    ] = None,
    accumulate: Annotated[int, typer.Option(help="Micro-batches a step.")] = 8,
    cost: Annotated[
        str | None, typer.Option(help="A,B of t(w) = A w + B w^2, or the scaling.json that `profile scaling` wrote.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Positions a row has at most; longer records are cut.")] = None,
    split: Annotated[str, typer.Option(help="Split of the corpus; 'all' for all of them.")] = "train",
    tokenizer: Tokenizer = "gpt2",
    seed: Annotated[int, typer.Option(help="Seed of the order.")] = 0,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Show how much of a corpus is padding, in file order and bucketed, and what bucketing would save."""
    from prism_fast.cli.data_commands import tokenizer_named
    from prism_fast.cli.plan_commands import _buckets
    from prism_fast.data.plan import plan_corpus
    from prism_fast.profiling.padding import cost_of, measure_padding
    from prism_fast.protocol.errors import PrismError

    fitted, cost_rows = cost_of(cost)
    try:
        result = plan_corpus(
            corpus,
            micro_batch=micro_batch,
            buckets=_buckets(bucket, micro_batch),
            seed=seed,
            accumulate=accumulate,
            cost=fitted,
            cost_rows=cost_rows,
            seq_len=seq_len,
            split=split,
            tokenizer=tokenizer_named(tokenizer),
        )
    except PrismError:
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    _show(measure_padding(corpus, result, fitted), out, json)


@profile.command("mask")
def mask(
    bundle: BundleArgument,
    seq_len: Annotated[int, typer.Option(help="Tokens a row.")] = c.DEFAULT_SEQUENCE_LENGTH,
    window: Annotated[
        int | None, typer.Option(help="Keys that a row of a sliding-window layer may see at most; exit 1 if not so.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each mask.")] = 9,
    data: Data = "sample",
    tokenizer: Tokenizer = "gpt2",
    device: DeviceOption = "auto",
    torch_threads: Threads = None,
    cache_dir: CacheDir = None,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Check which keys attention really sees, and time is_causal against the same mask written out.

    Exit 1 where --window was given and does not hold.
    """
    from prism_fast.profiling.mask import measure_mask

    job = _job(bundle, (seq_len,), data, tokenizer, device, torch_threads, cache_dir)
    document = measure_mask(job, window=window, repeats=repeats)
    _show(document, out, json)
    if document["window_holds"] is False:
        raise typer.Exit(1)


@profile.command("overhead")
def overhead(
    bundle: BundleArgument,
    seq_len: Annotated[int, typer.Option(help="Tokens a row.")] = c.DEFAULT_SEQUENCE_LENGTH,
    steps: Annotated[int, typer.Option(help="Steps a run.")] = 20,
    repeats: Annotated[int, typer.Option(help="Runs of each mode, in turn.")] = 3,
    modes: Annotated[str, typer.Option(help="Of bare, open and sealed, with commas between.")] = "bare,open,sealed",
    data: Data = "sample",
    tokenizer: Tokenizer = "gpt2",
    device: DeviceOption = "auto",
    torch_threads: Threads = None,
    cache_dir: CacheDir = None,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Compare the bundle's bare training loop with the same loop scored: what scoring costs."""
    from prism_fast.profiling.overhead import measure_overhead

    document = measure_overhead(
        bundle,
        seq_len=seq_len,
        steps=steps,
        repeats=repeats,
        modes=[word.strip() for word in modes.split(",")],
        data=data,
        tokenizer=tokenizer,
        device=device,
        torch_threads=torch_threads,
        cache_dir=cache_dir,
    )
    _show(document, out, json)


def _job(
    bundle: Path,
    widths: tuple[int, ...],
    data: str,
    tokenizer: str,
    device: str,
    torch_threads: int | None,
    cache_dir: Path | None,
    nproc: int = 1,
) -> BundleJob:
    from prism_fast.profiling.bundle_process import BundleJob

    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {device}: expected auto, cpu or cuda")
    return BundleJob(
        bundle,
        widths,
        steps=0,
        observe={},
        data=data,
        tokenizer=tokenizer,
        device=device,
        torch_threads=torch_threads,
        cache_dir=cache_dir,
        nproc=nproc,
    )


def _show(document: dict[str, Any], out: Path | None, as_json: bool) -> None:
    from prism_fast.report.probes import print_probe, write_probe

    if as_json:
        import orjson

        sys.stdout.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        print_probe(document)
    if out is not None:
        for path in write_probe(document, out):
            typer.echo(f"written: {path}", err=True)
