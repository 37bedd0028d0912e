"""Breaks runs at random: `python -m tests.faults.run --injections 200 --out benchmarks/results/faults.json`.

Each injection scores a small bundle and, at a random moment, sends a signal to a random process of the run, or gives it
a disk that fills up, or cuts a file of its corpus short. Whatever happens, the command must end within the limit after
the fault, leave no process behind, end with a documented exit code, and leave a run directory that says the truth: a
manifest that verifies after exit code 0, nothing that looks complete after any other.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from prism_fast.harness.process import processes
from prism_fast.protocol import constants as c
from tests.harness.conftest import score_command, write_bundle

KINDS = ("signal", "full disk", "cut data")
EXIT_CODES = {0, 2, 3, 4, 5, 7, 8, 130}
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSEGV", "SIGABRT", "SIGHUP", "SIGBUS")
COMPLETE = (c.RUN_MANIFEST_FILE, c.TRAIN_SERIES_FILE)


class Broken(AssertionError):
    """A run that did not end as it must."""


@dataclass
class Injection:
    """One fault and how the run took it. Times in seconds."""

    number: int
    kind: str
    what: str
    seal: str
    after_s: float = 0.0
    ended_s: float = 0.0
    exit_code: int | None = None
    status: str = ""
    broken: str = ""  # what was wrong with how it ended


def descendants(root: int) -> dict[int, str]:
    """Living processes below `root`: pid -> command line (or nothing, of one that hides it)."""
    return {pid: name for pid in processes.descendants(root) if (name := command_line(pid)) is not None}


def command_line(pid: int) -> str | None:
    """None: it lives no more."""
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return None
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None


def role(command: str) -> str:
    for word in ("bwrap", "process.torchrun", "trainer.rank", "executor.main", "tracer.main"):
        if word in command:
            return word
    return "other"


@contextlib.contextmanager
def small_disk(where: Path, size: int):
    """Mounts a tmpfs of `size` bytes at `where`; PermissionError where this user cannot."""
    where.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)], capture_output=True)
    if done.returncode:
        raise PermissionError(done.stderr.decode())
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


def inject(injection: Injection, source: random.Random, folder: Path, cache: Path, limit: float) -> None:
    """Runs one fault in `folder`, filling `injection` in; Broken if the run did not end as it must."""
    out = folder / "run"
    bundle = write_bundle(folder / "bundle")
    options = [f"--seal={injection.seal}", "--step-budget=12", "--val-byte-budget=1500"]
    with contextlib.ExitStack() as cleanup:
        if injection.kind == "full disk":
            size = source.choice((4096, 16384, 65536, 262144, 1 << 20, 4 << 20))
            cleanup.enter_context(small_disk(out, size))
            injection.what = f"{size:,} bytes"
        if injection.kind == "cut data":
            corpus = folder / "corpus"
            shutil.copytree(cache, corpus)
            options += ["--cache-dir", str(corpus)]
        process = subprocess.Popen(
            score_command(bundle, out, cache, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        family: dict[int, str] = {}
        try:
            broken_at = time.monotonic()
            injection.after_s = source.uniform(0.0, 12.0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(injection.after_s)
            family |= descendants(process.pid)
            if injection.kind == "signal":
                victims = sorted({process.pid: "referee", **family}.items())
                pid, command = source.choice(victims)
                name = source.choice(SIGNALS)
                injection.what = f"{name} to {'referee' if pid == process.pid else role(command)}"
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, getattr(signal, name))
                broken_at = time.monotonic()
            elif injection.kind == "cut data":
                victim = source.choice(sorted(p for p in corpus.rglob("*") if p.is_file()))
                length = source.randrange(max(victim.stat().st_size, 1))
                os.truncate(victim, length)
                injection.what = f"{victim.name} cut to {length:,} bytes"
                broken_at = time.monotonic()
            said = watch(process, family, limit)
            injection.ended_s = time.monotonic() - broken_at
            # Python itself has no better answer to Ctrl-C while it starts.
            while_starting = "SIGINT to referee" in injection.what and not (out / f"seed-{c.DEFAULT_SEED}").exists()
            if "Traceback" in said and not (while_starting and "prism_fast/cli/app.py" not in said):
                raise Broken(f"a traceback instead of a sentence: {said[-1500:]}")
            check(process, family, out, injection, limit)
        finally:
            for pid in (process.pid, *descendants(process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()  # its output is read in `watch`


def processor_seconds(pid: int) -> float:
    with contextlib.suppress(OSError, IndexError, ValueError):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def watch(process: subprocess.Popen, family: dict[int, str], limit: float) -> str:
    """Waits for the run's end, noting processes that it starts meanwhile; -> its stderr. Broken when it hangs.

    A fault need not touch the run, which then goes on to its end, slowly on a busy machine. So what counts towards
    `limit` is the time in which its processes together take less than a twentieth of a core: they wait for something.
    """
    outputs: list[str] = []
    reader = threading.Thread(target=lambda: outputs.extend(process.communicate()), daemon=True)
    reader.start()
    began = looked = time.monotonic()
    waited, used = 0.0, {}
    while reader.is_alive():
        family |= descendants(process.pid)
        now = time.monotonic()
        if now - looked > 1.0:
            before, used = used, {pid: processor_seconds(pid) for pid in (process.pid, *family)}
            worked = sum(max(0.0, seconds - before.get(pid, seconds)) for pid, seconds in used.items())
            waited += now - looked if worked < 0.05 * (now - looked) else 0.0
            looked = now
        if waited > limit or now - began > 10 * limit:
            alive = [role(command_line(pid) or "") for pid in family if command_line(pid) is not None]
            raise Broken(f"still running {now - began:.0f} s after the fault, {waited:.0f} s of it idle: {alive}")
        reader.join(0.05)
    return outputs[1]


def check(process: subprocess.Popen, family: dict[int, str], out: Path, injection: Injection, limit: float) -> None:
    injection.exit_code = process.returncode
    deadline = time.monotonic() + limit
    while left := {pid: name for pid, name in family.items() if name and command_line(pid) == name}:
        if time.monotonic() > deadline:
            raise Broken(f"left behind: {left}")
        time.sleep(0.05)
    killed = process.returncode < 0 and injection.kind in ("signal", "cut data")
    if process.returncode not in EXIT_CODES and not killed:
        raise Broken(f"undocumented exit code {process.returncode}")
    seed_dir = out / f"seed-{c.DEFAULT_SEED}"
    with contextlib.suppress(OSError, ValueError):
        injection.status = json.loads((seed_dir / c.RUN_STATUS_FILE).read_text())["status"]
    if process.returncode == 0:
        command = [sys.executable, "-m", "prism_fast.cli.main", "verify", str(seed_dir)]
        verified = subprocess.run(command, capture_output=True, text=True)
        if verified.returncode:
            raise Broken(f"exit code 0, but verify says {verified.stdout[-500:]}{verified.stderr[-500:]}")
    elif injection.status == "scored":
        raise Broken(f"exit code {process.returncode}, but the status is scored")
    elif complete := [name for name in COMPLETE if (seed_dir / name).exists()]:
        raise Broken(f"exit code {process.returncode}, but there is {complete}")


def run(numbers: Iterable[int], seed: int, limit: float = 30.0) -> list[Injection]:
    """Makes the faults of these numbers, of KINDS in turn; each says how its run ended and what was wrong."""
    done = []
    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(scratch) / "cache"
        subprocess.run(
            [sys.executable, "-m", "prism_fast.cli.main", "score", str(write_bundle(Path(scratch) / "first")),
             "--data=sample", f"--out={scratch}/first-run", f"--cache-dir={cache}", "--seq-len=64", "--step-budget=2",
             "--val-byte-budget=1500", "--seal=open"],
            check=True, capture_output=True,
        )  # fmt: skip
        for number in numbers:
            source = random.Random(f"{seed}-{number}")
            kind = KINDS[number % len(KINDS)]
            injection = Injection(number, kind, "", source.choice(("sealed", "sealed", "open")))
            folder = Path(scratch) / str(number)
            folder.mkdir()
            try:
                inject(injection, source, folder, cache, limit)
            except Broken as error:
                injection.broken = str(error)
            how = (
                injection.broken
                or f"exit {injection.exit_code}, {injection.status or 'no status'}, {injection.ended_s:.1f} s"
            )
            print(f"{number:>4}  {kind:<10}{injection.what:<44} at {injection.after_s:5.1f} s: {how}", flush=True)
            done.append(injection)
            shutil.rmtree(folder)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--injections", type=int, default=200)
    parser.add_argument("--again", action="store_true", help="only those that the file --out has as ended wrongly")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds that a run may hang after its fault")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    numbers: Iterable[int] = range(arguments.injections)
    known: dict[int, Injection] = {}
    if arguments.again:
        known = {row["number"]: Injection(**row) for row in json.loads(arguments.out.read_bytes())["faults"]}
        numbers = [number for number, injection in known.items() if injection.broken]
    known |= {injection.number: injection for injection in run(numbers, arguments.seed, arguments.limit)}
    done = list(known.values())
    ends = collections.Counter((i.kind, i.exit_code, i.status) for i in done)
    for (kind, code, status), count in sorted(ends.items(), key=str):
        print(f"{kind:<10} exit {code}, {status or 'no status'}: {count}")
    broken = [injection for injection in done if injection.broken]
    print(f"{len(done)} faults, {len(broken)} ended wrongly; slowest end {max(i.ended_s for i in done):.1f} s")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"faults": [asdict(i) for i in done]}, indent=1) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
