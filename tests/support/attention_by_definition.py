"""Attention calls in float64, written out in loops, and calls of backends beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from harness.gate.findings import Finding, worst
from harness.gate.gate import Part, check_part
from harness.gate.tolerances import format_of
from kernels import BACKENDS, Attention, AttentionProblem, AttentionSpec

# Each shape takes torch.compile ten seconds or more on a CPU, so these see few of them.
COMPILING = ("compiled", "flex")

# Triton's interpreter takes a second for some shapes: each is tried with either mask and in
# either type through autograd, and the other way round with an explicit lse.
INTERPRETED = () if torch.cuda.is_available() else ("flash_triton",)

# Largest error allowed, relative to the largest entry of the expected tensor.
CLOSENESS = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}


@dataclass(kw_only=True, slots=True)
class Expected:
    """Float64 attention of one problem."""

    o: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def attention_by_definition(
    q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, do_BHSD: Tensor, *, causal: bool, scale: float
) -> Expected:
    """One query at a time, over the keys that it sees; gradients by the chain rule, by hand."""
    q, k, v, do = (x.detach().double().cpu() for x in (q_BHSD, k_BHSD, v_BHSD, do_BHSD))
    batch_size, num_heads, q_len, _ = q.shape
    kv_len = k.shape[2]
    group_size = num_heads // k.shape[1]
    o, dq, dk, dv = map(torch.zeros_like, (do, q, k, v))
    lse = torch.zeros(batch_size, num_heads, q_len, dtype=torch.float64)
    for b in range(batch_size):
        for h in range(num_heads):
            g = h // group_size
            for i in range(q_len):
                seen = max(0, i + kv_len - q_len + 1) if causal else kv_len
                if seen == 0:
                    lse[b, h, i] = -torch.inf
                    continue
                keys, values = k[b, g, :seen], v[b, g, :seen]
                scores = keys @ q[b, h, i] * scale
                largest = scores.max()
                weights = (scores - largest).exp()
                lse[b, h, i] = largest + weights.sum().log()
                p = weights / weights.sum()
                o[b, h, i] = p @ values
                dp = values @ do[b, h, i]
                ds = p * (dp - (p * dp).sum()) * scale
                dq[b, h, i] = ds @ keys
                dk[b, g, :seen] += torch.outer(ds, q[b, h, i])
                dv[b, g, :seen] += torch.outer(p, do[b, h, i])
    return Expected(o=o, lse=lse, dq=dq, dk=dk, dv=dv)


def problem_of(**changes: object) -> AttentionProblem:
    plain = AttentionProblem(
        batch_size=2,
        num_heads=2,
        num_kv_heads=2,
        q_len=33,
        kv_len=33,
        head_dim=16,
        dtype="float32",
        device="cpu",
        causal=True,
        needs_grad=True,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


SHAPES = {
    "plain": {},
    "one token": {"q_len": 1, "kv_len": 1},
    "five tokens": {"q_len": 5, "kv_len": 5},
    "head_dim 40": {"head_dim": 40},
    "grouped queries": {"num_heads": 6, "num_kv_heads": 2},
    "one KV head": {"num_heads": 4, "num_kv_heads": 1, "batch_size": 1},
    "more keys": {"q_len": 5, "kv_len": 33},
    "one query": {"q_len": 1, "kv_len": 33, "num_heads": 4},
    "fewer keys": {"q_len": 33, "kv_len": 5},
    "narrow values": {"num_heads": 6, "head_dim": 24, "value_dim": 16},
    "two blocks": {"q_len": 130, "kv_len": 130, "batch_size": 1, "head_dim": 40},
}


@cache
def tensors_of(problem: AttentionProblem) -> tuple[Tensor, ...]:
    """q, k, v, do: the same for every backend."""
    generator = torch.Generator().manual_seed(11)

    def randn(heads: int, length: int, width: int) -> Tensor:
        shape = (problem.batch_size, heads, length, width)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(problem.device, getattr(torch, problem.dtype))

    return (
        randn(problem.num_heads, problem.q_len, problem.head_dim),
        randn(problem.num_kv_heads, problem.kv_len, problem.head_dim),
        randn(problem.num_kv_heads, problem.kv_len, problem.v_dim),
        randn(problem.num_heads, problem.q_len, problem.v_dim),
    )


@cache
def expected_of(problem: AttentionProblem) -> Expected:
    q, k, v, do = tensors_of(problem)
    return attention_by_definition(q, k, v, do, causal=problem.causal, scale=scale_of(problem))


def scale_of(problem: AttentionProblem) -> float:
    """Not the usual 1/sqrt(d), so that a backend which ignores it is found out."""
    return 0.7 * problem.head_dim**-0.5


def backend_of(name: str) -> Attention:
    entry = BACKENDS[name]
    return entry.target(name=name, **entry.preset)


def assert_close(got: Tensor, expected: Tensor, dtype: str, what: str) -> None:
    assert got.shape == expected.shape, what
    got = got.detach().double().cpu()
    # Rows without a key have lse minus infinity, on both sides or it is an error.
    infinite = expected.isinf()
    assert torch.equal(got[infinite], expected[infinite]), what
    got, expected = (x.masked_fill(infinite, 0.0) for x in (got, expected))
    error = float((got - expected).abs().max())
    # Inputs are standard normal; the gradients of a single token's scores are zero but for
    # what terms of that size leave when they cancel.
    limit = CLOSENESS[dtype] * max(0.1, float(expected.abs().max()))
    assert error <= limit, f"{what} is off by {error:.3g}, more than {limit:.3g}"


def require_support(backend: Attention, problem: AttentionProblem) -> None:
    reason = backend.why_unsupported(problem)
    if reason is not None:
        assert reason.strip(), "a backend says why"
        assert "\n" not in reason
        pytest.skip(f"{backend.name}: {reason}")


def compare(name: str, problem: AttentionProblem) -> None:
    """A backend's output and, if asked for, its gradients against the definition."""
    backend = backend_of(name)
    require_support(backend, problem)
    q, k, v, do = tensors_of(problem)
    leaves = [x.clone().requires_grad_(problem.needs_grad) for x in (q, k, v)]
    expected = expected_of(problem)
    with torch.set_grad_enabled(problem.needs_grad):
        o = backend.attend(*leaves, AttentionSpec(causal=problem.causal, scale=scale_of(problem)))
    assert o.dtype == q.dtype
    assert_close(o, expected.o, problem.dtype, "o")
    if problem.needs_grad:
        gradients = torch.autograd.grad(o, leaves, do)
        for what, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            assert gradient.dtype == q.dtype
            assert_close(gradient, getattr(expected, what), problem.dtype, what)


def findings(
    problem: AttentionProblem, tensors: dict[str, Tensor], name: str = "sdpa"
) -> dict[str, Finding]:
    part = Part(
        tensors=tensors,
        causal=problem.causal,
        scale=scale_of(problem),
        rounds_scores=backend_of(name).rounds_scores(problem),
    )
    return worst(check_part(part, format_of(problem.dtype), torch.Generator().manual_seed(0)))


def broken(
    problem: AttentionProblem, tensors: dict[str, Tensor], name: str = "sdpa"
) -> dict[str, Finding]:
    found = findings(problem, tensors, name)
    return {name: finding for name, finding in found.items() if not finding.holds}
