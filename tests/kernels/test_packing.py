"""Packed batches and merged parts: what every backend with an lse can do by derivation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import BACKENDS, Attention, AttentionProblem, AttentionSpec, Packing

LENGTHS = ((5, 5), (1, 1), (0, 0), (17, 17), (3, 9), (4, 0), (6, 2), (3, 1))
"""Query and key lengths of each sequence; with fewer keys, early queries see none."""


def lse_backends() -> list[Attention]:
    """Every registered backend that gives a log-sum-exp and runs here, on float32."""
    found = []
    for entry in BACKENDS:
        backend = entry.target(name=entry.name, **entry.preset)
        if not isinstance(backend, Attention):
            continue
        if backend.gives_lse and backend.supports(problem()) is None:
            found.append(backend)
    return found


def problem() -> AttentionProblem:
    return AttentionProblem(
        batch_size=len(LENGTHS),
        num_heads=4,
        num_kv_heads=2,
        q_len=17,
        kv_len=17,
        head_dim=16,
        dtype="float32",
        device="cpu",
        causal=True,
        needs_grad=True,
        packed=True,
    )


def packed_tensors() -> tuple[Tensor, Tensor, Tensor, Packing]:
    generator = torch.Generator().manual_seed(3)
    q_len, kv_len = (sum(pair[i] for pair in LENGTHS) for i in (0, 1))
    q = torch.randn(q_len, 4, 16, generator=generator)
    k = torch.randn(kv_len, 2, 16, generator=generator)
    v = torch.randn(kv_len, 2, 16, generator=generator)
    cu_q, cu_k = (torch.tensor([0, *(pair[i] for pair in LENGTHS)]).cumsum(0).int() for i in (0, 1))
    return q, k, v, Packing(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_q_len=17, max_kv_len=17)


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """One sequence [T, H, D] in float64, heads expanded; differentiable."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    scores = q @ k.mT * scale
    if causal:
        q_len, kv_len = scores.shape[-2:]
        hidden = torch.ones(q_len, kv_len).tril(kv_len - q_len) == 0
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    # Selected before the softmax, so that its gradient of a row without keys is not NaN times 0.
    seen = (lse > float("-inf")).unsqueeze(-1)
    probabilities = torch.where(seen, scores, 0.0).softmax(-1) * seen
    return (probabilities @ v).transpose(0, 1), lse


@pytest.mark.parametrize("backend", lse_backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("causal", [True, False])
def test_each_sequence_attends_to_itself_alone(backend: Attention, causal: bool) -> None:
    q, k, v, packing = packed_tensors()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = backend.attend(*leaves, AttentionSpec(causal=causal, scale=0.3, packing=packing))
    with torch.no_grad():
        _, lse = backend.forward(q, k, v, AttentionSpec(causal=causal, scale=0.3, packing=packing))
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(4))
    gradients = torch.autograd.grad(o, leaves, do)
    expected = [torch.zeros_like(x, dtype=torch.float64) for x in leaves]
    for queries, keys in packing.slices():
        if keys.start == keys.stop:
            assert (o[queries] == 0).all()
            assert (lse[:, queries] == -torch.inf).all()
            continue
        tokens = (queries, keys, keys)
        own = [x[s].detach().requires_grad_() for x, s in zip((q, k, v), tokens, strict=True)]
        part, part_lse = exact(*own, causal, 0.3)
        torch.testing.assert_close(o[queries], part.float(), rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(lse[:, queries], part_lse.float(), rtol=1e-4, atol=2e-5)
        parts = torch.autograd.grad(part, own, do[queries].double())
        for whole, tokens, gradient in zip(expected, (queries, keys, keys), parts, strict=True):
            whole[tokens] = gradient.double()
    for got, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("backend", lse_backends(), ids=lambda backend: backend.name)
def test_continuing_from_an_accumulator(backend: Attention) -> None:
    """Keys in three parts, each merged onto what came before, from nothing at all."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(2, 4, 6, 16, generator=generator)
    k, v = (torch.randn(2, 2, 30, 16, generator=generator) for _ in range(2))
    o = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -torch.inf)
    for keys in (slice(0, 12), slice(12, 13), slice(13, 30)):
        o, lse = backend.forward_onto(
            o, lse, q, k[:, :, keys], v[:, :, keys], AttentionSpec(causal=False, scale=0.3)
        )
    assert o.dtype == lse.dtype == torch.float32
    for b in range(2):
        tokens = (x[b].transpose(0, 1) for x in (q, k, v))
        part, part_lse = exact(*tokens, False, 0.3)
        torch.testing.assert_close(o[b].transpose(0, 1), part.float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[b], part_lse.float(), rtol=1e-4, atol=1e-5)


def test_naive_takes_sequences_with_fewer_keys_than_queries() -> None:
    """The longest lengths say it of a packed batch; only a dense one would have NaN in it."""
    naive = BACKENDS["naive"].target(name="naive")
    fewer = replace(problem(), q_len=17, kv_len=4)
    assert naive.supports(fewer) is None
    assert "without any key" in naive.supports(replace(fewer, packed=False))
