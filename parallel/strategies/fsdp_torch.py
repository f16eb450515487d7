"""parallel=fsdp_torch: PyTorch's fully_shard, the peer of our fsdp."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.registry import Look
from parallel.data import hybrid_sharding, model_blocks, replicas
from parallel.strategies._bases import FullyShardedStrategy
from parallel.strategies.strategy import strategy


@strategy("fsdp_torch", look=Look(colour="#882255", marker="*"))
@dataclass(kw_only=True, slots=True)
class TorchFSDP(FullyShardedStrategy):
    """Every block and the rest are sharded along their first dimension (FSDP2), or also HSDP."""

    def __post_init__(self) -> None:
        FullyShardedStrategy.__post_init__(self)
        if self.data_ranks == 1 and self.compute_dtype is not None:
            raise ValueError(
                f"parallel.compute_dtype={self.compute_dtype}: PyTorch's fully_shard needs several "
                "ranks; set parallel.dp to at least 2"
            )

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        if self.data_ranks == 1:
            # FSDP needs a process group, and one rank has none.
            return model
        # ``import torch`` does not load this module.
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        tensors = (*model.parameters(), *model.buffers())
        replicas.broadcast_from_first(tensors, self.data_mesh().get_group())
        mesh = self.data_mesh()
        if self.copies > 1:
            # Of two axes, fully_shard replicates over the first and shards over the second.
            mesh = self.hybrid_mesh()[hybrid_sharding.REPLICATE, hybrid_sharding.SHARD]
        dtype = self.torch_dtype()
        # As in our FSDP, inputs of blocks are not cast: the rotary tables stay in float32.
        policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
        for block in model_blocks.blocks_of(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        return model

    def after_backward(self, model: torch.nn.Module) -> None:
        """Nothing: it has averaged gradients when backward ends."""
