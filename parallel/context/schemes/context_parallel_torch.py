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
from parallel.context.attention import SequenceParallelAttention
from parallel.context.blocks.layouts import Contiguous, Layout, Zigzag
from parallel.context.memory.sizes import LocalSizes
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
        """Where a kernel call reads half of a visitor's keys, in the backward pass.

        By ``_templated_ring_attention_backward`` of PyTorch 2.11: sums in float32, of dk and dv as
        they were, joined to be sent, and received; and what the call before gave.
        """
        sizes = LocalSizes(problem=problem, layout=self.layout(problem.cp))
        q, kv, wide = sizes.q, sizes.kv, sizes.wide
        # Joined to be sent, and received: from all ranks at once, or twice from a neighbour.
        visiting = (problem.cp + 1 if self.rotate == "allgather" else 3) * kv
        found = {"inputs": q + kv, "output": q, "lse": sizes.lse}
        if not problem.needs_grad:
            # Float32 o and its update.
            return found | {"accumulator": 2 * wide * q, "visiting_keys": visiting}
        local = sizes.local_len
        call = replace(problem, cp=1, q_len=local, kv_len=local // 2, causal=False)
        return found | {
            "output_gradient": q,
            "visiting_keys": visiting,
            "dq": wide * q + q,
            "dk_dv": 3 * wide * kv + kv / 2,
            "earlier_results": q + kv,
            "kernel_workspace": self.on_one_device.backward_workspace(call),
        }

    @contextlib.contextmanager
    def bind(
        self, group: dist.ProcessGroup, device: torch.device
    ) -> Iterator[bound.SplitAttention]:
        with _torch_peer.patched_sdpa(group, device, self.rotate):
            yield _torch_peer.PatchedAttention(self.on_one_device, self.layout(group.size()), group)
