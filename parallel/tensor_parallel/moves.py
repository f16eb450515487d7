"""What travels between tensor-parallel ranks: three exchanges, local tensors in and out.

    forward                              backward
    gather_sequence   all-gather         reduce-scatter: each rank has a part of the gradient's sum
    scatter_sum       reduce-scatter     all-gather
    summed_gradient   nothing            all-reduce: each rank has seen its own tokens alone

Each says which placement its local tensor is a part of and which one it wants; DTensor makes the
collective of the two, and the one of their gradients.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

SEQUENCE_DIM = 1
"""Of activations [B, S, ...]."""


def gather_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's tokens [B, S / tp, ...] -> those of all ranks [B, S, ...].

    What follows computes another part of the output on each rank, so that gradients that come
    back are parts of a sum. Under autocast x is cast first, as matmuls would: half the bytes
    travel, and one copy is kept where each matmul would keep its own.
    """
    if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    part = DTensor.from_local(x, mesh, [Shard(SEQUENCE_DIM)], run_check=False)
    whole = cast(DTensor, part.redistribute(placements=[Replicate()]))
    return whole.to_local(grad_placements=[Partial()])


def scatter_sum(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Parts of a sum, [B, S, ...] on each rank -> the sum's tokens of this rank, [B, S / tp, ...].

    Added in x's dtype.
    """
    part = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    return cast(DTensor, part.redistribute(placements=[Shard(SEQUENCE_DIM)])).to_local()


def summed_gradient(parameter: Tensor, mesh: DeviceMesh) -> Tensor:
    """A parameter that all ranks hold and use on their own tokens; its gradient is their sum.

    Part of the graph, and not a hook on the parameter, which containers that replace parameters
    would lose.
    """
    whole = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])
