"""parallel=ddp_torch: PyTorch's DistributedDataParallel, the peer of every strategy here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.registry import Look
from parallel.strategies.strategy import Strategy, strategy


@strategy("ddp_torch", look=Look(colour="#D55E00", marker="v", baseline="PyTorch's DDP"))
@dataclass(kw_only=True, slots=True)
class TorchDDP(Strategy):
    """Bucketed gradient all-reduce that overlaps with the backward pass (Li et al., 2020)."""

    dp: int = 2
    bucket_size_mb: float = 25
    """Gradients are all-reduced in buckets of about this many MiB; 25 is PyTorch's default."""

    def __post_init__(self) -> None:
        Strategy.__post_init__(self)
        if not 0 < self.bucket_size_mb < math.inf:
            raise ValueError(
                f"parallel.bucket_size_mb={self.bucket_size_mb:g}: must be positive and finite"
            )
        if self.bucket_size_mb == int(self.bucket_size_mb):
            # Ids of cases are hashes of their options, and were made with whole numbers.
            self.bucket_size_mb = int(self.bucket_size_mb)

    def gradient_buffers(self, sizes: Sequence[float]) -> float:
        return 1.0 if self.world_size > 1 else 0.0

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        if self.data_ranks == 1:
            # DDP needs a process group, and one rank has none.
            return model
        return torch.nn.parallel.DistributedDataParallel(
            model,
            process_group=self.data_group(),
            bucket_cap_mb=self.bucket_size_mb,
            gradient_as_bucket_view=True,
        )
