"""What a bundle's processes say is checked where it arrives: bounds, types, order, blame."""

import os
import shutil
import socket
import struct

import numpy as np
import pytest
import torch

from prism_fast.harness.process import wire
from prism_fast.harness.process.artifacts import MAX_DEPTH, directory_bytes, make_removable
from prism_fast.harness.process.state_layout import Entry
from prism_fast.harness.referee.evaluator_client import MAX_MESSAGE, reported_fault
from prism_fast.harness.referee.launch import done_facts, started_facts
from prism_fast.harness.referee.ledger import Ledger
from prism_fast.harness.referee.probes import SUSPECTS, TOLERANCE, ProbePlan, TokenFrequencies, same_prefix
from prism_fast.harness.referee.sealed import checked_request
from prism_fast.protocol import ledger as layout
from prism_fast.protocol.errors import BundleFailed, BundleRejected, EngineFault
from prism_fast.protocol.manifest import HeadBlock
from prism_fast.protocol.run_spec import RunSpec

REQUEST = {"batch_size": 4, "seq_len": 64, "basis": "tokens"}
DONE = {
    "stopped_reason": "step_budget",
    "returned": None,
    "peak_rss_bytes": 1,
    "peak_vram_bytes": None,
    "peak_vram_reserved_bytes": None,
    "forward_flops": None,
    "head": HeadBlock().model_dump(),
}


def spec(**other) -> RunSpec:
    return RunSpec.model_construct(
        **{"sequence_length": 64, "batch_size": None, "tokenizer": "gpt2", **other}  # only what a request is held to
    )


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"seq_len": 65}, "prism:batch-request"),
        ({"seq_len": 1}, "prism:batch-request"),
        ({"seq_len": True}, "prism:batch-request"),
        ({"seq_len": 8.0}, "prism:batch-request"),
        ({"batch_size": 0}, "prism:batch-request"),
        ({"batch_size": 65536}, "prism:batch-request"),
        ({"batch_size": "4"}, "prism:batch-request"),
        ({"basis": "letters"}, "prism:tokenizer"),
    ],
)
def test_the_referee_holds_a_request_to_the_runs_own_bounds(wrong, rule):
    assert checked_request({**REQUEST, "more": 1}, spec()) == REQUEST
    with pytest.raises(BundleRejected) as e:
        checked_request({**REQUEST, **wrong}, spec())
    assert e.value.rule == rule


def test_a_pinned_batch_size_binds_the_request_too():
    with pytest.raises(BundleRejected):
        checked_request(REQUEST, spec(batch_size=5))


@pytest.mark.parametrize("basis", ["tokens", "bytes"])
def test_a_byte_run_may_be_asked_for_by_its_own_tokenizer_or_by_none(basis):
    assert checked_request({**REQUEST, "basis": basis}, spec(tokenizer="bytes"))["basis"] == basis


@pytest.mark.parametrize(
    "wrong",
    [
        {"peak_rss_bytes": "many"},
        {"peak_rss_bytes": float("nan")},
        {"peak_rss_bytes": -1},
        {"peak_vram_bytes": [1]},
        {"forward_flops": -5},
        {"head": {"audits": -1}},
        {"head": {"used": "neither"}},
        {"head": 5},
    ],
)
def test_a_ranks_last_report_is_held_to_its_types(wrong):
    assert done_facts(DONE) == DONE
    with pytest.raises((TypeError, ValueError)):
        done_facts({**DONE, **wrong})
    assert len(done_facts({**DONE, "returned": "x" * 10**6})["returned"]) == 1000


def test_a_start_without_its_time_is_none():
    for document in ([], {"bundle_import_s": "soon"}, {}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            started_facts(document)


def test_blame_cannot_be_put_on_the_engine_once_bundle_code_runs():
    fault = {"kind": "engine", "rule": None, "message": "disk\nfull\x1b[2J" + "x" * 10**5}
    assert isinstance(reported_fault(fault, ours_possible=True), EngineFault)
    error = reported_fault(fault, ours_possible=False)
    assert isinstance(error, BundleFailed) and error.rule == "prism:runtime-error"
    assert str(error).startswith("disk full [2J") and len(str(error)) == MAX_MESSAGE
    named = reported_fault({"kind": "rejected", "rule": "prism:tokenizer", "message": ""}, ours_possible=False)
    assert isinstance(named, BundleRejected) and named.rule == "prism:tokenizer"
    made_up = reported_fault({"kind": "rejected", "rule": "prism:fine", "message": ""}, ours_possible=False)
    assert made_up.rule == "prism:runtime-error"


def observation(index=0, rank=0, **other) -> bytes:
    record = np.zeros(1, layout.OBSERVATIONS_DTYPE)
    record["index"], record["rank"], record["grad_norm"] = index, rank, np.nan
    for name, value in other.items():
        record[name] = value
    return record.tobytes()


@pytest.mark.parametrize(
    "wrong",
    [b"short", observation(1), observation(0, 1), observation(0, wall_s=np.nan), observation(0, step_s=-1.0)],
)
def test_observations_come_once_a_batch_in_order_with_times(tmp_path, wrong):
    ledger = Ledger(tmp_path, 2)
    with pytest.raises(ValueError):
        ledger.observe(0, wrong)
    ledger.observe(0, observation(0))
    ledger.observe(1, observation(0, 1))
    with pytest.raises(ValueError):
        ledger.observe(0, observation(0))
    ledger.close()


def test_empty_files_count_and_a_bottomless_directory_counts_as_everything(tmp_path):
    for n in range(10):
        (tmp_path / str(n)).touch()
    os.symlink("/", tmp_path / "link")
    assert directory_bytes(tmp_path) == 11 * 4096
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 10**9)
    assert directory_bytes(tmp_path) >= 10**9
    (tmp_path.joinpath(*["d"] * 70)).mkdir(parents=True)
    assert directory_bytes(tmp_path) > 2**60


def test_what_a_bundle_leaves_can_be_removed(tmp_path):
    """1,500 directories inside each other, some closed, some with files: rmtree alone ends in a RecursionError."""
    artifacts = tmp_path / "artifacts"
    (artifacts / "kept").mkdir(parents=True)
    (artifacts / "kept" / "file").write_bytes(b"x")
    here = os.open(artifacts, os.O_RDONLY)
    for depth in range(1500):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        if depth % 100 == 99:
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=inner))
            os.mkdir("beside", dir_fd=inner)
            os.chmod("d", 0, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    make_removable(artifacts)
    assert directory_bytes(artifacts) < 2**20
    deepest = artifacts.joinpath(*["d"] * MAX_DEPTH)
    assert deepest.is_dir() and not list(deepest.iterdir())
    assert sorted(os.listdir(artifacts)) == ["d", "kept"] and (artifacts / "kept" / "file").read_bytes() == b"x"
    shutil.rmtree(artifacts)


def test_a_peer_that_does_not_read_does_not_hold_its_writer_up():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        wire.Channel(ours).send(wire.BATCH, bytes(8 << 20), timeout=0.01)


def test_descriptors_from_a_peer_that_may_not_send_any_are_not_taken():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        open_before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(theirs, [wire.encode(wire.DONE, b"{}")], [0, 1, 2])
        frame = wire.Channel(ours, descriptors=False).receive(5)
        assert frame.kind == wire.DONE and frame.fd is None
        assert len(os.listdir("/proc/self/fd")) == open_before
        socket.send_fds(theirs, [struct.pack("<BI", wire.REGION, 0)], [0])
        with pytest.raises(wire.FrameError):
            wire.Channel(ours, descriptors=False).receive(5)


def test_half_the_cuts_fall_behind_what_was_predicted_suspiciously_well():
    surprise = np.random.default_rng(0).normal(size=(4, 128))
    surprise[2, 17] = 12.0
    plan = ProbePlan(10**6)
    cuts = [plan.cut_after(surprise) for _ in range(4000)]
    assert all(1 <= cut < surprise.size for cut in cuts)
    behind = sum(cut == 2 * 128 + 17 + 1 for cut in cuts)
    assert behind > 4000 / (2 * SUSPECTS) * 0.7  # a uniform cut would hit it 8 times
    assert len(set(cuts)) > 300
    assert plan.cut_after(np.full((1, 2), -np.inf)) == 1


def test_what_a_target_costs_by_its_frequency():
    seen = TokenFrequencies(4)
    seen.add(np.array([[2, 2, -100], [2, 1, 2]]))
    cost = seen.nats(np.array([2, 0, -100]))
    assert cost[:2] == pytest.approx([np.log(9 / 5), np.log(9 / 1)]) and cost[2] == -np.inf


def test_logits_within_the_tolerance_are_equal_and_beyond_it_not():
    first = torch.zeros(1, 2, 3)
    first[0, 1, 2] = float("inf")
    for step, equal in ((TOLERANCE / 2, True), (TOLERANCE * 2, False)):
        second = first.clone()
        second[0, 0, 0] += step
        assert same_prefix(first, second, 2) is equal


def test_a_complex_parameter_is_two_numbers():
    assert Entry("w", "complex64", (3, 5), (5, 1), 0, True).numel == 30
    assert Entry("w", "float32", (3, 5), (5, 1), 0, True).numel == 15
