"""Tensor parallelism with sequence-parallel norms: every rank holds a part of each large weight.

Read in this order: ``exchanges`` (three collectives with their gradients), ``styles`` (how one
linear layer, embedding or norm is split, for DTensor's ``parallelize_module``), ``plan`` (the
style of each module of the transformer) and ``loss`` (cross-entropy of logits that are split
over the vocabulary).

The styles are our own and make no DTensors: parameters and activations are plain tensors, this
rank's shards. So any data-parallel container takes the result as any other module, with the
ranks that hold the same shards as its process group: ours, PyTorch's DistributedDataParallel,
which is not made for DTensor parameters, and ``fully_shard``. Attention kernels need no wrapping,
and the host does not dispatch each operator twice. Tools that read placements off parameters do
not work; ``plan`` has ``whole_parameters`` and ``gradient_norm`` in their place.

Shoeybi et al., "Megatron-LM" (2019), section 3; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (2022), section 4.2.2 (sequence parallelism).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Imported when first used (PEP 562): plans import modules of this folder, and no torch.
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

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
