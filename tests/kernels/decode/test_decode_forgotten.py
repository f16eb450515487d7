"""Steps by PyTorch's operators over caches in which forgotten tokens are not numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoding import Step, backend_of
from torch import Tensor

KEY_VALUE = ("standard", "sdpa", "sdpa_math")
LATENT = ("mla_absorbed", "mla_materialised")


def sizes_of(name: str) -> dict[str, int]:
    return {"kv_lora_rank": 8, "rope_head_dim": 2} if name in LATENT else {}


def storages(cache: Any) -> list[Tensor]:
    return cache.latents if hasattr(cache, "latents") else [*cache.keys, *cache.values]


def forget_what_is_not_a_number(step: Step) -> None:
    """Fill the whole cache with NaN, forget that, and put back what the sequences hold."""
    cache, places, layer = step.cache, step.cache.places, 1
    latent = hasattr(cache, "latents")
    held = [cache.sequence(layer, index, length) for index, length in enumerate(step.lengths)]
    places.fill([step.max_len] * len(step.lengths))
    for storage in storages(cache):
        storage.fill_(torch.nan)
    places.fill(step.lengths)
    for index, (length, tokens) in enumerate(zip(step.lengths, held, strict=True)):
        slots = places.of_sequence(index, length)
        given = (tokens,) if latent else [x.transpose(0, 1) for x in tokens]
        cache.store(layer, slots, *given)
    places.reserve(step.new_tokens)


@pytest.mark.parametrize("block_size", [None, 4])
@pytest.mark.parametrize("name", [*KEY_VALUE, *LATENT])
@pytest.mark.parametrize(
    ("new_tokens", "cuda_graph", "lengths"),
    [(1, False, [2, 9, 0]), (3, False, [2, 9, 0]), (1, True, [6, 6]), (2, True, [4, 1])],
)
def test_forgotten_tokens_do_not_matter(
    name: str, block_size: int | None, new_tokens: int, cuda_graph: bool, lengths: list[int]
) -> None:
    """Those of a rewound row, of a released block, and of blocks that nobody has."""
    sizes = sizes_of(name)
    step = Step(
        lengths=lengths, block_size=block_size, new_tokens=new_tokens, cuda_graph=cuda_graph,
        **sizes,
    )  # fmt: skip
    forget_what_is_not_a_number(step)
    step.check(backend_of(name), tolerance=1e-4)


@pytest.mark.parametrize("name", ["standard", "sdpa", "mla_absorbed"])
def test_forgotten_new_tokens_do_not_matter(name: str) -> None:
    """Guessed tokens that were written and taken back, in rows of different lengths."""
    sizes = sizes_of(name)
    step = Step(lengths=[3, 3], **sizes)
    guessed = Step(lengths=[3, 3], new_tokens=3, **sizes)
    guessed.cache = step.cache
    guessed.run(backend_of(name))
    # Were they not numbers: of one sequence the first is kept, and it is one.
    latent = hasattr(step.cache, "latents")
    for storage in storages(step.cache):
        (storage[:, 3:6] if latent else storage[:, :, 3:6]).fill_(torch.nan)
        (storage[0, 3:4] if latent else storage[0, :, 3:4]).fill_(1.0)
    step.cache.places.advance([1, 0])
    step.lengths = [4, 3]
    step.check(backend_of(name), tolerance=1e-4)


@pytest.mark.parametrize("name", ["standard", "sdpa", "mla_absorbed"])
def test_a_neighbour_that_is_not_a_number(name: str) -> None:
    """Entries of the block table that a sequence lacks show the first block, a neighbour's."""
    sizes = sizes_of(name)
    step = Step(lengths=[9, 1], block_size=4, **sizes)
    places = step.cache.places
    places.adopt([[0, 1, 2], [3]], [9, 1])
    places.reserve(1)
    expected, _ = step.expected()
    first, second = places.of_sequence(0, 9)
    latent = hasattr(step.cache, "latents")
    for storage in storages(step.cache):
        if latent:
            storage[first, second] = torch.nan
        else:
            storage[first, :, second] = torch.nan
    o = step.run(backend_of(name))
    assert o[0].isnan().all()
    torch.testing.assert_close(o[1].double(), expected[1], rtol=1e-4, atol=1e-4)
