"""Names of files that a bundle made: faithful, printable, found again."""

import hashlib
import os

import orjson
import pytest

from prism_fast.harness.process.artifacts import artifact_digests, files_below
from prism_fast.harness.process.wire import Channel
from prism_fast.protocol.errors import one_line
from prism_fast.protocol.file_names import escaped, unescaped

NAMES = [
    b"plain.pt",
    "ünï 🙂".encode(),
    b"\xff\xfe.pt",
    b"half\xc3",
    b"line\nend\r\t",
    b"\x1b[2J",
    b"back\\slash",
    b"\\xff",
    b"\\\\x41\\",
    "\u202ereversed".encode(),
    b"\x7f\x80",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_printable_utf_8_and_is_found_again(name):
    text = escaped(os.fsdecode(name))
    assert text.isprintable() and text.encode().decode() == text == one_line(text)
    assert os.fsencode(unescaped(text)) == name


def test_names_that_differ_are_written_differently():
    assert len({escaped(os.fsdecode(name)) for name in NAMES}) == len(NAMES)
    assert escaped("a/b é.pt") == "a/b é.pt"


def test_artifacts_of_any_name_and_kind_are_listed_in_order(tmp_path):
    run, folder = tmp_path, tmp_path / "artifacts"
    folder.mkdir()
    for name in NAMES:
        (folder / os.fsdecode(name)).write_bytes(name)
    (folder / "a link").symlink_to("plain.pt")
    os.mkfifo(folder / "a pipe")
    closed = folder / "closed"
    closed.write_bytes(b"closed")
    closed.chmod(0)
    found = artifact_digests(run, folder, 100)
    assert [os.fsencode(unescaped(path)) for path, _, _ in found] == sorted(
        b"artifacts/" + n for n in [*NAMES, b"closed"]
    )
    for path, size, digest in found:
        content = (run / unescaped(path)).read_bytes()
        assert (size, digest) == (len(content), hashlib.sha256(content).hexdigest())
    orjson.dumps(found)
    assert {p.name for p in files_below(folder)} >= {"a link", "a pipe"}
    assert len(artifact_digests(run, folder, 3)) == 3


def test_what_a_process_says_of_such_a_name_arrives():
    import socket

    ours, theirs = socket.socketpair()
    here, there = Channel(ours), Channel(theirs)
    here.send_json(8, {"message": os.fsdecode(b"no such file: \xff.pt"), "number": 1})
    assert there.receive().json() == {"message": "no such file: ?.pt", "number": 1}
    here.close(), there.close()
