"""The losses that miners import and validators score with. Needs torch and numpy alone."""

from prism_fast.kernels import nn
from prism_fast.kernels.backends import RowShard
from prism_fast.kernels.backends.recycled import empty_cache
from prism_fast.kernels.bits_per_byte import BitsPerByte, CodeLength, batch_code_length
from prism_fast.kernels.dispatch import available_backends, backend_for, backend_report, use_backend
from prism_fast.kernels.from_hidden import linear_cross_entropy
from prism_fast.kernels.from_logits import cross_entropy
from prism_fast.kernels.scoring import TokenNll, merge_shards, token_nll, token_nll_shard

__all__ = [
    "BitsPerByte",
    "CodeLength",
    "RowShard",
    "TokenNll",
    "available_backends",
    "backend_for",
    "backend_report",
    "batch_code_length",
    "cross_entropy",
    "empty_cache",
    "linear_cross_entropy",
    "merge_shards",
    "nn",
    "token_nll",
    "token_nll_shard",
    "use_backend",
]
