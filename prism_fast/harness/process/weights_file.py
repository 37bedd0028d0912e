"""The trained state on disk: safetensors, each tensor of the state dict under its own name, tied ones written twice."""

from __future__ import annotations

import errno
from pathlib import Path

from torch import Tensor


def save_weights(state: dict[str, Tensor], path: Path | str) -> None:
    """Writes tensors, copied to the CPU. Raises OSError as any writer does, and then leaves no file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in state.items()}, path)
    except (OSError, SafetensorError) as error:
        Path(path).unlink(missing_ok=True)
        if isinstance(error, SafetensorError):  # which says what the system said, but is no OSError
            raise OSError(errno.EIO, str(error), str(path)) from None
        raise
