"""`prism-fast plan`: what length bucketing would save on a corpus, and the chosen order as a manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from prism_fast.cli.options import MOST_POSITIONS, within

if TYPE_CHECKING:
    from prism_fast.data.plan import Bucket, Over


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    corpus: Annotated[str, typer.Argument(help="A packed corpus, text, a token file, or 'sample'.")],
    micro_batch: Annotated[
        int | None, typer.Option(help="Records a micro-batch; with --token-budget the most it may have. [default: 2]")
    ] = None,
    bucket: Annotated[
        str | None,
        typer.Option(
            help="Bucket sizes to try, in records; 'width' mixes no two lengths. "
            "[default: 1, 4, 16, 64 and 256 micro-batches]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order, 0 to 2^64 - 1.")] = 0,
    token_budget: Annotated[
        int | None, typer.Option(help="Padded tokens a micro-batch at most, end-of-text columns included.")
    ] = None,
    accumulate: Annotated[int, typer.Option(help="Micro-batches a step.")] = 8,
    cost: Annotated[
        str | None, typer.Option(help="A,B of the cost model t(w) = A w + B w^2, in seconds and tokens.")
    ] = None,
    cost_rows: Annotated[
        int | None, typer.Option(help="Rows of the micro-batches that --cost was fitted on. [default: --micro-batch]")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Positions a row has at most, the end-of-text before the record included.")
    ] = None,
    over: Annotated[str, typer.Option(help="Records longer than that: truncate, split or drop them.")] = "truncate",
    lengths: Annotated[
        bool, typer.Option("--lengths", help="CORPUS is a .npy file of record lengths in tokens.")
    ] = False,
    split: Annotated[str, typer.Option(help="Split of the corpus to plan; 'all' for all of them.")] = "train",
    tokenizer: Annotated[
        str, typer.Option(help="Of text and of other tools' token files: gpt2, bytes, or a .tiktoken rank file.")
    ] = "gpt2",
    sources: Annotated[
        Path | None, typer.Option(help="A .npy file naming each record's source. [default: its shard, if several]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the best order here, as a manifest to replay.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as a JSON array.")] = False,
) -> None:
    """Compare file order with length-bucketed orders: padding, mixing, and the predicted time of a step."""
    from prism_fast.cli.data_commands import tokenizer_named
    from prism_fast.data.plan import plan_corpus
    from prism_fast.protocol.errors import PrismError, UsageError

    if micro_batch is None and token_budget is None:
        micro_batch = 2
    try:
        result = plan_corpus(
            corpus,
            micro_batch=micro_batch,
            buckets=_buckets(bucket, micro_batch or 2),
            seed=seed,
            token_budget=token_budget,
            accumulate=accumulate,
            cost=_cost(cost),
            cost_rows=cost_rows,
            seq_len=seq_len,
            over=cast("Over", over),
            split=split,
            tokenizer=tokenizer_named(tokenizer),
            corpus_is_lengths=lengths,
            sources=sources,
        )
    except PrismError:
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    if as_json:
        import orjson

        typer.echo(orjson.dumps(result.reports, option=orjson.OPT_INDENT_2))
    else:
        _print_table(result.reports, accumulate)
    if seq_len is not None:
        typer.echo(_truncation_line(result.truncation), err=as_json)
    if out is not None:
        result.write(out)
        typer.echo(f"{out}: bucket {result.plan.bucket}, {len(result.plan)} micro-batches", err=as_json)


def _buckets(text: str | None, micro_batch: int) -> list[Bucket]:
    if text is None:
        return [micro_batch * factor for factor in (1, 4, 16, 64, 256)]
    buckets: list[Bucket] = []
    for word in text.split(","):
        if word.strip() == "width":
            buckets.append("width")
        elif word.strip().isdecimal():
            buckets.append(int(within("--bucket", int(word), 1, MOST_POSITIONS)))
        else:
            raise typer.BadParameter(f"{word!r} is neither a number of records nor 'width'", param_hint="--bucket")
    return buckets


def _cost(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        linear, quadratic = (within("--cost", float(word), -1e30, 1e30) for word in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected two numbers A,B", param_hint="--cost") from None
    return linear, quadratic


def _print_table(reports: list[dict[str, Any]], accumulate: int) -> None:
    from rich.table import Table

    from prism_fast.report.console import terminal

    first = reports[0]
    with_time = first["predicted_step_s"] is not None
    with_sources = first["sources_mean"] is not None
    columns = ["bucket", "padded tokens", "waste", "mean w", "mean w^2", "p50/p90/p99", "zero-pad", "adjacent r"]
    columns += ["sources mean/min"] * with_sources + ["step s", "quadratic", "pass h"] * with_time
    columns += ["tokens saved"] + ["time saved"] * with_time
    table = Table(
        title=f"{first['records']:,} records, {first['real_tokens']:,} tokens; {accumulate} micro-batches a step"
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in reports:
        cells = [
            "file order" if row["bucket"] is None else str(row["bucket"]),
            f"{row['padded_tokens']:,}",
            f"{row['waste']:.1%}",
            f"{row['mean_width']:.0f}",
            f"{row['mean_square_width']:.3e}",
            f"{row['width_p50']}/{row['width_p90']}/{row['width_p99']}",
            f"{row['zero_pad_micro_batches']:,}/{row['micro_batches']:,}",
            f"{row['adjacent_correlation']:+.3f}",
        ]
        if with_sources:
            cells.append(f"{row['sources_mean']:.2f}/{row['sources_min']}")
        if with_time:
            hours = row["predicted_micro_batch_s"] * row["micro_batches"] / 3600
            cells += [f"{row['predicted_step_s']:.3f}", f"{row['quadratic_share']:.0%}", f"{hours:.2f}"]
        cells.append(f"{row['saved_padded_tokens']:.1%}")
        if with_time:
            cells.append(f"{row['saved_time']:.1%}")
        table.add_row(*cells)
    terminal(piped_width=200).print(table)  # a folded table cannot be read by a script


def _truncation_line(truncation: dict[str, Any]) -> str:
    lost_bytes = truncation["bytes_lost"]
    return (
        f"over {truncation['seq_len']} positions: {truncation['records_over']:,} records, {truncation['over']}; lost "
        f"{truncation['records_lost']:,} records, {truncation['tokens_lost']:,} tokens, "
        f"{'an unknown number of' if lost_bytes is None else format(lost_bytes, ',')} bytes; "
        f"{truncation['rows']:,} rows planned"
    )
