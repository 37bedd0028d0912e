"""`prism-fast verify`: makes a run again from its receipts and names whatever does not agree.

The receipts alone first (`protocol.receipts`): digests, the chain, and the whole manifest made anew. With the corpus at
hand every batch's bytes and tokens are read again, and a sealed run is executed again from program and weights, without
running anybody's code (`reexecution`). With `replay`, the bundle itself runs again for the first batches, and their
ledger records are compared bit for bit (on the same hardware and torch threads they must be equal).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from prism_fast.protocol import constants as c
from prism_fast.protocol import ledger as layout
from prism_fast.protocol import manifest as m
from prism_fast.protocol.canonical import canonical_json
from prism_fast.protocol.errors import PrismError, UsageError
from prism_fast.protocol.receipts import Disagreement, Kept, differences, disagreements, read_document, read_file
from prism_fast.protocol.run_spec import RunSpec
from prism_fast.protocol.settings import phase2_sibling


def verify_run(
    seed_dir: Path,
    *,
    data: str | None = None,
    val: str | None = None,
    phase2: str | None = None,
    cache_dir: Path | None = None,
    bundle: Path | None = None,
    replay: int = 0,
) -> Iterator[str]:
    """Yields one sentence per disagreement; nothing when the run is what it says it is.

    `data`: the corpus the run was scored on (as for `prism-fast score --data`), to check every batch against it and to
    execute a sealed run again; `val`: the held-out one, where that was another; `phase2`: the second one of a
    full-scale run (default: the sibling sample-100BT). `replay`: batches for the bundle to train again, which needs
    `data` and `bundle`. Raises UsageError when there is no run here.
    """
    if not any((seed_dir / name).is_file() for name in (c.RUN_STATUS_FILE, c.RUN_MANIFEST_FILE, c.LEDGER_FILE)):
        raise UsageError(
            f"{seed_dir / c.RUN_STATUS_FILE}: no such file; expected the directory of a scored run, RUN/seed-<seed>"
        )
    if replay and (data is None or bundle is None):
        raise UsageError("--replay executes batches again: it needs --data and --bundle")
    found: list[Kept] = []
    sentences = list(disagreements(seed_dir, found))
    for check in (_bundle, _series):
        sentences += check(seed_dir, found)
    yield from sentences
    if data is None or not found or sentences:  # figures that do not agree among themselves are not worth a corpus
        return
    kept = found[0]
    yield from _against_corpus(seed_dir, data, val, phase2, cache_dir, kept)
    if replay:
        assert bundle is not None
        yield from _replay(seed_dir, data, val, phase2, cache_dir, bundle, kept, replay)


def verify_summary(run_dir: Path) -> Iterator[str]:
    """Yields one sentence for each field of a run's summary.json that its seeds' files do not give."""
    from prism_fast.harness.referee.referee import seed_result, summarise

    path = run_dir / c.SUMMARY_FILE
    try:
        summary, written = read_document(path, m.RunSummary)
        results = []
        for told in summary.seeds:
            folder = run_dir / f"seed-{told.seed}"
            status = read_file(folder / c.RUN_STATUS_FILE, m.RunStatus)
            if status.status == "scored":
                manifest = read_file(folder / c.RUN_MANIFEST_FILE, m.RunManifest)
                results.append(seed_result(told.seed, folder, manifest=manifest))
            else:
                stated = {"exit_code": status.exit_code, "rule": status.rule, "message": status.message}
                kind = "rejected" if status.status == "rejected" else "failed"
                results.append(seed_result(told.seed, folder).model_copy(update={**stated, "status": kind}))
        spec = next(
            (
                read_file(run_dir / r.run_dir / c.RUN_SPEC_FILE, RunSpec)
                for r in results
                if (run_dir / r.run_dir / c.RUN_SPEC_FILE).is_file()
            ),
            None,
        )
        named = {
            read_file(run_dir / r.run_dir / c.RUN_MANIFEST_FILE, m.RunManifest).submission_id
            for r in results
            if r.status == "scored"
        }
        submission_id = min(named) if named else summary.submission_id
        accounting = summary.accounting if spec is None else spec.accounting
        yield from differences(path, summary, summarise(submission_id, results, accounting), written)
        told_of = {each.run_dir for each in results}
        for folder in sorted(run_dir.glob("seed-*")):
            if folder.name not in told_of and (folder / c.RUN_STATUS_FILE).is_file():
                yield f"{path}: says nothing of {folder.name}"
    except Disagreement as sentence:
        yield f"{path}: {sentence}"
    except Exception as error:  # figures may be any numbers: too large to be averaged, say
        yield f"{path}: cannot be made again from its seeds: {type(error).__name__}: {error}"[:500]


def _bundle(seed_dir: Path, found: list[Kept]) -> Iterator[str]:
    """The scripts that were kept are the submission that the spec names."""
    from prism_fast.harness.bundle.bundle import load_bundle

    if not found:
        return
    try:
        digest = load_bundle(seed_dir / c.BUNDLE_DIR).digest
    except (PrismError, OSError) as error:
        yield str(error)
        return
    if digest != found[0].spec.bundle_digest:
        yield f"{seed_dir / c.BUNDLE_DIR}: bundle {digest[:12]}; the spec names {found[0].spec.bundle_digest[:12]}"


def _series(seed_dir: Path, found: list[Kept]) -> Iterator[str]:
    """The train series is that of ledger and observations."""
    from prism_fast.harness.referee.train_series import build_series

    path = seed_dir / c.TRAIN_SERIES_FILE
    if not found or not path.is_file():
        return
    spec, genesis, receipt = found[0].spec, found[0].genesis, found[0].receipt
    try:
        series = build_series(
            seed_dir,
            submission_id=genesis.submission_id,
            run_id=genesis.run_id,
            token_budget=spec.token_budget,
            world_size=spec.world_size,
        )
        stated = (receipt.series_points, receipt.clip_events)
        if (series.aggregates.n_points, series.aggregates.clip_events) != stated:
            yield f"{seed_dir / c.RECEIPT_FILE}: states (points, clip events) = {stated} of a series that has others"
        if canonical_json(series.model_dump(mode="json")) != path.read_bytes():
            yield f"{path}: does not follow from {c.LEDGER_FILE} and {c.OBSERVATIONS_FILE}"
    except Exception as error:  # whatever damaged records lead to
        yield f"{path}: cannot be made again from {c.LEDGER_FILE} and {c.OBSERVATIONS_FILE}: {error}"[:500]


def _against_corpus(
    seed_dir: Path, data: str, val: str | None, phase2: str | None, cache_dir: Path | None, kept: Kept
) -> Iterator[str]:
    from prism_fast.data.corpus import joined_splits, resolve_data, verify_corpus
    from prism_fast.data.tokenizers import reference_tokenizer
    from prism_fast.harness.audits.reexecution import reexecute

    spec, manifest, records = kept.spec, kept.manifest, kept.records

    def resolve(place: str, fingerprint: str | None, split: str) -> Any:
        corpus = resolve_data(place, reference_tokenizer(spec.tokenizer), cache_dir, mount_of=split)
        verify_corpus(corpus.folder, mounts=corpus.mounts)
        if corpus.fingerprint != fingerprint:
            named = "none" if fingerprint is None else fingerprint[:12]
            raise _OtherCorpus(f"{place}: corpus {corpus.fingerprint[:12]}; the run was scored on {named}")
        return corpus

    try:
        corpus = resolve(data, spec.corpus_fingerprint, "train")
        phases = [corpus.split("train")]
        if spec.phase2_corpus_fingerprint is not None:
            second = resolve(phase2 or phase2_sibling(data), spec.phase2_corpus_fingerprint, "train")
            phases.append(second.split("train"))
        val_corpus = None
        if spec.val_corpus_fingerprint is not None:
            val_corpus = resolve(val or data, spec.val_corpus_fingerprint, "val") if val else corpus
    except _OtherCorpus as other:
        yield str(other)
        return
    split = joined_splits(*phases)
    if not spec.exact:
        yield from _against_contiguous_rows(split, manifest, spec, records)
        return
    yield from _against_rows(split, manifest, spec, records)
    if spec.seal == "sealed":
        yield from reexecute(
            seed_dir,
            manifest,
            spec,
            corpus,
            val_corpus,
            split,
            snapshots=[each.model_dump() for each in kept.receipt.snapshots],
            matmul_precision=kept.receipt.model.matmul_precision or "highest",
        )


class _OtherCorpus(Exception):
    """Not the corpus that a run was scored on."""


def _against_rows(split: Any, manifest: Any, spec: Any, records: np.ndarray) -> Iterator[str]:
    from prism_fast.data.stream import TokenStream

    for rank in range(spec.world_size):
        own = records[rank :: spec.world_size]
        stream = TokenStream(
            split,
            manifest.engine.seq_len,
            manifest.engine.batch_size,
            basis="bytes" if manifest.engine.basis == "bytes" and spec.tokenizer != "bytes" else "tokens",
            rank=rank,
            world=spec.world_size,
        )
        with stream:
            for record in own:
                block = next(stream, None)
                found = None if block is None else (block.bytes, block.scored_tokens, block.special_tokens)
                stated = (int(record["bytes"]), int(record["scored_tokens"]), int(record["special_tokens"]))
                if found != stated:
                    yield (
                        f"{c.LEDGER_FILE}: rank {rank} batch {int(record['index'])} states (bytes, tokens, special) = "
                        f"{stated}; the corpus has {found}"
                    )
                    return


def _against_contiguous_rows(split: Any, manifest: Any, spec: Any, records: np.ndarray) -> Iterator[str]:
    from prism_fast.data.contiguous import ContiguousStream, WholeBytes

    engine, whole = manifest.engine, WholeBytes()
    stream = ContiguousStream(
        split, engine.seq_len, engine.batch_size, basis=engine.basis, token_budget=spec.token_budget
    )
    for record in records:
        block = next(stream, None)
        found = None if block is None else (whole(block.utf8_bytes), block.tokens.size)
        stated = (int(record["bytes"]), int(record["positions"]))
        if found != stated:
            yield (
                f"{c.LEDGER_FILE}: batch {int(record['index'])} states (bytes, tokens) = {stated}; the corpus: {found}"
            )
            return


def _replay(
    seed_dir: Path,
    data: str,
    val: str | None,
    phase2: str | None,
    cache_dir: Path | None,
    bundle: Path,
    kept: Kept,
    batches: int,
) -> Iterator[str]:
    from prism_fast.harness.bundle.bundle import load_bundle
    from prism_fast.harness.referee.referee import score_bundle
    from prism_fast.harness.referee.request import request_again

    spec, records = kept.spec, kept.records
    digest = load_bundle(bundle).digest
    if digest != spec.bundle_digest:
        yield f"{bundle}: bundle {digest[:12]}; the run was made with {spec.bundle_digest[:12]}"
        return
    batches = min(batches, len(records) // spec.world_size)
    with tempfile.TemporaryDirectory(prefix="prism-replay-") as out:
        request = request_again(
            spec,
            bundle=bundle,
            data=data,
            val=val,
            phase2=phase2,
            out=Path(out),
            step_budget=batches,
            val_byte_budget=1,
            policy="off",
            cache_dir=cache_dir,
        )
        summary = score_bundle(request)
        if summary.exit_code:
            yield f"{bundle}: the replay ended with: {summary.seeds[0].message}"
            return
        again = layout.read_records(
            Path(out) / summary.seeds[0].run_dir / c.LEDGER_FILE, layout.LEDGER_MAGIC, layout.LEDGER_DTYPE
        )
        stated = np.array(records[: batches * spec.world_size])
        if len(again) != len(stated):
            yield f"{seed_dir}: the replay took {len(again)} batches of {len(stated)}"
            return
        different = np.flatnonzero(np.array(again) != stated)
        if len(different):
            index = int(stated["index"][different[0]])
            yield (
                f"{seed_dir / c.LEDGER_FILE}: batch {index} states {float(stated['nats'][different[0]])!r} nats; "
                f"executed again it has {float(again['nats'][different[0]])!r}"
            )
