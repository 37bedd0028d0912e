"""`prism-fast densify`: a closer look at a scored run, on the host, from what it left behind. It never ranks.

Two panels: long context, from the trained weights behind executors (`long_context`), and sample
efficiency, from the series alone (`sample_efficiency`). What was not run is null with a reason. One new file is
written beside the run's, `prism_densify.v1.json`; no file of the run is touched.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism_fast.harness.audits.densify.sample_efficiency import sample_efficiency_panel
from prism_fast.harness.bundle.bundle import Bundle, load_bundle
from prism_fast.harness.process.isolation import bwrap_fault, data_places, resolve_isolation
from prism_fast.harness.process.processes import descendants, end_processes
from prism_fast.harness.referee.request import Prepared, Reporter, SilentReporter
from prism_fast.protocol import constants as c
from prism_fast.protocol import manifest as m
from prism_fast.protocol.canonical import file_sha256, write_json
from prism_fast.protocol.errors import DataError, PrismError, UsageError
from prism_fast.protocol.run_spec import RunSpec

VAL_BYTES = 65_536  # of the text that the long-context panel reads


@dataclass(frozen=True)
class DensifyRequest:
    """`bundle`: where the run kept none. `data`, `val`: where its corpora are (default: as the manifest names them)."""

    bundle: Path | None = None
    data: str | None = None
    val: str | None = None
    val_byte_budget: int = VAL_BYTES
    isolation: str = "auto"
    cache_dir: Path | None = None


def densify_run(seed_dir: Path, request: DensifyRequest, reporter: Reporter | None = None) -> dict[str, Any]:
    """Writes `prism_densify.v1.json` into a scored seed's directory and returns it.

    Raises UsageError when there is no scored run here or the bundle is another one, DataError when a file is not the
    one that the manifest names. Whatever cannot be measured is null in the document, with the reason.
    """
    reporter = reporter or SilentReporter()
    manifest, spec = _read(seed_dir)
    engine = manifest.engine
    if (found := file_sha256(seed_dir / c.WEIGHTS_FILE)) != engine.weights_sha256:
        raise DataError(
            f"{seed_dir / c.WEIGHTS_FILE}: sha256 {found[:12]}; the manifest names {engine.weights_sha256[:12]}"
        )
    bundle = _bundle(seed_dir, request, spec)
    reporter.stage(f"{manifest.run_id}: sample efficiency")
    series = m.TrainSeries.model_validate_json((seed_dir / c.TRAIN_SERIES_FILE).read_bytes())
    efficiency = sample_efficiency_panel(series)
    reporter.stage(f"{manifest.run_id}: long context")
    document = {
        "schema": c.DENSIFY_SCHEMA,
        "submission_id": manifest.submission_id,
        "run_id": manifest.run_id,
        "seed": spec.seed,
        "accounting": spec.accounting,
        "research_grade": True,
        "ranks": False,
        "emission_weight_crown": False,
        "weights_sha256": engine.weights_sha256,
        "bundle_sha256": engine.bundle_sha256,
        "panels": {
            "long_context": _long_context(seed_dir, request, manifest, spec, bundle, reporter),
            "sample_efficiency": efficiency,
        },
    }
    write_json(seed_dir / c.DENSIFY_FILE, document)
    return document


def _read(seed_dir: Path) -> tuple[m.RunManifest, RunSpec]:
    try:
        manifest = m.RunManifest.model_validate_json((seed_dir / c.RUN_MANIFEST_FILE).read_bytes())
        spec = RunSpec.model_validate_json((seed_dir / c.RUN_SPEC_FILE).read_bytes())
    except OSError as e:
        raise UsageError(f"{e.filename}: no such file; expected a scored run's RUN/seed-<seed>") from None
    except ValueError as e:
        raise DataError(f"{seed_dir}: a file is not of its schema: {' '.join(str(e).split())[:300]}") from None
    return manifest, spec


def _bundle(seed_dir: Path, request: DensifyRequest, spec: RunSpec) -> Bundle:
    kept = seed_dir / c.BUNDLE_DIR
    if request.bundle is None and not kept.is_dir():
        raise UsageError(f"{kept}: the run kept no copy of its bundle; give it with --bundle")
    bundle = load_bundle(request.bundle or kept)
    if bundle.digest != spec.bundle_digest:
        raise UsageError(
            f"{request.bundle or kept}: bundle {bundle.digest[:12]}; the run was made with {spec.bundle_digest[:12]}"
        )
    return bundle


def _long_context(
    seed_dir: Path,
    request: DensifyRequest,
    manifest: m.RunManifest,
    spec: RunSpec,
    bundle: Bundle,
    reporter: Reporter,
) -> dict[str, Any]:
    """The panel, or nulls throughout with the one reason why nothing could be run."""
    from prism_fast.harness.audits.densify.long_context import long_context_panel, no_long_context
    from prism_fast.harness.audits.densify.trained import TrainedModel

    if not spec.exact:
        return no_long_context(f"accounting {spec.accounting} trains on rows without end-of-text and with folded ids")
    try:
        corpus = _val_corpus(request, manifest, spec, reporter)
    except PrismError as error:
        return no_long_context(str(error))
    isolation = resolve_isolation(request.isolation)
    if isolation == "none" and request.isolation == "auto":
        reporter.warn(f"isolation: none, architecture.py runs unsandboxed as this user: {bwrap_fault()}")
    keep = set(descendants(os.getpid()))
    own = spec.model_copy(update={"seal": "sealed", "isolation": isolation})  # no text for its code
    try:
        with tempfile.TemporaryDirectory(prefix="prism-densify-") as private:
            hidden = data_places(corpus, places=(request.data, request.val))
            prepared = Prepared(bundle, corpus, corpus, None, None, isolation, hidden=hidden)
            model = TrainedModel(own, prepared, seed_dir / c.WEIGHTS_FILE, Path(private), manifest.engine.basis)
            try:
                return long_context_panel(model, corpus, manifest, request.val_byte_budget)
            finally:
                model.close()
    finally:
        end_processes(None, keep)


def _val_corpus(request: DensifyRequest, manifest: m.RunManifest, spec: RunSpec, reporter: Reporter) -> Any:
    from prism_fast.data.corpus import resolve_data
    from prism_fast.data.tokenizers import reference_tokenizer

    if spec.val_corpus_fingerprint is None:
        raise UsageError("the run had no val split")
    place = request.val or request.data or manifest.data.data_dir
    corpus = resolve_data(
        place, reference_tokenizer(spec.tokenizer), request.cache_dir, reporter.packing, mount_of="val"
    )
    if corpus.fingerprint != spec.val_corpus_fingerprint or "val" not in corpus.splits:
        raise UsageError(f"{place} is not the corpus that the run was held out on; give it with --val")
    return corpus
