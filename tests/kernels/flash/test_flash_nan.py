"""A key that is not a number: whoever sees it gets no number, and nobody else loses one.

Only a query that sees no key has output zero and lse minus infinity. Where a NaN looked like that,
merging by log-sum-exp erased it, and a training run went on with wrong numbers.
"""

from __future__ import annotations

import pytest
import torch
from exact_attention import inputs, packed
from torch import Tensor
from triton_device import RUNS_TRITON

from kernels import BACKENDS
from kernels.problem import AttentionSpec

BAD_KEY = 20

KERNELS = [pytest.param("flash_triton", marks=RUNS_TRITON), "flash_torch"]


def with_bad_key(k: Tensor) -> Tensor:
    """One entry of one key of the first head is not a number."""
    k = k.clone()
    k[0, 0, BAD_KEY, 3] = torch.nan
    return k


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("causal", [False, True])
def test_who_sees_it_gets_nan_in_o_lse_and_gradients(name: str, causal: bool) -> None:
    kernel = BACKENDS[name].target(name=name)  # type: ignore[call-arg]
    q, k, v, do = inputs(q_len=50, kv_len=50)
    spec = AttentionSpec(causal=causal, scale=0.3)
    clean = kernel.forward(q, k, v, spec)
    o, lse = kernel.forward(q, with_bad_key(k), v, spec)
    sees = torch.zeros(lse.shape, dtype=torch.bool, device=lse.device)
    sees[0, 0, BAD_KEY if causal else 0 :] = True
    assert torch.equal(lse.isnan(), sees)
    assert torch.equal(o.isnan(), sees[..., None].expand_as(o))
    for got, wanted, rows in zip((o, lse), clean, (~sees, ~sees), strict=True):
        assert torch.equal(got[rows], wanted[rows])
    dq, dk, dv = kernel.backward(do, q, with_bad_key(k), v, o, lse, spec)
    assert dq[sees].isnan().all()
    assert dk[0, 0, BAD_KEY].isnan().all()
    assert dv[0, 0, : BAD_KEY + 1].isnan().all()
    # The other head knows nothing of it.
    assert all(bool(x[:, 1].isfinite().all()) for x in (dq, dk, dv))


@pytest.mark.parametrize("name", KERNELS)
def test_later_keys_do_not_erase_it(name: str) -> None:
    """As a ring attends: part by part, each merged with those before."""
    kernel = BACKENDS[name].target(name=name)  # type: ignore[call-arg]
    q, k, v, _ = inputs(q_len=37, kv_len=60)
    k = with_bad_key(k)
    spec = AttentionSpec(causal=False, scale=0.3)
    for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
        o = torch.zeros(q.shape, device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, device=q.device)
        for part in order:
            keys = slice(20 * part, 20 * part + 20)
            o, lse = kernel.forward_onto(o, lse, q, k[:, :, keys], v[:, :, keys], spec)
        assert lse[0, 0].isnan().all(), order
        assert o[0, 0].isnan().all(), order
        assert lse[0, 1].isfinite().all(), order
        assert o[0, 1].isfinite().all(), order


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("row", [0, 36])
def test_it_may_come_with_the_accumulator(name: str, row: int) -> None:
    """Of ten keys the first query sees none, under the mask, and the last one all."""
    kernel = BACKENDS[name].target(name=name)  # type: ignore[call-arg]
    q, k, v, _ = inputs(q_len=37, kv_len=10)
    o = torch.zeros(q.shape, device=q.device)
    lse = torch.zeros(q.shape[:-1], device=q.device)
    o[0, 0, row], lse[0, 0, row] = torch.nan, torch.nan
    o, lse = kernel.forward_onto(o, lse, q, k, v, AttentionSpec(causal=True, scale=0.3))
    assert lse[0, 0].isnan().nonzero().flatten().tolist() == [row]
    assert o[0, 0].isnan().all(-1).nonzero().flatten().tolist() == [row]
    assert o[0, 1].isfinite().all()


@pytest.mark.parametrize("name", KERNELS)
def test_a_packed_neighbour_keeps_its_numbers(name: str) -> None:
    kernel = BACKENDS[name].target(name=name)  # type: ignore[call-arg]
    q, k, v, _, packing = packed([(20, 33), (0, 4), (7, 5)])
    k = k.clone()
    k[30, 0, 3] = torch.nan
    o, lse = kernel.forward(q, k, v, AttentionSpec(causal=False, scale=0.3, packing=packing))
    assert lse[:2, :20].isnan().all()
    assert o[:20, :2].isnan().all()
    assert lse[:, 20:].isfinite().all()
    assert o[20:].isfinite().all()
