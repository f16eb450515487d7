"""Kernels that are right raise no alarm: 300 random cases, of which a few are always run."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from harness.gate.comparison import compare, errors_of
from harness.gate.findings import worst
from harness.gate.gate import Part, check_part
from harness.gate.tolerances import format_of
from harness.measure.attention_calls import self_attention_packing, sequences_of
from kernels import BACKENDS, Attention, AttentionProblem, AttentionSpec

NAMES = ("naive", "sdpa", "sdpa_flash", "sdpa_math", "flash_torch", "auto")

CASES = 300

ALWAYS = range(0, CASES, 20)


def backend_of(name: str) -> Attention:
    entry = BACKENDS[name]
    return entry.target(name=name, **entry.preset).role(Attention)


def problem_of(rng: random.Random) -> AttentionProblem:
    """Sizes as models have them, and odd ones; lengths around the edges of tiles."""
    groups = rng.choice((1, 2, 3))
    length = rng.choice((1, 2, 3, 16, 33, 63, 64, 65, 127, 128, 160, 200, 257, 384))
    packed = rng.random() < 0.25
    more = 0 if packed or rng.random() < 0.7 else rng.choice((1, 7, 64, 100))
    return AttentionProblem(
        batch_size=rng.choice((1, 2, 3)),
        num_heads=groups * rng.choice((1, 2, 4)),
        num_kv_heads=groups,
        q_len=length,
        kv_len=length + more,
        head_dim=rng.choice((8, 16, 32, 40, 64, 80, 96, 128, 192, 256)),
        dtype=rng.choice(("float32", "bfloat16", "float16")),
        device="cpu",
        causal=rng.random() < 0.7,
        needs_grad=True,
        packed=packed,
    )


@pytest.mark.parametrize(
    "number",
    [
        number if number in ALWAYS else pytest.param(number, marks=pytest.mark.exhaustive)
        for number in range(CASES)
    ],
)
def test_no_alarm(number: int) -> None:
    rng = random.Random(number)
    problem = problem_of(rng)
    names = [name for name in NAMES if backend_of(name).supports(problem) is None]
    backend = backend_of(rng.choice(names))
    sequence_major = rng.random() < 0.5
    torch.manual_seed(number)
    dtype = getattr(torch, problem.dtype)
    lengths = [rng.randint(1, problem.q_len) for _ in range(3)]

    def tensor(heads: int, length: int) -> torch.Tensor:
        if problem.packed:
            return torch.randn(sum(lengths), heads, problem.head_dim, dtype=dtype)
        order = (length, heads) if sequence_major else (heads, length)
        x = torch.randn(problem.batch_size, *order, problem.head_dim, dtype=dtype)
        return x.transpose(1, 2) if sequence_major else x

    leaves = [
        tensor(problem.num_heads, problem.q_len),
        tensor(problem.num_kv_heads, problem.kv_len),
        tensor(problem.num_kv_heads, problem.kv_len),
    ]
    packing = None
    if problem.packed:
        packing = self_attention_packing(lengths, torch.device("cpu"))
    spec = AttentionSpec(causal=problem.causal, scale=problem.head_dim**-0.5, packing=packing)
    for x in leaves:
        x.requires_grad_()
    o = backend.attend(*leaves, spec)
    do = torch.randn(o.shape, dtype=dtype)
    gradients = torch.autograd.grad(o, leaves, do)
    q, k, v = (x.detach() for x in leaves)
    tensors = {"q": q, "k": k, "v": v, "o": o.detach(), "do": do}
    tensors |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    if backend.gives_lse:
        with torch.no_grad():
            tensors["lse"] = backend.forward(q, k, v, spec)[1]
    if packing is None:
        parts = [
            Part(
                tensors=tensors,
                causal=spec.causal,
                scale=spec.scale,
                rounds_scores=backend.rounds_scores(problem),
            )
        ]
    else:
        starts = packing.cu_seqlens_q.tolist()
        rounds_scores = backend.rounds_scores(problem)
        parts = list(sequences_of(tensors, starts, spec, rounds_scores=rounds_scores))
    generator = torch.Generator().manual_seed(number)
    number_format = format_of(problem.dtype)
    found = worst(f for part in parts for f in check_part(part, number_format, generator))
    assert [(f.said, f.tolerance) for f in found.values() if not f.holds] == [], (backend, problem)


class TestLongSums:
    """Sums in float32 of many terms, one after another, as kernels without tensor cores add."""

    NUM_TERMS = 2**18

    def broken(self, *, lost: int) -> list[str]:
        """What the gate says of four rows whose sums have lost so many of their terms."""
        terms = torch.randn(self.NUM_TERMS, 4, 16, generator=torch.Generator().manual_seed(1))
        one_by_one = torch.from_numpy(np.cumsum(terms[lost:].numpy(), axis=0)[-1])
        exact = terms.double().sum(0)
        size = terms.double().square().sum((0, 2)).sqrt()
        found = compare(
            "dv",
            errors_of(one_by_one, exact, size),
            errors_of(terms.sum(0), exact, size),
            format_of("float32"),
            rows=torch.arange(4),
            place=lambda index: "the only head",
            num_terms=self.NUM_TERMS,
        )
        return [finding.name for finding in found if not finding.holds]

    def test_their_order_is_a_kernels_own(self) -> None:
        assert self.broken(lost=0) == []

    def test_a_term_that_is_missing_shows(self) -> None:
        assert {"dv", "dv row"} <= set(self.broken(lost=1))
