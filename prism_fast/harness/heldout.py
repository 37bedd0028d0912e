"""The referee's side of held-out scoring: starts a fresh evaluator process and reads its figures."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import orjson

from prism_fast.harness.bundle import Bundle
from prism_fast.harness.launch import StopFlag, descendants, end_processes
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BudgetExceeded, BundleFailed, BundleRejected, EngineFault
from prism_fast.protocol.run_spec import RunSpec
from prism_fast.protocol.score import CodeLength, HeldOut

DOCUMENTS_FILE = "heldout_documents.npz"
TIME_LIMIT_S = 6 * 3600.0


@dataclass(frozen=True)
class HeldOutRequest:
    """What is measured: the val split of `val_corpus_dir`, and a prefix of `corpus_dir`'s train split."""

    corpus_dir: str
    val_corpus_dir: str
    val_split: str
    basis: str
    tokenizer_dir: str


def score_heldout(
    spec: RunSpec,
    bundle: Bundle,
    request: HeldOutRequest,
    run_dir: Path,
    environment: dict[str, str],
    stop: StopFlag,
) -> tuple[HeldOut, dict[str, Any]]:
    """-> the sums, and the report that `heldout.json` keeps. Raises the PrismError that stopped it."""
    keep = set(descendants(os.getpid()))
    with tempfile.TemporaryDirectory(prefix="prism-") as private:
        architecture_dir = Path(private) / "bundle"
        bundle.write_to(architecture_dir, ("architecture.py",))
        report_path = Path(private) / "report.json"
        job = {
            "spec": spec.model_dump(),
            "bundle_dir": str(architecture_dir),
            "corpus_dir": request.corpus_dir,
            "val_corpus_dir": request.val_corpus_dir,
            "val_split": request.val_split,
            "basis": request.basis,
            "tokenizer_dir": request.tokenizer_dir,
            "weights_path": str(run_dir / c.WEIGHTS_FILE),
            "report_path": str(report_path),
            "documents_path": str(run_dir / DOCUMENTS_FILE),
        }
        job_path = Path(private) / "job.json"
        job_path.write_bytes(orjson.dumps(job))
        with open(run_dir / c.EVALUATOR_LOG_FILE, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "prism_fast.harness.evaluator", str(job_path)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=private,
                start_new_session=True,
            )
            try:
                _wait(process, stop)
            finally:
                end_processes(process, keep)
        if not report_path.exists():
            raise BundleFailed(
                f"the held-out evaluator ended without a result (code {process.returncode}); "
                f"see {c.EVALUATOR_LOG_FILE}",
                rule=c.RULE_RUNTIME_ERROR,
            )
        report = orjson.loads(report_path.read_bytes())
    if "fault" in report:
        fault = report["fault"]
        kinds = {"rejected": BundleRejected, "failed": BundleFailed, "engine": EngineFault}
        raise kinds[fault["kind"]](fault["message"], rule=fault["rule"])

    def code_length(name: str) -> CodeLength:
        return CodeLength(nats=report[name]["nats"], bytes=report[name]["bytes"], tokens=report[name]["tokens"])

    heldout = HeldOut(
        trained=code_length("trained"),
        twin=code_length("twin"),
        train_prefix=code_length("train_prefix"),
        n_vocab=report["n_vocab"],
    )
    return heldout, report


def _wait(process: subprocess.Popen[bytes], stop: StopFlag) -> None:
    """Waits for the evaluator; a stop that was asked for while training does not cut the held-out figures short."""
    stopped_before = stop.reason is not None
    deadline = monotonic() + TIME_LIMIT_S
    while True:
        try:
            process.wait(0.2)
            return
        except subprocess.TimeoutExpired:
            if stop.reason is not None and not stopped_before:
                raise EngineFault("interrupted in held-out scoring: the run is left incomplete") from None
            if monotonic() > deadline:
                raise BudgetExceeded(
                    f"held-out scoring took longer than {TIME_LIMIT_S:.0f} s ({c.MARKER_BUDGET_EXCEEDED})",
                    rule=c.RULE_BUDGET_EXCEEDED,
                ) from None
