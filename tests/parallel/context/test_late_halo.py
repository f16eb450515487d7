"""A window over symmetric memory, whose side stream runs as late as CUDA's streams allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from late_stream import LateStream
from masked_split import MaskedBatch
from ranks import on_ranks
from split_attention import CPU, scheme_of, shard
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from parallel.context.transports import symmetric_halo

BATCH = MaskedBatch(lengths=(48, 48), window=5)


def passes(bound: Any, batch: MaskedBatch, saved: bool) -> list[Tensor]:
    """(o, dq, dk, dv) of three passes over other values; in a checkpoint, unless ``saved``."""
    found = []
    for number in range(3):
        q, k, v, do = (shard(bound, x + number, batch) for x in batch.tensors())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def run(*inputs: Tensor) -> Tensor:
            return bound.attend(*inputs, batch.spec(None))

        o = run(*leaves) if saved else checkpoint(run, *leaves, use_reentrant=False)
        found += [o.detach(), *torch.autograd.grad(o, leaves, do)]
    return found


def differences(
    group: dist.ProcessGroup, name: str, slow: int, saved: bool
) -> tuple[bool, int, int, int]:
    """Whether a late side stream changes no bit, and what it had to do."""
    options = {"kernel": "naive", "transport": "symmetric"}
    batch = replace(BATCH, window=3) if name == "zigzag" else BATCH
    with scheme_of(name, **options).bind(group, CPU) as bound:
        expected = passes(bound, batch, saved)
    with scheme_of(name, **options).bind(group, CPU) as bound:
        # Buffers are made in the first call.
        passes(bound, batch, saved)
        delay = 0.02 if dist.get_rank(group) == slow else 0.0
        late = LateStream(delay, symmetric_halo, (symmetric_halo, "copy_rows"))
        with late.patched():
            found = passes(bound, batch, saved)
    same = all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    return same, late.num_barriers, late.num_freed, late.num_left


@pytest.mark.parametrize("saved", [True, False], ids=["saved", "checkpoint"])
@pytest.mark.parametrize(("name", "slow"), [("ring", 0), ("ring", 1), ("ring", 3), ("zigzag", 2)])
def test_passes_wait_for_their_copies(name: str, slow: int, saved: bool) -> None:
    """Two barriers a pass; a checkpoint makes the forward pass twice."""
    barriers = 3 * 2 * (2 if saved else 3)
    assert on_ranks(4, differences, name, slow, saved) == [(True, barriers, 0, 0)] * 4


def order_of_events(group: dist.ProcessGroup) -> list[str]:
    """What a backward pass does, kernel calls with their keys among it."""
    events: list[str] = []
    fetch = symmetric_halo.SymmetricHalo._fetch

    def fetched(*arguments: Any) -> Any:
        events.append("exchange")
        return fetch(*arguments)

    with scheme_of("ring", kernel="naive", transport="symmetric").bind(group, CPU) as bound:
        q, k, v, do = (shard(bound, x, BATCH) for x in BATCH.tensors())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = bound.attend(*leaves, BATCH.spec(None))
        kernel = type(bound._kernel)
        backward = kernel.backward

        def called(*arguments: Any) -> Any:
            events.append("own" if arguments[3].shape[2] == k.shape[2] else "other")
            return backward(*arguments)

        with (
            patch.object(symmetric_halo.SymmetricHalo, "_fetch", fetched),
            patch.object(kernel, "backward", called),
        ):
            torch.autograd.grad(o, leaves, do)
    return events


def test_gradients_leave_before_a_rank_computes_with_its_own_keys() -> None:
    first, *others = on_ranks(3, order_of_events)
    assert first == ["exchange", "own"]
    assert others == [["other", "exchange", "own"]] * 2
