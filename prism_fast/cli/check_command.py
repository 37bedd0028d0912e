"""`prism-fast check`: the distributed contract of a bundle, before anybody pays for a run."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from prism_fast.cli.options import MOST, whole_numbers
from prism_fast.protocol.errors import EXIT_BUNDLE_REJECTED


class Isolation(StrEnum):
    auto = "auto"
    bwrap = "bwrap"
    none = "none"


class Policy(StrEnum):
    reject = "reject"
    flag = "flag"
    off = "off"


def register(app: typer.Typer) -> None:
    app.command("check")(check)


def check(
    bundle: Annotated[Path, typer.Argument(help="Directory or .zip holding architecture.py and training.py.")],
    policy: Annotated[Policy, typer.Option(help="What an unmet requirement means; off: no static check.")] = (
        Policy.reject
    ),
    functional: Annotated[
        bool, typer.Option("--functional", help="Also run the bundle under gloo at every world size.")
    ] = False,
    worlds: Annotated[str, typer.Option(help="World sizes of the functional check.")] = "2,4",
    nccl_advisory: Annotated[
        bool, typer.Option("--nccl-advisory", help="Also run two processes on one GPU under NCCL; never a gate.")
    ] = False,
    data: Annotated[str, typer.Option(help="What the functional check trains on; as in `score`.")] = "sample",
    tokenizer: Annotated[str, typer.Option(help="gpt2 or bytes.")] = "gpt2",
    steps: Annotated[int, typer.Option(min=4, help="Steps of each rank in the functional check.")] = 16,
    seq_len: Annotated[int, typer.Option(min=2, help="Sequence length of the functional check.")] = 64,
    isolation: Annotated[Isolation, typer.Option(help="Sandbox around the functional check.")] = Isolation.auto,
    cache_dir: Annotated[Path | None, typer.Option(help="Where packed text is cached.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
) -> None:
    """Check the multi-GPU contract of training.py, without running it; --functional runs it on the CPU.

    Exit 0 when everything is met or the policy does not reject, 3 when something is not met.
    """
    from prism_fast.harness.bundle.bundle import load_bundle
    from prism_fast.harness.bundle.static_contract import check_static_contract
    from prism_fast.report.scale_tables import print_contract

    loaded = load_bundle(bundle)
    static = check_static_contract(loaded, policy.value)
    document: dict[str, Any] = {
        "schema": "prism_contract_check.v1",
        "bundle": loaded.name,
        "bundle_sha256": loaded.digest,
        "ok": static.ok,
        "static": static.as_dict(),
        "functional": None,
        "nccl_advisory": None,
    }
    if functional or nccl_advisory:
        from prism_fast.cli.progress import TerminalReporter
        from prism_fast.data.corpus import resolve_data
        from prism_fast.data.tokenizers import reference_tokenizer
        from prism_fast.harness.audits.functional_contract import Trial, advise_on_nccl, check_functional_contract
        from prism_fast.harness.process.isolation import bwrap_fault, resolve_isolation

        sizes = whole_numbers("--worlds", worlds, -MOST, MOST, "2,4")  # `check_single_node` refuses by rule
        with TerminalReporter() as reporter:
            vocabulary = reference_tokenizer(tokenizer)
            sandbox = resolve_isolation(isolation.value)
            if sandbox == "none" and isolation is Isolation.auto:
                reporter.warn(f"isolation: none, the bundle runs unsandboxed as this user: {bwrap_fault()}")
            corpus = resolve_data(data, vocabulary, cache_dir, reporter.packing)
            trial = Trial(corpus, vocabulary, sandbox, steps, seq_len)
            if functional:
                runs = check_functional_contract(loaded, trial, sizes, reporter.stage)
                document["functional"] = runs.as_dict()
                document["ok"] &= runs.ok
            if nccl_advisory:
                reporter.stage(f"{loaded.name}: advisory run under NCCL, two processes on one GPU")
                document["nccl_advisory"] = advise_on_nccl(loaded, trial).as_dict()
    if json:
        import orjson

        sys.stdout.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        print_contract(document)
    raise typer.Exit(0 if document["ok"] or policy is not Policy.reject else EXIT_BUNDLE_REJECTED)
