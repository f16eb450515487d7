"""Gradients of a rank's own keys, to which other ranks add."""

from __future__ import annotations

import pytest
import torch

from kernels import AttentionSpec
from parallel.context.blocks.halo import Halo
from parallel.context.blocks.loops import Contribution, Visit
from parallel.context.blocks.rows import DenseRows
from parallel.context.blocks.schedule import KernelCall
from parallel.context.blocks.score_blocks import disjoint
from parallel.context.transports.own_gradients import OwnGradients


class TestDisjoint:
    def test_parts_that_touch_are(self) -> None:
        assert disjoint([slice(4, 6), slice(0, 4), slice(5, 5)])
        assert disjoint([])

    def test_parts_with_a_row_in_common_are_not(self) -> None:
        assert not disjoint([slice(4, 6), slice(0, 5)])
        assert not disjoint([slice(0, 9), slice(1, 2), slice(20, 21)])


def gradients(own: torch.Tensor, *, asked_once: bool) -> OwnGradients:
    """dk and dv as one call gave them, both ``own``."""
    everything = DenseRows(slice(0, own.shape[2]), whole=True)
    spec = AttentionSpec(causal=True, scale=1.0)
    call = KernelCall(q=everything, kv=everything, first=True, spec=spec)
    visit = Visit(step=0, source=0, kv_heads=slice(0, own.shape[1]), k=own, v=own)
    halo = Halo(needed=(), asked=(), asked_once=asked_once, counts=None)
    return OwnGradients(visit, [Contribution(call, own, own.clone())], halo)


def test_a_row_that_is_asked_for_once_is_added_to_as_in_float32() -> None:
    generator = torch.Generator().manual_seed(3)
    own, part = torch.randn(2, 1, 2, 64, 8, generator=generator).bfloat16()
    expected = own.clone()
    expected[:, :, 40:] = (own.float() + part.float()).bfloat16()[:, :, 40:]
    total = gradients(own, asked_once=True)
    total.add(DenseRows(slice(40, 64), whole=False), [part[:, :, 40:]] * 2)
    dk, dv = total.result()
    assert dk.data_ptr() == own.data_ptr(), "in place"
    assert torch.equal(dk, expected)
    assert torch.equal(dv, expected)


@pytest.mark.parametrize("asked_once", [True, False])
def test_rows_that_are_asked_for_again_are_summed_in_float32(asked_once: bool) -> None:
    """257 additions of 2^-8 to 1: to a bfloat16 number each would be lost."""
    total = gradients(torch.ones(1, 2, 8, 3, dtype=torch.bfloat16), asked_once=asked_once)
    rows, part = DenseRows(slice(3, 5), whole=False), torch.full((1, 2, 2, 3), 2.0**-8)
    for _ in range(257):
        total.add(rows, [part.bfloat16()] * 2)
    for x in total.result():
        assert (x[:, :, 3:5].float() == (1.0 if asked_once else 1.0 + 257 / 256)).all()
        assert (x[:, :, :3] == 1.0).all()
        assert (x[:, :, 5:] == 1.0).all()
