"""Attention on one device: backends, kernels and caches.

Imports nothing else of this project, so that a kernel can be lifted out and used alone.
"""

from kernels.backend import (
    BACKENDS,
    Attention,
    AttentionBackend,
    Decoding,
    DelegatedAttention,
    DenseAttention,
    attention_backend,
)
from kernels.problem import AttentionProblem, AttentionSpec, Packing

__all__ = [
    "BACKENDS",
    "Attention",
    "AttentionBackend",
    "AttentionProblem",
    "AttentionSpec",
    "Decoding",
    "DelegatedAttention",
    "DenseAttention",
    "Packing",
    "attention_backend",
]
