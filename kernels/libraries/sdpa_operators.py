"""The operators behind scaled_dot_product_attention that give the log-sum-exp, and take it.

They are PyTorch's, and internal: an underscore and no promise. PyTorch's own context parallel
attention calls them too. Shapes are this project's, [B, H, S, D] with fewer heads in k and v;
cuDNN's log-sum-exp has a further dimension of size 1. The kernels read a head's entries one after
another, and PyTorch checks that only on the way from its public function, so that a tensor whose
last stride is another would give wrong results here without a word: such a one is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.problem import AttentionSpec

_ALIGNED = 8
"""FlashAttention-2 reads 16 bytes at a time: head_dim is padded to a multiple of this."""


def forward(
    operator: str, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """(o, lse) by ``flash``, ``flash_for_cpu`` or ``cudnn``."""
    q, k, v = (with_adjacent_entries(x) for x in (q, k, v))
    if operator == "flash_for_cpu":
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, spec.causal, scale=spec.scale
        )
    elif operator == "flash":
        head_dim = v.shape[-1]
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            *(_aligned(x) for x in (q, k, v)), 0.0, spec.causal, False, scale=spec.scale
        )
        o = o[..., :head_dim]
    else:
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, spec.causal, False, scale=spec.scale
        )
    return o, lse.reshape(q.shape[:3])


def backward(
    operator: str,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from any lse of the same rows, such as that of all keys of a ring."""
    do, q, k, v, o = (with_adjacent_entries(x) for x in (do, q, k, v, o))
    # The kernels read it by its address alone.
    lse = lse.contiguous()
    if operator == "flash_for_cpu":
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, spec.causal, scale=spec.scale
        )
        return dq, dk, dv
    # The random state of dropout, which is off; the batch is not packed.
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    lengths = (None, None, q.shape[2], k.shape[2])
    if operator == "flash":
        head_dim = q.shape[-1]
        do, q, k, v, o = (_aligned(x) for x in (do, q, k, v, o))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, o, lse, *lengths, 0.0, spec.causal, seed, offset, scale=spec.scale
        )
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim]
    lse = lse.unsqueeze(-1)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse, seed, offset, None, *lengths, 0.0, spec.causal, scale=spec.scale
    )
    return dq, dk, dv


def with_adjacent_entries(x: Tensor) -> Tensor:
    """x, or a copy where the entries of a head do not lie one after another."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _aligned(x: Tensor) -> Tensor:
    missing = -x.shape[-1] % _ALIGNED
    return pad(x, (0, missing)) if missing else x
