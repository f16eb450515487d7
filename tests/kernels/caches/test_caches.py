"""Caches against lists: what was appended is where it belongs; what cannot be changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.caches import CACHES, CacheChoice, CacheShape
from kernels.caches.key_values import KeyValueCache
from kernels.caches.places import BlockAllocator, BlockPlaces, Places
from kernels.caches.sizes import ATTENTION_TYPES, MODEL_SHAPES

HEADS, DIM, RANK, ROPE = 2, 3, 4, 2


def choice_of(name: str, **options: Any) -> CacheChoice:
    return CACHES[name].target(name=name, **options)


def shape_of(choice: CacheChoice, batch_size: int, max_len: int, layers: int = 1) -> CacheShape:
    sizes: dict[str, int] = {"num_kv_heads": HEADS, "head_dim": DIM}
    if choice.is_latent:
        sizes = {"kv_lora_rank": RANK, "rope_head_dim": ROPE}
    return CacheShape(
        num_layers=layers, batch_size=batch_size, max_len=max_len, dtype="float32", **sizes
    )


def kinds() -> st.SearchStrategy[CacheChoice]:
    sizes = st.integers(1, 5)
    return st.one_of(
        st.just(choice_of("contiguous")),
        st.builds(lambda size: choice_of("paged", block_size=size), sizes),
        st.builds(lambda size: choice_of("latent", block_size=size), st.none() | sizes),
    )


def state(cache: Any) -> list[Tensor]:
    """A copy of all that a cache holds on its device."""
    held = cache.latents if hasattr(cache, "latents") else [*cache.keys, *cache.values]
    places = cache.places
    table = [] if places.block_table is None else [places.block_table]
    return [x.clone() for x in (*held, places.lengths, *table)]


def bookkeeping(places: Places) -> tuple[Any, ...]:
    blocks = (places.blocks, places.allocator.num_free) if isinstance(places, BlockPlaces) else ()
    return places.host_lengths, *blocks


def assert_refused(cache: Any, words: str, action: Any) -> None:
    """One line of ValueError, and everything as it was."""
    before, kept = state(cache), bookkeeping(cache.places)
    with pytest.raises(ValueError, match=words) as caught:
        action()
    assert "\n" not in str(caught.value)
    assert bookkeeping(cache.places) == kept
    assert all(torch.equal(old, new) for old, new in zip(before, state(cache), strict=True))


def append(cache: Any, tokens: Tensor) -> None:
    """Tokens [B, T, C], cut into what the cache keeps of them."""
    if hasattr(cache, "latents"):
        cache.append(0, tokens)
    else:
        k, v = tokens.unflatten(-1, (2, HEADS, DIM)).unbind(2)
        cache.append(0, k.transpose(1, 2), v.transpose(1, 2))


def kept(cache: Any, index: int, length: int) -> Tensor:
    """The inverse, [length, C]."""
    if hasattr(cache, "latents"):
        return cache.sequence(0, index, length)
    k, v = cache.sequence(0, index, length)
    return torch.stack((k, v)).permute(2, 0, 1, 3).flatten(1)


@settings(max_examples=60)
@given(data=st.data())
def test_what_is_appended_is_found(data: st.DataObject) -> None:
    """Any order of appending, advancing and rewinding, beside one list for each sequence."""
    choice = data.draw(kinds())
    batch_size, max_len = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    shape = shape_of(choice, batch_size, max_len)
    cache = choice.allocate(shape, "cpu", seed=data.draw(st.none() | st.integers(0, 9)))
    starts = data.draw(st.lists(st.integers(0, max_len), min_size=batch_size, max_size=batch_size))
    cache.places.fill(starts)
    generator = torch.Generator().manual_seed(0)
    width = shape.elements_per_token
    expected = [kept(cache, index, length).clone() for index, length in enumerate(starts)]
    for _ in range(data.draw(st.integers(1, 5))):
        new = data.draw(st.integers(1, 4))
        tokens = torch.randn(batch_size, new, width, generator=generator)
        if max(map(len, expected)) + new > max_len:
            assert_refused(
                cache, r"cache is full: sequence \d+ holds", lambda x=tokens: append(cache, x)
            )
            continue
        append(cache, tokens)
        if data.draw(st.booleans()):
            cache.places.advance(new)
            expected = [torch.cat(pair) for pair in zip(expected, tokens, strict=True)]
        elif min(map(len, expected)) > 0 and data.draw(st.booleans()):
            cache.places.rewind(1)
            expected = [rows[:-1] for rows in expected]
        lengths = [len(rows) for rows in expected]
        assert cache.places.host_lengths == cache.places.lengths.tolist() == lengths
        for index, rows in enumerate(expected):
            assert torch.equal(kept(cache, index, len(rows)), rows)
    longest = max(map(len, expected))
    dense = cache.dense(0, longest)
    for index, rows in enumerate(expected):
        if hasattr(cache, "latents"):
            assert torch.equal(dense[index, : len(rows)], rows)
        else:
            k = rows.unflatten(-1, (2, HEADS, DIM))[:, 0]
            assert torch.equal(dense[0][index, :, : len(rows)].transpose(0, 1), k)


@settings(max_examples=60)
@given(data=st.data())
def test_no_block_has_two_owners(data: st.DataObject) -> None:
    size, batch_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    num_blocks, max_len = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 16))
    places = BlockPlaces(batch_size, max_len, size, "cpu", num_blocks=num_blocks)
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()):
            places.release(data.draw(st.integers(0, batch_size - 1)))
        counts = [data.draw(st.integers(0, 5)) for _ in range(batch_size)]
        before = bookkeeping(places)
        held = zip(places.host_lengths, places.blocks, counts, strict=True)
        missing = [-(-(length + new) // size) - len(blocks) for length, blocks, new in held]
        too_long = any(
            length + new > max_len for length, new in zip(places.host_lengths, counts, strict=True)
        )
        if too_long or sum(max(0, number) for number in missing) > places.allocator.num_free:
            with pytest.raises(ValueError, match="cache is full"):
                places.reserve(counts)
            assert bookkeeping(places) == before
        else:
            places.reserve(counts)
            places.advance(counts)
        owned = [block for blocks in places.blocks for block in blocks]
        assert len(owned) == len(set(owned))
        assert len(owned) + places.allocator.num_free == num_blocks
        for row, blocks, length in zip(
            places.block_table.tolist(), places.blocks, places.host_lengths, strict=True
        ):
            assert row[: len(blocks)] == blocks
            assert -(-length // size) <= len(blocks)


def paged(batch_size: int = 2, max_len: int = 8, **options: Any) -> KeyValueCache:
    choice = choice_of("paged", **{"block_size": 4, **options})
    cache: KeyValueCache = choice.allocate(shape_of(choice, batch_size, max_len), "cpu")
    return cache


class TestRefusals:
    """Each before any write, in one line, with the cache as it was."""

    @pytest.mark.parametrize("name", ["contiguous", "paged", "latent"])
    def test_a_full_cache(self, name: str) -> None:
        choice = choice_of(name)
        cache = choice.allocate(shape_of(choice, 2, 8), "cpu")
        cache.places.fill([3, 8])
        width = cache.shape.elements_per_token
        words = "cache is full: sequence 1 holds 8 of max_len=8"
        assert_refused(cache, words, lambda: append(cache, torch.ones(2, 1, width)))

    def test_a_pool_that_is_too_small(self) -> None:
        cache = paged(num_blocks=3)
        cache.places.fill([4, 5])
        words = "cache is full: 1 more blocks are needed"
        assert_refused(cache, words, lambda: append(cache, torch.ones(2, 1, 2 * HEADS * DIM)))

    @pytest.mark.parametrize(
        ("table", "lengths", "words"),
        [
            ([[0, 4], [1]], [5, 1], "block 4 does not exist; num_blocks=4"),
            ([[0, -1], [1]], [5, 1], "block -1 does not exist"),
            ([[0, 2], [2]], [5, 1], "block 2 stands in it twice"),
            ([[0], [1]], [5, 1], "sequence 0 has 1 blocks of 4 for 5 tokens"),
            ([[0, 1, 2], [3]], [5, 1], "sequence 0 has 3 blocks of 4 for 5 tokens, and at most 2"),
            ([[0, 1]], [5, 1], "1 rows for 2 sequences"),
            ([[0, 1], [2]], [5], "tokens for 1 sequences, and it holds 2"),
        ],
    )
    def test_a_block_table_that_cannot_be(
        self, table: list[list[int]], lengths: list[int], words: str
    ) -> None:
        cache = paged()
        cache.places.fill([3, 6])
        assert isinstance(cache.places, BlockPlaces)
        assert_refused(cache, words, lambda: cache.places.adopt(table, lengths))  # type: ignore[attr-defined]

    def test_a_block_table_of_somebody_else(self) -> None:
        cache = paged()
        places = cache.places
        assert isinstance(places, BlockPlaces)
        places.adopt([[3, 1], [0]], [5, 2])
        append(cache, torch.arange(2.0 * 2 * HEADS * DIM).view(2, 1, -1))
        # Token 5 of sequence 0 is place 1 of block 1, token 2 of sequence 1 place 2 of block 0.
        assert cache.keys[0][1, 0, 1].tolist() == [0.0, 1.0, 2.0]
        assert cache.keys[0][0, 0, 2].tolist() == [12.0, 13.0, 14.0]
        assert places.allocator.num_free == 1

    def test_advancing_beyond_what_is_reserved(self) -> None:
        cache = paged()
        words = "sequence 0 has no block for its next 1"
        assert_refused(cache, words, lambda: cache.places.advance(1))

    def test_forgetting_more_than_there_is(self) -> None:
        cache = paged()
        cache.places.fill([1, 4])
        assert_refused(cache, "holds fewer than 2 tokens", lambda: cache.places.rewind(2))

    @pytest.mark.parametrize("name", ["contiguous", "paged", "latent"])
    def test_what_would_be_a_negative_number_of_tokens(self, name: str) -> None:
        choice = choice_of(name)
        cache = choice.allocate(shape_of(choice, 2, 8), "cpu")
        cache.places.fill([3, 4])
        words = "num_tokens=-5: must be at least 0"
        assert_refused(cache, words, lambda: cache.places.rewind(-5))
        assert_refused(cache, words, lambda: cache.places.advance(-5))
        assert_refused(cache, words, lambda: cache.places.reserve([1, -5]))

    @pytest.mark.parametrize(
        ("lengths", "words"),
        [
            ([1, 9], r"lengths\[1\]=9: must be at most max_len=8"),
            ([8, 5], "lengths need 4 blocks of 4; must be at most num_blocks=3"),
            ([1, -1], "num_tokens=-1: must be at least 0"),
            ([1], "tokens for 1 sequences, and it holds 2"),
        ],
    )
    def test_filling_beyond_the_room(self, lengths: list[int], words: str) -> None:
        cache = paged(num_blocks=3)
        cache.places.fill([3, 5])
        assert_refused(cache, words, lambda: cache.places.fill(lengths))
        # What an empty cache has room for replaces what it holds.
        cache.places.fill([8, 4])
        assert cache.places.host_lengths == [8, 4]

    def test_adopting_more_tokens_than_the_maximum(self) -> None:
        """The last block of 4 has room for 12 tokens, and a sequence for 10."""
        cache = paged(max_len=10)
        cache.places.fill([3, 6])
        table, words = [[0, 1, 2], [3]], r"lengths\[0\]=12: must be at most max_len=10"
        assert_refused(cache, words, lambda: cache.places.adopt(table, [12, 1]))  # type: ignore[attr-defined]

    @pytest.mark.parametrize("sequence", [-1, 2])
    def test_releasing_a_sequence_that_is_not_there(self, sequence: int) -> None:
        cache = paged()
        cache.places.fill([3, 6])
        words = f"sequence={sequence}: must be at least 0 and less than 2"
        assert_refused(cache, words, lambda: cache.places.release(sequence))  # type: ignore[attr-defined]

    @pytest.mark.parametrize("wrong", ["k", "v"])
    @pytest.mark.parametrize(
        "shape", [(2, 1, 3, DIM), (2, HEADS + 1, 3, DIM), (1, HEADS, 3, DIM), (2, HEADS, 3, 1)]
    )
    def test_keys_that_would_be_broadcast(self, wrong: str, shape: tuple[int, ...]) -> None:
        cache = paged()
        cache.places.fill([3, 4])
        tensors = {"k": torch.ones(2, HEADS, 3, DIM), "v": torch.ones(2, HEADS, 3, DIM)}
        tensors[wrong] = torch.ones(shape)
        words = rf"cache: {wrong} has shape .*: must be \[2, {HEADS}, 3, {DIM}\]"
        assert_refused(cache, words, lambda: cache.append(0, tensors["k"], tensors["v"]))
        slots = cache.places.of_sequence(1, 3)
        tokens = {name: x[0].transpose(0, 1) for name, x in tensors.items()}
        if tokens[wrong].shape != (3, HEADS, DIM):
            words = rf"cache: {wrong} has shape .*: must be \[3, {HEADS}, {DIM}\]"
            assert_refused(cache, words, lambda: cache.store(0, slots, **tokens))

    @pytest.mark.parametrize("shape", [(1, 3, RANK + ROPE), (2, 3, 1)])
    def test_latents_that_would_be_broadcast(self, shape: tuple[int, ...]) -> None:
        choice = choice_of("latent")
        cache = choice.allocate(shape_of(choice, 2, 8), "cpu")
        cache.places.fill([3, 4])
        words = rf"cache: latents has shape .*: must be \[2, 3, {RANK + ROPE}\]"
        assert_refused(cache, words, lambda: cache.append(0, torch.ones(shape)))
        words = rf"cache: latents has shape .*: must be \[4, {RANK + ROPE}\]"
        slots = cache.places.of_sequence(1, 4)
        assert_refused(cache, words, lambda: cache.store(0, slots, torch.ones(shape)[0]))

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("paged", {"block_size": 0}),
            ("paged", {"num_blocks": 0}),
            ("latent", {"block_size": -1}),
        ],
    )
    def test_sizes(self, name: str, options: dict[str, int]) -> None:
        (key,) = options
        with pytest.raises(ValueError, match=rf"cache\.{key}=-?\d+: must be at least 1"):
            choice_of(name, **options)

    def test_giving_back_twice(self) -> None:
        allocator = BlockAllocator(2)
        taken = allocator.take(1)
        allocator.give_back(taken)
        with pytest.raises(ValueError, match="given back twice"):
            allocator.give_back(taken)
        assert allocator.num_free == 2


class TestSizes:
    """The calculator, against what is allocated and against published totals."""

    @pytest.mark.parametrize("attention_type", ATTENTION_TYPES)
    @pytest.mark.parametrize("block_size", [None, 1, 48])
    @pytest.mark.parametrize("shape", list(MODEL_SHAPES))
    def test_formula_is_what_is_allocated(
        self, shape: str, attention_type: str, block_size: int | None
    ) -> None:
        size = MODEL_SHAPES[shape].cache_shape(
            attention_type, batch_size=3, max_len=100, dtype="bfloat16"
        )
        name = "latent" if attention_type == "mla" else "paged" if block_size else "contiguous"
        options = {} if name == "contiguous" else {"block_size": block_size}
        choice = choice_of(name, **options)
        cache = choice.allocate(size, "meta")
        assert cache.storage_bytes == choice.storage_bytes(size)
        places = cache.places
        index = [places.lengths] + ([] if places.block_table is None else [places.block_table])
        assert sum(4 * x.numel() for x in index) == choice.index_bytes(size)

    @pytest.mark.parametrize(
        ("shape", "attention_type", "gigabytes"),
        [
            # 2 x 61 x 131,072 x 128 x 128 elements of 2 bytes, and 61 x 131,072 x 576.
            ("deepseek_v3", "mha", 524),
            ("deepseek_v3", "mla", 9.2),
            # 2 x 32 x 131,072 x 8 x 128 x 2 bytes, and 2 x 80 x 131,072 x 8 x 128 x 2.
            ("llama3_8b", "gqa", 17.18),
            ("llama3_70b", "gqa", 42.95),
        ],
    )
    def test_published_totals(self, shape: str, attention_type: str, gigabytes: float) -> None:
        size = MODEL_SHAPES[shape].cache_shape(
            attention_type, batch_size=1, max_len=131072, dtype="bfloat16"
        )
        total = choice_of("contiguous").storage_bytes(size)
        assert total / 1e9 == pytest.approx(gigabytes, rel=2e-3)

    def test_a_pool_has_the_size_that_was_asked_for(self) -> None:
        choice = choice_of("paged", block_size=4, num_blocks=5)
        size = shape_of(choice, 2, 8, layers=3)
        cache = choice.allocate(size, "cpu")
        assert cache.storage_bytes == choice.storage_bytes(size) == 5 * 4 * 3 * 2 * HEADS * DIM * 4
