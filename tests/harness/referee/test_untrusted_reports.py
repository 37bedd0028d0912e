"""Everything a bundle's process reports is held to its form before it is believed or written anywhere."""

import os
import shutil
import socket
import struct

import numpy as np
import orjson
import pytest

from prism_fast.harness.process import jobs, wire
from prism_fast.harness.process.artifacts import MAX_DEPTH, directory_bytes, make_removable
from prism_fast.harness.referee.ledger import Ledger
from prism_fast.harness.referee.session import checked_request
from prism_fast.protocol import ledger as layout
from prism_fast.protocol.errors import BundleFailed, BundleRejected, EngineFault
from prism_fast.protocol.run_spec import RunSpec

SHARE = {
    "batch_size": 4,
    "seq_len": 64,
    "basis": "tokens",
    "dtypes": {"w": "float32"},
    "other_dtypes": {},
    "matmul_precision": "highest",
}
DONE = {
    "rank": 0,
    "stopped_reason": "step_budget",
    "returned": None,
    "peak_rss_bytes": 1,
    "peak_vram_bytes": None,
    "peak_vram_reserved_bytes": None,
    "forward_flops": None,
    "save_s": 0.5,
}


def spec(**other) -> RunSpec:
    return RunSpec.model_construct(
        **{"sequence_length": 64, "batch_size": None, "tokenizer": "gpt2", **other}  # only what a request is held to
    )


def share(**other) -> jobs.ShareRequest:
    return jobs.read(jobs.ShareRequest, orjson.dumps({**SHARE, **other}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"seq_len": True},
        {"seq_len": 8.0},
        {"batch_size": "4"},
        {"basis": "letters"},
        {"more": 1},
        {"dtypes": [1]},
        {"dtypes": {"w" * 600: "float32"}},
        {"matmul_precision": "best"},
    ],
)
def test_a_request_is_held_to_its_types(wrong):
    with pytest.raises(BundleFailed, match="ShareRequest"):
        share(**wrong)


@pytest.mark.parametrize("wrong", [{"seq_len": 65}, {"seq_len": 1}, {"batch_size": 0}, {"batch_size": 65536}])
def test_the_referee_holds_a_request_to_the_runs_own_bounds(wrong):
    assert checked_request(share(), spec())["seq_len"] == 64
    with pytest.raises(BundleRejected) as e:
        checked_request(share(**wrong), spec())
    assert e.value.rule == "prism:batch-request"


def test_a_pinned_batch_size_binds_the_request_too():
    with pytest.raises(BundleRejected):
        checked_request(share(), spec(batch_size=5))


@pytest.mark.parametrize("basis", ["tokens", "bytes"])
def test_a_byte_run_may_be_asked_for_by_its_own_tokenizer_or_by_none(basis):
    assert checked_request(share(basis=basis), spec(tokenizer="bytes"))["basis"] == basis


@pytest.mark.parametrize(
    "wrong",
    [
        {"peak_rss_bytes": "many"},
        {"peak_rss_bytes": -1},
        {"peak_rss_bytes": 1.5},
        {"peak_vram_bytes": [1]},
        {"forward_flops": -5},
        {"save_s": 1e300},
        {"returned": "x" * 10**6},
        {"rank": 9},
    ],
)
def test_a_ranks_last_report_is_held_to_its_types(wrong):
    assert jobs.read(jobs.Done, orjson.dumps(DONE)).model_dump(exclude_unset=True) == DONE
    with pytest.raises(BundleFailed, match=f"Done.{next(iter(wrong))}"):
        jobs.read(jobs.Done, orjson.dumps({**DONE, **wrong}))


@pytest.mark.parametrize("body", [b"[]", b"{}", b"", b"[" * 10**6, b'{"rank": 0, "bundle_import_s": NaN}', b"\xff"])
def test_a_start_that_is_none_is_the_bundles_fault(body):
    with pytest.raises(BundleFailed, match="Started"):
        jobs.read(jobs.Started, body)


def test_whatever_is_raised_while_a_bundle_is_handled_is_that_bundles_fault():
    with pytest.raises(BundleFailed, match="rank 3: ZeroDivisionError"), jobs.handling("rank 3"):
        1 / 0  # noqa: B018
    with pytest.raises(OSError), jobs.handling("rank 3"):
        raise OSError(28, "No space left on device")


def test_blame_cannot_be_put_on_the_engine_once_bundle_code_runs():
    fault = jobs.Fault(kind="engine", message="disk\nfull\x1b[2J" + "x" * 90_000)
    assert isinstance(fault.error(ours_possible=True), EngineFault)
    error = fault.error(ours_possible=False)
    assert isinstance(error, BundleFailed) and error.rule == "prism:runtime-error"
    assert str(error).startswith("disk full [2J") and len(str(error)) == jobs.MAX_MESSAGE
    named = jobs.Fault(kind="rejected", rule="prism:tokenizer", message="").error(ours_possible=False)
    assert isinstance(named, BundleRejected) and named.rule == "prism:tokenizer"
    made_up = jobs.Fault(kind="rejected", rule="prism:fine", message="").error(ours_possible=False)
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
