"""The executor process, through the referee's own client: a program captured here, run there."""

from __future__ import annotations

import dataclasses
import os
import signal
from time import monotonic

import numpy as np
import pytest
import torch
from torch import nn

from prism_fast.harness.marking.sums import BatchSums
from prism_fast.harness.process.environment import engine_environment
from prism_fast.harness.process.isolation import Sandbox
from prism_fast.harness.process.shared_memory import SharedRegion
from prism_fast.harness.process.shared_state import bytes_at, region_bytes, slots_of
from prism_fast.harness.referee.executing import Executor
from prism_fast.harness.referee.tracing import Traced, TracedWidth
from prism_fast.harness.trainer.predictor import InProcessPredictor
from prism_fast.program.capture import capture
from prism_fast.program.format import Program
from prism_fast.protocol.errors import BudgetExceeded, BundleFailed, BundleRejected, EngineFault
from prism_fast.protocol.run_spec import RunSpec

VOCAB, WIDTH = 97, 16
SIZES = np.arange(VOCAB, dtype=np.int32) % 5


class Small(nn.Module):
    def __init__(self, vocab: int = VOCAB, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocab, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab, bias=False)

    def hidden(self, tokens):
        x = self.embedding(tokens)
        steps = torch.arange(1, x.shape[1] + 1)[None, :, None]
        return x + torch.tanh(self.mix(x.cumsum(1) / steps))

    def forward(self, tokens):
        return self.head(self.hidden(tokens))


def spec(**other: object) -> RunSpec:
    return RunSpec.model_validate(
        {
            "engine_version": "0",
            "bundle_digest": "0",
            "seal": "sealed",
            "isolation": "none",
            "tokenizer": "gpt2",
            "tokenizer_fingerprint": "0",
            "corpus_fingerprint": "0",
            "val_corpus_fingerprint": None,
            "vocab_size": VOCAB,
            "sequence_length": WIDTH,
            "device": "cpu",
            "torch_threads": 1,
            **other,
        }
    )


def shown(model: nn.Module, slots) -> SharedRegion:
    """The model's state in a region, as a trainer would have it."""
    region = SharedRegion.create("test", region_bytes(slots))
    found = model.state_dict()
    with SharedRegion.writer(region) as writer:
        for slot in slots:
            flat = found[slot.name].detach().contiguous().reshape(-1)
            bytes_at(slot, writer)[:] = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return region


def traced(model: nn.Module, widths=(WIDTH,), rows: int = 2, **options: object) -> Traced:
    programs = []
    for width in widths:
        found = capture(model, width=width, rows=rows, compare=False, **options)
        programs.append(TracedWidth(found.program, found.constants, None, ()))
    slots = slots_of(programs[0].program.state)
    return Traced(tuple(programs), slots, shown(model, slots))


@pytest.fixture
def start(tmp_path):
    """`start(traced, **options) -> Executor`, loaded, the initial state adopted as "live" too."""
    started = []

    def run(found: Traced, *, token_bytes=SIZES, live=None, seconds: float = 60, share: float = 0.0, **other):
        chosen = spec(**other)
        executor = Executor(
            chosen,
            Sandbox("none"),
            engine_environment(chosen),
            tmp_path / "executor.log",
            deadline=lambda: monotonic() + seconds,
            probe_share=share,
        )
        started.append(executor)
        executor.load(found, token_bytes)
        executor.adopt("live", live or found.initial_state)
        executor.adopt("trained", live or found.initial_state)
        return executor

    yield run
    for executor in started:
        executor.close()
        assert executor.process.wait(20) is not None


def drawn(rows: int, width: int = WIDTH, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    targets = random.integers(0, VOCAB, (rows, width))
    targets[0, 0] = -100
    return random.integers(0, VOCAB, (rows, width)), targets


def expected(model: nn.Module, tokens: np.ndarray, targets: np.ndarray) -> BatchSums:
    predictor = InProcessPredictor(model, torch.from_numpy(SIZES), cap=10**9, stage="explore")
    return BatchSums(*predictor.predict(torch.from_numpy(tokens), torch.from_numpy(targets)).sums.tolist())


@pytest.mark.parametrize("threads", [1, 2])
def test_sums_are_the_bits_of_the_models_own_process(start, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = Small(width=256)
        executor = start(traced(model), torch_threads=threads)
        for rows in (2, 1, 7, 64):
            tokens, targets = drawn(rows, seed=rows)
            record, row_nats = executor.predict(tokens, targets, state="live")
            assert record[:6] == expected(model, tokens, targets) and len(row_nats) == 0
            assert (record.head_width, record.probed_rows, record.verdict) == (VOCAB, 0, 0)
            held_out, row_nats = executor.predict(tokens, targets, state="initial")
            assert held_out.nats == row_nats.sum() == pytest.approx(record.nats + record.special_nats, rel=1e-12)
    finally:
        torch.set_num_threads(before)


def test_each_width_has_its_program_and_no_other_width_has_one(start):
    model = Small()
    executor = start(traced(model, (8, WIDTH)))
    for width in (8, WIDTH):
        tokens, targets = drawn(3, width)
        assert executor.predict(tokens, targets, state="live")[0][:6] == expected(model, tokens, targets)
    with pytest.raises(BundleFailed, match="no program for rows of 9 tokens"):
        executor.predict(*drawn(2, 9), state="live")


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])
def test_a_program_of_one_batch_size_takes_any_number_of_rows(start, rows):
    model = Small()
    found = traced(model, rows=4, symbolic=False)
    assert found.programs[0].program.batch == 4
    tokens, targets = drawn(rows)
    sums = start(found).predict(tokens, targets, state="live")[0]
    reference = expected(model, tokens, targets)
    assert sums[2:6] == reference[2:] and sums.nats == pytest.approx(reference.nats, rel=1e-6)


def test_weights_are_taken_afresh_and_are_the_executors_own(start):
    model = Small()
    found = traced(model)
    live = shown(model, found.slots)
    executor = start(found, live=live)
    tokens, targets = drawn(3)
    first = executor.predict(tokens, targets, state="live")[0]
    with torch.no_grad():
        model.head.weight.mul_(1.5)
    with SharedRegion.writer(live) as writer:
        for slot in found.slots:
            bytes_at(slot, writer)[:] = model.state_dict()[slot.name].contiguous().view(-1).view(torch.uint8).numpy()
    assert executor.predict(tokens, targets, state="live", fresh=False)[0][:6] == first[:6]
    assert executor.predict(tokens, targets, state="live")[0][:6] == expected(model, tokens, targets)
    assert executor.predict(tokens, targets, state="initial")[0].nats != pytest.approx(first.nats * 1.01)


class Remembering(Small):
    """Writes what it reads into its state, and adds what is there to its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, WIDTH, VOCAB))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        logits = self.head(self.hidden(tokens)) + self.cache + self.calls
        self.cache.copy_(logits.mean(0, keepdim=True))
        self.calls.add_(1)
        return logits * (1 + self.calls)


def test_what_a_program_writes_to_its_state_goes_with_the_call(start):
    executor = start(traced(Remembering()))
    tokens, targets = drawn(3)
    first = executor.predict(tokens, targets, state="live")[0]
    for fresh in (False, True, False):
        again = executor.predict(tokens, targets, state="live", fresh=fresh)[0]
        assert again[:6] == first[:6] and again.trained_numbers == 0


def test_a_changed_buffer_is_counted(start):
    model = Remembering()
    found = traced(model)
    model.cache[0, 0, 0] = 1.0
    executor = start(found, live=shown(model, found.slots), max_parameters=found.numbers - 1)
    assert executor.predict(*drawn(2), state="trained")[0].trained_numbers == WIDTH * VOCAB


def test_buffers_that_cannot_break_the_cap_are_not_looked_at(start):
    model = Remembering()
    found = traced(model)
    model.cache[0, 0, 0] = 1.0
    executor = start(found, live=shown(model, found.slots), max_parameters=found.numbers)
    assert executor.predict(*drawn(2), state="trained")[0].trained_numbers == 0


class Ahead(Small):
    def forward(self, tokens):
        return self.head(self.hidden(tokens)) + 5.0 * nn.functional.one_hot(tokens.roll(-1, 1), VOCAB)


def test_a_program_that_looks_ahead_is_named_by_its_executor(start):
    executor = start(traced(Ahead()), share=0.5)
    for seed in range(8):
        executor.predict(*drawn(4, seed=seed), state="live")
    assert executor.rules == ["prism:noncausal"] and executor.probed_rows > 0


def test_nothing_is_probed_that_was_not_to_be(start):
    executor = start(traced(Ahead()), share=0.5)
    for seed in range(4):
        executor.predict(*drawn(4, seed=seed), state="live", probe=False)
    assert executor.rules == [] and executor.probed_rows == 0


# --------------------------------------------------------------------------------------------------- memory and ends


def test_hidden_states_and_the_head_in_pieces_cost_the_same(monkeypatch):
    """Where logits are too large for the memory, they are never made."""
    from prism_fast.harness.executor import main as executing
    from prism_fast.harness.process.jobs import LoadedProgram, LoadJob, PredictRecord

    found = traced(Small())
    program, constants = found.programs[0].program.to_bytes(), found.programs[0].constants
    region = SharedRegion.create("test", len(program) + len(constants) + SIZES.nbytes)
    with SharedRegion.writer(region) as writer:
        writer.array()[: len(program) + len(constants) + SIZES.nbytes] = np.frombuffer(
            program + constants + SIZES.tobytes(), np.uint8
        )
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        sums = {}
        for memory in (1 << 40, 1 << 10):
            job = LoadJob(
                device="cpu",
                local_rank=0,
                torch_threads=1,
                deterministic_algorithms=False,
                matmul_precision="highest",
                memory_bytes=memory,
                programs=[
                    LoadedProgram(width=WIDTH, program=(0, len(program)), constants=(len(program), len(constants)))
                ],
                token_bytes=(len(program) + len(constants), SIZES.nbytes),
                probe_share=0.0,
            )
            executor = executing.Executor(job, region)
            executor.adopt("initial", found.initial_state)
            executor.adopt("live", found.initial_state)
            monkeypatch.setattr(executing, "HEAD_ROWS", 7)
            sums[memory], _ = executor.predict(PredictRecord(5, WIDTH, 0, 0, 1, 0), *drawn(5))
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
    whole, pieces = sums[1 << 40], sums[1 << 10]
    assert (whole.head, pieces.head) == (0, 1)
    assert pieces.nats == pytest.approx(whole.nats, rel=1e-6)
    assert pieces.special_nats == pytest.approx(whole.special_nats, rel=1e-6)
    assert pieces[2:7] == whole[2:7]


class Hungry(Small):
    def forward(self, tokens):
        return self.head(self.hidden(tokens)) + torch.zeros(1 << 42).sum()


class Narrow(Small):
    def __init__(self) -> None:
        super().__init__(vocab=VOCAB - 1)

    def forward(self, tokens):
        return super().forward(tokens % (VOCAB - 1))


class Outside(Small):
    def forward(self, tokens):
        return self.head(self.hidden(tokens + VOCAB))


class Endless(Small):
    def forward(self, tokens):
        big = torch.ones(5000, 5000) + self.head.weight.mean()
        for _ in range(400):
            big = big @ big
        return self.head(self.hidden(tokens)) + big.mean() * 0


@pytest.mark.parametrize(
    ("model", "kind", "rule", "words"),
    [
        (Hungry, BundleFailed, "prism:resource-oom", "more memory than there is"),
        (Narrow, BundleRejected, "prism:vocab-mismatch", "96 wide"),
        (Outside, BundleFailed, "prism:runtime-error", "the model's forward failed on 2 rows of 16 tokens"),
    ],
)
def test_a_program_that_cannot_be_run_is_named_and_its_executor_is_gone(start, model, kind, rule, words):
    executor = start(traced(model()))
    with pytest.raises(kind, match=words) as failure:
        executor.predict(*drawn(2), state="live")
    assert failure.value.rule == rule
    assert executor.process.wait(20) == 1


def test_no_text_of_torchs_is_in_what_a_program_failed_with(start):
    """An operator can be made to put memory that is not the program's into its message."""
    with pytest.raises(BundleFailed) as failure:
        start(traced(Outside())).predict(*drawn(2), state="live")
    assert "aten.embedding" in str(failure.value) and "range" not in str(failure.value)


def test_a_program_without_an_end_is_over_the_budget(start):
    executor = start(traced(Endless()), seconds=6)
    with pytest.raises(BudgetExceeded, match="still predicting"):
        executor.predict(*drawn(2), state="live")
    executor.process.kill()


@pytest.mark.parametrize(
    ("number", "rule", "words"),
    [
        (signal.SIGKILL, "prism:resource-oom", "killed, most likely out of memory"),
        (signal.SIGSEGV, "prism:runtime-error", "ended in the model's program"),
    ],
)
def test_an_executor_that_dies_is_named(start, number, rule, words):
    executor = start(traced(Small()))
    executor.predict(*drawn(2), state="live")
    os.kill(executor.process.pid, number)
    with pytest.raises(BundleFailed, match=words) as failure:
        executor.predict(*drawn(2), state="live")
    assert failure.value.rule == rule


def test_programs_whose_bytes_were_changed_on_the_way_are_refused(start):
    """What the referee has checked, the executor checks again."""
    found = traced(Small())
    program = found.programs[0].program

    class Forged(Program):
        def to_bytes(self) -> bytes:
            return program.to_bytes().replace(b"aten.tanh.default", b"aten.rand.default")

    own = {field.name: getattr(program, field.name) for field in dataclasses.fields(program)}
    forged = Traced(
        (TracedWidth(Forged(**own), found.programs[0].constants, None, ()),), found.slots, found.initial_state
    )
    with pytest.raises(BundleRejected, match=r"aten\.rand\.default") as failure:
        start(forged).predict(*drawn(2), state="live")
    assert failure.value.rule == "prism:not-exportable"


def test_an_executor_that_may_not_tell_does_not(start):
    with pytest.raises(EngineFault, match="FrameError"):
        start(traced(Small())).detail(*drawn(2), "live")


def test_an_executor_ends_when_its_channel_is_closed(start):
    executor = start(traced(Small()))
    executor.predict(*drawn(2), state="live")
    executor.close()
    assert executor.process.wait(20) == 0
