"""Windows, prefixes, caps and sinks on split sequences, against float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from masked_split import MaskedBatch, check
from ranks import RankError
from split_attention import PROBLEM, SCHEMES, TRANSPORTS, scheme_of

MASKS: tuple[dict[str, Any], ...] = (
    {"window": 1},
    {"window": 5},
    {"window": 13, "softcap": 0.7},
    {"window": 6, "with_sinks": True},
    {"prefix_len": 7},
    {"prefix_len": 19, "softcap": 0.5, "with_sinks": True},
)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_dense(name: str, num_ranks: int) -> None:
    for number, mask in enumerate(MASKS):
        # Lengths that no number of ranks divides.
        batch = MaskedBatch(lengths=(35,) * (1 + number % 2), **mask)
        transport = TRANSPORTS[name][number % 2]
        check(num_ranks, name, {"transport": transport}, batch)


@pytest.mark.parametrize("name", ["ring", "zigzag", "striped"])
def test_results_are_rounded_once(name: str) -> None:
    """In bfloat16, of 24 tokens or two runs of 12, as a kernel gave them or merged."""
    for window in (3, 7, 12, 17):
        for transport in TRANSPORTS[name]:
            batch = MaskedBatch(lengths=(72,) * 2, window=window, dtype=torch.bfloat16)
            check(3, name, {"transport": transport}, batch)
    for transport in TRANSPORTS["ring"]:
        batch = MaskedBatch(lengths=(72,), causal=False, window=4, dtype=torch.bfloat16)
        check(3, "ring", {"transport": transport}, batch)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_packed(name: str, num_ranks: int) -> None:
    for number, mask in enumerate(MASKS):
        batch = MaskedBatch(lengths=(21, 3, 1, 30), packed=True, **mask)
        transport = TRANSPORTS[name][number % 2]
        check(num_ranks, name, {"transport": transport}, batch)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("transport", ["all_to_all", "symmetric"])
def test_exchanged_heads(transport: str, num_ranks: int, packed: bool) -> None:
    for number, mask in enumerate(MASKS):
        # Three ranks have parts of groups of query heads, one at a time or several.
        lengths = (21, 3, 1, 30) if packed else (35,)
        options = {"transport": transport, "head_groups": 1 + number % 2}
        batch = MaskedBatch(lengths=lengths, packed=packed, num_heads=6, **mask)
        check(num_ranks, "ulysses", options, batch)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["ulysses_ring", "ulysses_zigzag"])
def test_exchanged_heads_and_a_ring(name: str, packed: bool) -> None:
    for number, mask in enumerate(MASKS):
        lengths = (21, 24, 30) if packed else (35,)
        options = {"ulysses": 2, "head_groups": 1 + number // 2 % 2}
        options |= {"transport": ("send_recv", "symmetric")[number % 2]}
        check(4, name, options, MaskedBatch(lengths=lengths, packed=packed, **mask))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_placed_documents(num_ranks: int) -> None:
    for number, mask in enumerate(MASKS):
        for lengths in ((21, 3, 1, 30), (40,), (9, 8, 17, 12)):
            options = {"keep_keys": ("always", "never")[number % 2]}
            options |= {"transport": ("all_to_all", "symmetric")[number // 2 % 2]}
            check(
                num_ranks, "documents", options, MaskedBatch(lengths=lengths, packed=True, **mask)
            )


def test_a_prefix_that_shows_padding_of_a_packed_batch_is_refused() -> None:
    batch = MaskedBatch(lengths=(21, 3), packed=True, prefix_len=7)
    with pytest.raises(RankError, match="a sequence of 3 tokens does not divide by 4, and prefix"):
        check(4, "ulysses_ring", {"ulysses": 2}, batch)


@pytest.mark.parametrize("name", ["ring", "llama3"])
def test_a_window_to_both_sides(name: str) -> None:
    for window in (1, 4, 11):
        check(3, name, {}, MaskedBatch(lengths=(24, 24), causal=False, window=window))
    check(2, name, {}, MaskedBatch(lengths=(12, 20), packed=True, causal=False, window=5))


def test_runs_of_a_packed_batch_in_one_call() -> None:
    options = {"forward_mode": "fused", "backward_mode": "fused"}
    for mask in MASKS:
        batch = MaskedBatch(lengths=(21, 3, 30), packed=True, **mask)
        check(3, "zigzag_llama3", options, batch)


def test_some_heads_at_a_time() -> None:
    batch = MaskedBatch(lengths=(22,), window=5, with_sinks=True)
    for transport in TRANSPORTS["llama3"]:
        check(2, "llama3", {"kv_heads_at_once": 1, "transport": transport}, batch)


def rows_seen(name: str, num_ranks: int, batch: MaskedBatch) -> int:
    """Keys of other ranks that the queries of each rank see, all ranks together, pair by pair."""
    layout, (length,) = scheme_of(name).layout(num_ranks), batch.lengths
    held = [layout.positions(rank, length).tolist() for rank in range(num_ranks)]
    return sum(
        any(batch.sees(query, key) for query in held[to])
        for to in range(num_ranks)
        for source in range(num_ranks)
        if source != to
        for key in held[source]
    )


@pytest.mark.parametrize("name", ["ring", "zigzag", "striped"])
def test_rings_send_what_is_seen_and_nothing_else(name: str) -> None:
    masks: tuple[dict[str, Any], ...] = ({"window": 5}, {"window": 14}, {"prefix_len": 7})
    for transport in TRANSPORTS[name]:
        for mask in masks:
            batch = MaskedBatch(lengths=(48,), **mask)
            found = check(4, name, {"transport": transport}, batch)
            row = 2 * batch.num_kv_heads * batch.head_dim * 4
            # Keys and values, again for the backward pass if they are many, and their gradients.
            times = 2 if (name, mask) == ("ring", {"window": 5}) else 3
            expected = times * row * rows_seen(name, 4, batch)
            assert sum(one.sent_bytes for one in found) == expected


@pytest.mark.parametrize("name", ["llama3", "zigzag_llama3"])
def test_gathers_read_what_is_seen_and_nothing_else(name: str) -> None:
    masks: tuple[dict[str, Any], ...] = ({}, {"window": 5}, {"window": 14}, {"prefix_len": 7})
    for number, mask in enumerate(masks):
        batch = MaskedBatch(lengths=(48,), **mask)
        options = {"transport": "symmetric", "kv_heads_at_once": number % 2}
        found = check(4, name, options, batch)
        row = 2 * batch.num_kv_heads * batch.head_dim * 4
        # Keys and values in both passes, and their gradients.
        expected = 3 * row * rows_seen(name, 4, batch)
        assert sum(one.sent_bytes for one in found) == expected


def test_a_rank_whose_keys_nobody_sees_sends_nothing() -> None:
    found = check(4, "ring", {"transport": "send_recv"}, MaskedBatch(lengths=(48,), window=5))
    row = 2 * 2 * 8 * 4
    assert [one.sent_bytes for one in found] == [
        # Four keys to the next rank, and four gradients to the one before.
        4 * row,
        2 * 4 * row,
        2 * 4 * row,
        4 * row,
    ]


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("ring", {"window": 9}),
        ("ring", {"window": 9, "dtype": torch.bfloat16}),
        ("ring", {"window": 9, "with_sinks": True, "softcap": 0.7}),
        ("ring", {"window": 4, "causal": False}),
        # A rank has two runs, and has the keys before a late one itself or another has.
        ("zigzag", {"window": 4}),
        ("zigzag", {"window": 6, "with_sinks": True, "dtype": torch.bfloat16}),
    ],
)
def test_few_keys_are_sent_once(name: str, mask: dict[str, Any]) -> None:
    """A backward pass has them from the forward pass."""
    batch = MaskedBatch(lengths=(96, 96), **mask)
    row = 2 * batch.num_kv_heads * batch.head_dim * batch.dtype.itemsize * len(batch.lengths)
    for transport in TRANSPORTS[name]:
        found = check(4, name, {"transport": transport}, batch)
        seen = rows_seen(name, 4, replace(batch, lengths=(96,)))
        assert sum(one.sent_bytes for one in found) == 2 * row * seen


def test_masks_lengths_and_layouts_at_random() -> None:
    draw = random.Random(5)
    for _ in range(24):
        name = draw.choice(SCHEMES)
        mask: dict[str, Any] = {"window": draw.choice([None, 1, 2, 3, 8, 17, 50])}
        if mask["window"] is None:
            mask["prefix_len"] = draw.randrange(0, 30)
        packed = draw.random() < 0.5
        batch = MaskedBatch(
            lengths=tuple(draw.randrange(1, 34) for _ in range(3)) if packed else (33,),
            packed=packed,
            num_heads=2,
            num_kv_heads=1,
            head_dim=4,
            softcap=draw.choice([None, 0.8]),
            with_sinks=draw.random() < 0.5,
            **mask,
        )
        transport = draw.choice(TRANSPORTS[name])
        check(draw.choice([2, 3, 4]), name, {"transport": transport}, batch)


class TestSupport:
    def test_kernels_are_asked_for_the_masks_of_blocks(self) -> None:
        windowed = replace(PROBLEM, window=5)
        assert scheme_of("ring", kernel="flash_torch").why_unsupported(windowed) is None
        reason = scheme_of("ring", kernel="sdpa_flash").why_unsupported(windowed)
        assert reason == "attention.kernel=sdpa_flash: takes no attention.window=5"

    def test_sinks_are_no_matter_of_the_kernel(self) -> None:
        problem = replace(PROBLEM, sinks=True)
        assert scheme_of("zigzag", kernel="sdpa_flash").why_unsupported(problem) is None

    def test_a_prefix_that_shows_padding_is_refused(self) -> None:
        problem = replace(PROBLEM, q_len=62, kv_len=62, prefix_len=63)
        reason = scheme_of("zigzag", kernel="flash_torch").why_unsupported(problem)
        assert reason is not None
        assert reason.startswith("attention.prefix_len=63: must be at most the 62 tokens")
