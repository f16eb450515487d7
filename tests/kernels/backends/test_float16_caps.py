"""Scores with a cap in float16, of which neither the cap times a gradient nor a small share fit."""

from __future__ import annotations

import pytest
import torch

from kernels import AttentionSpec
from tests.support.attention_by_definition import backend_of


@pytest.mark.parametrize(("softcap", "factor"), [(1e30, 1.0), (1e4, 1.0), (50.0, 4096.0)], ids=str)
@pytest.mark.parametrize("name", ["naive", "flash_torch"])
def test_float16_has_room_for_any_cap(name: str, softcap: float, factor: float) -> None:
    """Output and gradients against float64, the latter multiplied as training in float16 does."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(1, 2, 9, 8, generator=generator).half() for _ in range(4))
    do = do * factor
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    spec = AttentionSpec(causal=False, scale=0.5, softcap=softcap)
    o = backend_of(name).attend(*leaves, spec)
    found = [o.detach(), *torch.autograd.grad(o, leaves, do)]

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    scores = softcap * torch.tanh(exact[0] @ exact[1].mT * 0.5 / softcap)
    right = scores.softmax(-1) @ exact[2]
    expected = [right.detach(), *torch.autograd.grad(right, exact, do.double())]
    for got, want in zip(found, expected, strict=True):
        assert float((got.double() - want).abs().max()) < 4e-3 * float(want.abs().max())
