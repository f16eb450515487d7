"""Activation checkpointing: blocks whose activations are computed again in the backward pass.

Chen et al. 2016 (arXiv:1604.06174) keep the input of each block and run the block's forward pass
once more before its backward pass. Korthikanti et al. 2022 (arXiv:2205.05198, section 5) recompute
only activations that are large and cheap: all but those of linear layers and fused attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from kernels.ranges import named_range
from models.transformer import Transformer

CHECKPOINTED = "checkpointed"
"""Name of the profiler range around a checkpointed block, in both passes."""

_KEPT = ("mm", "addmm")
"""ATen operators of linear layers, whose outputs are kept; explicit attention's are bmm."""

_FUSED_ATTENTION = ("_scaled_dot_product", "_flash_attention_forward", "flash_forward", "flex_")


def is_checkpointed(index: int, every: int) -> bool:
    """Whether block ``index`` is one of every ``every``-th: the last of each group."""
    return index % every == every - 1


def checkpoint_blocks(model: Transformer, *, every: int = 1, selective: bool = False) -> None:
    """Checkpoint blocks of ``model``, whose names and state_dict stay as they are.

    Called before the model is compiled, so that torch.compile sees the recomputation.

    Args:
        every: one block in this many is checkpointed.
        selective: keep outputs of linear layers and of fused attention operators.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for index, block in enumerate(model.blocks):
        if is_checkpointed(index, every):
            block.forward = _recomputed(block.forward, options)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def marked(*inputs: Any) -> Any:
        with named_range(CHECKPOINTED):
            return forward(*inputs)

    def run(*inputs: Any) -> Any:
        # Without gradients nothing is kept in the first place.
        if not torch.is_grad_enabled():
            return forward(*inputs)
        return checkpoint(marked, *inputs, **options)

    return run


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operator.__name__.split(".")[0]
    if name in _KEPT or name.startswith(_FUSED_ATTENTION):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
