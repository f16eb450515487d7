"""Greedy generation from caches, token by token as the model without one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from decoding import backend_of
from torch import Tensor

from kernels.caches import CACHES
from models.accounting import count_parameters
from models.config import ModelConfig
from models.generation import Generator, Prompts
from models.transformer import Transformer

VOCAB, MAX_LEN, NUM_TOKENS = 97, 32, 10

KEY_VALUE = (
    *(("standard", "contiguous", {}), ("sdpa", "contiguous", {}), ("auto", "contiguous", {})),
    *(("standard", "paged", {"block_size": 4}), ("sdpa", "paged", {"block_size": 64})),
)

LATENT = (
    *(("mla_absorbed", "latent", {"block_size": 4}), ("mla_materialised", "latent", {})),
    *(("mla_absorbed", "latent", {"block_size": None}), ("auto", "latent", {})),
)


def config(**changes: Any) -> ModelConfig:
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return ModelConfig(name="test", **{**sizes, **changes})


def model_of(sizes: ModelConfig) -> Transformer:
    torch.manual_seed(0)
    return Transformer(sizes, backend_of("naive"))


GROUPED, LATENTS = config(num_kv_heads=2), config(kv_lora_rank=12)


def prompts_of(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


@cache
def without_a_cache(latent: bool, lengths: tuple[int, ...]) -> Tensor:
    """Tokens of the whole sequence anew for each one, [B, NUM_TOKENS]."""
    model, prompts = model_of(LATENTS if latent else GROUPED), prompts_of(*lengths)
    found = []
    with torch.no_grad():
        for prompt in prompts:
            tokens = prompt
            for _ in range(NUM_TOKENS):
                logits = model(tokens[None], torch.arange(len(tokens)))
                tokens = torch.cat((tokens, logits[0, -1:].argmax(-1)))
            found.append(tokens[len(prompt) :])
    return torch.stack(found)


def generator_of(
    model: Transformer, attention: str, cache: str, batch_size: int = 3, **options: Any
) -> Generator:
    return Generator(
        model,
        backend_of(attention),
        backend_of("naive"),
        CACHES[cache].target(name=cache, **options),
        batch_size=batch_size,
        max_len=MAX_LEN,
        dtype="float32",
    )


RAGGED, EQUAL = (5, 1, 17), (6, 6, 6)


@pytest.mark.parametrize(
    ("sizes", "attention", "cache", "options", "lengths"),
    [(GROUPED, *kind, lengths) for kind in KEY_VALUE for lengths in (RAGGED, EQUAL)]
    + [(LATENTS, *kind, lengths) for kind in LATENT for lengths in (RAGGED, EQUAL)]
    # Once under Triton's interpreter, which takes seconds.
    + [(GROUPED, "flash_decode", "paged", {"block_size": 16}, RAGGED)],
)
def test_greedy_output_is_the_same(
    sizes: ModelConfig,
    attention: str,
    cache: str,
    options: dict[str, Any],
    lengths: tuple[int, ...],
) -> None:
    """In float32, token by token, with every cache and backend; and again over a used cache."""
    model, prompts = model_of(sizes), prompts_of(*lengths)
    try:
        generator = generator_of(model, attention, cache, **options)
    except ValueError as error:
        # Triton's interpreter, or the kernel, is not here: the reason is the backend's own.
        assert attention == "flash_decode"
        pytest.skip(str(error))
    expected = without_a_cache(sizes is LATENTS, lengths)
    for _ in range(2):
        assert torch.equal(generator.generate(prompts, NUM_TOKENS), expected)
    assert generator.cache.places.host_lengths == [len(x) + NUM_TOKENS - 1 for x in prompts]


@pytest.mark.parametrize("block_size", [4, None])
def test_greedy_output_of_the_latent_kernels(block_size: int | None) -> None:
    backend = backend_of("mla_absorbed", implementation="triton")
    lengths = RAGGED
    try:
        generator = Generator(
            model_of(LATENTS),
            backend,
            backend_of("naive"),
            CACHES["latent"].target(name="latent", block_size=block_size),
            batch_size=3,
            max_len=MAX_LEN,
            dtype="float32",
        )
    except ValueError as error:
        pytest.skip(str(error))
    found = generator.generate(prompts_of(*lengths), NUM_TOKENS)
    assert torch.equal(found, without_a_cache(True, lengths))


class TestLatentAttention:
    def test_parameters_are_counted(self) -> None:
        for sizes in (GROUPED, LATENTS, config(kv_lora_rank=7, rope_head_dim=2)):
            held = sum(x.numel() for x in model_of(sizes).parameters())
            assert count_parameters(sizes).total == held

    def test_by_definition(self) -> None:
        """One layer in float64, head by head, from the formulas of DeepSeek-V2."""
        model = model_of(LATENTS).double()
        attention = model.blocks[0].attention
        x = torch.randn(5, 32, dtype=torch.float64)
        down = x @ attention.kv_down.weight.T
        c = torch.nn.functional.rms_norm(down[:, :12], (12,), attention.kv_norm.weight, 1e-5)
        angles = torch.arange(5.0)[:, None] * 10000.0 ** -torch.arange(0, 1, 0.5)
        turn = torch.polar(torch.ones(5, 2, dtype=torch.float64), angles.double())

        def turned(y: Tensor) -> Tensor:
            pairs = torch.view_as_complex(y.unflatten(-1, (2, 2)).contiguous())
            return torch.view_as_real(pairs * turn).flatten(-2)

        q = (x @ attention.q_proj.weight.T).unflatten(-1, (4, 8))
        heads = []
        for head in range(4):
            k_up = attention.k_up.weight[4 * head : 4 * head + 4]
            v_up = attention.v_up.weight[8 * head : 8 * head + 8]
            key = torch.cat((c @ k_up.T, turned(down[:, 12:])), dim=-1)
            query = torch.cat((q[:, head, :4], turned(q[:, head, 4:])), dim=-1)
            hidden = torch.ones(5, 5).triu(1).bool()
            scores = (query @ key.T * 8**-0.5).masked_fill(hidden, -torch.inf)
            heads.append(scores.softmax(-1) @ (c @ v_up.T))
        expected = torch.cat(heads, dim=-1) @ attention.o_proj.weight.T
        cos, sin = turn.real[:, None], turn.imag[:, None]
        found = attention(x[None], cos, sin)[0]
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"kv_lora_rank": 0}, "model.kv_lora_rank=0: must be at least 1"),
            ({"rope_head_dim": 4}, "model.rope_head_dim=4: is of latent attention"),
            ({"kv_lora_rank": 4, "num_kv_heads": 2}, "model.num_kv_heads=2: latent attention"),
            ({"kv_lora_rank": 4, "rope_head_dim": 3}, "model.rope_head_dim=3: must be even"),
            ({"kv_lora_rank": 4, "rope_head_dim": 8}, "less than head_dim 8"),
        ],
    )
    def test_sizes_that_make_no_sense(self, changes: dict[str, int], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            config(**changes)


class TestRefusals:
    """Before anything is written: the cache holds what it held."""

    def test_a_full_cache(self) -> None:
        generator = generator_of(model_of(GROUPED), "standard", "paged", block_size=4)
        generator.prefill(Prompts.of(prompts_of(MAX_LEN, 2, 3)))
        before = [x.clone() for x in (*generator.cache.keys, generator.cache.places.block_table)]
        with pytest.raises(ValueError, match="cache is full: sequence 0 holds 32 of max_len=32"):
            generator.step(torch.zeros(3, dtype=torch.long))
        after = (*generator.cache.keys, generator.cache.places.block_table)
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        assert generator.cache.places.host_lengths == [32, 2, 3]

    @pytest.mark.parametrize(
        ("lengths", "words"),
        [
            ((33, 1, 1), "a prompt of 33 tokens for max_len=32"),
            ((1, 1), "2 for a cache of 3 sequences"),
            ((1, 0, 1), "each must have at least one token"),
        ],
    )
    def test_prompts(self, lengths: tuple[int, ...], words: str) -> None:
        generator = generator_of(model_of(GROUPED), "standard", "contiguous")
        generator.prefill(Prompts.of(prompts_of(4, 5, 6)))
        before = generator.cache.keys[1].clone()
        with pytest.raises(ValueError, match=words):
            generator.prefill(Prompts.of(prompts_of(*lengths)))
        assert torch.equal(generator.cache.keys[1], before)
        assert generator.cache.places.host_lengths == [4, 5, 6]

    def test_a_dynamic_batch(self) -> None:
        generator = generator_of(model_of(GROUPED), "standard", "contiguous")
        generator.prefill(Prompts.of(prompts_of(4, 5, 6)))
        with pytest.raises(ValueError, match="a dynamic batch needs a Generator of its size"):
            generator.step(torch.zeros(2, dtype=torch.long))
        assert generator.cache.places.host_lengths == [4, 5, 6]

    def test_a_cache_of_another_kind(self) -> None:
        with pytest.raises(ValueError, match="cache=latent: model=test keeps keys and values"):
            generator_of(model_of(GROUPED), "mla_absorbed", "latent")
        with pytest.raises(ValueError, match="attention=mla_absorbed: takes latents"):
            generator_of(model_of(GROUPED), "mla_absorbed", "paged")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("sizes", "attention", "cache"),
    [
        pytest.param(config(d_model=256), "standard", "contiguous", marks=pytest.mark.exhaustive),
        pytest.param(config(d_model=256), "sdpa", "paged", marks=pytest.mark.exhaustive),
        (config(d_model=256), "flash_decode", "paged"),
        (config(d_model=256, kv_lora_rank=64), "mla_absorbed", "latent"),
    ],
)
def test_a_graph_generates_the_same(sizes: ModelConfig, attention: str, cache: str) -> None:
    """Twice, since the second prefill finds a graph that was captured for the first."""
    torch.manual_seed(0)
    model = Transformer(sizes, backend_of("naive"), device="cuda")
    prompts = [prompt.cuda() for prompt in prompts_of(5, 1, 17)]
    found = []
    for cuda_graph in (False, True):
        generator = Generator(
            model, backend_of(attention), backend_of("naive"), CACHES[cache].target(name=cache),
            batch_size=3, max_len=MAX_LEN, dtype="float32", cuda_graph=cuda_graph,
        )  # fmt: skip
        found += [generator.generate(prompts, NUM_TOKENS) for _ in range(2)]
    assert all(torch.equal(tokens, found[0]) for tokens in found)
