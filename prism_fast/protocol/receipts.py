"""What a manifest is made of, kept beside it, and the manifest made again from that: `verify` compares the two.

A run keeps two receipts. `genesis.json` is what was fixed before the first batch was shown: spec, scripts, programs,
initial state. Its digest stands in the head of `ledger.bin` and begins `ledger.chain`. `receipt.json` is what was
decided or seen by the end and is not in the ledger; its digest is the chain's last link. Every field of the manifest
is a function of these two, the spec, the ledger and the held-out report (`build_manifest`), and every other file is
named by digest in one of them. So a field that is altered anywhere is found by making the manifest again, and a new
field is verified because it has to come from somewhere.

Nothing is signed: who rewrites every file consistently makes another run's receipts. What tells those from a run is
executing it again (`verify --data`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
import stat
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prism_fast.protocol import constants as c
from prism_fast.protocol import ledger as layout
from prism_fast.protocol import manifest as m
from prism_fast.protocol.budgets import training_flops
from prism_fast.protocol.errors import EXIT_SCORED
from prism_fast.protocol.file_names import unescaped
from prism_fast.protocol.run_spec import RunSpec
from prism_fast.protocol.score import CodeLength, HeldOut, Score, compute_score

GENESIS_SCHEMA: Final = "prism_genesis.v1"
RECEIPT_SCHEMA: Final = "prism_receipt.v1"
MAX_JSON_BYTES = 64 << 20
MAX_FILE_BYTES = 1 << 31  # of a file that is read whole, packed and unpacked
MAX_SENTENCES = 200


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Genesis(_Block):
    """Fixed before the first batch was shown."""

    schema_version: Literal["prism_genesis.v1"] = GENESIS_SCHEMA
    run_spec_sha256: str
    submission_id: str
    run_id: str
    script_sha256: dict[str, str]
    data_dir: str = Field(description="as it was given")
    data_source: str
    shard_count: int
    available_bytes: int
    programs: list[m.ProgramRef] = Field(description="none in open mode")
    initial_state_sha256: str | None = Field(description="of initial_state.safetensors; null in open mode")
    pin: m.PinBlock | None
    distributed_contract: m.ContractBlock | None


class ModelFacts(_Block):
    """What was trained, and on what batches."""

    batch_size: int
    seq_len: int
    basis: Literal["tokens", "bytes"]
    head_width: int
    model_params: int
    corpus_bytes: int
    corpus_tokens: int
    matmul_precision: str | None = Field(default=None, description="in force when the first batch was asked for")


class Observed(_Block):
    """Merely seen, and bound like the rest: nothing here enters a score."""

    device: str
    torch_version: str
    backends: dict[str, str]
    peak_vram_bytes: int | None
    peak_rss_bytes: int
    wall_clock_seconds: float


class Receipt(_Block):
    """Decided or seen by the end of a run."""

    schema_version: Literal["prism_receipt.v1"] = RECEIPT_SCHEMA
    stopped_reason: str
    model: ModelFacts
    violations: list[str] = Field(description="rules that probes saw broken")
    probed_rows: int
    probe_mode: Literal["none", "rows", "batches"]
    head: Literal["logits", "hidden"]
    snapshots: list[m.SnapshotRef]
    sha256: dict[str, str] = Field(description="of every kept file that neither genesis nor the ledger's chain names")
    series_points: int
    clip_events: int
    artifacts: list[m.ArtifactRef]
    miner_reported: dict[str, str]
    observed: Observed


def document_bytes(block: BaseModel) -> bytes:
    """A receipt's file: indented JSON, fields in their order."""
    return orjson.dumps(block.model_dump(mode="json"), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


# ------------------------------------------------------------------------------------------------------- the manifest


@dataclasses.dataclass(frozen=True)
class Totals:
    """A ledger's sums, in the referee's own order of summation."""

    online: CodeLength
    special_nats: float
    special_tokens: int
    positions: int
    documents: int
    batches: int
    faults: int
    nan_inf_batches: int
    step0_loss: float

    @classmethod
    def of(cls, records: np.ndarray, world_size: int) -> Totals:
        """Raises ValueError unless there is one record a batch and rank, in order."""
        count = len(records) // world_size
        batches, ranks = np.repeat(np.arange(count), world_size), np.tile(np.arange(world_size), count)
        in_order = np.array_equal(records["index"], batches) and np.array_equal(records["rank"], ranks)
        if len(records) % world_size or not in_order:
            raise ValueError("its records are not one per batch and rank, in order")
        nats = special = 0.0
        for one, other in zip(records["nats"].tolist(), records["special_nats"].tolist(), strict=True):
            nats += one
            special += other
        first = records[:world_size]
        first_nats, first_tokens = 0.0, int(first["scored_tokens"].sum())
        for value in first["nats"].tolist():
            first_nats += value
        faults = records["faults"].reshape(-1, world_size).astype(np.int64).sum(axis=1)
        return cls(
            online=CodeLength(nats, int(records["bytes"].sum()), int(records["scored_tokens"].sum())),
            special_nats=special,
            special_tokens=int(records["special_tokens"].sum()),
            positions=int(records["positions"].sum()),
            documents=int(records["documents"].sum()),
            batches=count,
            faults=int(faults.sum()),
            nan_inf_batches=int((faults > 0).sum()),
            step0_loss=first_nats / first_tokens if first_tokens else math.nan,
        )


def score_of(totals: Totals, spec: RunSpec, receipt: Receipt, heldout: HeldOut | None) -> Score:
    return compute_score(
        totals.online,
        step0_loss=totals.step0_loss,
        head_width=spec.baseline_width(receipt.model.head_width),
        faults=totals.faults,
        heldout=heldout,
        violations=receipt.violations,
        cap_twin_at_uniform=spec.exact,
    )


def ineligible_reasons(spec: RunSpec, genesis: Genesis, receipt: Receipt, score: Score) -> list[str]:
    """Why a run cannot take the crown, whatever its score."""
    reasons = []
    if spec.seal != "sealed":
        reasons.append("seal is open: the bundle ran in the process that scored it")
    if spec.isolation != "bwrap":
        reasons.append("isolation is none")
    if spec.accounting != "exact":
        reasons.append(f"accounting is {spec.accounting}")
    if spec.world_size != 1:
        reasons.append(f"scored runs use one process; this one used {spec.world_size}")
    if receipt.stopped_reason == c.STOP_INTERRUPTED:
        reasons.append("the run was interrupted")
    if score.degraded:
        reasons.append("no held-out figure")
    contract = genesis.distributed_contract
    if contract is not None and contract.policy == "off":
        reasons.append("the distributed contract was not looked at")
    elif contract is not None and not contract.ok:
        reasons.append(f"the distributed contract is not met: {', '.join(contract.unmet)}")
    return reasons


def build_manifest(
    spec: RunSpec,
    genesis: Genesis,
    receipt: Receipt,
    totals: Totals,
    heldout: HeldOut | None,
    *,
    ledger_sha256: str,
    ledger_chain: str,
) -> m.RunManifest:
    """The whole manifest. Raises BundleFailed for a run that must not be ranked."""
    model, observed, online = receipt.model, receipt.observed, totals.online
    score = score_of(totals, spec, receipt, heldout)
    reasons = ineligible_reasons(spec, genesis, receipt, score)
    covered_tokens = online.tokens if spec.exact else totals.positions  # there, row-first tokens count
    return m.RunManifest(
        submission_id=genesis.submission_id,
        run_id=genesis.run_id,
        mode=spec.mode,
        run=m.RunBlock(
            seed=spec.seed,
            deterministic_algorithms=spec.deterministic_algorithms,
            world_size=spec.world_size,
            device=observed.device,
            nproc_per_node=spec.world_size,
            stopped_reason=receipt.stopped_reason,
        ),
        compute=m.ComputeBlock(
            gpu_count=spec.world_size if observed.device.startswith("cuda") else 0,
            world_size=spec.world_size,
            nproc_per_node=spec.world_size,
            device=observed.device,
            model_params=model.model_params,
            param_ladder_stage=spec.param_ladder_stage,
            param_ladder_cap=spec.max_parameters,
            peak_vram_bytes=observed.peak_vram_bytes,
            peak_rss_bytes=observed.peak_rss_bytes,
            wall_clock_seconds=observed.wall_clock_seconds,
            estimated_flops=training_flops(model.model_params, totals.positions),
        ),
        data=m.DataBlock(
            data_dir=genesis.data_dir,
            shard_count=genesis.shard_count,
            available_bytes=genesis.available_bytes,
            source=genesis.data_source,
            covered_bytes=online.bytes,
            covered_bytes_cumulative=online.bytes,
            unread_tail_bytes=model.corpus_bytes - online.bytes,
            unread_tail_tokens=model.corpus_tokens - covered_tokens,
            consumed_documents=totals.documents,
            consumed_batches=totals.batches,
            stopped_reason=receipt.stopped_reason,
        ),
        metrics=m.MetricsBlock(
            online_loss=online.nats / online.tokens,
            step0_loss=totals.step0_loss,
            random_init_baseline_nats=math.log(spec.baseline_width(model.head_width)),
            consumed_batches=totals.batches,
            covered_bytes=online.bytes,
            total_bytes_covered=online.bytes,
            predicted_tokens=online.tokens,
            tokens_seen=totals.positions,
            special_tokens=totals.special_tokens,
            special_nll_nats=totals.special_nats,
            sum_neg_log_likelihood_nats=online.nats,
            sum_neg_log2_likelihood_bits=online.bits,
            cumulative_codelength_bits=online.bits,
            prequential_bpb=score.prequential_bpb,
            bits_per_byte=score.prequential_bpb,
            nan_inf_batches=totals.nan_inf_batches,
            train_bpb_basis="converged_train_prefix" if score.train_bpb_converged is not None else "prequential",
            model_params=model.model_params,
            train_series=m.TrainSeriesRef(
                path=c.TRAIN_SERIES_FILE, sha256=receipt.sha256[c.TRAIN_SERIES_FILE], points=receipt.series_points
            ),
            clip_events=receipt.clip_events,
        ),
        score=m.ScoreBlock(
            emission_crown_eligible=not reasons,
            emission_ineligible_reasons=reasons,
            final_score=score.final_score,
            emission_rank_score=score.final_score,
            prequential_bpb=score.prequential_bpb,
            heldout_delta=score.heldout_delta,
            val_bpb_trained=score.val_bpb_trained,
            val_bpb_random_init=score.val_bpb_random_init,
            val_bpb_uniform=score.val_bpb_uniform,
            train_bpb_converged=score.train_bpb_converged,
            tokens_consumed=totals.positions,
            anti_cheat_multiplier=score.anti_cheat_multiplier,
            anomaly=score.step0_anomaly,
            flags=score.flags,
            memorization_flag=score.memorization_flag,
            memorization_penalty=score.memorization_penalty,
        ),
        anti_cheat=m.AntiCheatBlock(
            step0_anomaly=score.step0_anomaly,
            step0_anomaly_threshold_nats=score.step0_anomaly_threshold_nats,
            nan_inf_detected=totals.nan_inf_batches > 0,
            nan_inf_batches=totals.nan_inf_batches,
            no_learning=score.no_learning,
            zero_forward=False,
            memorization_flag=score.memorization_flag,
            train_heldout_gap=score.train_heldout_gap,
            budget_exceeded=False,
            artifacts_quota_exceeded=False,
        ),
        engine=m.EngineBlock(
            version=spec.engine_version,
            accounting=spec.accounting,
            seal=spec.seal,
            isolation=spec.isolation,
            backends=observed.backends,
            tokenizer=spec.tokenizer,
            tokenizer_fingerprint=spec.tokenizer_fingerprint,
            basis=model.basis,
            corpus_fingerprint=spec.corpus_fingerprint,
            val_corpus_fingerprint=spec.val_corpus_fingerprint,
            head_width=model.head_width,
            head=receipt.head,
            torch_version=observed.torch_version,
            torch_threads=spec.torch_threads,
            batch_size=model.batch_size,
            seq_len=model.seq_len,
            run_spec_sha256=genesis.run_spec_sha256,
            bundle_sha256=spec.bundle_digest,
            architecture_sha256=genesis.script_sha256.get("architecture.py"),
            training_sha256=genesis.script_sha256.get("training.py"),
            programs=genesis.programs,
            initial_state_sha256=genesis.initial_state_sha256,
            weights_sha256=receipt.sha256[c.WEIGHTS_FILE],
            ledger_sha256=ledger_sha256,
            ledger_chain=ledger_chain,
            heldout_sha256=receipt.sha256.get(c.HELDOUT_FILE),
            heldout_documents_sha256=receipt.sha256.get(c.HELDOUT_DOCUMENTS_FILE),
            pin=genesis.pin,
            distributed_contract=genesis.distributed_contract,
            probes=receipt.probed_rows,
            probe_mode=receipt.probe_mode,
            snapshots=receipt.snapshots,
        ),
        artifacts=receipt.artifacts,
        miner_reported_ignored=receipt.miner_reported,
    )


def heldout_of(report: Mapping[str, Any]) -> HeldOut:
    """The sums that a heldout.json states. Raises KeyError, TypeError or ValueError where it states none."""

    def code_length(name: str) -> CodeLength:
        part = report[name]
        return CodeLength(nats=float(part["nats"]), bytes=int(part["bytes"]), tokens=int(part["tokens"]))

    return HeldOut(
        trained=code_length("trained"),
        twin=code_length("twin"),
        train_prefix=code_length("train_prefix"),
        n_vocab=int(report["n_vocab"]),
    )


# ------------------------------------------------------------------------------------------------------ verification

B = TypeVar("B", bound=BaseModel)


class Disagreement(Exception):
    """A file cannot be used; the sentence says why."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """A scored seed's receipts, read: each of its type."""

    spec: RunSpec
    manifest: m.RunManifest
    genesis: Genesis
    receipt: Receipt
    records: np.ndarray


def disagreements(seed_dir: Path, kept: list[Kept] | None = None) -> Iterator[str]:
    """One sentence for each file or field that does not follow from the receipts; nothing for a run that is whole.

    `kept`: gets the receipts, where they could be read. Needs no corpus, no torch, and never raises for what is in the
    files.
    """
    try:
        yield from _disagreements(seed_dir, kept)
    except Disagreement as sentence:
        yield str(sentence)
    except Exception as error:  # the one outer rule: whatever a damaged file leads to is that run's, not the reader's
        yield f"{seed_dir}: cannot be made again from its receipts: {type(error).__name__}: {error}"[:500]


def _disagreements(seed_dir: Path, kept: list[Kept] | None) -> Iterator[str]:
    status, status_bytes = read_document(seed_dir / c.RUN_STATUS_FILE, m.RunStatus)
    spec, spec_bytes = read_document(seed_dir / c.RUN_SPEC_FILE, RunSpec)
    expected = m.RunStatus(status="scored", exit_code=EXIT_SCORED, rule=None, message=None, run_spec_sha256=spec.hash)
    yield from differences(seed_dir / c.RUN_STATUS_FILE, status, expected, status_bytes)
    yield from differences(seed_dir / c.RUN_SPEC_FILE, spec, spec, spec_bytes)
    manifest, manifest_bytes = read_document(seed_dir / c.RUN_MANIFEST_FILE, m.RunManifest)
    genesis, genesis_bytes = read_document(seed_dir / c.GENESIS_FILE, Genesis)
    receipt, receipt_bytes = read_document(seed_dir / c.RECEIPT_FILE, Receipt)
    if genesis.run_spec_sha256 != spec.hash:
        named = genesis.run_spec_sha256[:12]
        yield f"{seed_dir / c.RUN_SPEC_FILE}: hash {spec.hash[:12]}; {c.GENESIS_FILE} names {named}"
    records = layout.read_records(seed_dir / c.LEDGER_FILE, layout.LEDGER_MAGIC, layout.LEDGER_DTYPE)
    if kept is not None:
        kept.append(Kept(spec, manifest, genesis, receipt, records))
    yield from _chain(seed_dir, spec, genesis_bytes, receipt_bytes)
    yield from _files(seed_dir, genesis, receipt)
    heldout = None
    if c.HELDOUT_FILE in receipt.sha256:
        report = _json(seed_dir / c.HELDOUT_FILE)
        heldout = heldout_of(report)
        yield from _documents(seed_dir, spec, report)
    try:
        totals = Totals.of(records, spec.world_size)
    except ValueError as error:
        raise Disagreement(f"{seed_dir / c.LEDGER_FILE}: {error}") from None
    rebuilt = build_manifest(
        spec,
        genesis,
        receipt,
        totals,
        heldout,
        ledger_sha256=_sha256(seed_dir / c.LEDGER_FILE),
        ledger_chain=(seed_dir / c.LEDGER_CHAIN_FILE).read_bytes()[-32:].hex(),
    )
    yield from differences(seed_dir / c.RUN_MANIFEST_FILE, manifest, rebuilt, manifest_bytes)


def _chain(seed_dir: Path, spec: RunSpec, genesis: bytes, receipt: bytes) -> Iterator[str]:
    path = seed_dir / c.LEDGER_CHAIN_FILE
    told = _bytes(path)
    digest = hashlib.sha256(genesis).digest()
    if layout.genesis_of(seed_dir / c.LEDGER_FILE) != digest:
        yield f"{seed_dir / c.GENESIS_FILE}: not the file whose digest stands in the head of {c.LEDGER_FILE}"
    elif _head(seed_dir / c.LEDGER_FILE) != layout.pack_header(
        layout.LEDGER_MAGIC, layout.LEDGER_DTYPE, spec.world_size, digest
    ):
        yield f"{seed_dir / c.LEDGER_FILE}: its head is not that of a ledger of {spec.world_size} ranks"
    links = layout.chain_of(seed_dir / c.LEDGER_FILE, digest)
    closing = layout.next_link(links[-1], hashlib.sha256(receipt).digest())
    found = [told[i : i + 32] for i in range(0, len(told), 32)]
    if found[:-1] != links:
        yield f"{path}: does not follow from {c.GENESIS_FILE} and {c.LEDGER_FILE}"
    elif found[-1] != closing:
        yield f"{path}: its last link is not that of {c.RECEIPT_FILE}"


def _files(seed_dir: Path, genesis: Genesis, receipt: Receipt) -> Iterator[str]:
    expected = dict(receipt.sha256)
    expected |= {f"{c.BUNDLE_DIR}/{name}": digest for name, digest in genesis.script_sha256.items()}
    for program in genesis.programs:
        stem = f"{c.PROGRAM_DIR}/width-{program.width}"
        expected |= {f"{stem}.json": program.sha256, f"{stem}.safetensors": program.constants_sha256}
    if genesis.initial_state_sha256 is not None:
        expected[c.INITIAL_STATE_FILE] = genesis.initial_state_sha256
    expected |= {each.path: each.sha256 for each in receipt.snapshots}
    expected |= {unescaped(each.path): each.sha256 for each in receipt.artifacts}
    for name, digest in expected.items():
        path = seed_dir / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            yield f"{seed_dir}: the receipts name {name!r}, which is no file of a run"
        elif not path.is_file():
            yield f"{path}: missing; the receipts name it with sha256 {digest[:12]}"
        elif (found := _sha256(path)) != digest:
            yield f"{path}: sha256 {found[:12]}; the receipts name {digest[:12]}"
    folders = (c.PROGRAM_DIR, c.SNAPSHOTS_DIR, c.BUNDLE_DIR)
    read_where_there = [seed_dir / name for name in (c.HELDOUT_FILE, c.HELDOUT_DOCUMENTS_FILE, c.INITIAL_STATE_FILE)]
    for path in (*read_where_there, *(path for folder in folders for path in sorted((seed_dir / folder).glob("*")))):
        if path.is_file() and path.relative_to(seed_dir).as_posix() not in expected:
            yield f"{path}: is in no receipt"


def _documents(seed_dir: Path, spec: RunSpec, report: Mapping[str, Any]) -> Iterator[str]:
    """Held-out sums, from the nats of every document; prism-v2 has no figures of documents."""
    if not spec.exact:
        return
    path = seed_dir / c.HELDOUT_DOCUMENTS_FILE
    data = io.BytesIO(_bytes(path))
    with zipfile.ZipFile(data) as members:
        unpacked = sum(member.file_size for member in members.infolist())
    if unpacked > MAX_FILE_BYTES:
        raise Disagreement(f"{path}: {unpacked:,} bytes unpacked; at most {MAX_FILE_BYTES:,} are read")
    with np.load(data, allow_pickle=False) as arrays:
        documents = {name: np.asarray(arrays[name]) for name in arrays.files}
    for name in ("trained", "twin"):
        total = 0.0
        for value in documents[f"nats_{name}"].tolist():
            total += value
        if total != report[name]["nats"] or int(documents["utf8_bytes"].sum()) != report[name]["bytes"]:
            yield f"{seed_dir / c.HELDOUT_FILE}: {name}'s sums are not those of {c.HELDOUT_DOCUMENTS_FILE}"


def differences(path: Path, stated: BaseModel, found: BaseModel, written: bytes) -> Iterator[str]:
    """A sentence for each field, however deep, in which two documents differ; MAX_SENTENCES at most.

    `written`: the file that `stated` was read from. It is to be what we write of `found`, byte for byte: a reader that
    takes the first of two equal keys must not see another document.
    """
    one = dict(_leaves(orjson.loads(orjson.dumps(stated.model_dump(mode="json", by_alias=True)))))
    other = dict(_leaves(orjson.loads(orjson.dumps(found.model_dump(mode="json", by_alias=True)))))
    apart = [n for n in sorted(one.keys() | other.keys()) if n not in one or n not in other or one[n] != other[n]]
    for name in apart[:MAX_SENTENCES]:
        yield f"{path}: {name} is {one.get(name)!r}; the receipts give {other.get(name)!r}"
    if not apart and written != document_bytes(found):
        yield f"{path}: its fields are right, but it is not spelled as a run writes it (a key twice, other spaces)"


def _leaves(document: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(document, dict) and document:
        for key, value in document.items():
            yield from _leaves(value, f"{where}.{key}" if where else key)
    elif isinstance(document, list) and document:
        for index, value in enumerate(document):
            yield from _leaves(value, f"{where}[{index}]")
    else:
        yield where, document


def read_file(path: Path, kind: type[B]) -> B:
    """A JSON file of this type. Raises Disagreement with the sentence that says what it is not."""
    return read_document(path, kind)[0]


def read_document(path: Path, kind: type[B]) -> tuple[B, bytes]:
    """The same, with its bytes."""
    data = _bytes(path, MAX_JSON_BYTES)
    try:
        return kind.model_validate_json(data), data
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Disagreement(f"{path}: {where}: {first['msg']}; expected a {kind.__name__}") from None
    except (ValueError, RecursionError):
        raise Disagreement(f"{path}: not a {kind.__name__}") from None


def _json(path: Path) -> Any:
    try:
        return orjson.loads(_bytes(path, MAX_JSON_BYTES))
    except ValueError:
        raise Disagreement(f"{path}: not JSON") from None


def _bytes(path: Path, most: int = MAX_FILE_BYTES) -> bytes:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
            raise Disagreement(f"{path}: no regular file")
        if found.st_size > most:
            raise Disagreement(f"{path}: {found.st_size:,} bytes; at most {most:,} are read")
        return path.read_bytes()
    except OSError as error:
        raise Disagreement(f"{path}: {error.strerror or error}; a scored run has this file") from None


def _head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(layout.HEADER_BYTES)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
