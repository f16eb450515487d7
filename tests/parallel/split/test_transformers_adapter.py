"""Models of Hugging Face over split sequences: its calling convention, and a model if installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from split_attention import CLOSENESS, SCALE, Batch, exact
from torch import nn

import parallel.split
from parallel.split import (
    position_ids,
    register_with_transformers,
    release,
    shard,
    shard_stream,
    stream_attention,
    unshard,
    zigzag_attention,
)
from parallel.split.hugging_face import attention_function


def stand_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A module like transformers, as far as the adapter sees it; gives what is registered."""
    registered: dict[str, Any] = {}

    class AttentionInterface:
        @classmethod
        def register(cls, key: str, value: Any) -> None:
            registered[key] = value

    module = ModuleType("transformers")
    module.AttentionInterface = AttentionInterface  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", module)
    return registered


class Layer(nn.Module):
    """What transformers hands to an attention function as the module."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal


def errors(group: dist.ProcessGroup, name: str, packed: bool) -> list[float]:
    """Of o, dq, dk and dv, called as transformers does, with q, k, v [B, H, S, D]."""
    with pytest.MonkeyPatch.context() as patch:
        registered = stand_in(patch)
        function = getattr(parallel.split, f"{name}_attention")
        key = register_with_transformers(function, group=group)
        assert key == f"{name}_attention"
        attention = registered[key]
    batch = Batch(lengths=(24, 12) if packed else (24, 24), packed=packed)
    starts = batch.packing().cu_seqlens_q if packed else None

    def own(x: torch.Tensor) -> torch.Tensor:
        if name == "stream":
            part = shard_stream(x, group=group)
        else:
            part = shard(x, name, dim=0 if packed else 2, cu_seqlens=starts, group=group)
        return part.transpose(0, 1).unsqueeze(0) if packed else part

    q, k, v, do = (own(x) for x in batch.tensors())
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    more = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts} if packed else {}
    o, weights = attention(
        Layer(), *leaves, None, dropout=0.0, scaling=SCALE, sliding_window=4096, **more
    )
    assert weights is None
    found = [o.detach().transpose(1, 2), *torch.autograd.grad(o, leaves, do.transpose(1, 2))]
    return [
        float((got - want).abs().max() / want.abs().max())
        for got, want in zip(found, map(own, exact(batch)), strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "packed"), [("zigzag", False), ("ulysses", False), ("zigzag", True), ("stream", True)]
)
def test_the_calling_convention(name: str, packed: bool) -> None:
    for found in on_ranks(3, errors, name, packed):
        assert max(found) < CLOSENESS


def refused(group: dist.ProcessGroup, arguments: dict[str, Any]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        registered = stand_in(patch)
        name = register_with_transformers(zigzag_attention, name="mine", group=group)
    q = torch.zeros(1, 2, 8, 4)
    try:
        registered[name](Layer(), q, q, q, **{"attention_mask": None, "scaling": 1.0, **arguments})
    except ValueError as error:
        return str(error)
    finally:
        release(group)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"attention_mask": torch.ones(1, 8)}, "attn_implementation: takes no mask tensor; a "),
        ({"dropout": 0.1}, "attn_implementation: has no dropout; it was asked for 0.1"),
        (
            {"sliding_window": 12, "is_causal": False},
            "attn_implementation: has no sliding window without a causal mask; it was asked for 12",
        ),
        (
            {"position_bias": torch.ones(1)},
            "attn_implementation: has no position_bias, which the model passes",
        ),
        ({"is_causal": False}, "zigzag_attention: zigzag balances a causal mask"),
    ],
)
def test_calls_that_it_cannot_split(arguments: dict[str, Any], reason: str) -> None:
    for message in on_ranks(2, refused, arguments):
        assert message.startswith(f"rank 0: {reason}")


def with_positions(group: dist.ProcessGroup, given: bool) -> str:
    """What is raised for a model that was given positions, or that counts from 0 by itself."""
    q = torch.zeros(1, 2, 8, 4)
    at = position_ids("zigzag", length=8 * group.size(), group=group) if given else torch.arange(8)
    attention = attention_function(zigzag_attention, group=group)
    try:
        attention(Layer(), q, q, q, None, scaling=1.0, position_ids=at[None])
    except ValueError as error:
        return str(error)
    finally:
        release(group)
    return "nothing was raised"


def test_positions_that_were_forgotten() -> None:
    assert on_ranks(3, with_positions, True) == ["nothing was raised"] * 3
    for message in on_ranks(3, with_positions, False):
        assert message.startswith("rank 1: position_ids begin at 0: give the model those of split")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"transformers with an AttentionInterface \(4\.48 or"):
        register_with_transformers(stream_attention)


def llama_errors(group: dist.ProcessGroup) -> list[float]:
    """Of a Llama's logits and of a weight's gradient, against the same model in one process."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    name = register_with_transformers(zigzag_attention, name="zigzag", group=group)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(16, (2, 24))
    weight = model.model.layers[0].self_attn.k_proj.weight
    model.set_attn_implementation("sdpa")
    whole = model(tokens).logits
    (want,) = torch.autograd.grad(whole.square().sum(), weight)
    model.set_attn_implementation(name)
    positions = position_ids("zigzag", length=24, group=group)
    own = shard(tokens, "zigzag", dim=1, group=group)
    logits = model(own, position_ids=positions.expand(len(own), -1)).logits
    (got,) = torch.autograd.grad(logits.square().sum(), weight)
    dist.all_reduce(got, group=group)
    joined = unshard(logits, "zigzag", dim=1, group=group)
    return [float((joined - whole).abs().max()), float((got - want).abs().max())]


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_llama() -> None:
    for found in on_ranks(2, llama_errors):
        assert max(found) < 1e-4
