"""What scoring costs a bundle: its bare training loop beside the same loop scored, process by process in turn."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prism_fast.harness.process.commands import child_command, child_environment
from prism_fast.profiling.bundle_process import BundleJob, run_bundle
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleFailed, BundleRejected, EngineFault, UsageError
from prism_fast.protocol.manifest import ThroughputProfile

SCHEMA = "prism_profile_overhead.v1"
MODES = ("bare", "open", "sealed")
WARMUP_STEPS = 3


def measure_overhead(
    bundle: Path,
    *,
    seq_len: int = c.DEFAULT_SEQUENCE_LENGTH,
    steps: int = 20,
    repeats: int = 3,
    modes: Sequence[str] = MODES,
    data: str = "sample",
    tokenizer: str = "gpt2",
    device: str = "auto",
    torch_threads: int | None = None,
    cache_dir: Path | None = None,
) -> dict[str, Any]:
    """-> {"rows": [...], "counters": {...}, ...}: one row a mode, in the order of `modes`.

    bare: `train(ctx)` with nothing watching but a clock a step; open, sealed: `prism-fast score --seal MODE`.

    Row keys: mode, vocab (the head's width; null before a scored mode has shown it), seq (tokens a row), batch (rows),
    params, tokens_per_s (steady state, median of the repeats), ratio (bare tokens/s over this mode's: 1.0 is free),
    tokens_per_s_all (each repeat's). The modes take turns, so that a slow minute hits all of them.

    counters: what observing a step costs (clock readings and the record sent), as seconds and as a share of the bare
    step; the gradient norm, which a bundle that calls clip_grad_norm_ pays itself, apart.

    steps: steady-state steps a repeat, beside 3 (bare) or a tenth (scored) to warm up.
    Raises what the bundle's own run raises (BundleRejected, BundleFailed, UsageError, EngineFault).
    """
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise UsageError(f"mode {unknown[0] if unknown else 'none'}: expected {', '.join(MODES)}")
    if steps < 1 or repeats < 1:
        raise UsageError(f"{steps} steps, {repeats} repeats: expected 1 or more of both")
    job = BundleJob(
        bundle,
        (seq_len,),
        steps + WARMUP_STEPS,
        {"what": "steps"},
        data=data,
        tokenizer=tokenizer,
        device=device,
        torch_threads=torch_threads,
        cache_dir=cache_dir,
    )
    rates: dict[str, list[float]] = {mode: [] for mode in modes}
    bare: dict[str, Any] | None = None
    scored: dict[str, Any] = {}
    for repeat in range(repeats):
        for mode in modes:
            if mode == "bare":
                found = run_bundle(replace(job, counters=repeat == 0))[0]
                bare = bare or found
                kept = found["step_s"][WARMUP_STEPS:]
                rates[mode].append(len(kept) * found["batch_size"] * seq_len / sum(kept))
            else:
                profile, scored = _scored(job, mode)
                rates[mode].append(_steady_rate(profile))
    typical = {mode: statistics.median(values) for mode, values in rates.items()}
    rows = [
        {
            "mode": mode,
            "vocab": scored.get("head_width"),
            "seq": seq_len,
            "batch": bare["batch_size"] if bare else scored.get("batch_size"),
            "params": bare["model_params"] if bare else scored.get("model_params"),
            "tokens_per_s": typical[mode],
            "ratio": typical["bare"] / typical[mode] if "bare" in typical else None,
            "tokens_per_s_all": rates[mode],
        }
        for mode in modes
    ]
    counters = None
    if bare is not None:
        step_s = statistics.median(bare["step_s"][WARMUP_STEPS:])
        counters = {
            **bare["counters"],
            "step_s": step_s,
            "observe_share": bare["counters"]["observe_s"] / step_s,
            "grad_norm_share": bare["counters"]["grad_norm_s"] / step_s,
        }
    return {
        "schema": SCHEMA,
        "submission_id": bare["submission_id"] if bare else scored.get("submission_id"),
        "machine": bare["machine"] if bare else scored.get("machine"),
        "device": bare["device"] if bare else scored.get("device"),
        "steps": steps,
        "repeats": repeats,
        "rows": rows,
        "counters": counters,
    }


def _steady_rate(profile: ThroughputProfile) -> float:
    rate = profile.steady_state.tokens_per_s
    if rate is None:
        raise EngineFault("the scored run has no steady state: give it more --steps")
    return rate


def _scored(job: BundleJob, mode: str) -> tuple[ThroughputProfile, dict[str, Any]]:
    """The throughput profile of one `prism-fast score`, and what its manifest says of the model."""
    import orjson

    with tempfile.TemporaryDirectory(prefix="prism-overhead-") as folder:
        out = Path(folder) / "run"
        arguments = [
            "score", str(job.bundle),
            f"--data={job.data}", f"--out={out}", f"--tokenizer={job.tokenizer}", f"--seq-len={max(job.widths)}",
            f"--step-budget={job.steps}", "--token-budget=0", "--val-byte-budget=1000",
            f"--seal={mode}", f"--device={job.device}", f"--seeds={job.seed}",
        ]  # fmt: skip
        arguments += [f"--torch-threads={job.torch_threads}"] if job.torch_threads else []
        arguments += [f"--cache-dir={job.cache_dir}"] if job.cache_dir else []
        command = child_command("prism_fast.cli.main", *arguments)
        done = subprocess.run(command, capture_output=True, text=True, env=child_environment())
        if done.returncode:
            kind = {3: BundleRejected, 4: BundleFailed, 2: UsageError}.get(done.returncode, EngineFault)
            said = done.stderr.strip().splitlines()
            raise kind(f"scoring the bundle in {mode} mode failed: {said[-1] if said else done.returncode}")
        run = out / f"seed-{job.seed}"
        profile = ThroughputProfile.model_validate_json((run / c.THROUGHPUT_PROFILE_FILE).read_bytes())
        manifest = orjson.loads((run / c.RUN_MANIFEST_FILE).read_bytes())
    return profile, {
        "head_width": manifest["engine"]["head_width"],
        "batch_size": manifest["engine"]["batch_size"],
        "model_params": manifest["metrics"]["model_params"],
        "submission_id": manifest["submission_id"],
        "machine": profile.machine.model_dump(mode="json"),
        "device": manifest["run"]["device"],
    }
