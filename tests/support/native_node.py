"""Calls for tests of the compiled autograd node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.flash import flash_attention
from kernels.flash.call.arguments import FlashOptions

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

NODE = "FlashAttentionBackward"
"""The name of the node in autograd."""


def run(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, autograd: str = "auto", **options: Any
) -> tuple[Tensor, ...]:
    """o, dq, dk, dv."""
    o = flash_attention(q, k, v, options=FlashOptions(autograd=autograd), **options)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do)
