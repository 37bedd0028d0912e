"""The losses that miners import and validators score with. Needs torch and numpy alone."""

from prism_fast.kernels.bits_per_byte import BitsPerByte, CodeLength, batch_code_length
from prism_fast.kernels.dispatch import available_backends, backend_for, backend_report, use_backend
from prism_fast.kernels.from_logits import cross_entropy
from prism_fast.kernels.scoring import TokenNll, token_nll

__all__ = [
    "BitsPerByte",
    "CodeLength",
    "TokenNll",
    "available_backends",
    "backend_for",
    "backend_report",
    "batch_code_length",
    "cross_entropy",
    "token_nll",
    "use_backend",
]
