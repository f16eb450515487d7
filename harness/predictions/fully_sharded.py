"""Peak of a step whose weights are gathered block by block (ZeRO stage 3, FSDP).

A rank holds its shards throughout. Besides, weights outside of blocks are whole from the forward
pass to the end of the backward pass, and within a pass two blocks: the one in use and the next one.
The backward pass ends each block with its gradients and, of the same size, the buffer in which they
travel; what arrives is a shard. :class:`parallel.data.FSDP` and PyTorch's fully_shard agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.memory import MemoryPrediction

WHOLE_BLOCKS = 2
"""Blocks whose weights are whole at once."""

GRADIENT_COPIES = 2
"""A block's gradients, and the buffer in which they travel."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Moment:
    """Bytes beside shards of weights and optimizer state at one moment of a step."""

    gathered: float
    """Whole weights."""
    gradients_or_activations: float

    @property
    def total(self) -> float:
        return self.gathered + self.gradients_or_activations


def peak_moment(
    whole: MemoryPrediction,
    *,
    num_blocks: int,
    block: float,
    outside: float,
    gradient_share: float,
) -> Moment:
    """The moment of a step at which a rank holds most.

    Args:
        whole: of the same step where no weight is sharded.
        block: bytes of one block's weights in the dtype in which they are used.
        outside: of the weights outside of blocks.
        gradient_share: fraction of the gradients that a rank keeps.
    """
    in_use = outside + WHOLE_BLOCKS * block
    if not whole.gradients:
        return Moment(gathered=in_use, gradients_or_activations=whole.activations)
    # The head's gradients come first, and travel last.
    travelling = GRADIENT_COPIES * block + outside / 2
    left = whole.saved - num_blocks * whole.of_block
    moments = (
        # Where the loss is, no block is needed.
        Moment(gathered=outside, gradients_or_activations=whole.activations),
        Moment(gathered=in_use, gradients_or_activations=whole.saved + whole.recomputed),
        # The last block's gradients, the first of the backward pass, and the first block's.
        Moment(
            gathered=in_use,
            gradients_or_activations=whole.saved - whole.of_block + travelling,
        ),
        Moment(
            gathered=in_use,
            gradients_or_activations=left + travelling + gradient_share * whole.gradients,
        ),
    )
    return max(moments, key=lambda moment: moment.total)
