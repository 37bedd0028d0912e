"""Text to tokens on disk, and tokens to batches. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prism_fast.data.corpus import Corpus as Corpus
    from prism_fast.data.corpus import Split as Split
    from prism_fast.data.corpus import build_corpus as build_corpus
    from prism_fast.data.corpus import open_corpus as open_corpus
    from prism_fast.data.corpus import resolve_data as resolve_data
    from prism_fast.data.corpus import verify_corpus as verify_corpus
    from prism_fast.data.loader import Block as Block
    from prism_fast.data.loader import TokenLoader as TokenLoader
    from prism_fast.data.plan import BucketPlan as BucketPlan
    from prism_fast.data.plan import RecordRows as RecordRows
    from prism_fast.data.plan import bucket_plan as bucket_plan
    from prism_fast.data.plan import fit_rows as fit_rows
    from prism_fast.data.shards import Shard as Shard
    from prism_fast.data.shards import ShardWriter as ShardWriter
    from prism_fast.data.shards import open_shard as open_shard
    from prism_fast.data.shards import write_shard as write_shard
    from prism_fast.data.stream import StreamBatch as StreamBatch
    from prism_fast.data.stream import TokenStream as TokenStream
    from prism_fast.data.tokenizers import Tokenizer as Tokenizer
    from prism_fast.data.tokenizers import reference_tokenizer as reference_tokenizer
    from prism_fast.data.tokenizers import tokenizer_from_file as tokenizer_from_file

# Where each public name lives. A submodule may not have the name of a function in it (`pack`): Python would set the
# attribute to the module as soon as it is imported.
_HOME = {
    "Block": "loader",
    "BucketPlan": "plan",
    "RecordRows": "plan",
    "TokenLoader": "loader",
    "bucket_plan": "plan",
    "fit_rows": "plan",
    "Corpus": "corpus",
    "Shard": "shards",
    "ShardWriter": "shards",
    "Split": "corpus",
    "StreamBatch": "stream",
    "TokenStream": "stream",
    "Tokenizer": "tokenizers",
    "build_corpus": "corpus",
    "open_corpus": "corpus",
    "open_shard": "shards",
    "reference_tokenizer": "tokenizers",
    "resolve_data": "corpus",
    "tokenizer_from_file": "tokenizers",
    "verify_corpus": "corpus",
    "write_shard": "shards",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        import importlib

        value = getattr(importlib.import_module(f"prism_fast.data.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'prism_fast.data' has no attribute {name!r}")
