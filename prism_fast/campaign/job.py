"""One run of a campaign, as a worker does it: `prism-fast score` of one bundle and seed, in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import prism_fast
from prism_fast.harness.bundle.bundle import Bundle
from prism_fast.harness.process.commands import child_command, child_environment
from prism_fast.harness.process.die_with_parent import die_with_parent
from prism_fast.protocol.errors import (
    EXIT_ARTIFACTS_QUOTA,
    EXIT_BUNDLE_FAILED,
    EXIT_BUNDLE_REJECTED,
    EXIT_SCORED,
    EXIT_USAGE,
    EXIT_WATCHDOG,
    EngineFault,
)

WORK_DIR = "work"
ID_FILE = ".campaign.id"
LOG_FILE = "score.log"
KNOBS = "PRISM_"
# What a run may end with that says something about the bundle: it would again. The rest is the machine's.
VERDICTS = (EXIT_SCORED, EXIT_BUNDLE_REJECTED, EXIT_BUNDLE_FAILED, EXIT_WATCHDOG, EXIT_ARTIFACTS_QUOTA)


@dataclass(frozen=True)
class Job:
    """What a worker is sent. The bundle travels; `folder`, the campaign's, and the data are where all nodes look."""

    bundle: Bundle
    seed: int
    attempt: int
    folder: str
    campaign_id: str
    engine_version: str
    options: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> tuple[str, int]:
        return self.bundle.submission_id, self.seed

    @property
    def work(self) -> Path:
        """Where this attempt writes: no other attempt's folder, so one taken for dead can do no harm."""
        return Path(self.folder) / WORK_DIR / f"{self.bundle.submission_id}-{self.seed}-{self.attempt}"


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended. `exit_code` is None when its worker died or could not begin; `message` says how."""

    exit_code: int | None
    message: str | None
    node: str | None = None
    seconds: float | None = None

    @property
    def is_verdict(self) -> bool:
        return self.exit_code in VERDICTS

    @property
    def is_usage(self) -> bool:
        return self.exit_code == EXIT_USAGE


def run_job(job: Job) -> Outcome:
    """Runs `job` to its end. Raises EngineFault where this node is not one of the campaign's."""
    node = socket.gethostname()
    _check_node(job, node)
    began = monotonic()
    job.work.mkdir(parents=True, exist_ok=True)
    log = job.work / LOG_FILE
    with tempfile.TemporaryDirectory(prefix="prism-campaign-") as folder:
        bundle = Path(folder) / job.bundle.name
        job.bundle.write_to(bundle)
        command = score_command(job, bundle)
        with open(log, "wb") as stream:
            # Ray sets the threads of its workers; those of a run are part of its spec. The knobs that `score` reads
            # from the environment are the campaign's, not those of whichever node.
            environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS" and not k.startswith(KNOBS)}
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=child_environment(environment, dict(job.environment)),
                preexec_fn=die_with_parent,
            )
    return Outcome(done.returncode, _sentence(log), node, monotonic() - began)


def score_command(job: Job, bundle: Path) -> list[str]:
    """The command line of `job`. A pin holds all its seeds, whichever is scored; without one, a run's are its own."""
    pinned = any(option.startswith("--seeds=") for option in job.options)
    seed = f"--only-seeds={job.seed}" if pinned else f"--seeds={job.seed}"
    return child_command("prism_fast.cli.main", "score", str(bundle), f"--out={job.work}", seed, *job.options)


def _check_node(job: Job, node: str) -> None:
    if prism_fast.__version__ != job.engine_version:
        raise EngineFault(
            f"node {node}: prism-fast {prism_fast.__version__}; expected {job.engine_version} on every node"
        )
    marker = Path(job.folder) / ID_FILE
    try:
        found = marker.read_text()
    except OSError as error:
        raise EngineFault(
            f"node {node}: {marker}: {error.strerror}; expected --out on a file system that every node shares"
        ) from error
    if found != job.campaign_id:
        raise EngineFault(f"node {node}: {marker}: is another campaign's; expected one file system on every node")


def _sentence(log: Path) -> str | None:
    """The last sentence that the command said for itself."""
    lines = log.read_text(errors="replace").splitlines()
    said = [line.removeprefix("prism-fast: ") for line in lines if line.startswith("prism-fast: ")]
    spoken = [line.strip(" │") for line in lines if any(letter.isalpha() for letter in line)]  # a usage error has a box
    return said[-1] if said else spoken[-1] if spoken else None
