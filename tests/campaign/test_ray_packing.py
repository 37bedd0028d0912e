"""Packing on Ray, for real: the same bytes as threads make, also when a worker is killed meanwhile."""

import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from prism_fast.data.pack import pack
from prism_fast.data.tokenizers import reference_tokenizer, tokenizer_from_file
from tests.live_processes import living

ray = pytest.importorskip("ray")


def write_documents(path: Path, megabytes: int) -> None:
    words = ("the", "quick", "naïve", "fox", "jumped", "over", "1,024", "λ", "dogs;", "\\n")
    with path.open("w", encoding="utf-8") as file:
        number = size = 0
        while size < megabytes << 20:
            text = " ".join(words[(number * 7 + k * k) % len(words)] for k in range(20 + number % 700))
            size += file.write(f'{{"id": "d{number}", "text": "{text}"}}\n')
            number += 1


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def encoding_workers() -> list[int]:
    return [p.pid for p in living() if p.words[0].startswith("ray::_encode")]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_cluster_packs_the_bytes_that_threads_pack_and_loses_a_worker_without_a_trace(tmp_path):
    from prism_fast.campaign.encoders import RayEncoders

    tokenizer = reference_tokenizer("gpt2")
    write_documents(tmp_path / "text.jsonl", 12)
    pack([tmp_path / "text.jsonl"], tmp_path / "threads", tokenizer, documents_per_shard=500)
    killed = []

    def kill_one() -> None:
        while not killed and not ended.wait(0.01):
            for pid in encoding_workers()[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    ended = threading.Event()
    killer = threading.Thread(target=kill_one)
    with RayEncoders(tokenizer, "local") as encoders:
        killer.start()
        try:
            pack([tmp_path / "text.jsonl"], tmp_path / "ray", tokenizer, documents_per_shard=500, encoders=encoders)
        finally:
            ended.set()
            killer.join()
    assert len(killed) == 1
    assert files(tmp_path / "ray") == files(tmp_path / "threads")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_command_packs_on_a_cluster(tmp_path):
    write_documents(tmp_path / "text.jsonl", 1)
    for name, options in (("threads", ()), ("ray", ("--address=local",))):
        command = [sys.executable, "-m", "prism_fast.cli.main", "pack", str(tmp_path / "text.jsonl")]
        done = subprocess.run([*command, f"--out={tmp_path / name}", *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert files(tmp_path / "ray") == files(tmp_path / "threads")


def test_a_tokenizer_travels_by_what_it_is_made_of(tmp_path):
    import base64

    ranks = [bytes([i]) for i in range(256)] + [b"th", b"the"]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(ranks)]
    (tmp_path / "own.tiktoken").write_bytes(b"\n".join(lines))
    own = tokenizer_from_file(tmp_path / "own.tiktoken", pattern=r"\S+|\s+")
    (tmp_path / "own.tiktoken").unlink()
    for tokenizer in (reference_tokenizer("bytes"), reference_tokenizer("gpt2"), own):
        again = pickle.loads(pickle.dumps(tokenizer))
        assert (again.name, again.fingerprint) == (tokenizer.name, tokenizer.fingerprint)
        assert again.encode_ordinary("the thé <|endoftext|>").tolist() == (
            tokenizer.encode_ordinary("the thé <|endoftext|>").tolist()
        )
