"""The transformer against a float64 reference; its formulas against PyTorch's counts."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from kernels import AttentionSpec
from models import accounting
from models.config import ModelConfig
from models.memory import MemoryPrediction, Mode, TrainingStep
from models.transformer import Transformer, cross_entropy

MODEL_DIR = Path(__file__).parents[2] / "conf" / "model"
SIZES = sorted(path.stem for path in MODEL_DIR.glob("*.yaml"))
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


def load_size(name: str) -> ModelConfig:
    values = OmegaConf.to_container(OmegaConf.load(MODEL_DIR / f"{name}.yaml"))
    return ModelConfig(**values)


def small_config(**overrides: object) -> ModelConfig:
    sizes = {"vocab_size": 61, "d_model": 48, "d_ff": 80, "num_layers": 2, "num_heads": 6}
    return ModelConfig(name="test", **{**sizes, **overrides})


@dataclass(kw_only=True, slots=True)
class ExplicitSoftmax:
    """Attention by its definition; a key is visible where its position is not later."""

    positions: Tensor | None = None
    """Positions of the tokens in their order; None is 0, 1, 2, ..."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, /) -> Tensor:
        self.seen.append((q.detach(), k.detach(), v.detach()))
        return explicit_softmax(q, k, v, self.positions, spec.causal, spec.scale)


def explicit_softmax(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, causal: bool, scale: float
) -> Tensor:
    group_size = q.shape[1] // k.shape[1]
    if group_size > 1:
        k, v = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
    scores = q @ k.mT * scale
    if causal:
        if positions is None:
            positions = torch.arange(q.shape[2], device=q.device)
        hidden = positions[None, :] > positions[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(dim=-1).to(v.dtype) @ v


@dataclass(kw_only=True, slots=True)
class Pure:
    """Explicit softmax that remembers nothing, for the compiler and the memory counts."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, /) -> Tensor:
        return explicit_softmax(q, k, v, None, spec.causal, spec.scale)


@dataclass(kw_only=True, slots=True)
class Sdpa:
    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, /) -> Tensor:
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=spec.causal, scale=spec.scale, enable_gqa=gqa
        )


def random_tokens(config: ModelConfig, batch_size: int, seq_len: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (batch_size, seq_len), generator=generator)


def double_model(config: ModelConfig, attention: object = None) -> Transformer:
    """A float64 model whose norms have weights that matter."""
    torch.manual_seed(0)
    model = Transformer(config, attention or ExplicitSoftmax(), dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model


# The sizes


def test_table_1_of_cs336() -> None:
    table = {
        "small": (768, 3072, 12, 12),
        "medium": (1024, 4096, 24, 16),
        "large": (1280, 5120, 36, 20),
        "xl": (1600, 6400, 48, 25),
        "2.7B": (2560, 10240, 32, 32),
    }
    for name, sizes in table.items():
        config = load_size(name)
        assert (config.d_model, config.d_ff, config.num_layers, config.num_heads) == sizes
        assert (config.name, config.vocab_size, config.kv_heads) == (name, 10_000, sizes[3])


@pytest.mark.parametrize("name", SIZES)
def test_each_size_opens_with_its_source_and_carries_its_name(name: str) -> None:
    assert (MODEL_DIR / f"{name}.yaml").read_text().startswith("# ")
    assert load_size(name).name == name


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"num_heads": 11}, "num_heads"),
        ({"num_heads": 16}, "num_heads"),
        ({"num_kv_heads": 4}, "num_kv_heads"),
        ({"num_layers": 0}, "num_layers"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
    ],
)
def test_bad_sizes_name_the_key(overrides: dict[str, int], key: str) -> None:
    with pytest.raises(ValueError, match=rf"^model\.{key}={overrides[key]}:"):
        small_config(**overrides)


# The network


def reference_logits(model: Transformer, tokens: Tensor, positions: Tensor) -> Tensor:
    """One sequence through the definition: RoPE by complex multiplication, a loop over heads."""
    config, weights = model.config, model.state_dict()
    head_dim, group_size = config.head_dim, config.num_heads // config.kv_heads
    frequencies = torch.tensor(
        [config.rope_theta ** (-2 * i / head_dim) for i in range(head_dim // 2)],
        dtype=torch.float64,
    )
    angles = torch.outer(positions.double(), frequencies)
    rotations = torch.polar(torch.ones_like(angles), angles)
    hidden = positions[None, :] > positions[:, None]

    def norm(x: Tensor, name: str) -> Tensor:
        root_mean_square = torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + config.norm_eps)
        return x / root_mean_square * weights[f"{name}.weight"]

    def rope(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.reshape(len(x), -1, 2)) * rotations)

    x = weights["embedding.weight"][tokens]
    for layer in range(config.num_layers):
        prefix = f"blocks.{layer}"
        h = norm(x, f"{prefix}.attention_norm")
        q, k, v = (
            (h @ weights[f"{prefix}.attention.{name}_proj.weight"].T).split(head_dim, dim=-1)
            for name in "qkv"
        )
        heads = []
        for head, q_head in enumerate(q):
            kv_head = head // group_size
            q_rotated, k_rotated = rope(q_head).flatten(1), rope(k[kv_head]).flatten(1)
            scores = q_rotated @ k_rotated.T / math.sqrt(head_dim)
            scores[hidden] = -math.inf
            unnormalised = torch.exp(scores - scores.max(-1, keepdim=True).values)
            heads.append(unnormalised / unnormalised.sum(-1, keepdim=True) @ v[kv_head])
        x = x + torch.cat(heads, dim=-1) @ weights[f"{prefix}.attention.o_proj.weight"].T
        h = norm(x, f"{prefix}.feed_forward_norm")
        w1, w2, w3 = (weights[f"{prefix}.feed_forward.w{i}.weight"] for i in (1, 2, 3))
        gate = h @ w1.T
        x = x + (gate / (1 + torch.exp(-gate)) * (h @ w3.T)) @ w2.T
    return norm(x, "final_norm") @ weights["head.weight"].T


@pytest.mark.parametrize("num_kv_heads", [None, 3, 1])
def test_logits_match_the_definition(num_kv_heads: int | None) -> None:
    config = small_config(num_kv_heads=num_kv_heads)
    model = double_model(config)
    tokens, positions = random_tokens(config, 2, 11), torch.arange(11)
    with torch.no_grad():
        logits = model(tokens, positions)
        reference = torch.stack([reference_logits(model, row, positions) for row in tokens])
    torch.testing.assert_close(logits, reference, rtol=1e-10, atol=1e-10)


def test_positions_may_differ_between_sequences() -> None:
    config = small_config()
    model = double_model(config)
    tokens = random_tokens(config, 2, 9)
    positions = torch.stack([torch.arange(9), torch.arange(0, 27, 3)])
    with torch.no_grad():
        logits = model(tokens, positions)
        reference = torch.stack(
            [reference_logits(model, *row) for row in zip(tokens, positions, strict=True)]
        )
    torch.testing.assert_close(logits, reference, rtol=1e-10, atol=1e-10)


def test_permuting_tokens_with_their_positions_permutes_logits() -> None:
    config = small_config(num_kv_heads=2)
    attention = ExplicitSoftmax()
    model = double_model(config, attention)
    tokens, positions = random_tokens(config, 2, 16), torch.arange(16)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = model(tokens, positions)
        attention.positions = positions[order]
        permuted = model(tokens[:, order], positions[order])
    torch.testing.assert_close(permuted, logits[:, order], rtol=1e-10, atol=1e-10)


def test_only_relative_positions_matter() -> None:
    config = small_config()
    model = double_model(config)
    tokens, positions = random_tokens(config, 2, 16), torch.arange(16)
    with torch.no_grad():
        logits = model(tokens, positions)
        shifted = model(tokens, positions + 1000)
        stretched = model(tokens, positions * 2)
    torch.testing.assert_close(shifted, logits, rtol=1e-9, atol=1e-9)
    assert (stretched - logits).abs().max() > 1e-3


def test_a_later_token_changes_no_earlier_logits() -> None:
    config = small_config()
    model = double_model(config)
    tokens, positions = random_tokens(config, 2, 16), torch.arange(16)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % config.vocab_size
    with torch.no_grad():
        difference = (model(changed, positions) - model(tokens, positions)).abs().amax(dim=(0, 2))
    assert difference[:9].max() == 0
    assert difference[9:].min() > 1e-6


def test_attention_gets_views_with_unexpanded_keys() -> None:
    config = small_config(num_kv_heads=2)
    attention = ExplicitSoftmax()
    double_model(config, attention)(random_tokens(config, 3, 10), torch.arange(10))
    assert len(attention.seen) == config.num_layers
    for q, k, v in attention.seen:
        assert q.shape == (3, 6, 10, 8)
        assert k.shape == v.shape == (3, 2, 10, 8)
        assert all(x.transpose(1, 2).is_contiguous() for x in (q, k, v))


def test_cross_entropy_of_bfloat16_logits_is_float32_accurate() -> None:
    logits = (4 * torch.randn(2, 5, 300, generator=torch.Generator().manual_seed(0))).bfloat16()
    targets = torch.arange(10).view(2, 5)
    wide = logits.double()
    by_hand = wide.exp().sum(-1).log() - wide.gather(-1, targets[..., None]).squeeze(-1)
    loss = cross_entropy(logits, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(by_hand.mean().item(), rel=1e-6)


# Construction, compilation, precision


def named_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear))


def test_initialisation_is_truncated_normal() -> None:
    config = small_config(vocab_size=400, d_model=192, d_ff=320, num_layers=1, num_kv_heads=3)
    torch.manual_seed(0)
    model = Transformer(config, Pure())
    stds = {"embedding": (model.embedding.weight, 1.0)}
    for name, linear in named_linears(model):
        assert linear.bias is None
        d_out, d_in = linear.weight.shape
        stds[name] = (linear.weight, math.sqrt(2 / (d_in + d_out)))
    assert len(stds) == 1 + 7 + 1
    std_after_truncation = 0.98658  # of a unit normal cut at 3: sqrt(1 - 6 phi(3) / erf(3/sqrt 2))
    for name, (weight, std) in stds.items():
        assert weight.abs().max() <= 3 * std * (1 + 1e-6), name
        assert weight.abs().max() > 2.7 * std, name
        assert weight.std().item() == pytest.approx(std_after_truncation * std, rel=0.02), name
        assert abs(weight.mean().item()) < 0.03 * std, name
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            assert (module.weight == 1).all()


def test_one_seed_gives_one_model_in_every_precision() -> None:
    parameters = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        parameters[dtype] = list(Transformer(small_config(), Pure(), dtype=dtype).parameters())
    for wide, low in zip(*parameters.values(), strict=True):
        assert low.dtype == torch.bfloat16
        assert torch.equal(wide.bfloat16(), low)


@pytest.mark.parametrize("device", ["cpu", "meta", GPU])
def test_parameters_are_made_on_the_device(device: str) -> None:
    model = Transformer(small_config(), Pure(), device=device)
    assert {parameter.device.type for parameter in model.parameters()} == {device}


def test_compiles_without_a_graph_break() -> None:
    torch._dynamo.reset()
    config = small_config(num_kv_heads=3)
    model = double_model(config, Pure())
    tokens, positions = random_tokens(config, 2, 8), torch.arange(8)
    expected = model(tokens, positions)
    whole = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(tokens, positions), expected)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="eager")
    by_block = model(tokens, positions)
    by_block.sum().backward()
    torch.testing.assert_close(by_block, expected)
    assert model.embedding.weight.grad is not None


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_autocast_feeds_attention_one_low_dtype_and_keeps_norms_accurate(device: str) -> None:
    config = small_config()
    attention = ExplicitSoftmax()
    model = Transformer(config, attention, device=device)
    norms: list[tuple[Tensor, Tensor]] = []
    model.final_norm.register_forward_hook(lambda _, x, y: norms.append((x[0], y)))
    tokens, positions = random_tokens(config, 2, 8).to(device), torch.arange(8, device=device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        logits = model(tokens, positions)
    assert logits.dtype == torch.bfloat16
    for qkv in attention.seen:
        assert [x.dtype for x in qkv] == [torch.bfloat16] * 3
    ((x, y),) = norms
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)


def test_rms_norm_of_bfloat16_rounds_once() -> None:
    model = Transformer(small_config(d_model=1536), Pure(), dtype=torch.bfloat16)
    x = 30 * torch.randn(64, 1536, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(
        model.final_norm(x).double(), expected, rtol=2**-8 * 1.01, atol=1e-30
    )


# Formulas


def test_accounting_needs_no_torch() -> None:
    code = (
        "import sys; from harness.commands import lazy_imports; lazy_imports.install(); "
        "from models.accounting import forward_flops; from models.memory import TrainingStep; "
        "sys.exit('torch._C' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=MODEL_DIR.parents[1])


@pytest.mark.parametrize("name", SIZES)
def test_parameters_by_formula_are_those_of_the_module(name: str) -> None:
    config = load_size(name)
    model = Transformer(config, Pure(), device="meta")
    by_part = dict.fromkeys(("embedding", "attention", "feed_forward", "norms", "head"), 0)
    for parameter_name, parameter in model.named_parameters():
        parts = parameter_name.split(".")
        part = "norms" if parts[-2].endswith("norm") else parts[2] if len(parts) > 2 else parts[0]
        by_part[part] += parameter.numel()
    counted = accounting.count_parameters(config)
    assert {part: getattr(counted, part) for part in by_part} == by_part
    assert accounting.num_parameters(config) == sum(by_part.values())


@pytest.mark.parametrize("num_kv_heads", [None, 2])
def test_flops_by_formula_are_those_counted(num_kv_heads: int | None) -> None:
    config, batch_size, seq_len = small_config(num_kv_heads=num_kv_heads), 3, 20
    model = Transformer(config, Pure())
    with FlopCounterMode(display=False) as forward:
        logits = model(random_tokens(config, batch_size, seq_len), torch.arange(seq_len))
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    shape = {"config": config, "batch_size": batch_size, "seq_len": seq_len, "causal": False}
    assert forward.get_total_flops() == accounting.forward_flops(**shape)
    assert backward.get_total_flops() == accounting.backward_flops(**shape)
    assert accounting.train_step_flops(**shape) == 3 * forward.get_total_flops()


def test_a_causal_mask_halves_attention_alone() -> None:
    config = small_config()
    full = accounting.forward_flops(config, 3, 20, causal=False)
    causal = accounting.forward_flops(config, 3, 20)
    batch_size, num_heads, seq_len, head_dim, num_layers = 3, 6, 20, 8, 2
    assert full - causal == 2 * batch_size * num_heads * seq_len**2 * head_dim * num_layers


def saved_bytes(model: Transformer, tokens: Tensor, autocast: bool = False) -> int:
    """Bytes of distinct storages, parameters apart, that autograd keeps for one backward pass."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would refer back to its own graph

    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(inputs.shape[1], device=tokens.device)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast),
    ):
        loss = cross_entropy(model(inputs, positions), targets)
    assert loss.requires_grad
    return sum(storages.values())


MEMORY_SIZES = {"vocab_size": 500, "d_model": 96, "d_ff": 256, "num_layers": 3}
LOSS_GRADIENTS = 2 * 4 * 500
"""Bytes a token of the two gradients with which the backward pass begins: not saved."""


@pytest.mark.parametrize("num_kv_heads", [None, 2])
@pytest.mark.parametrize("attention", [Pure(), Sdpa()], ids=["explicit", "sdpa"])
def test_activations_by_formula_are_those_saved_on_the_cpu(
    attention: Pure | Sdpa, num_kv_heads: int | None
) -> None:
    config = small_config(**MEMORY_SIZES, num_kv_heads=num_kv_heads)
    batch_size, seq_len = 3, 64
    tokens = random_tokens(config, batch_size, seq_len + 1)
    measured = saved_bytes(Transformer(config, attention), tokens)
    num_norms = 2 * config.num_layers + 1
    kept_by_cpu_norms = num_norms * 4 * batch_size * seq_len * config.d_model
    step = TrainingStep(
        config=config,
        batch_size=batch_size,
        seq_len=seq_len,
        mode="forward_backward",
        attention_saves_scores=isinstance(attention, Pure),
        param_bytes=4,
        activation_bytes=4,
    )
    predicted = step.predict_memory().activations
    predicted -= LOSS_GRADIENTS * batch_size * seq_len
    assert predicted == pytest.approx(measured - kept_by_cpu_norms, rel=0.003)
    assert predicted == pytest.approx(measured, rel=0.15)


PRECISIONS = {
    "fp32": (torch.float32, False),
    "bf16": (torch.float32, True),
    "bf16_pure": (torch.bfloat16, False),
}


@pytest.mark.parametrize(
    ("attention", "precision"),
    [(Pure(), "fp32"), (Pure(), "bf16"), (Sdpa(), "bf16"), (Sdpa(), "bf16_pure")],
)
@pytest.mark.parametrize("device", [GPU])
def test_memory_by_formula_is_that_on_the_gpu(
    device: str, attention: Pure | Sdpa, precision: str
) -> None:
    dtype, autocast = PRECISIONS[precision]
    config, batch_size, seq_len = load_size("medium"), 4, 512
    # What earlier tests left in reference cycles would be freed while this one measures.
    gc.collect()
    memory_before = torch.cuda.memory_allocated()
    model = Transformer(config, attention, device=device, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = random_tokens(config, batch_size, seq_len + 1).to(device)
    positions = torch.arange(seq_len, device=device)

    def predict(mode: Mode) -> MemoryPrediction:
        return TrainingStep(
            config=config,
            batch_size=batch_size,
            seq_len=seq_len,
            mode=mode,
            attention_saves_scores=isinstance(attention, Pure),
            param_bytes=dtype.itemsize,
            activation_bytes=4 if precision == "fp32" else 2,
            autocast=autocast,
        ).predict_memory()

    def forward() -> None:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=autocast):
            cross_entropy(model(tokens[:, :-1], positions), tokens[:, 1:])

    def forward_backward() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = cross_entropy(model(tokens[:, :-1], positions), tokens[:, 1:])
        loss.backward()

    def train_step() -> None:
        forward_backward()
        optimizer.step()

    loss_gradients = 8 * batch_size * seq_len * config.vocab_size
    saved = saved_bytes(model, tokens, autocast)
    assert predict("train_step").activations - loss_gradients == pytest.approx(saved, rel=0.01)
    steps = {"forward": forward, "forward_backward": forward_backward, "train_step": train_step}
    for mode, step in steps.items():
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            step()
            model.zero_grad(set_to_none=True)
        peak = torch.cuda.max_memory_allocated() - memory_before
        assert predict(mode).total == pytest.approx(peak, rel=0.1), mode
