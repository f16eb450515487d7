"""Windows, prefixes, caps and sinks in the transformer, against loops over the definition."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kernels import BACKENDS, AttentionSpec
from kernels.caches import CACHES
from models import accounting
from models.checkpointing import checkpoint_blocks
from models.config import ModelConfig
from models.generation import Generator
from models.memory import TrainingStep
from models.transformer import Transformer, cross_entropy
from models.variants import AttentionVariant

SEQ_LEN = 11


def small_config(**overrides: object) -> ModelConfig:
    sizes = {"vocab_size": 23, "d_model": 32, "d_ff": 48, "num_layers": 4, "num_heads": 4}
    return ModelConfig(name="test", **{**sizes, "num_kv_heads": 2, **overrides})


def backend(name: str, **options: Any) -> Any:
    return BACKENDS[name].target(name=name, **options)


def double_model(
    config: ModelConfig, variant: AttentionVariant, attention: Any = None
) -> Transformer:
    """A float64 model whose norms and sinks have weights that matter."""
    torch.manual_seed(0)
    attention = backend("naive") if attention is None else attention
    model = Transformer(config, attention, variant=variant, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if "norm" in name or "sinks" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def random_tokens(config: ModelConfig, batch_size: int = 2, seq_len: int = SEQ_LEN) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (batch_size, seq_len), generator=generator)


VARIANTS = {
    "window": (AttentionVariant(window=3), {}),
    "window in every second layer": (AttentionVariant(window=3), {"full_attention_every": 2}),
    "window, every third full": (AttentionVariant(window=3), {"full_attention_every": 3}),
    "prefix": (AttentionVariant(prefix_len=4), {}),
    "capped": (AttentionVariant(softcap=0.7), {}),
    "sinks": (AttentionVariant(sinks=True), {}),
    "all that gpt-oss and Gemma 2 have": (
        AttentionVariant(window=4, softcap=0.7, sinks=True),
        {"full_attention_every": 2},
    ),
}


def sees(variant: AttentionVariant, every: int | None, layer: int, query: int, key: int) -> bool:
    """Whether a query sees a key in a layer, by the definition."""
    is_full = every is not None and (layer + 1) % every == 0
    if key < variant.prefix_len:
        return True
    in_window = variant.window is None or is_full or query - key < variant.window
    return key <= query and in_window


def logits_by_definition(model: Transformer, variant: AttentionVariant, tokens: Tensor) -> Tensor:
    """One sequence, one query of one head after the other."""
    config, weights = model.config, dict(model.named_parameters())
    length, width = len(tokens), config.head_dim
    group = config.num_heads // config.kv_heads
    turns = [config.rope_theta ** (-2 * i / width) for i in range(width // 2)]
    angles = torch.outer(torch.arange(length).double(), torch.tensor(turns, dtype=torch.float64))
    rotations = torch.polar(torch.ones_like(angles), angles)

    def norm(x: Tensor, name: str) -> Tensor:
        size = ((x * x).sum(-1, keepdim=True) / x.shape[-1] + config.norm_eps).sqrt()
        return x / size * weights[f"{name}.weight"]

    def rope(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(length, -1, 2))
        return torch.view_as_real(pairs * rotations).flatten(1)

    x = weights["embedding.weight"][tokens]
    for layer in range(config.num_layers):
        prefix = f"blocks.{layer}"
        h = norm(x, f"{prefix}.attention_norm")
        q, k, v = (
            (h @ weights[f"{prefix}.attention.{name}_proj.weight"].T).split(width, dim=-1)
            for name in "qkv"
        )
        heads = []
        for head in range(config.num_heads):
            queries, keys = rope(q[head]), rope(k[head // group])
            rows = []
            for i in range(length):
                every = config.full_attention_every
                seen = [j for j in range(length) if sees(variant, every, layer, i, j)]
                scores = torch.stack([queries[i] @ keys[j] for j in seen]) / math.sqrt(width)
                if variant.softcap is not None:
                    scores = variant.softcap * torch.tanh(scores / variant.softcap)
                exponentials = torch.exp(scores)
                total = exponentials.sum()
                if variant.sinks:
                    total = total + torch.exp(weights[f"{prefix}.attention.sinks"][head])
                rows.append(exponentials / total @ v[head // group][seen])
            heads.append(torch.stack(rows))
        x = x + torch.cat(heads, dim=-1) @ weights[f"{prefix}.attention.o_proj.weight"].T
        h = norm(x, f"{prefix}.feed_forward_norm")
        w1, w2, w3 = (weights[f"{prefix}.feed_forward.w{i}.weight"] for i in (1, 2, 3))
        gate = h @ w1.T
        x = x + (gate / (1 + torch.exp(-gate)) * (h @ w3.T)) @ w2.T
    return norm(x, "final_norm") @ weights["head.weight"].T


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_gradients_are_those_of_the_definition(name: str) -> None:
    """Of every parameter, the sinks of every layer among them."""
    variant, overrides = VARIANTS[name]
    config = small_config(**overrides)
    model = double_model(config, variant)
    tokens = random_tokens(config)
    logits = model(tokens, torch.arange(SEQ_LEN))
    expected = torch.stack([logits_by_definition(model, variant, row) for row in tokens])
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn(logits.shape, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    assert sum("sinks" in one for one in parameters) == (4 if variant.sinks else 0)
    got = torch.autograd.grad(logits, list(parameters.values()), weights)
    wanted = torch.autograd.grad(expected, list(parameters.values()), weights)
    for parameter, mine, theirs in zip(parameters, got, wanted, strict=True):
        assert theirs.abs().max() > 0, parameter
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10, msg=parameter)


def test_sinks_gradients_are_finite_differences() -> None:
    """Through the explicit passes of a tiled backend, whose lse is float32, in every layer."""
    config = small_config(num_layers=2)
    model = double_model(config, AttentionVariant(window=4, sinks=True), backend("flash_torch"))
    tokens, positions = random_tokens(config), torch.arange(SEQ_LEN)

    def loss() -> Tensor:
        return cross_entropy(model(tokens, positions), tokens.roll(-1, 1))

    loss().backward()
    step = 1e-2
    for name, parameter in model.named_parameters():
        if "sinks" not in name:
            continue
        for head in range(config.num_heads):
            found = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter[head] += sign * step
                    found.append(loss().item())
                    parameter[head] -= sign * step
            assert parameter.grad is not None
            slope = (found[0] - found[1]) / (2 * step)
            assert parameter.grad[head].item() == pytest.approx(slope, rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize(("every", "reaches"), [(None, False), (2, True), (4, True)])
def test_a_token_outside_every_window_matters_where_a_layer_is_full(
    every: int | None, reaches: bool
) -> None:
    """Four windows of 3 keys reach 8 tokens back; the first token is 11 before the last."""
    config = small_config(full_attention_every=every)
    model = double_model(config, AttentionVariant(window=3))
    seen: list[Tensor] = []
    model.embedding.register_forward_hook(lambda module, args, x: seen.append(x))
    logits = model(random_tokens(config, 1, 12), torch.arange(12))
    (gradient,) = torch.autograd.grad(logits[0, -1].square().sum(), seen)
    of_token = gradient[0].abs().amax(-1)
    assert (of_token[3:] > 0).all()
    assert ((of_token[:3] > 0) == reaches).all()


class Noting:
    """Attention that notes the window of each call."""

    def __init__(self) -> None:
        self.windows: list[int | None] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, /) -> Tensor:
        self.windows.append(spec.window)
        return q


@pytest.mark.parametrize(
    ("every", "windows"),
    [
        (None, [5] * 6),
        (2, [5, None] * 3),
        (3, [5, 5, None] * 2),
        (6, [5, 5, 5, 5, 5, None]),
        (4, [5, 5, 5, None, 5, 5]),
    ],
)
def test_the_last_layer_of_each_group_is_full(every: int | None, windows: list[int | None]) -> None:
    config, noting = small_config(num_layers=6, full_attention_every=every), Noting()
    model = Transformer(config, noting, variant=AttentionVariant(window=5))
    model(random_tokens(config), torch.arange(SEQ_LEN))
    assert noting.windows == windows


@pytest.mark.parametrize("every", [0, 1, 5])
def test_a_wrong_number_of_layers_is_one_line(every: int) -> None:
    with pytest.raises(ValueError, match=rf"^model\.full_attention_every={every}: .*") as error:
        small_config(full_attention_every=every)
    assert "\n" not in str(error.value)
    assert "num_layers=4" in str(error.value)


EVERYTHING = AttentionVariant(window=4, softcap=2.0, sinks=True)


def test_sinks_begin_at_zero_in_the_parameters_dtype_on_any_device() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = Transformer(small_config(), Noting(), variant=EVERYTHING, dtype=dtype)
        for block in model.blocks:
            assert torch.equal(block.attention.sinks, torch.zeros(4, dtype=dtype))
    hollow = Transformer(small_config(), Noting(), variant=EVERYTHING, device="meta")
    attention = hollow.blocks[0].attention
    assert attention.sinks.is_meta
    attention.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        attention.sinks.fill_(3.0)
    attention.reset_parameters()
    assert torch.equal(attention.sinks, torch.zeros(4))


def test_an_optimizer_trains_sinks_under_autocast() -> None:
    config = small_config()
    torch.manual_seed(0)
    model = Transformer(config, backend("flash_torch"), variant=EVERYTHING)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = random_tokens(config)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model(tokens, torch.arange(SEQ_LEN)), tokens.roll(-1, 1))
    loss.backward()
    optimizer.step()
    for block in model.blocks:
        assert (block.attention.sinks.detach().abs() > 1e-3).all()


def test_compiled_and_checkpointed_models_compute_the_same() -> None:
    torch._dynamo.reset()
    config = small_config(full_attention_every=2)
    tokens, positions = random_tokens(config), torch.arange(SEQ_LEN)

    def gradients(model: nn.Module) -> list[Tensor]:
        return list(
            torch.autograd.grad(model(tokens, positions).square().sum(), list(model.parameters()))
        )

    expected = gradients(double_model(config, EVERYTHING))
    for selective in (False, True):
        model = double_model(config, EVERYTHING)
        checkpoint_blocks(model, selective=selective)
        torch.testing.assert_close(gradients(model), expected)
    model = double_model(config, EVERYTHING)
    model.compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(gradients(model), expected)
    model = double_model(config, EVERYTHING)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(gradients(model), expected)


# Formulas


@pytest.mark.parametrize("variant", [AttentionVariant(window=4), EVERYTHING])
def test_parameters_by_formula_are_those_of_the_module_in_its_order(
    variant: AttentionVariant,
) -> None:
    config = small_config()
    sizes = [p.numel() for p in Transformer(config, Noting(), variant=variant).parameters()]
    assert accounting.parameter_sizes(config, variant=variant) == sizes
    assert accounting.num_parameters(config, variant) == sum(sizes)
    assert accounting.count_parameters(config, variant).sinks == (16 if variant.sinks else 0)


@pytest.mark.parametrize("name", VARIANTS)
def test_flops_count_the_pairs_that_each_layer_sees(name: str) -> None:
    variant, overrides = VARIANTS[name]
    config = small_config(**overrides)
    every, seq_len = config.full_attention_every, 12
    pairs = 0.0
    for layer in range(config.num_layers):
        seen = sum(
            sees(variant, every, layer, i, j)
            for i, j in itertools.product(range(seq_len), repeat=2)
        )
        # A causal mask alone counts as half of the square.
        pairs += seq_len**2 / 2 if seen == seq_len * (seq_len + 1) / 2 else seen
    linear = 2 * accounting.count_parameters(config, variant).linear * 3 * seq_len
    expected = linear + 4 * 3 * config.num_heads * config.head_dim * pairs
    shape = {"config": config, "batch_size": 3, "seq_len": seq_len, "variant": variant}
    assert accounting.forward_flops(**shape) == expected
    assert accounting.backward_flops(**shape) == 2 * expected
    assert accounting.train_step_flops(**shape) == 3 * expected


def test_memory_counts_sinks_among_parameters() -> None:
    config = small_config()

    def predicted(variant: AttentionVariant) -> Any:
        return TrainingStep(
            config=config,
            batch_size=2,
            seq_len=16,
            mode="train_step",
            attention_saves_scores=False,
            param_bytes=4,
            activation_bytes=4,
            variant=variant,
        ).predict_memory()

    plain, with_sinks = predicted(AttentionVariant()), predicted(AttentionVariant(sinks=True))
    assert with_sinks.parameters - plain.parameters == 4 * 16
    # Two moments of each sink, and a count of steps for the sinks of each layer.
    assert with_sinks.optimizer_state - plain.optimizer_state == 2 * 4 * 16 + 4 * 4


def saved_bytes(model: Transformer, tokens: Tensor) -> int:
    """Bytes of distinct storages, parameters apart, that autograd keeps for a backward pass."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        cross_entropy(model(tokens, torch.arange(tokens.shape[1])), tokens)
    return sum(storages.values())


@pytest.mark.parametrize("variant", [AttentionVariant(window=5), EVERYTHING])
def test_activations_by_formula_are_those_saved(variant: AttentionVariant) -> None:
    config = small_config(vocab_size=200, num_layers=3)
    tokens = random_tokens(config, 3, 64)
    measured = saved_bytes(Transformer(config, backend("naive"), variant=variant), tokens)
    step = TrainingStep(
        config=config,
        batch_size=3,
        seq_len=64,
        mode="forward_backward",
        attention_saves_scores=True,
        param_bytes=4,
        activation_bytes=4,
        on_cpu=True,
        variant=variant,
    )
    assert step.predict_memory().saved == pytest.approx(measured, rel=0.005)


def test_the_tanh_of_a_cap_is_saved_in_float32_beside_float16() -> None:
    config = small_config(vocab_size=200)
    tokens = random_tokens(config, 2, 32)

    def measured(softcap: float | None) -> int:
        variant = AttentionVariant(softcap=softcap)
        model = Transformer(config, backend("naive"), variant=variant, dtype=torch.float16)
        return saved_bytes(model, tokens)

    def predicted(softcap: float | None) -> float:
        step = TrainingStep(
            config=config,
            batch_size=2,
            seq_len=32,
            mode="forward_backward",
            attention_saves_scores=True,
            param_bytes=2,
            activation_bytes=2,
            capped_bytes=4,
            variant=AttentionVariant(softcap=softcap),
        )
        return step.predict_memory().saved

    more = measured(2.0) - measured(None)
    assert more == 4 * config.num_layers * 2 * config.num_heads * 32**2
    assert predicted(2.0) - predicted(None) == more


# What cannot be


def test_a_cache_takes_no_variant() -> None:
    config, naive = small_config(), backend("naive")
    windowed = Transformer(config, naive, variant=AttentionVariant(window=4))
    plain = Transformer(config, naive)
    with_window = backend("naive", window=4)
    for model, prefill in ((windowed, naive), (plain, with_window)):
        with pytest.raises(ValueError, match=r"^attention\.window=4: .*leave it out$"):
            Generator(
                model,
                backend("standard"),
                prefill,
                CACHES["contiguous"].target(name="contiguous"),
                batch_size=1,
                max_len=16,
                dtype="float32",
            )


def test_latent_attention_takes_no_variant() -> None:
    config = small_config(kv_lora_rank=8, num_kv_heads=None)
    with pytest.raises(ValueError, match=r"^attention\.softcap=2\.0: .*kv_lora_rank=8"):
        Transformer(config, Noting(), variant=AttentionVariant(softcap=2.0))
