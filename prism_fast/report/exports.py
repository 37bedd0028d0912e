"""A run's series for other tools: CSV rows, and TensorBoard events under the names that torchtitan's users know."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from prism_fast.protocol.canonical import write_atomically
from prism_fast.protocol.errors import UsageError
from prism_fast.report.page import Seed, Sources

CSV_COLUMNS = (
    "run",
    "seed",
    "i",
    "tokens_seen",
    "covered_bytes",
    "train_ce_nats",
    "running_bpb",
    "wall_s",
    "grad_norm",
    "clip_event",
    "nan_inf",
)


def write_csv(sources: Sources, out: Path) -> None:
    """One row a point of every seed's train series; a figure that is not there is an empty field."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for seed in sources.seeds:
        columns = seed.series.columns
        name = sources.runs[seed.run][0]
        points = zip(*(getattr(columns, column) for column in CSV_COLUMNS[2:]), strict=True)
        for point in points:
            writer.writerow([name, seed.source.seed, *("" if v is None else v for v in point)])
    write_atomically(out, text.getvalue().encode())


def write_tensorboard(sources: Sources, folder: Path) -> list[Path]:
    """One event file a seed, in FOLDER/RUN/seed-N. Steps are batch numbers. Needs the `tensorboard` extra."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise UsageError(
            f"--tensorboard needs the tensorboard package ({error}): pip install 'prism-fast[tensorboard]'"
        ) from error
    written = []
    for seed in sources.seeds:
        name = sources.runs[seed.run][0].replace("/", "_")
        path = folder / name / f"seed-{seed.source.seed}"
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob("events.out.tfevents.*"):
            old.unlink()  # written again: two files of one run would be drawn over each other
        began = seed.source.directory.stat().st_mtime
        writer = EventFileWriter(str(path))
        for step, wall_s, tag, value in scalars(seed):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(wall_time=began + wall_s, step=step, summary=summary))
        writer.close()
        written.append(path)
    return written


def scalars(seed: Seed) -> Iterator[tuple[int, float, str, float]]:
    """(batch number, seconds since train(ctx) began, tag, value) of every figure that has one."""
    columns = seed.series.columns
    for place, step in enumerate(columns.i):
        wall = columns.wall_s[place]
        for tag, values in (
            ("loss_metrics/global_avg_loss", columns.train_ce_nats),
            ("loss_metrics/running_bpb", columns.running_bpb),
            ("grad_norm", columns.grad_norm),
            ("loss_metrics/covered_bytes", columns.covered_bytes),
        ):
            if (value := values[place]) is not None:  # type: ignore[index]
                yield step, wall, tag, float(value)
    profile = seed.profile
    series, memory, flops = profile.series, profile.memory, profile.flops
    if series is None:
        return
    positions = max(1, columns.tokens_seen[-1]) if columns.tokens_seen else 1
    per_token = (flops.attention_aware_total or flops.total) / positions
    wall = 0.0
    for place, step in enumerate(series.i):
        parts = (
            series.data_wait_s[place],
            series.predict_forward_s[place],
            series.scoring_kernel_s[place],
            series.miner_step_s[place],
            series.ledger_s[place],
        )
        step_s, rate = sum(parts), series.tokens_per_s[place]
        wall += step_s * series.stride
        yield step, wall, "throughput(tps)", rate
        yield step, wall, "tflops", rate * per_token / 1e12
        if flops.peak_flops:
            yield step, wall, "mfu(%)", 100 * rate * per_token / flops.peak_flops
        yield step, wall, "time_metrics/end_to_end(s)", step_s
        yield step, wall, "time_metrics/data_loading(s)", parts[0]
        yield step, wall, "time_metrics/predict_forward(s)", parts[1]
        yield step, wall, "time_metrics/scoring_kernel(s)", parts[2]
        yield step, wall, "time_metrics/miner_step(s)", parts[3]
        yield step, wall, "time_metrics/ledger(s)", parts[4]
        if step_s > 0:
            yield step, wall, "time_metrics/data_loading(%)", 100 * parts[0] / step_s
    last = series.i[-1] if series.i else 0
    for tag, value in (
        ("memory/max_active(GiB)", memory.peak_device_allocated_bytes),
        ("memory/max_reserved(GiB)", memory.peak_device_reserved_bytes),
        ("memory/peak_rss(GiB)", memory.peak_rss_bytes),
    ):
        if value is not None:
            yield last, wall, tag, value / 2**30
