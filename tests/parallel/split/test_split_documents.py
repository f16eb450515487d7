"""The library's functions with documents that are placed on ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from split_attention import CLOSENESS, SCALE, Batch, exact

from parallel.split import (
    local_cu_seqlens,
    position_ids,
    release,
    shard,
    split_attention,
    unshard,
)

LENGTHS = (24, 7, 0, 1, 13)


def largest_error(group: dist.ProcessGroup, lengths: tuple[int, ...], causal: bool) -> float:
    """Of o, lse-free, and of dq, dk and dv, over all ranks' tokens, from parts to the whole."""
    batch = Batch(lengths=lengths, packed=True, causal=causal)
    starts = batch.packing().cu_seqlens_q

    def part(x: torch.Tensor) -> torch.Tensor:
        return shard(x, "documents", dim=0, cu_seqlens=starts, pad_value=0, group=group)

    try:
        *leaves, do = (part(x).requires_grad_() for x in batch.tensors())
        o = split_attention(
            *("documents", *leaves),
            cu_seqlens=starts,
            causal=causal,
            scale=SCALE,
            group=group,
            kernel="naive",
        )
        found = [o, *torch.autograd.grad(o, leaves, do.detach())]
        wholes = [
            unshard(x.detach(), "documents", dim=0, cu_seqlens=starts, length=None, group=group)
            for x in found
        ]
    finally:
        release(group)
    pairs = zip(wholes, exact(batch), strict=True)
    return max(float((got.double() - want).abs().max()) for got, want in pairs)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [LENGTHS, (7, 7, 2), (40,)])
def test_against_float64(num_ranks: int, causal: bool, lengths: tuple[int, ...]) -> None:
    assert max(on_ranks(num_ranks, largest_error, lengths, causal)) < CLOSENESS


def positions_agree(group: dist.ProcessGroup) -> bool:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    starts = [0, 24, 31, 31, 32, 45]
    own = shard(positions, "documents", dim=0, cu_seqlens=starts, pad_value=0, group=group)
    found = position_ids("documents", cu_seqlens=starts, group=group)
    return torch.equal(found, own)


def test_positions_are_those_in_their_documents() -> None:
    assert on_ranks(4, positions_agree) == [True] * 4


def small_part(group: dist.ProcessGroup) -> int:
    part = shard(torch.zeros(16), "documents", dim=0, cu_seqlens=[0, 7, 14, 16], group=group)
    return len(part)


def test_no_document_is_padded() -> None:
    assert on_ranks(4, small_part) == [4] * 4


def of_offsets(group: dist.ProcessGroup) -> object:
    return local_cu_seqlens("documents", [0, 7, 14, 16], group=group)


def of_parts(group: dist.ProcessGroup) -> object:
    q = torch.zeros(4, 2, 4)
    return split_attention("documents", q, q, q, local_cu_seqlens=[0, 2, 4], group=group)


def of_dense_batches(group: dist.ProcessGroup) -> object:
    q = torch.zeros(1, 4, 2, 4)
    return split_attention("documents", q, q, q, causal=True, group=group)


def of_padding(group: dist.ProcessGroup) -> object:
    return shard(torch.zeros(17), "documents", dim=0, cu_seqlens=[0, 8, 17], group=group)


def of_other_tokens(group: dist.ProcessGroup) -> object:
    q = torch.zeros(5, 2, 4)
    return split_attention("documents", q, q, q, cu_seqlens=[0, 7, 14, 16], group=group)


def message_of(group: dist.ProcessGroup, call: Callable[[dist.ProcessGroup], object]) -> str:
    try:
        call(group)
    except ValueError as error:
        return str(error)
    finally:
        release(group)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (of_offsets, "give cu_seqlens= of whole documents"),
        (of_parts, "give cu_seqlens= of whole documents"),
        (of_dense_batches, "attention=zigzag splits them evenly"),
        (of_padding, "17 tokens do not divide by 4"),
        (of_other_tokens, "q has 5 tokens, and one of 4 parts of sequences of 7, 7, 2 has 4"),
    ],
)
def test_mistakes(call: Callable[[dist.ProcessGroup], object], words: str) -> None:
    for message in on_ranks(4, message_of, call):
        assert words in message
        assert "\n" not in message
