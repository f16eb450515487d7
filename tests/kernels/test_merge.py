"""The merge by log-sum-exp: the Triton kernel against PyTorch, and both against one softmax."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from kernels.merge import merge

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

needs_triton = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="Triton runs on a CPU under TRITON_INTERPRET=1 only",
)


def parts(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o, lse) in float32 and a new part, with rows that one or both parts do not reach."""
    generator = torch.Generator().manual_seed(7)
    o, new_o = (torch.randn(shape, generator=generator) for _ in range(2))
    lse, new_lse = (3 * torch.randn(shape[:-1], generator=generator) for _ in range(2))
    for x, seen, rows in ((o, lse, (0, 2)), (new_o, new_lse, (1, 2))):
        for row in rows:
            x[..., row, :] = 0.0
            seen[..., row] = -torch.inf
    return o.to(DEVICE), lse.to(DEVICE), new_o.to(DEVICE, dtype), new_lse.to(DEVICE)


def by_torch(o: Tensor, lse: Tensor, new_o: Tensor, new_lse: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, by the definition of a softmax over both."""
    weights = torch.stack([lse, new_lse]).double()
    whole = weights.logsumexp(dim=0)
    shares = (weights - whole.masked_fill(whole == -torch.inf, 0.0)).exp().unsqueeze(-1)
    return shares[0] * o.double() + shares[1] * new_o.double(), whole


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize("shape", [(2, 3, 37, 16), (4, 70, 40), (1, 2, 3, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_one_softmax(shape: tuple[int, ...], dtype: torch.dtype, fused: bool) -> None:
    o, lse, new_o, new_lse = parts(shape, dtype)
    expected = by_torch(o, lse, new_o, new_lse)
    if fused:
        from kernels import merge_kernel as _merge_kernel

        assert _merge_kernel.takes(o, new_o)
        got = _merge_kernel.merge(o, lse, new_o, new_lse)
    else:
        cpu = [x.cpu() for x in (o, lse, new_o, new_lse)]
        o = cpu[0]
        got = merge(*cpu)
    assert got[0].data_ptr() == o.data_ptr(), "in place"
    for mine, wanted in zip(got, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.cpu(), wanted.float().cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize("of", ["old", "new"])
@pytest.mark.parametrize("other", [0.5, -torch.inf])
def test_what_is_not_a_number_stays(of: str, other: float, fused: bool) -> None:
    """Minus infinity says that no key was seen; a part that is not a number has seen one."""
    o, new_o = torch.zeros(2, 3, 40, 16), torch.zeros(2, 3, 40, 16)
    lse, new_lse = torch.zeros(2, 3, 40), torch.full((2, 3, 40), other)
    if of == "new":
        lse, new_lse = new_lse, lse
    (o if of == "old" else new_o)[..., 5, :] = torch.nan
    (lse if of == "old" else new_lse)[..., 5] = torch.nan
    if fused:
        from kernels import merge_kernel as _merge_kernel

        got = _merge_kernel.merge(*(x.to(DEVICE) for x in (o, lse, new_o, new_lse)))
    else:
        got = merge(o, lse, new_o, new_lse)
    for x in got:
        bad = x.isnan().flatten(3).any(-1) if x.dim() == 4 else x.isnan()
        assert bad[..., 5].all()
        assert bad.sum() == 6


@needs_triton
def test_views_with_other_strides() -> None:
    """The layout of packed batches: [T, H, D] seen as [H, T, D], and lse [H, T] of a longer one."""
    from kernels import merge_kernel as _merge_kernel

    o, lse, new_o, new_lse = parts((5, 44, 24))
    expected = by_torch(o, lse, new_o, new_lse)
    o = o.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.zeros(5, 60, device=DEVICE)
    wide[:, 9:53] = lse
    got = _merge_kernel.merge(o, wide[:, 9:53], new_o, new_lse)
    for mine, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, wanted.float(), rtol=1e-5, atol=1e-5)


@needs_triton
def test_what_the_kernel_leaves_to_pytorch() -> None:
    from kernels import merge_kernel as _merge_kernel

    o, _, new_o, _ = parts((2, 3, 8, 16))
    assert not _merge_kernel.takes(o.bfloat16(), new_o)
    assert not _merge_kernel.takes(o[:, :, :, ::2], new_o[..., :8])
    assert not _merge_kernel.takes(o.flatten(), new_o.flatten())
    assert not _merge_kernel.takes(o[:, :, :0], new_o[:, :, :0])
    assert not _merge_kernel.takes(o[:1].expand(4, 3, 8, 16), new_o)
