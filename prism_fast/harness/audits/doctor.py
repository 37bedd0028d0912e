"""Looks at the machine as a run would find it. Each finding is tried, not assumed."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from prism_fast.harness.process.isolation import bwrap_fault
from prism_fast.profiling.machine import cpu_name, memory_bytes, triton_version, usable_cpus


@dataclass(frozen=True)
class Finding:
    """`state`: ok, missing (a run goes on without it) or broken (no run can start)."""

    area: str
    name: str
    state: str
    detail: str


def examine() -> list[Finding]:
    findings = [
        Finding("machine", "cpu", "ok", f"{cpu_name()}, {usable_cpus()} usable"),
        Finding("machine", "memory", "ok", f"{memory_bytes() / 2**30:.1f} GiB"),
    ]
    findings += _torch()
    findings += _core()
    findings += _tokenizers()
    findings += [_sample(), _isolation(), _text(), _torchrun()]
    return findings


def _torch() -> list[Finding]:
    try:
        import torch
    except ImportError as e:
        return [Finding("torch", "torch", "broken", f"cannot be imported: {e}; install torch>=2.9")]
    found = [Finding("torch", "torch", "ok", f"{torch.__version__}, python {sys.version.split()[0]}")]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            found.append(Finding("device", f"cuda:{i}", "ok", f"{p.name}, {p.total_memory / 2**30:.0f} GiB"))
    else:
        found.append(Finding("device", "cuda", "missing", "torch sees no CUDA device; runs use the CPU"))
    version = triton_version()
    if version is None:
        found.append(
            Finding("torch", "triton", "missing", "not installed; needed on GPUs: pip install 'prism-fast[triton]'")
        )
    else:
        found.append(Finding("torch", "triton", "ok", version))
    return found


def _core() -> list[Finding]:
    try:
        from prism_fast.kernels.dispatch import backend_report
    except ImportError as e:
        return [
            Finding("kernels", "core", "broken", f"the compiled core cannot be imported: {e}; reinstall prism-fast")
        ]
    found = []
    for name, text in backend_report().items():
        found.append(Finding("kernels", name, "missing" if text.startswith("unavailable") else "ok", text))
    return found


def _tokenizers() -> list[Finding]:
    from prism_fast.data.tokenizers import reference_tokenizer

    found = []
    for name in ("gpt2", "bytes"):
        try:
            tokenizer = reference_tokenizer(name)
            found.append(
                Finding("tokenizer", name, "ok", f"{tokenizer.n_vocab} ids, fingerprint {tokenizer.fingerprint[:12]}")
            )
        except Exception as e:
            found.append(Finding("tokenizer", name, "broken", str(e)))
    return found


def _sample() -> Finding:
    from pathlib import Path

    import prism_fast

    path = Path(prism_fast.__file__).parent / "data" / "assets" / "kjv-chapters.jsonl.gz"
    if path.is_file():
        return Finding("data", "sample", "ok", f"{path.stat().st_size / 1e6:.1f} MB of text shipped with the package")
    return Finding("data", "sample", "broken", f"{path} is missing; reinstall prism-fast")


def _isolation() -> Finding:
    fault = bwrap_fault()
    if fault is not None:
        return Finding("isolation", "bwrap", "missing", fault)
    return Finding("isolation", "bwrap", "ok", "user, network, PID and mount namespaces work")


def _text() -> Finding:
    """Whether a sandbox can keep text from a bundle: the cache's, and that of the default mounts."""
    from prism_fast.data.corpus import default_cache_dir
    from prism_fast.harness.process.isolation import check_hideable, data_places
    from prism_fast.protocol.errors import PrismError
    from prism_fast.protocol.settings import read_settings

    try:
        settings = read_settings()
        mounts = (settings.base_eval_train_data_dir, settings.base_eval_val_data_dir)
        check_hideable([default_cache_dir(), *data_places(places=tuple(str(m) for m in mounts if m))])
    except PrismError as error:
        return Finding("isolation", "text", "broken", str(error))
    return Finding("isolation", "text", "ok", "the cache and the mounts can be hidden from a bundle")


def _torchrun() -> Finding:
    from importlib.util import find_spec

    if find_spec("torch.distributed.run") is None:
        return Finding(
            "launch", "torchrun", "broken", "torch.distributed.run is not there; this torch has no distributed"
        )
    return Finding("launch", "torchrun", "ok", "torch.distributed.run --standalone --nnodes=1")
