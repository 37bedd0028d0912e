"""Frames survive any fragmentation, and what is not a frame is refused."""

import socket
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_fast.harness.process import wire

FRAMES = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=300)), max_size=8)


@given(FRAMES, st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_frames_come_out_as_they_went_in_however_they_are_cut(frames, cuts):
    stream = b"".join(wire.encode(kind, body) for kind, body in frames)
    decoder, out, at, turn = wire.FrameDecoder(), [], 0, 0
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        out += decoder.feed(stream[at : at + step])
        at, turn = at + step, turn + 1
    assert out == frames


def test_a_frame_that_claims_gigabytes_is_refused_before_it_is_read():
    with pytest.raises(wire.FrameError, match="claims"):
        wire.FrameDecoder().feed(wire.HEADER.pack(1, 1 << 30))


@pytest.fixture
def channel(tmp_path):
    path = str(tmp_path / "s")
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(1)
    rank = wire.RankChannel(path)
    referee = wire.Channel(server.accept()[0])
    yield rank, referee
    rank.close()
    referee.close()
    server.close()


def test_a_stop_is_seen_without_blocking(channel):
    rank, referee = channel
    assert rank.stop_requested() is None
    referee.send_json(wire.STOP, {"reason": "interrupted"})
    assert rank.stop_requested() == "interrupted"
    assert rank.stop_requested() == "interrupted"


def test_a_referee_that_is_gone_stops_the_loop(channel):
    rank, referee = channel
    referee.close()
    assert rank.stop_requested() == "referee gone"


def test_ask_waits_for_go_and_obeys_stop(channel):
    rank, referee = channel
    referee.send(wire.GO)
    referee.send(wire.GO)
    assert rank.ask(0).kind == rank.ask(1).kind == wire.GO
    referee.send_json(wire.STOP, {"reason": "wall_clock"})
    assert rank.ask(2) == "wall_clock"
    assert [frame.kind for frame in referee.receive_now()] == [wire.READY] * 3


def test_polling_an_idle_channel_returns_at_once(channel):
    rank, referee = channel
    assert referee.receive_now() == [] and rank.receive_now() == []


def test_a_descriptor_travels_with_its_frame(channel, tmp_path):
    rank, referee = channel
    path = tmp_path / "passed"
    path.write_text("by descriptor")
    with path.open() as f:
        referee.send(wire.REGION, b"first", fd=f.fileno())
    referee.send(wire.BATCH, b"x" * 100_000)
    frame = rank.wait_for(wire.REGION)
    with open(frame.fd) as received:
        assert received.read() == "by descriptor"
    assert len(rank.wait_for(wire.BATCH).body) == 100_000


def test_a_frame_that_lacks_its_descriptor_is_refused(channel):
    rank, referee = channel
    referee.send(wire.REGION)
    with pytest.raises(wire.FrameError, match="descriptor"):
        rank.receive(timeout=5)


def test_a_peer_that_answers_and_goes_at_once_is_still_sent_to():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    real = socket.send_fds

    def send_then_lose_the_peer(*arguments):
        sent = real(*arguments)
        theirs.recv(1 << 16)
        theirs.sendall(wire.encode(wire.LOADED, b"{}"))
        theirs.close()
        return sent

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile() as file:
        patch.setattr(socket, "send_fds", send_then_lose_the_peer)
        channel = wire.Channel(ours)
        channel.send(wire.STATE, b"{}", fd=file.fileno())
        assert channel.receive(5).kind == wire.LOADED
    channel.close()
