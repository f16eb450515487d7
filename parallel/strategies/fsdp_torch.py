"""PyTorch's fully_shard, the peer of our fully sharded data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.registry import Look
from parallel.strategies._fully_sharded import FullyShardedStrategy
from parallel.strategy import strategy

if TYPE_CHECKING:
    from torch import nn


@strategy("fsdp_torch", look=Look(colour="#882255", marker="*"))
@dataclass(kw_only=True, slots=True)
class TorchFSDP(FullyShardedStrategy):
    """Every block and the rest are sharded along their first dimension (FSDP2)."""

    def __post_init__(self) -> None:
        FullyShardedStrategy.__post_init__(self)
        if self.data_ranks == 1 and self.compute_dtype is not None:
            raise ValueError(
                f"parallel.compute_dtype={self.compute_dtype}: PyTorch's fully_shard needs several "
                "ranks; set parallel.dp to at least 2"
            )

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.data_ranks == 1:
            # It needs a process group, which one rank does without.
            return model
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from parallel.data.containers import broadcast_from_first
        from parallel.data.model_blocks import blocks_of

        mesh = self.data_mesh()
        broadcast_from_first(model, self.data_group())
        dtype = self.torch_dtype()
        # As ours, blocks take what the rest of the model hands them, tables in float32 too.
        policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        return model

    def after_backward(self, model: nn.Module) -> None:
        """It has averaged when backward has ended."""
