"""Placements of documents: every token once, equal tokens, equal work, and few keys to send."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.tasks.lengths import ragged_lengths
from parallel.context.documents.layout import Documents
from parallel.context.documents.lower_bound import least_received
from parallel.context.documents.placement import (
    TOLERANCE,
    Placement,
    place,
)
from parallel.context.documents.routes import Routes
from parallel.context.documents.runs import Run, pairs_up_to

LENGTHS = st.lists(st.integers(0, 200), min_size=1, max_size=20).map(tuple)
RANKS = st.integers(1, 8)


def log_normal(num_documents: int, seed: int, spread: float = 1.0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(
        max(1, int(1000 * math.exp(spread * draw.gauss(0, 1)))) for _ in range(num_documents)
    )


def tokens_of(placement: Placement) -> list[int]:
    return [placement.tokens(rank) for rank in range(placement.num_ranks)]


def pairs_of(placement: Placement) -> list[int]:
    return [placement.pairs(rank) for rank in range(placement.num_ranks)]


def received(placement: Placement) -> int:
    return sum(placement.received(rank) for rank in range(placement.num_ranks))


class TestProperties:
    @given(LENGTHS, RANKS)
    def test_every_token_is_on_one_rank(self, lengths: tuple[int, ...], num_ranks: int) -> None:
        found = [
            (run.document, position)
            for part in place(lengths, num_ranks).parts
            for run in part
            for position in range(run.start, run.stop)
        ]
        wanted = [(document, p) for document, length in enumerate(lengths) for p in range(length)]
        assert sorted(found) == wanted

    @given(LENGTHS, RANKS)
    def test_tokens_differ_by_one_at_most(self, lengths: tuple[int, ...], num_ranks: int) -> None:
        placement = place(lengths, num_ranks)
        tokens = tokens_of(placement)
        assert max(tokens) - min(tokens) <= 1
        assert max(tokens) == placement.local_len

    @given(LENGTHS, RANKS)
    def test_pairs_are_near_the_mean(self, lengths: tuple[int, ...], num_ranks: int) -> None:
        """Ranks differ by a token where tokens do not divide, and a cut moves whole tokens."""
        pairs = pairs_of(place(lengths, num_ranks))
        mean = sum(pairs) / num_ranks
        for own in pairs:
            assert abs(own - mean) <= TOLERANCE * mean + 2 * max(lengths) + 1

    @given(LENGTHS, RANKS)
    def test_the_same_when_computed_again(self, lengths: tuple[int, ...], num_ranks: int) -> None:
        first = place(lengths, num_ranks)
        place.cache_clear()
        assert place(lengths, num_ranks) == first

    @given(LENGTHS, RANKS)
    def test_at_least_the_lower_bound_is_received(
        self, lengths: tuple[int, ...], num_ranks: int
    ) -> None:
        placement = place(lengths, num_ranks)
        assert received(placement) >= least_received(placement)

    @given(LENGTHS, RANKS)
    def test_rows_that_travel_are_those_that_are_counted(
        self, lengths: tuple[int, ...], num_ranks: int
    ) -> None:
        placement = place(lengths, num_ranks)
        routes = Routes.of(placement, causal=True)
        ranks = range(num_ranks)
        assert [routes.received(rank) for rank in ranks] == list(map(placement.received, ranks))
        assert sum(routes.sends(rank) for rank in ranks) == received(placement)

    @given(LENGTHS, RANKS)
    def test_shards_join_to_the_whole(self, lengths: tuple[int, ...], num_ranks: int) -> None:
        layout = Documents(num_ranks=num_ranks)
        x = torch.arange(2 * sum(lengths)).reshape(-1, 2)
        shards = [layout.shard_packed(x, lengths, rank, fill=-1) for rank in range(num_ranks)]
        assert {len(shard) for shard in shards} == {layout.packed_len(lengths)}
        assert torch.equal(layout.unshard_packed(shards, lengths), x)
        positions = torch.cat([torch.arange(length) for length in lengths])
        for rank in range(num_ranks):
            own = layout.shard_packed(positions, lengths, rank)
            assert torch.equal(layout.packed_positions(lengths, rank), own)


class TestBalance:
    @pytest.mark.parametrize("num_ranks", [2, 4, 8])
    @pytest.mark.parametrize(("spread", "share"), [(0.5, 0.05), (1.0, 0.1), (1.5, 0.2)])
    @pytest.mark.parametrize("seed", range(3))
    def test_log_normal_batches(
        self, num_ranks: int, spread: float, share: float, seed: int
    ) -> None:
        """Work to two percent, with a share of the keys that gathering all of them sends.

        Zigzag on each document needs 3/4 of them.
        """
        lengths = log_normal(64, seed, spread)
        placement = place(lengths, num_ranks)
        pairs = pairs_of(placement)
        assert max(pairs) <= 1.02 * sum(pairs) / num_ranks
        assert received(placement) <= share * sum(lengths) * (num_ranks - 1)

    def test_a_long_document_costs_what_zigzag_does(self) -> None:
        """Its chunks r and 2P-1-r, so 3/4 (P-1) keys for each token; in shells from the middle."""
        length = 65536
        for num_ranks in (2, 4, 8):
            placement = place((length,), num_ranks)
            chunk = length // (2 * num_ranks)
            found = {tuple(sorted(part)) for part in placement.parts}
            early = [(r * chunk, (r + 1) * chunk) for r in range(2 * num_ranks)]
            wanted = {(Run(0, *early[r]), Run(0, *early[-1 - r])) for r in range(num_ranks - 1)} | {
                (Run(0, early[num_ranks - 1][0], early[num_ranks][1]),)
            }
            assert found == wanted
            assert received(placement) == 3 * length * (num_ranks - 1) // 4
            assert received(placement) <= 1.12 * least_received(placement)

    @pytest.mark.parametrize("seed", range(3))
    def test_settled_owners_need_fewer_keys_than_windows(
        self, monkeypatch: pytest.MonkeyPatch, seed: int
    ) -> None:
        """By 15% to 47% in these batches."""
        batches = tuple(ragged_lengths(8, 8192, seed)), log_normal(64, seed)
        settled = [received(place.__wrapped__(lengths, 4)) for lengths in batches]
        monkeypatch.setattr("parallel.context.documents.placement._LARGEST_SETTLED", 0)
        by_windows = [received(place.__wrapped__(lengths, 4)) for lengths in batches]
        for few, many in zip(settled, by_windows, strict=True):
            assert few < 0.87 * many

    def test_equal_documents_stay_whole(self) -> None:
        for num_ranks in (1, 2, 4, 8):
            placement = place((1000,) * 8, num_ranks)
            assert received(placement) == 0
            assert all(placement.is_whole(run) for part in placement.parts for run in part)


class TestDegenerateBatches:
    @pytest.mark.parametrize(
        ("lengths", "num_ranks", "tokens"),
        [
            ((), 3, [0, 0, 0]),
            ((0, 0), 2, [0, 0]),
            ((1,), 4, [1, 0, 0, 0]),
            ((1, 1), 4, [1, 1, 0, 0]),
            ((3,), 2, [2, 1]),
            ((1,) * 10, 4, [3, 3, 2, 2]),
            ((5, 0, 7), 1, [12]),
        ],
    )
    def test_tokens(self, lengths: tuple[int, ...], num_ranks: int, tokens: list[int]) -> None:
        assert sorted(tokens_of(place(lengths, num_ranks)), reverse=True) == tokens


class TestLowerBound:
    def test_one_document_by_hand(self) -> None:
        """On two ranks with 2 and 2 of 4 tokens, and 5 of 10 pairs: 1 and 2, 0 and 3.

        The rank without the last token ends at e, and the other has 4 - e <= 2 tokens and
        10 - e (e + 1) / 2 <= 5 pairs: e >= 3, all but the last token.
        """
        parts = ((Run(0, 1, 3),), (Run(0, 0, 1), Run(0, 3, 4)))
        assert least_received(Placement(lengths=(4,), parts=parts)) == 3

    def test_tokens_alone(self) -> None:
        """Contiguous halves: no more than 4 tokens, whatever the pairs."""
        parts = ((Run(0, 0, 4),), (Run(0, 4, 8),))
        assert least_received(Placement(lengths=(8,), parts=parts)) == 4

    def test_whole_documents(self) -> None:
        parts = ((Run(0, 0, 5),), (Run(1, 0, 5),))
        assert least_received(Placement(lengths=(5, 5), parts=parts)) == 0

    def test_pairs_of_a_run(self) -> None:
        assert Run(0, 3, 6).pairs == 4 + 5 + 6 == pairs_up_to(6) - pairs_up_to(3)
