"""Names and numbers of the contract. Imports nothing else of ours."""

from prism_fast.protocol.context import PrismBatch, PrismContext

__all__ = ["PrismBatch", "PrismContext"]
