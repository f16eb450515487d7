"""Tensor parallelism with sequence-parallel norms: every rank holds a part of each large weight.

Read in this order: ``moves`` (the three exchanges between ranks), ``styles`` (what becomes of a
linear layer, an embedding, a norm, for DTensor's ``parallelize_module``), ``plan`` (which style
each module of the transformer gets) and ``loss`` (cross-entropy of logits that are split over
the vocabulary).

The styles are our own, and what they leave is no DTensor: parameters and activations are plain
tensors, this rank's part. So any container works on the result as on any module, given the
ranks that hold the same parts as its process group: those here as well as PyTorch's
DistributedDataParallel, which is not made for DTensor parameters, and ``fully_shard``. Attention
kernels take what they get, and the host does not dispatch each operator twice. What is lost are
tools that read placements off parameters; ``plan`` has ``whole_parameters`` and
``gradient_norm`` in their place.

Shoeybi et al., "Megatron-LM" (2019), section 3; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (2022), section 4.2.2 (sequence parallelism).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "ColumnParallel": "parallel.tensor.styles",
    "GatherInput": "parallel.tensor.styles",
    "GatheredColumnParallel": "parallel.tensor.styles",
    "RowParallel": "parallel.tensor.styles",
    "SequenceParallelNorm": "parallel.tensor.styles",
    "VocabParallelEmbedding": "parallel.tensor.styles",
    "gradient_norm": "parallel.tensor.plan",
    "split_transformer": "parallel.tensor.plan",
    "vocab_parallel_cross_entropy": "parallel.tensor.loss",
    "whole_parameters": "parallel.tensor.plan",
}

__all__ = [
    "ColumnParallel",
    "GatherInput",
    "GatheredColumnParallel",
    "RowParallel",
    "SequenceParallelNorm",
    "VocabParallelEmbedding",
    "gradient_norm",
    "split_transformer",
    "vocab_parallel_cross_entropy",
    "whole_parameters",
]


def __getattr__(name: str) -> Any:
    """The names above, imported when first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
