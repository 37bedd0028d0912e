"""Tokenising for the packer on the cores of a Ray cluster. What is read and written stays on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from prism_fast.campaign.cluster import alive_nodes, connect
from prism_fast.data.documents import Document
from prism_fast.data.pack import Encoded, encode_run
from prism_fast.data.tokenizers import Tokenizer
from prism_fast.protocol.errors import EngineFault, UsageError

# Runs under way at once are some 1 MiB of text and as much of tokens each; a document may be longer.
OBJECT_STORE_BYTES = 256 * 1024**2
TRIES_AGAIN = 3  # after a lost worker: tokenising the same text gives the same tokens

_tokenizers: dict[str, Tokenizer] = {}  # in a worker, by fingerprint


def _encode(split: str, documents: Sequence[Document], fingerprint: str, shared: list[Any]) -> Encoded:
    if fingerprint not in _tokenizers:
        import ray

        _tokenizers[fingerprint] = ray.get(shared[0])
    return encode_run(split, documents, _tokenizers[fingerprint])


class _Task:
    """A run under way: a `data.pack.Pending`."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def result(self) -> Encoded:
        try:
            encoded: Encoded = self._ray.get(self._reference)
        except self._ray.exceptions.RayError as error:
            what = str(getattr(error, "cause", None) or error).splitlines()[-1]
            raise EngineFault(f"pack: the cluster did not tokenise a run of documents: {what}; pack again") from error
        return encoded

    def cancel(self) -> object:
        return self._ray.cancel(self._reference, force=True)


class RayEncoders:
    """`data.pack.Encoders` on Ray, one core a run: `with RayEncoders(tokenizer, address) as encoders: pack(...)`.

    `address`: "local" for this machine's cores, "auto" or HOST:PORT for a cluster whose nodes have prism_fast. A run of
    a worker that dies is tokenised again elsewhere. Raises UsageError, EngineFault.
    """

    def __init__(self, tokenizer: Tokenizer, address: str) -> None:
        self._ray = connect("pack", address, OBJECT_STORE_BYTES)
        self.width = int(sum(node.get("CPU", 0) for node in alive_nodes(self._ray)))
        if self.width == 0:
            self._ray.shutdown()
            raise UsageError(f"--address {address}: no node of the cluster has a core to tokenise on")
        self._fingerprint = tokenizer.fingerprint
        # In a list, so that a worker fetches it once and not with every task.
        self._shared = [self._ray.put(tokenizer)]
        self._task = self._ray.remote(_encode).options(num_cpus=1, max_retries=TRIES_AGAIN)

    def __enter__(self) -> RayEncoders:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ray.shutdown()

    def submit(self, split: str, documents: Sequence[Document]) -> _Task:
        return _Task(self._ray, self._task.remote(split, documents, self._fingerprint, self._shared))
