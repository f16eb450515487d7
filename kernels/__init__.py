"""Attention on one device: one file per backend, each behind the same small interface.

Imports nothing else of this project, so that a kernel can be lifted out and used alone.
"""

from kernels.backend import (
    BACKENDS,
    AttentionBackend,
    AttentionProblem,
    Packing,
    attention_backend,
)

__all__ = ["BACKENDS", "AttentionBackend", "AttentionProblem", "Packing", "attention_backend"]
