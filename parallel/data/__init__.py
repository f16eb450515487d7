"""Distributed data parallelism, step by step: every rank holds the model and a batch of its own.

Read in this order: ``gradients`` (transfers that average one gradient or a bucket of them),
``replicas`` (all ranks begin with the values of the first), ``data_parallel`` and ``containers``
(when transfers start: after the backward pass, or during it), ``clipping`` (gradients by the norm
of all),
``sharded_optimizer`` (the optimizer's state, divided among the ranks by whole parameters),
``flat`` and ``shards`` (tensors in one buffer, cut into a shard for each rank),
``shard_gradients`` (reduce-scatter) and ``zero`` (ranks update shards of replicated parameters).
In a room of its own, ``fsdp``, ranks hold shards alone; ``hybrid_sharding`` is for many hosts.

CS336 assignment 2, sections 2.2, 2.3 and 3; Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training" (VLDB 2020).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Imported when first used (PEP 562): plans import modules of this folder, and no torch.
_HOMES = {
    "NaiveDDP": "parallel.data.containers",
    "FlatDDP": "parallel.data.containers",
    "OverlappedDDP": "parallel.data.containers",
    "BucketedDDP": "parallel.data.containers",
    "ShardedOptimizer": "parallel.data.sharded_optimizer",
    "Zero1": "parallel.data.zero",
    "Zero2": "parallel.data.zero",
    "FSDP": "parallel.data.fsdp.container",
    "AgreeingGradScaler": "parallel.data.grad_scaler",
    "optimizer_of_shards": "parallel.data.elementwise_optimizer",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
