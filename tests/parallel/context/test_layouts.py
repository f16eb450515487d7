"""Layouts: positions, blocks against the mask written out, exact round trips, FLOP counts."""

from __future__ import annotations

import pytest
import torch

from kernels.problem import Mask
from parallel.context.blocks.balance import Balance, attended, count_flops, tiled
from parallel.context.blocks.layouts import (
    LAYOUTS,
    Contiguous,
    ScoreBlock,
    Striped,
    Zigzag,
    permute_striped,
    unpermute_striped,
)

NAMES = list(LAYOUTS)


def causal_mask(length: int) -> torch.Tensor:
    return torch.ones(length, length).tril().bool()


def mask_of(block: ScoreBlock) -> torch.Tensor:
    """The scores of a block that its mask keeps, aligned to the bottom right."""
    everything = torch.ones(block.q_len, block.kv_len).bool()
    return everything.tril(block.kv_len - block.q_len) if block.causal else everything


class TestPositions:
    def test_by_hand(self) -> None:
        """16 tokens on 4 ranks, from the definitions."""
        contiguous, zigzag, striped = (
            [LAYOUTS[name](num_ranks=4).positions(rank, 16).tolist() for rank in range(4)]
            for name in ("contiguous", "zigzag", "striped")
        )
        assert contiguous[1] == [4, 5, 6, 7]
        assert zigzag[0] == [0, 1, 14, 15]
        assert zigzag[3] == [6, 7, 8, 9]
        assert striped[1] == [1, 5, 9, 13]

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
    @pytest.mark.parametrize("length", [1, 23, 24])
    def test_every_token_is_somewhere_once(self, name: str, num_ranks: int, length: int) -> None:
        layout = LAYOUTS[name](num_ranks=num_ranks)
        held = torch.cat([layout.positions(rank, length) for rank in range(num_ranks)])
        assert held.sort().values.tolist() == list(range(layout.padded(length)))
        assert length <= layout.padded(length) < length + layout.multiple
        for rank in range(num_ranks):
            assert layout.positions(rank, length).diff().gt(0).all()


class TestBlocks:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("chunk", [1, 3])
    def test_cover_the_mask_exactly(
        self, name: str, num_ranks: int, causal: bool, chunk: int
    ) -> None:
        """Each attended pair is in one block, and no other pair is in any."""
        layout = LAYOUTS[name](num_ranks=num_ranks)
        length = layout.multiple * chunk
        local = layout.local_len(length)
        covered = torch.zeros(length, length, dtype=torch.int64)
        for rank in range(num_ranks):
            for source in range(num_ranks):
                block = layout.block(rank, source, local, causal)
                if block is None:
                    continue
                q = layout.positions(rank, length)[block.q]
                kv = layout.positions(source, length)[block.kv]
                covered[q[:, None], kv] += mask_of(block).long()
        expected = causal_mask(length) if causal else torch.ones(length, length)
        assert torch.equal(covered, expected.long())

    @pytest.mark.parametrize("layout_type", [Contiguous, Zigzag])
    @pytest.mark.parametrize("causal", [True, False])
    def test_prefixes_cover_the_mask_exactly(
        self, layout_type: type[Contiguous | Zigzag], causal: bool
    ) -> None:
        """The texts' early chunks saw keys up to the end of chunk P - 1, and so the future."""
        layout = layout_type(num_ranks=3)
        length = 18
        covered = torch.zeros(length, length, dtype=torch.int64)
        for rank in range(3):
            for block in layout.prefix_blocks(rank, layout.local_len(length), causal):
                q = layout.positions(rank, length)[block.q]
                covered[q, block.kv] += mask_of(block).long()
        expected = causal_mask(length) if causal else torch.ones(length, length)
        assert torch.equal(covered, expected.long())

    def test_stripes_are_no_prefix(self) -> None:
        with pytest.raises(ValueError, match="striped"):
            Striped(num_ranks=2).prefix_blocks(0, 4, True)

    def test_the_strict_case_of_striped(self) -> None:
        """Between rank p's queries and rank s's keys, strictly causal for s > p."""
        layout = Striped(num_ranks=4)
        assert layout.block(2, 1, 5, True) == ScoreBlock(q=slice(0, 5), kv=slice(0, 5), causal=True)
        assert layout.block(1, 2, 5, True) == ScoreBlock(q=slice(1, 5), kv=slice(0, 4), causal=True)


class TestShards:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("num_ranks", [1, 2, 3])
    @pytest.mark.parametrize("length", [12, 11, 1])
    @pytest.mark.parametrize("dim", [0, 1, 2])
    def test_round_trip(self, name: str, num_ranks: int, length: int, dim: int) -> None:
        layout = LAYOUTS[name](num_ranks=num_ranks)
        shape = [2, 3, 4]
        shape[dim] = length
        x = torch.randn(shape)
        shards = [layout.shard(x, rank, dim) for rank in range(num_ranks)]
        assert {shard.shape[dim] for shard in shards} == {layout.local_len(length)}
        assert torch.equal(layout.unshard(shards, dim, length), x)

    @pytest.mark.parametrize("name", NAMES)
    def test_shards_hold_their_positions(self, name: str) -> None:
        layout = LAYOUTS[name](num_ranks=3)
        x = torch.arange(17)
        for rank in range(3):
            shard = layout.shard(x, rank, dim=0, fill=-1)
            positions = layout.positions(rank, 17)
            assert torch.equal(shard, positions.where(positions < 17, -1))

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("dim", [0, 1])
    def test_packed_round_trip(self, name: str, dim: int) -> None:
        layout = LAYOUTS[name](num_ranks=2)
        lengths = [8, 3, 1, 5]
        x = torch.randn(17, 2) if dim == 0 else torch.randn(2, 17)
        shards = [layout.shard_packed(x, lengths, rank, dim) for rank in range(2)]
        assert torch.equal(layout.unshard_packed(shards, lengths, dim), x)
        first = layout.shard(x.narrow(dim, 8, 3), 1, dim)
        local = layout.local_len(8)
        assert torch.equal(shards[1].narrow(dim, local, layout.local_len(3)), first)

    def test_differentiable(self) -> None:
        x = torch.randn(11, requires_grad=True)
        Zigzag(num_ranks=2).shard(x, 0, 0).sum().backward()
        assert x.grad is not None
        # 12 tokens with padding: chunks 0 and 3 of 3 tokens, the last one padding.
        assert x.grad.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1]


class TestStripedPermutation:
    def test_the_texts_example(self) -> None:
        expected = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15]
        assert permute_striped(torch.arange(16), 0, 4).tolist() == expected

    @pytest.mark.parametrize(("length", "num_ranks"), [(16, 4), (12, 3), (6, 6), (5, 1)])
    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_formula_and_round_trip(self, length: int, num_ranks: int, dim: int) -> None:
        d, n = num_ranks, length // num_ranks
        x = torch.randn(length, 2) if dim == 0 else torch.randn(2, length)
        permuted = permute_striped(x, dim, num_ranks)
        source = torch.tensor([(i % n) * d + i // n for i in range(length)])
        assert torch.equal(permuted, x.index_select(dim, source))
        inverse = torch.tensor([(i % d) * n + i // d for i in range(length)])
        assert torch.equal(unpermute_striped(x, dim, num_ranks), x.index_select(dim, inverse))
        assert torch.equal(unpermute_striped(permuted, dim, num_ranks), x)

    def test_equal_parts_are_the_striped_layout(self) -> None:
        x = torch.arange(12)
        for rank, part in enumerate(permute_striped(x, 0, 3).chunk(3)):
            assert torch.equal(part, Striped(num_ranks=3).shard(x, rank, 0))

    def test_lengths_that_do_not_divide(self) -> None:
        with pytest.raises(ValueError, match=r"dim 0 has 5 entries: must be a multiple of 2"):
            permute_striped(torch.arange(5), 0, 2)


def guide(name: str, length: int = 65_536) -> Balance:
    """The published guide's configuration: 8 ranks, 32 heads of 128."""
    return count_flops(
        LAYOUTS[name](num_ranks=8), length, num_heads=32, head_dim=128, block_q=128, block_k=128
    )


class TestFewNeeded:
    """What ranks of 12 tokens need of the ranks 1, 2 and 3 before them."""

    @pytest.mark.parametrize(
        ("name", "mask", "expected"),
        [
            ("contiguous", Mask(causal=True, window=5), [4, 0, 0]),
            ("contiguous", Mask(causal=True, window=6), [5, 0, 0]),
            # Half of them.
            ("contiguous", Mask(causal=True, window=7), None),
            ("contiguous", Mask(causal=False, window=3), [2, 0, 2]),
            ("contiguous", Mask(causal=True, window=1), [0, 0, 0]),
            # Early chunks need the rank before, late ones the rank after: three before.
            ("zigzag", Mask(causal=True, window=3), [2, 0, 2]),
            ("zigzag", Mask(causal=True, window=4), None),
        ],
    )
    def test_by_hand(self, name: str, mask: Mask, expected: list[int] | None) -> None:
        assert LAYOUTS[name](num_ranks=4).few_needed(12, mask) == expected


class TestFlops:
    def test_the_guides_table(self) -> None:
        """GFLOP per rank by the chunk count; the guide prints some a tenth off, by rounding."""
        found = [round(flops / 1e9, 1) for flops in guide("contiguous").per_rank("chunk")]
        assert found == [824.6, 1924.1, 3023.7, 4123.2, 5222.7, 6322.2, 7421.7, 8521.2]
        assert found[7] / found[0] == pytest.approx(10.3, abs=0.05)
        zigzag = {round(flops / 1e9, 1) for flops in guide("zigzag").per_rank("chunk")}
        assert zigzag == {4672.9}

    def test_the_guides_chunks(self) -> None:
        chunks = [part / 1e9 for rank in guide("contiguous").chunk for part in rank]
        assert [round(part, 1) for part in chunks[:3]] == [274.9, 549.8, 824.6]
        assert round(chunks[-1], 1) == 4398.0

    def test_exact_pairs_are_worse_for_contiguous(self) -> None:
        """max / min tends to 2 P - 1."""
        flops = guide("contiguous").per_rank("pair")
        assert max(flops) / min(flops) == pytest.approx(15, abs=0.01)

    @pytest.mark.parametrize("name", NAMES)
    def test_all_pairs_are_counted(self, name: str) -> None:
        total = sum(guide(name, 4096).per_rank("pair"))
        assert total == 4 * 32 * 128 * 4096 * 4097 / 2

    @pytest.mark.parametrize(
        ("num_ranks", "expected"),
        [(8, (1.874, 1.000, 1.007)), (4, (1.749, 1.000, 1.003))],
    )
    def test_lockstep_cost(self, num_ranks: int, expected: tuple[float, ...]) -> None:
        """1,024 tokens; relative to a perfect split."""
        for name, cost in zip(NAMES, expected, strict=True):
            balance = count_flops(
                LAYOUTS[name](num_ranks=num_ranks),
                1024,
                num_heads=1,
                head_dim=1,
                block_q=1,
                block_k=1,
            )
            assert balance.lockstep_cost("pair") == pytest.approx(cost, abs=5e-4)
            # Tiles of one pair are pairs.
            assert balance.tile == balance.pair

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize(("q_len", "kv_len"), [(10, 10), (7, 20), (1, 5)])
    def test_tiles_against_the_mask_written_out(
        self, causal: bool, q_len: int, kv_len: int
    ) -> None:
        block = ScoreBlock(q=slice(3, 3 + q_len), kv=slice(5, 5 + kv_len), causal=causal)
        mask = mask_of(block)
        assert attended(block) == int(mask.sum())
        pairs = 0
        for rows in mask.split(4):
            pairs += sum(tile.numel() for tile in rows.split(3, dim=1) if tile.any())
        assert tiled(block, 4, 3) == pairs
