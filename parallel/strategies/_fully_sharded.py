"""What fully sharded data parallelism shares, ours and PyTorch's: all state is divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel.strategies._data_parallel import DataParallelStrategy

if TYPE_CHECKING:
    import torch

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(kw_only=True, slots=True)
class FullyShardedStrategy(DataParallelStrategy):
    """A strategy of which each rank holds a part of parameters, gradients and state."""

    compute_dtype: str | None = None
    """dtype in which weights are gathered and used, and gradients travel; the weights that the
    optimizer updates stay as they are. None gathers them in that dtype."""

    def __post_init__(self) -> None:
        DataParallelStrategy.__post_init__(self)
        if self.compute_dtype is not None and self.compute_dtype not in COMPUTE_DTYPES:
            raise ValueError(
                f"parallel.compute_dtype={self.compute_dtype}: must be null or one of "
                f"{', '.join(COMPUTE_DTYPES)}"
            )

    @property
    def parameter_share(self) -> float:
        return 1 / self.data_ranks

    @property
    def gradient_share(self) -> float:
        return 1 / self.data_ranks

    @property
    def optimizer_state_share(self) -> float:
        return 1 / self.data_ranks

    def torch_dtype(self) -> torch.dtype | None:
        import torch

        return None if self.compute_dtype is None else getattr(torch, self.compute_dtype)

    @property
    def gradients_differ(self) -> bool:
        return True
