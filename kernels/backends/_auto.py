"""The problem that a call of attention=auto poses, from its tensors, and who solves it.

torch.compile takes the choice for a constant: to it, the backend is the one that was chosen
when the call was compiled for these shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import AttentionBackend, AttentionProblem, Packing
from kernels.backends.auto import choose


def backend_of_call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> AttentionBackend:
    """For a differentiable dense call."""
    batch_size, num_heads, q_len, head_dim = q.shape
    return _choose(
        (batch_size, num_heads, k.shape[1], q_len, k.shape[2], head_dim),
        q.dtype,
        q.device.type,
        causal=causal,
        needs_grad=_needs_grad(q, k, v),
    )


def backend_of_packed_call(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, causal: bool
) -> AttentionBackend:
    """For a differentiable packed call."""
    return _choose(
        _packed_sizes(q, k, packing),
        q.dtype,
        q.device.type,
        causal=causal,
        needs_grad=_needs_grad(q, k, v),
        packed=True,
    )


def backend_with_lse(q: Tensor, k: Tensor, causal: bool) -> AttentionBackend:
    """For the explicit forward, and for the backward that may follow: one and the same."""
    batch_size, num_heads, q_len, head_dim = q.shape
    return _choose(
        (batch_size, num_heads, k.shape[1], q_len, k.shape[2], head_dim),
        q.dtype,
        q.device.type,
        causal=causal,
        needs_grad=True,
        with_lse=True,
    )


def packed_backend_with_lse(
    q: Tensor, k: Tensor, packing: Packing, causal: bool
) -> AttentionBackend:
    """The same over a packed batch."""
    return _choose(
        _packed_sizes(q, k, packing),
        q.dtype,
        q.device.type,
        causal=causal,
        needs_grad=True,
        packed=True,
        with_lse=True,
    )


def _packed_sizes(q: Tensor, k: Tensor, packing: Packing) -> tuple[int, ...]:
    num_sequences = packing.cu_seqlens_q.shape[0] - 1
    lengths = (packing.max_q_len, packing.max_kv_len)
    return (num_sequences, q.shape[1], k.shape[1], *lengths, q.shape[2])


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


@torch.compiler.assume_constant_result
def _choose(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    *,
    causal: bool,
    needs_grad: bool,
    packed: bool = False,
    with_lse: bool = False,
) -> AttentionBackend:
    batch_size, num_heads, num_kv_heads, q_len, kv_len, head_dim = sizes
    problem = AttentionProblem(
        batch_size=batch_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        causal=causal,
        needs_grad=needs_grad,
        packed=packed,
    )
    return choose(problem, with_lse=with_lse)
