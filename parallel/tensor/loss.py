"""Cross-entropy of logits that are split over the vocabulary, without gathering them.

Each rank has [B, S, V / tp]. Gathered logits would be the largest tensor of the model and as
large a message; the loss of a token needs three numbers of each rank instead: its largest
logit, its sum of exponentials, and the target's logit if it has it (Megatron-LM, section 3).
PyTorch's ``loss_parallel`` computes the same of DTensor logits, inside a context that backward
must be in too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

IGNORE_INDEX = -100
"""A target that the loss ignores; PyTorch's default."""


def vocab_parallel_cross_entropy(
    logits_BSV: Tensor,
    targets_BS: Tensor,
    num_targets: float | None = None,
    *,
    mesh: DeviceMesh,
) -> Tensor:
    """Mean negative log-likelihood of the targets in nats, equal on all ranks.

    Computed in float32 or wider.

    Args:
        logits_BSV: this rank's part of the vocabulary, V / tp of them, in rank order.
        targets_BS: equal on all ranks; IGNORE_INDEX does not count.
        num_targets: divisor of the sum over targets; None is the number of these.
        mesh: of one axis, the ranks that share the vocabulary.
    """
    targets = targets_BS.flatten()
    losses = _CrossEntropy.apply(logits_BSV.flatten(0, 1), targets, mesh)
    counts = targets != IGNORE_INDEX
    total = losses.masked_fill(~counts, 0).sum()
    return total / (counts.sum() if num_targets is None else num_targets)


class _CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] of each row; saves the probabilities of this rank's columns."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, mesh: DeviceMesh) -> Tensor:
        wide = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        num_columns = wide.shape[1]
        column_T = targets_T - mesh.get_local_rank() * num_columns
        here_T = (column_T >= 0) & (column_T < num_columns)
        column_T1 = column_T.masked_fill(~here_T, 0).unsqueeze(1)

        largest_T = wide.amax(1)
        dist.all_reduce(largest_T, dist.ReduceOp.MAX, group=mesh.get_group())
        shifted = wide - largest_T.unsqueeze(1)
        of_target_T = shifted.gather(1, column_T1).squeeze(1).masked_fill(~here_T, 0)
        probabilities = shifted.exp_()
        sums = torch.stack([probabilities.sum(1), of_target_T])
        dist.all_reduce(sums, group=mesh.get_group())
        total_T, target_T = sums.unbind()
        probabilities.div_(total_T.unsqueeze(1))
        ctx.save_for_backward(probabilities, column_T1, here_T)
        ctx.dtype = logits_TV.dtype
        return total_T.log() - target_T

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> Any:
        # To autograd the saved probabilities are a constant, and the second order would be wrong.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "vocab_parallel_cross_entropy: create_graph=True asks for second derivatives, "
                "which are not available"
            )
        probabilities, column_T1, here_T = ctx.saved_tensors
        gradient_TV = probabilities * gradient_T.unsqueeze(1)
        of_target_T = gradient_T.masked_fill(~here_T, 0)
        gradient_TV.scatter_add_(1, column_T1, -of_target_T.unsqueeze(1))
        return gradient_TV.to(ctx.dtype), None, None
