"""The referee's side of sealed scoring: it owns the stream, the targets, the budgets and the sums.

    referee:   batch k --tokens--> evaluator --logits--> scored here --record--> ledger
                  |--------------- after the record ----------------> trainer --step--> weights k+1 (shared)

Logits for batch k exist, and are scored, before the trainer's process has seen batch k. Order is the proof.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from prism_fast.harness.bundle.bundle import Bundle
from prism_fast.harness.process import wire
from prism_fast.harness.process.isolation import Sandbox
from prism_fast.harness.process.shared_memory import SharedRegion
from prism_fast.harness.referee.evaluator_client import Evaluator, Prediction
from prism_fast.harness.referee.head_choice import REASONS, HeadChoice, compare_rows
from prism_fast.harness.referee.ledger import Ledger, pack_record
from prism_fast.harness.referee.probes import ProbePlan, TokenFrequencies, broken_rule
from prism_fast.protocol import constants as c
from prism_fast.protocol.budgets import budget_reached, steps_at_most
from prism_fast.protocol.errors import BundleFailed, BundleRejected
from prism_fast.protocol.run_spec import RunSpec

MIN_REGION_LIMIT = 1 << 30
MAX_BATCH_SIZE = 65535


@dataclass(frozen=True)
class SealedData:
    """What a sealed run reads. `tokenizer` made the corpus; `basis_tokenizer(basis)` is what its stream is made of."""

    split: Any
    tokenizer: Any
    byte_tokenizer: Any
    prefetch: int

    def basis_tokenizer(self, basis: str) -> Any:
        return self.tokenizer if basis == "tokens" else self.byte_tokenizer


class _Rank:
    """One rank's stream, evaluator and shared weights."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.region: SharedRegion | None = None
        self.layout: Any = None
        self.request: dict[str, Any] | None = None
        self.stream: Any = None


class SealedSession:
    """Predicts and scores for one seed's trainer ranks. Owned by the referee's loop."""

    def __init__(
        self,
        spec: RunSpec,
        bundle: Bundle,
        sandbox: Sandbox,
        environment: dict[str, str],
        run_dir: Path,
        data: SealedData,
        ledger: Ledger,
        tokenizer_dir: str,
        deadline: Callable[[], float],
        scorer_threads: int,
    ) -> None:
        self.scorer_threads = scorer_threads  # of this process; they never change a figure
        self.spec, self.data, self.ledger = spec, data, ledger
        self.violations: list[str] = []
        self.stopped_reason: str | None = None  # as the ranks were told; None: they were always given a batch
        self.probes = 0
        self.head_width = 0
        self.model: dict[str, Any] | None = None
        self.head = HeadChoice(spec.head)

        def start(rank: int) -> Evaluator:
            return Evaluator(
                spec,
                bundle,
                sandbox,
                environment,
                run_dir / c.EVALUATOR_LOG_FILE,
                tokenizer_dir=tokenizer_dir,
                deadline=deadline,
                rank=rank,
            )

        self._ranks = [_Rank(start(rank)) for rank in range(spec.world_size)]
        self._shadow: Evaluator | None = None
        self._shadow_adopted = False
        self._start = start
        self._plan: ProbePlan | None = None
        self._buffer_digests: dict[str, bytes] = {}
        self._filler: Any = None
        self._tokens_seen = 0
        # Importing torch takes as long as the children's own start: it runs beside them.
        self._torch = threading.Thread(target=import_torch, daemon=True)
        self._torch.start()

    def set_shadow_deadline(self, deadline: Callable[[], float]) -> None:
        """For held-out scoring, whose time is its own."""
        self.start_shadow()
        assert self._shadow is not None
        self._shadow.set_deadline(deadline)

    def start_shadow(self) -> None:
        """Once a rank is up: until then its imports would take the processor from those that the start waits for."""
        if self._shadow is None:
            self._shadow = self._start(0)

    @property
    def shadow(self) -> Evaluator:
        """The shadow evaluator with rank 0's weights adopted, which is waited for at its first use."""
        self.start_shadow()
        assert self._shadow is not None
        if not self._shadow_adopted:
            state = self._ranks[0]
            assert state.region is not None
            self._shadow.n_vocab = state.evaluator.n_vocab
            self._shadow.adopt(state.layout, state.region, check_init=False)  # the scored evaluator has checked it
            self._shadow_adopted = True
        return self._shadow

    # -------------------------------------------------------------------------------------------- weights are shown

    def share(self, rank: int, document: dict[str, Any]) -> SharedRegion:
        """A rank describes its model's state: -> the region it shall live in. Raises BundleRejected."""
        self._torch.join()
        import torch

        from prism_fast.harness.process.state_layout import from_json, region_bytes

        torch.set_num_threads(self.scorer_threads)

        state = self._ranks[rank]
        if state.region is not None:
            raise BundleFailed(f"rank {rank} described its weights twice", rule=c.RULE_RUNTIME_ERROR)
        request = checked_request(document, self.spec)
        entries = from_json(document["layout"])
        count = self._check_cap({e.offset: e.numel for e in entries if e.is_parameter and e.nbytes})
        size, limit = region_bytes(entries), max(MIN_REGION_LIMIT, 16 * self.spec.max_parameters)
        if size > limit:
            raise BundleRejected(
                f"the model's state takes {size:,} bytes; at most {limit:,} are shared", rule=c.RULE_PARAM_CAP
            )
        state.region = SharedRegion.create("prism-weights", size)
        state.layout, state.request = document["layout"], {**request, "model_params": count}
        return state.region

    def _check_cap(self, sizes: dict[int, int]) -> int:
        """`sizes`: elements by place in the region. -> their sum; raises BundleRejected above the cap."""
        count = sum(sizes.values())
        if count > self.spec.max_parameters:
            raise BundleRejected(
                f"the model trains {count:,} parameters; the {self.spec.param_ladder_stage} stage allows at most "
                f"{self.spec.max_parameters:,} ({c.MARKER_PARAM_CAP})",
                rule=c.RULE_PARAM_CAP,
            )
        return count

    def check_trained_state(self) -> None:
        """Whatever has changed since the forced init was trained, buffers too, and counts towards the cap."""
        from prism_fast.harness.process.state_layout import from_json

        state = self._ranks[0]
        if state.region is None or not self._buffer_digests:
            return
        sizes = {
            e.offset: e.numel
            for e in from_json(state.layout)
            if e.is_parameter or self._buffer_digests.get(e.name) != _digest(e, state.region)
        }
        self._check_cap(sizes)

    def mapped(self, rank: int) -> None:
        """The rank has its weights in the region: nobody else may write there, and the evaluators adopt them."""
        from prism_fast.data.stream import TokenStream

        state = self._ranks[rank]
        if state.region is None or state.request is None or state.stream is not None:
            raise BundleFailed("a rank mapped weights it had not described, or twice", rule=c.RULE_RUNTIME_ERROR)
        state.region.close_to_writers()
        basis = state.request["basis"]
        n_vocab = self.data.basis_tokenizer(basis).n_vocab
        state.evaluator.n_vocab = n_vocab
        state.evaluator.adopt(state.layout, state.region, check_init=True)
        state.stream = self._open_stream(TokenStream, state.request, rank)
        if rank == 0:
            from prism_fast.harness.process.state_layout import from_json

            self._buffer_digests = {
                e.name: _digest(e, state.region) for e in from_json(state.layout) if not e.is_parameter
            }
            self._seen = TokenFrequencies(n_vocab)
            self._plan = ProbePlan(min(len(state.stream), self._batches_at_most(state.request)))
            self._filler = self._open_filler(TokenStream, state.request, len(state.stream))

    def _open_stream(self, token_stream: Any, request: dict[str, Any], rank: int, start: int = 0) -> Any:
        return token_stream(
            self.data.split,
            request["seq_len"],
            request["batch_size"],
            basis="bytes" if request["basis"] == "bytes" and self.spec.tokenizer != "bytes" else "tokens",
            rank=rank,
            world=self.spec.world_size,
            prefetch=self.data.prefetch if start == 0 else 1,
            start_batch=start,
        )

    def _open_filler(self, token_stream: Any, request: dict[str, Any], batches: int) -> Any:
        """Text for probes, from a secret place, beyond what the run will read if there is such text."""
        assert self._plan is not None
        last = self._batches_at_most(request)
        first = last if last < batches - 1 else 0
        return self._open_stream(token_stream, request, 0, start=first + self._plan.cut(max(2, batches - first)) - 1)

    def _batches_at_most(self, request: dict[str, Any]) -> int:
        """Batches of one rank that the budgets allow."""
        tokens_per_step = request["seq_len"] * request["batch_size"] * self.spec.world_size
        return steps_at_most(self.spec, tokens_per_step, request["model_params"])

    # ------------------------------------------------------------------------------------------ batches are scored

    def hand_out(self, index: int, autocast: dict[int, int], stop: str | None) -> dict[int, bytes] | str:
        """Every rank has asked for batch `index`: -> each rank's BATCH body, or why there is none."""
        answer = self._hand_out(index, autocast, stop)
        if isinstance(answer, str):
            self.stopped_reason = self.stopped_reason or answer
        return answer

    def _hand_out(self, index: int, autocast: dict[int, int], stop: str | None) -> dict[int, bytes] | str:
        if index != self.ledger.batches:
            raise BundleFailed(
                f"batch {index} was asked for; the next one is {self.ledger.batches}", rule=c.RULE_RUNTIME_ERROR
            )
        if any(self._ranks[r].stream is None for r in autocast):
            raise BundleFailed("a batch was asked for before the weights were shown", rule=c.RULE_RUNTIME_ERROR)
        first = self._ranks[0].request
        assert first is not None
        if (reason := budget_reached(self.spec, self._tokens_seen, index, first["model_params"])) is not None:
            return reason
        if stop is not None:
            return stop
        if index >= min(len(self._ranks[r].stream) for r in autocast):
            return c.STOP_DATA_EXHAUSTED
        return {rank: self._score(rank, index, autocast[rank]) for rank in sorted(autocast)}

    def _score(self, rank: int, index: int, autocast: int) -> bytes:
        import torch

        from prism_fast.kernels import batch_code_length

        state = self._ranks[rank]
        t0 = perf_counter()
        block = next(state.stream)
        t1 = perf_counter()
        if index == 0:
            self._try_head(state, block.tokens.shape[1], autocast)
        prediction = state.evaluator.predict(block.tokens, autocast, fused=self.head.fused)
        t2 = perf_counter()
        if self.head.fused and prediction.head is None:
            self.head.give_up(REASONS[prediction.why_plain or "processed"])
        self.head_width = self.head_width or prediction.head_width
        if prediction.head_width != self.head_width:
            raise BundleFailed(
                f"the model's logits were {self.head_width} wide and are now {prediction.head_width}",
                rule=c.RULE_OUTPUT_SHAPE,
            )
        if self.model is None:
            self._describe(state)
        probed = rank == 0 and self._plan is not None and self._plan.probes(index)
        if probed:
            prediction.keep()
        targets = torch.from_numpy(block.targets)
        nll = prediction.nll(targets)
        fault_nats = c.FAULT_CODE_LENGTH_FACTOR * math.log(self.head_width)
        sums = batch_code_length(nll, targets, self._token_bytes, fault_nats).tolist()
        rows, width = block.tokens.shape
        self.ledger.add(rank, pack_record(index, sums, rows * width, block.documents, rank, rows))
        self._tokens_seen += rows * width
        t3 = perf_counter()
        if probed:
            self.check_trained_state()
            surprise = self._seen.nats(block.targets) - nll.numpy()
            self._probe(block.tokens, prediction, surprise, autocast)
        for row in self.head.rows_to_audit(index, rows) if prediction.head is not None else ():
            compare_rows(self.head, f"batch {index}", state.evaluator, block.tokens, targets, row, autocast)
        if rank == 0:
            self._seen.add(block.targets)
        t4 = perf_counter()
        return wire.BATCH_RECORD.pack(index, rows, width, t1 - t0, t2 - t1 + t4 - t3, t3 - t2) + block.tokens.tobytes()

    def _try_head(self, state: _Rank, width: int, autocast: int) -> None:
        """Before the first batch: on random ids, which tell the evaluator nothing."""
        import torch

        tokens, targets = np.random.default_rng().integers(0, state.evaluator.n_vocab, (2, 1, width))

        def predict(fused: bool) -> tuple[Any, str | None]:
            answer = state.evaluator.predict(tokens, autocast, fused=fused)
            reason = REASONS[answer.why_plain or "processed"] if fused and answer.head is None else None
            return answer.nll(torch.from_numpy(targets)), reason

        self.head.try_out(predict)

    def _describe(self, state: _Rank) -> None:
        import torch

        from prism_fast.kernels import backend_for

        assert state.request is not None
        request = {k: v for k, v in state.request.items() if k != "layout"}
        table = self.data.basis_tokenizer(request["basis"]).token_bytes
        self._token_bytes = torch.from_numpy(np.array(table, np.int32))
        self.model = {
            **request,
            "head_width": self.head_width,
            "plan": asdict(state.stream.plan_summary()),
            "backends": {"token_nll": backend_for(torch.device("cpu")).name},
        }

    def _probe(self, tokens: np.ndarray, scored: Prediction, surprise: np.ndarray, autocast: int) -> None:
        assert self._plan is not None
        block = next(self._filler, None)
        if block is None:
            self._filler = self._open_stream(type(self._filler), self._ranks[0].request or {}, 0)
            block = next(self._filler)
        self.probes += 1
        cut = self._plan.cut_after(surprise)
        rule = broken_rule(scored, tokens, block.tokens, cut, self.shadow, autocast)
        if rule is not None and rule not in self.violations:
            self.violations.append(rule)

    # ------------------------------------------------------------------------------------------------------ the end

    @property
    def processes(self) -> set[int]:
        started = [state.evaluator for state in self._ranks]
        started += [] if self._shadow is None else [self._shadow]
        return {evaluator.process.pid for evaluator in started}

    def final_state(self) -> tuple[Any, SharedRegion]:
        """-> (layout, region) of rank 0's weights as the trainer left them."""
        state = self._ranks[0]
        assert state.region is not None
        return state.layout, state.region

    def save_weights(self, path: Path) -> None:
        """Writes the final state as safetensors, tied tensors under each of their names."""
        from prism_fast.harness.process.state_layout import from_json
        from prism_fast.harness.process.weights_file import save_weights

        layout, region = self.final_state()
        save_weights({e.name: e.view(region) for e in from_json(layout)}, path)

    def close(self) -> None:
        for state in self._ranks:
            state.evaluator.close()
            if state.stream is not None:
                state.stream.close()
        if self._shadow is not None:
            self._shadow.close()


def checked_request(document: Any, spec: RunSpec) -> dict[str, Any]:
    """What a trainer asked for, held to the same bounds that its own process should have held it to.

    Raises BundleRejected; KeyError or TypeError for what is not a request at all.
    """
    request = {name: document[name] for name in ("batch_size", "seq_len", "basis")}
    for name, low, high in (("seq_len", 2, spec.sequence_length), ("batch_size", 1, MAX_BATCH_SIZE)):
        if type(request[name]) is not int or not low <= request[name] <= high:
            raise BundleRejected(
                f"the trainer asked for {name}={request[name]!r}; expected {low} to {high}", rule=c.RULE_BATCH_REQUEST
            )
    if spec.batch_size not in (None, request["batch_size"]):
        raise BundleRejected(
            f"the trainer asked for batch_size={request['batch_size']}; this run pins it to {spec.batch_size}",
            rule=c.RULE_BATCH_REQUEST,
        )
    if request["basis"] not in ("bytes", "tokens"):
        raise BundleRejected(f"the trainer asked for the basis {request['basis']!r}", rule=c.RULE_TOKENIZER)
    return request


def _digest(entry: Any, region: SharedRegion) -> bytes:
    view = entry.view(region).detach().contiguous().flatten()
    return hashlib.blake2b(_bytes_of(view)).digest()


def _bytes_of(flat: Any) -> Any:
    import torch

    return flat.view(torch.uint8).numpy()


def import_torch() -> None:
    import prism_fast.kernels  # noqa: F401
