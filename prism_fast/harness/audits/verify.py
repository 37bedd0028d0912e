"""`prism-fast verify`: recomputes a run's figures from its receipts and names whatever does not agree.

Digests first, then arithmetic: the ledger's sums, the held-out documents' sums, the score folded anew. With the corpus
at hand every batch's bytes and tokens are read again; with `replay`, the first batches are executed again and
their ledger records compared bit for bit (on the same hardware and torch threads they must be equal).
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from prism_fast.protocol import constants as c
from prism_fast.protocol import ledger as layout
from prism_fast.protocol import manifest as m
from prism_fast.protocol.canonical import canonical_json, file_sha256, sha256_hex
from prism_fast.protocol.errors import PrismError, UsageError
from prism_fast.protocol.run_spec import RunSpec
from prism_fast.protocol.score import CodeLength, HeldOut, compute_score
from prism_fast.protocol.settings import phase2_sibling

KEPT_SCORE_FIELDS = (
    "final_score",
    "prequential_bpb",
    "heldout_delta",
    "val_bpb_trained",
    "val_bpb_random_init",
    "val_bpb_uniform",
    "train_bpb_converged",
    "anti_cheat_multiplier",
    "memorization_flag",
    "memorization_penalty",
    "flags",
)
RULE_PREFIX = "prism:"


def verify_run(
    seed_dir: Path,
    *,
    data: str | None = None,
    phase2: str | None = None,
    cache_dir: Path | None = None,
    bundle: Path | None = None,
    replay: int = 0,
) -> Iterator[str]:
    """Yields one sentence per disagreement; nothing when the run is what it says it is.

    `data`: the corpus the run was scored on (as for `prism-fast score --data`), to check every batch against it;
    `phase2`: the second one of a full-scale run (default: the sibling sample-100BT).
    `replay`: batches to execute again, which needs `data` and `bundle`. Raises UsageError when there is no run here.
    """
    try:
        manifest = m.RunManifest.model_validate_json((seed_dir / c.RUN_MANIFEST_FILE).read_bytes())
        spec = RunSpec.model_validate_json((seed_dir / c.RUN_SPEC_FILE).read_bytes())
        status = m.RunStatus.model_validate_json((seed_dir / c.RUN_STATUS_FILE).read_bytes())
    except OSError as e:
        raise UsageError(
            f"{e.filename}: no such file; expected the directory of a scored run, RUN/seed-<seed>"
        ) from None
    except ValueError as e:
        yield f"{seed_dir}: a file is not of its schema: {' '.join(str(e).split())[:300]}"
        return
    if status.status != "scored":
        yield f"{seed_dir / c.RUN_STATUS_FILE}: the run is {status.status}, not scored"
    yield from _digests(seed_dir, manifest, spec)
    try:
        records = layout.read_records(seed_dir / c.LEDGER_FILE, layout.LEDGER_MAGIC, layout.LEDGER_DTYPE)
    except (OSError, PrismError) as e:
        yield str(e)
        return
    yield from _figures(seed_dir, manifest, spec, records)
    if data is not None:
        yield from _against_corpus(data, phase2, cache_dir, manifest, spec, records)
    if replay:
        if data is None or bundle is None:
            raise UsageError("--replay executes batches again: it needs --data and --bundle")
        yield from _replay(seed_dir, data, cache_dir, bundle, manifest, spec, records, replay)


def _digests(seed_dir: Path, manifest: m.RunManifest, spec: RunSpec) -> Iterator[str]:
    engine = manifest.engine
    if spec.hash != engine.run_spec_sha256:
        yield f"{seed_dir / c.RUN_SPEC_FILE}: hash {spec.hash[:12]}; the manifest names {engine.run_spec_sha256[:12]}"
    expected = {
        c.LEDGER_FILE: engine.ledger_sha256,
        c.WEIGHTS_FILE: engine.weights_sha256,
        c.TRAIN_SERIES_FILE: manifest.metrics.train_series.sha256,
        c.HELDOUT_FILE: engine.heldout_sha256,
        c.HELDOUT_DOCUMENTS_FILE: engine.heldout_documents_sha256,
        **{a.path: a.sha256 for a in manifest.artifacts},
    }
    for name, digest in expected.items():
        path = seed_dir / name
        if digest is None:
            continue
        if not path.is_file():
            yield f"{path}: missing; the manifest names it with sha256 {digest[:12]}"
        elif (found := file_sha256(path)) != digest:
            yield f"{path}: sha256 {found[:12]}; the manifest names {digest[:12]}"
    kept = seed_dir / c.BUNDLE_DIR
    if kept.is_dir() and (found := _digest_of_bundle(kept)) != engine.bundle_sha256:
        yield f"{kept}: bundle {found[:12]}; the manifest names {engine.bundle_sha256[:12]}"
    chain = seed_dir / c.LEDGER_CHAIN_FILE
    if not chain.is_file():
        yield f"{chain}: missing"
    elif (seed_dir / c.LEDGER_FILE).is_file():
        links = layout.chain_of(seed_dir / c.LEDGER_FILE)
        if b"".join(links) != chain.read_bytes():
            yield f"{chain}: does not follow from {c.LEDGER_FILE}"
        elif (links[-1].hex() if links else layout.CHAIN_SEED.hex()) != engine.ledger_chain:
            yield f"{chain}: its last link is not the manifest's"


def _digest_of_bundle(folder: Path) -> str:
    from prism_fast.harness.bundle.bundle import load_bundle

    try:
        return load_bundle(folder).digest
    except PrismError as error:
        return str(error)


def _figures(seed_dir: Path, manifest: m.RunManifest, spec: RunSpec, records: np.ndarray) -> Iterator[str]:
    def differs(what: str, stated: Any, found: Any) -> Iterator[str]:
        if stated != found:
            yield f"{seed_dir / c.RUN_MANIFEST_FILE}: {what} is {stated!r}; the receipts give {found!r}"

    metrics, world = manifest.metrics, spec.world_size
    if len(records) % world or not np.array_equal(records["index"], np.repeat(np.arange(len(records) // world), world)):
        yield f"{seed_dir / c.LEDGER_FILE}: its records are not one per batch and rank, in order"
        return
    nats = special_nats = 0.0
    for record in records:  # the referee's own order of summation
        nats += float(record["nats"])
        special_nats += float(record["special_nats"])
    online = CodeLength(nats, int(records["bytes"].sum()), int(records["scored_tokens"].sum()))
    first = records[:world]
    step0 = sum(map(float, first["nats"])) / max(1, int(first["scored_tokens"].sum()))
    faults = np.add.reduce(records["faults"].reshape(-1, world).astype(np.int64), axis=1)
    yield from differs("sum_neg_log_likelihood_nats", metrics.sum_neg_log_likelihood_nats, nats)
    yield from differs("special_nll_nats", metrics.special_nll_nats, special_nats)
    yield from differs("covered_bytes", metrics.covered_bytes, online.bytes)
    yield from differs("data.covered_bytes", manifest.data.covered_bytes, online.bytes)
    yield from differs("predicted_tokens", metrics.predicted_tokens, online.tokens)
    yield from differs("tokens_seen", metrics.tokens_seen, int(records["positions"].sum()))
    yield from differs("consumed_batches", metrics.consumed_batches, len(records) // world)
    yield from differs("nan_inf_batches", metrics.nan_inf_batches, int((faults > 0).sum()))
    yield from differs("step0_loss", metrics.step0_loss, step0)
    yield from differs("cumulative_codelength_bits", metrics.cumulative_codelength_bits, online.bits)
    yield from differs("bits_per_byte", metrics.bits_per_byte, online.bpb)
    yield from differs("online_loss", metrics.online_loss, nats / online.tokens)
    yield from differs("run.seed", manifest.run.seed, spec.seed)
    yield from differs("seal", manifest.engine.seal, spec.seal)

    heldout = None
    if (seed_dir / c.HELDOUT_FILE).is_file():
        report = orjson.loads((seed_dir / c.HELDOUT_FILE).read_bytes())
        for name in ("trained", "twin") if spec.exact else ():  # prism-v2 has no figures of documents
            documents = np.load(seed_dir / c.HELDOUT_DOCUMENTS_FILE)
            total = 0.0
            for value in documents[f"nats_{name}"].tolist():
                total += value
            if total != report[name]["nats"] or int(documents["utf8_bytes"].sum()) != report[name]["bytes"]:
                yield f"{seed_dir / c.HELDOUT_FILE}: {name}'s sums are not those of {c.HELDOUT_DOCUMENTS_FILE}"

        def code(name: str) -> CodeLength:
            return CodeLength(report[name]["nats"], report[name]["bytes"], report[name]["tokens"])

        heldout = HeldOut(code("trained"), code("twin"), code("train_prefix"), report["n_vocab"])
    score = compute_score(
        online,
        step0_loss=step0,
        head_width=spec.baseline_width(manifest.engine.head_width),
        faults=int(faults.sum()),
        heldout=heldout,
        violations=[f for f in manifest.score.flags if f.startswith(RULE_PREFIX)],
        cap_twin_at_uniform=spec.exact,
    )
    folded = dataclasses.asdict(score)
    for field in KEPT_SCORE_FIELDS:
        yield from differs(f"score.{field}", getattr(manifest.score, field), folded[field])
    series = (seed_dir / c.TRAIN_SERIES_FILE).read_bytes() if (seed_dir / c.TRAIN_SERIES_FILE).is_file() else b""
    if series and sha256_hex(canonical_json(orjson.loads(series))) != metrics.train_series.sha256:
        yield f"{seed_dir / c.TRAIN_SERIES_FILE}: not the series whose digest the manifest holds"
    if not math.isclose(metrics.random_init_baseline_nats, math.log(spec.baseline_width(manifest.engine.head_width))):
        yield f"{seed_dir / c.RUN_MANIFEST_FILE}: random_init_baseline_nats is not ln of the head's width"


def _against_corpus(
    data: str, phase2: str | None, cache_dir: Path | None, manifest: m.RunManifest, spec: RunSpec, records: np.ndarray
) -> Iterator[str]:
    from prism_fast.data.corpus import joined_splits, resolve_data, verify_corpus
    from prism_fast.data.stream import TokenStream
    from prism_fast.data.tokenizers import reference_tokenizer

    places = [(data, spec.corpus_fingerprint)]
    if spec.phase2_corpus_fingerprint is not None:
        places.append((phase2 or phase2_sibling(data), spec.phase2_corpus_fingerprint))
    phases = []
    for place, fingerprint in places:
        corpus = resolve_data(place, reference_tokenizer(spec.tokenizer), cache_dir, mount_of="train")
        verify_corpus(corpus.folder, mounts=corpus.mounts)
        if corpus.fingerprint != fingerprint:
            yield f"{place}: corpus {corpus.fingerprint[:12]}; the run was scored on {fingerprint[:12]}"
            return
        phases.append(corpus.split("train"))
    split = joined_splits(*phases)
    if not spec.exact:
        yield from _against_contiguous_rows(split, manifest, spec, records)
        return
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


def _against_contiguous_rows(split: Any, manifest: m.RunManifest, spec: RunSpec, records: np.ndarray) -> Iterator[str]:
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
    cache_dir: Path | None,
    bundle: Path,
    manifest: m.RunManifest,
    spec: RunSpec,
    records: np.ndarray,
    batches: int,
) -> Iterator[str]:
    from prism_fast.harness.bundle.bundle import load_bundle
    from prism_fast.harness.referee.referee import score_bundle
    from prism_fast.harness.referee.request import ScoreRequest

    digest = load_bundle(bundle).digest
    if digest != spec.bundle_digest:
        yield f"{bundle}: bundle {digest[:12]}; the run was made with {spec.bundle_digest[:12]}"
        return
    batches = min(batches, len(records) // spec.world_size)
    with tempfile.TemporaryDirectory(prefix="prism-replay-") as out:
        summary = score_bundle(
            ScoreRequest(
                bundle=bundle,
                data=data,
                out=Path(out),
                tokenizer=spec.tokenizer,
                sequence_length=spec.sequence_length,
                batch_size=spec.batch_size,
                token_budget=spec.token_budget,
                step_budget=batches,
                flops_budget=spec.flops_budget,
                stage=spec.param_ladder_stage,
                vocab_size=spec.vocab_size,
                policy="off",
                budget_seconds=spec.budget_seconds,
                val_byte_budget=1,
                seeds=(spec.seed,),
                nproc=spec.world_size,
                accounting=spec.accounting,
                seal=spec.seal,
                head=spec.head,
                isolation=spec.isolation if spec.seal == "sealed" else "auto",
                device=spec.device,
                torch_threads=spec.torch_threads,
                cache_dir=cache_dir,
            )
        )
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
