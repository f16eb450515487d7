"""Distributed data parallelism, step by step: every rank holds the model and a batch of its own.

Read in this order: ``gradients`` (what one all-reduce averages: one gradient, or a bucket of
them), ``containers`` (when the all-reduces start: after the backward pass, or during it) and
``sharded_optimizer`` (the optimizer's state, divided among the ranks).
Nothing here imports torch until one of the names below is used.

CS336 assignment 2, sections 2.2, 2.3 and 3; Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training" (VLDB 2020).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "NaiveDDP": "parallel.data_parallel.containers",
    "FlatDDP": "parallel.data_parallel.containers",
    "OverlappedDDP": "parallel.data_parallel.containers",
    "BucketedDDP": "parallel.data_parallel.containers",
    "ShardedOptimizer": "parallel.data_parallel.sharded_optimizer",
}

__all__ = ["BucketedDDP", "FlatDDP", "NaiveDDP", "OverlappedDDP", "ShardedOptimizer"]


def __getattr__(name: str) -> Any:
    """The classes, imported when first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
