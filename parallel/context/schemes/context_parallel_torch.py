"""attention=context_parallel_torch: PyTorch's own, the peer that the schemes are compared with.

``torch.distributed.tensor.experimental.context_parallel`` replaces
scaled_dot_product_attention by a ring over the zigzag layout, merged in float32; an experimental
interface, with the limits that :meth:`why_not_split` reports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
import torch.distributed as dist

from kernels import AttentionProblem, attention_backend
from kernels.registry import Look
from parallel.context import bound
from parallel.context.attention import SequenceParallelAttention, local_memory
from parallel.context.blocks.layouts import Contiguous, Layout, Zigzag
from parallel.context.schemes import _torch_peer

ROTATE_METHODS = ("allgather", "alltoall")

KERNELS = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient")
"""Kernels that PyTorch has a ring of."""


@attention_backend("context_parallel_torch", look=Look(colour="#661100", marker="P"))
@dataclass(kw_only=True, slots=True)
class TorchContextParallel(SequenceParallelAttention):
    """PyTorch's context_parallel around one kernel of scaled_dot_product_attention."""

    kernel: str = "sdpa_cudnn"
    """sdpa_flash, sdpa_cudnn or sdpa_efficient."""
    rotate: str = "allgather"
    """How keys travel: gathered at once (allgather), or from rank to rank (alltoall)."""

    def __post_init__(self) -> None:
        SequenceParallelAttention.__post_init__(self)
        if self.kernel not in KERNELS:
            raise ValueError(
                f"attention.kernel={self.kernel}: must be one of {', '.join(KERNELS)}, which "
                "PyTorch's context_parallel knows"
            )
        if self.rotate not in ROTATE_METHODS:
            raise ValueError(
                f"attention.rotate={self.rotate}: must be one of {', '.join(ROTATE_METHODS)}"
            )

    def layout(self, num_ranks: int) -> Layout:
        return Zigzag(num_ranks=num_ranks) if num_ranks > 1 else Contiguous(num_ranks=1)

    def kernel_of(self, problem: AttentionProblem) -> str:
        return self.kernel

    def transport_of(self, problem: AttentionProblem) -> str:
        return self.rotate

    def why_not_split(self, problem: AttentionProblem) -> str | None:
        if problem.device != "cuda":
            return "PyTorch's context_parallel has kernels for CUDA devices only"
        if find_spec("torch.distributed.tensor.experimental") is None:
            return "this version of torch has no torch.distributed.tensor.experimental"
        if problem.packed:
            return "takes no packed batch of different lengths"
        if not problem.causal:
            return "PyTorch's context_parallel balances a causal mask and refuses calls without"
        multiple = self.layout(problem.cp).multiple
        if problem.q_len % multiple or problem.kv_len != problem.q_len:
            return f"{problem.q_len} tokens do not divide by {multiple}, and it does not pad"
        return None

    def split_peak_memory(self, problem: AttentionProblem) -> dict[str, float] | None:
        """Local tensors and, gathered at once, all ranks' keys; merged results are in float32.

        Each call of the kernel has the queries of a rank and as many keys.
        """
        found = local_memory(problem, self.layout(problem.cp))
        kv = found.pop("kv")
        blocks = problem.cp if self.rotate == "allgather" else 2
        wide = 1 if problem.dtype == "float32" else 2
        found |= {"visiting_keys": blocks * kv, "dk_dv": 3 * wide * kv}
        if problem.needs_grad:
            local = self.layout(problem.cp).local_len(problem.q_len)
            call = replace(problem, cp=1, q_len=local, kv_len=local)
            found["kernel_workspace"] = self.on_one_device.backward_workspace(call)
        return found

    @contextlib.contextmanager
    def bind(
        self, group: dist.ProcessGroup, device: torch.device
    ) -> Iterator[bound.SplitAttention]:
        with _torch_peer.patched_sdpa(group, device, self.rotate):
            yield _torch_peer.PatchedAttention(self.on_one_device, self.layout(group.size()), group)
