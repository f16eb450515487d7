"""PyTorch's experimental context_parallel, entered once for many calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kernels import Attention, AttentionSpec
from parallel.context.blocks.layouts import Layout
from parallel.context.bound import SplitAttention


class PatchedAttention(SplitAttention):
    """A kernel of scaled_dot_product_attention, called while that is PyTorch's ring."""

    def __init__(self, kernel: Attention, layout: Layout, group: dist.ProcessGroup) -> None:
        super().__init__(layout, group)
        self._kernel = kernel

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        return self._kernel.attend(q, k, v, spec)


@contextlib.contextmanager
def patched_sdpa(group: dist.ProcessGroup, device: torch.device, rotate: str) -> Iterator[None]:
    """Run scaled_dot_product_attention over the group, forward and backward, while inside."""
    if group.size() == 1:
        yield
        return
    # Experimental: a version of torch may lack it.
    from torch.distributed.tensor import experimental
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    mesh = DeviceMesh.from_group(group, device.type)
    set_rotate_method(rotate)
    # PyTorch requires a tensor to split; ours are split already, by the same layout.
    nothing = torch.zeros(2 * group.size(), device=device)
    with experimental.context_parallel(mesh, buffers=[nothing], buffer_seq_dims=[0]):
        yield
