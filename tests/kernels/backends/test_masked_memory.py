"""Predicted memory of masked calls, against the tensors that live while they run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import AttentionProblem, AttentionSpec, accounting, sinks
from kernels.backend import Attention
from tests.support.attention_by_definition import backend_of, problem_of
from tests.support.live_tensors import LiveTensors

KINDS = {
    "causal": {},
    "window": {"window": 30},
    "window on both sides": {"window": 30, "causal": False},
    "prefix": {"prefix_len": 40},
    "softcap": {"softcap": 3.0},
    "softcap, no mask": {"softcap": 3.0, "causal": False},
    "sinks": {"sinks": True},
    "all at once": {"window": 30, "softcap": 3.0, "sinks": True},
}


def peak_of(backend: Attention, problem: AttentionProblem) -> tuple[int, int]:
    """Bytes at the peak of a call with its inputs, and those between its two passes."""

    def product(op: Any, args: tuple[Any, ...]) -> int:
        # On CUDA the softmax's backward pass makes a tensor of gradient times result, on CPU none.
        is_softmax = op is torch.ops.aten._softmax_backward_data.default
        return args[0].nbytes if is_softmax else 0

    with LiveTensors(product) as live:
        q = torch.randn(problem.batch_size, problem.num_heads, problem.q_len, problem.head_dim)
        k, v = torch.randn(2, problem.batch_size, problem.num_kv_heads, problem.kv_len, 16)
        q, k, v = (x.to(getattr(torch, problem.dtype), copy=True) for x in (q, k, v))
        logits = torch.randn(problem.num_heads) if problem.sinks else None
        spec = AttentionSpec(
            causal=problem.causal,
            scale=0.25,
            window=problem.window,
            prefix_len=problem.prefix_len,
            softcap=problem.softcap,
            sinks=logits,
        )
        live.peak = 0
        if not problem.needs_grad:
            with torch.no_grad():
                backend.attend(q, k, v, spec)
            return live.peak, 0
        do = torch.randn_like(q)
        for x in (q, k, v, logits):
            if x is not None:
                x.requires_grad_()
        o = backend.attend(q, k, v, spec)
        between = live.bytes - do.nbytes
        o.backward(do)
        return live.peak, between


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_naive(kind: str, dtype: str, needs_grad: bool) -> None:
    """To within what the logits take, a number for each head."""
    shape = {"q_len": 128, "kv_len": 128, "num_heads": 2, "batch_size": 1}
    problem = problem_of(**shape, dtype=dtype, needs_grad=needs_grad, **KINDS[kind])
    backend = backend_of("naive")
    peak, between = peak_of(backend, problem)
    predicted = backend.peak_memory(problem)
    assert predicted is not None
    assert peak == pytest.approx(sum(predicted.values()), abs=64)
    if needs_grad:
        kept = accounting.memory(problem, keeps_scores=True)
        assert between == pytest.approx(sum(kept.values()), abs=64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [False, True])
def test_sinks_take_parts_of_a_gradient_at_once(
    monkeypatch: pytest.MonkeyPatch, dtype: str, packed: bool
) -> None:
    """The workspace of d sinks is that of a part, and its sum that of the whole."""
    problem = problem_of(dtype=dtype, q_len=1000, batch_size=1, num_heads=4, sinks=True)
    generator = torch.Generator().manual_seed(5)
    shape = (1000, 4, 16) if packed else (1, 4, 1000, 16)
    o, do = (torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for _ in "od")
    lse = torch.randn((4, 1000) if packed else (1, 4, 1000), generator=generator)
    logits = torch.randn(4, generator=generator)
    monkeypatch.setattr(sinks, "ELEMENTS_AT_ONCE", 6_000)
    with LiveTensors() as live:
        found = sinks.gradient(do, o, lse, logits)
    predicted = sinks.gradient_workspace(problem)
    # Parts are views, by which the whole is counted as well.
    assert live.peak - o.nbytes - do.nbytes <= 1.1 * predicted
    assert predicted < o.numel() * 4

    dots = (do.double() * o.double()).sum(-1)
    weights = (logits.double()[:, None] - lse.double()).exp()
    expected = -(weights * (dots.mT if packed else dots)).reshape(4, -1).sum(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_sinks_are_added_without_a_wider_copy_of_the_output() -> None:
    problem = problem_of(dtype="bfloat16", q_len=100, batch_size=1, sinks=True, needs_grad=False)
    o, lse, logits = torch.randn(1, 2, 100, 16).bfloat16(), torch.randn(1, 2, 100), torch.randn(2)
    with LiveTensors() as live:
        found, _ = sinks.add(o, lse, logits)
    assert live.peak < o.nbytes + 8 * lse.nbytes
    weight = (lse - torch.logaddexp(lse, logits[:, None])).exp()
    assert torch.equal(found, (o * weight[..., None]).bfloat16())
    plain = backend_of("flash_torch").peak_memory(replace(problem, sinks=False)) or {}
    wider = backend_of("flash_torch").peak_memory(problem) or {}
    assert sum(wider.values()) == sum(plain.values()) + o.nbytes
