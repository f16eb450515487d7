"""A packed stream cut regardless of its sequences, against float64 attention of each sequence."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from split_attention import CLOSENESS, SCALE, Batch, exact
from torch import Tensor

from kernels import BACKENDS, AttentionSpec
from parallel.split import (
    shard_stream,
    stream_attention,
    stream_part,
    stream_position_ids,
    unshard_stream,
)

SHORT = Batch(lengths=(7, 7, 2), packed=True)
"""16 tokens: [0, 7, 14, 16] on four ranks is four tokens each."""

STREAMS = {
    "short": SHORT,
    "a sequence over all ranks": Batch(lengths=(5, 40, 3), packed=True),
    "one token each": Batch(lengths=(1,) * 12, packed=True),
    "empty sequences": Batch(lengths=(0, 9, 0, 0, 15, 0), packed=True),
    "does not divide": Batch(lengths=(7, 11, 5), packed=True),
    "last ranks without tokens": Batch(lengths=(3, 2), packed=True),
    # An eighth of the lengths in ring-flash-attention's test of its llama3 functions.
    "an odd number of heads": Batch(
        lengths=(15, 141, 372), packed=True, num_heads=5, num_kv_heads=5
    ),
}


def starts_of(batch: Batch) -> Tensor:
    return batch.packing().cu_seqlens_q


def results(group: dist.ProcessGroup, batch: Batch, options: dict[str, Any]) -> list[Tensor]:
    """o, dq, dk, dv of this rank; padding gets a gradient that must lead nowhere."""
    tensors = [shard_stream(x, pad_value=0, group=group) for x in batch.tensors()]
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    padding = 1 - shard_stream(torch.ones_like(batch.tensors()[0]), pad_value=0, group=group)
    o = stream_attention(
        *(q, k, v),
        cu_seqlens=starts_of(batch),
        causal=batch.causal,
        scale=SCALE,
        group=group,
        **options,
    )
    assert not (o * padding).any()
    gradients = torch.autograd.grad(o, (q, k, v), tensors[3] + 100 * padding)
    return [o.detach(), *gradients]


def errors(group: dist.ProcessGroup, batch: Batch, options: dict[str, Any]) -> list[float]:
    found = results(group, batch, options)
    wanted = [shard_stream(x, pad_value=0, group=group) for x in exact(batch)]
    return [
        float((got - want).abs().max() / want.abs().max().clamp_min(0.1))
        for got, want in zip(found, wanted, strict=True)
    ]


def check(num_ranks: int, batch: Batch, **options: Any) -> None:
    for rank, found in enumerate(on_ranks(num_ranks, errors, batch, options)):
        for what, error in zip(("o", "dq", "dk", "dv"), found, strict=True):
            assert error < CLOSENESS, f"{what} on rank {rank} is off by {error:.2g}"


class TestAgainstOneProcess:
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
    @pytest.mark.parametrize("name", STREAMS)
    def test_streams(self, name: str, num_ranks: int, causal: bool) -> None:
        check(num_ranks, replace(STREAMS[name], causal=causal))

    @pytest.mark.parametrize("kernel", ["naive", "flash_torch"])
    def test_kernels(self, kernel: str) -> None:
        check(4, STREAMS["a sequence over all ranks"], kernel=kernel)

    @pytest.mark.parametrize("heads_at_once", [1, 2])
    def test_some_heads_at_a_time(self, heads_at_once: int) -> None:
        many = replace(SHORT, num_heads=8, num_kv_heads=4)
        check(3, many, kv_heads_at_once=heads_at_once)


def twice(group: dist.ProcessGroup) -> bool:
    batch = STREAMS["a sequence over all ranks"]
    runs = [results(group, batch, {}) for _ in range(2)]
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_equal_bits_in_two_runs() -> None:
    assert all(on_ranks(4, twice))


def log_sum_exp_error(group: dist.ProcessGroup) -> float:
    batch = STREAMS["does not divide"]
    spec = AttentionSpec(causal=True, scale=SCALE, packing=batch.packing())
    q, k, v, _ = batch.tensors()
    _, lse = BACKENDS["flash_torch"].target(name="flash_torch").forward(q, k, v, spec)
    own = [shard_stream(x, pad_value=0, group=group) for x in (q, k, v)]
    starts = starts_of(batch).tolist()
    _, got = stream_attention(
        *own, cu_seqlens=starts, causal=True, scale=SCALE, return_lse=True, group=group
    )
    whole = unshard_stream(got, dim=1, group=group)
    assert (whole[:, sum(batch.lengths) :] == -torch.inf).all()
    return float((whole[:, : sum(batch.lengths)] - lse).abs().max())


def test_the_log_sum_exp() -> None:
    assert max(on_ranks(4, log_sum_exp_error)) < 1e-5


def second_derivative(group: dist.ProcessGroup) -> str:
    q, k, v, _ = (shard_stream(x, group=group) for x in SHORT.tensors())
    q.requires_grad_()
    o = stream_attention(q, k, v, cu_seqlens=starts_of(SHORT), group=group)
    try:
        torch.autograd.grad(o.square().sum(), q, create_graph=True)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_second_derivatives_raise() -> None:
    for message in on_ranks(2, second_derivative):
        assert message.startswith("stream_attention: create_graph=True")


def under_autocast(group: dist.ProcessGroup) -> tuple[torch.dtype, ...]:
    q, k, v, _ = (shard_stream(x, group=group) for x in SHORT.tensors())
    leaves = [q.requires_grad_(), k.bfloat16().requires_grad_(), v.requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        o = stream_attention(*leaves, cu_seqlens=starts_of(SHORT), group=group)
    o.float().sum().backward()
    return (o.dtype, *(x.grad.dtype for x in leaves))  # type: ignore[union-attr]


def test_mixed_dtypes_under_autocast() -> None:
    wanted = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)
    assert on_ranks(2, under_autocast) == [wanted] * 2


class TestParts:
    """By hand, as ring-flash-attention's llama3_flash_attn_prepare_cu_seqlens would cut."""

    @pytest.mark.parametrize(
        ("rank", "of_q", "of_k", "keys"),
        [
            (0, [0, 4], [0, 4], (0, 4)),
            (1, [0, 3, 4], [0, 7, 8], (0, 8)),
            (2, [0, 4], [0, 5], (7, 12)),
            (3, [0, 2, 4], [0, 7, 9], (7, 16)),
        ],
    )
    def test_sixteen_tokens_on_four_ranks(
        self, rank: int, of_q: list[int], of_k: list[int], keys: tuple[int, int]
    ) -> None:
        part = stream_part([0, 7, 14, 16], causal=True, rank=rank, num_ranks=4)
        assert part.packing is not None
        assert part.packing.cu_seqlens_q.tolist() == of_q
        assert part.packing.cu_seqlens_k.tolist() == of_k
        assert (part.keys.start, part.keys.stop) == keys
        assert (part.queries.start, part.queries.stop) == (4 * rank, 4 * rank + 4)

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
    def test_longest_lengths_are_those_of_the_offsets(self, num_ranks: int, causal: bool) -> None:
        for rank in range(num_ranks):
            packing = stream_part(
                [0, 7, 14, 16], causal=causal, rank=rank, num_ranks=num_ranks
            ).packing
            assert packing is not None
            assert packing.max_q_len == max(packing.cu_seqlens_q.diff())
            assert packing.max_kv_len == max(packing.cu_seqlens_k.diff())

    def test_a_full_mask_sees_whole_sequences(self) -> None:
        part = stream_part([0, 7, 14, 16], causal=False, rank=0, num_ranks=4)
        assert part.packing is not None
        assert part.packing.cu_seqlens_k.tolist() == [0, 7]
        assert (part.keys.start, part.keys.stop) == (0, 7)

    def test_a_rank_of_padding_alone(self) -> None:
        part = stream_part([0, 5], causal=True, rank=3, num_ranks=4)
        assert part.packing is None
        assert part.queries == slice(5, 5)


def positions_of(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    own = stream_position_ids([0, 7, 14, 16], group=group)
    return own.tolist(), unshard_stream(own, length=15, group=group).tolist()


def test_positions_are_those_in_the_own_sequence() -> None:
    whole = list(itertools.chain(range(7), range(7), range(2)))
    for rank, (own, joined) in enumerate(on_ranks(4, positions_of)):
        assert own == whole[4 * rank : 4 * rank + 4]
        assert joined == whole[:15]
