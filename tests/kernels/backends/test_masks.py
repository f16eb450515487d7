"""Windows, prefixes, caps and sinks of every backend that takes them, against the definition."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kernels import BACKENDS, Attention
from kernels.problem import Mask
from tests.support.attention_by_definition import (
    COMPILING,
    INTERPRETED,
    assert_close,
    backend_of,
    problem_of,
)
from tests.support.masked_attention import is_seen, masked_attention

KINDS = {
    "window": {"window": 7},
    "window of one": {"window": 1},
    "window over several tiles": {"window": 150, "q_len": 300, "kv_len": 300, "batch_size": 1},
    "window, more keys": {"window": 9, "q_len": 20, "kv_len": 50},
    "window, grouped": {"window": 20, "num_heads": 6},
    "window on both sides": {"window": 5, "causal": False},
    "prefix": {"prefix_len": 11},
    "prefix beyond the sequence": {"prefix_len": 99},
    "softcap": {"softcap": 2.0},
    "softcap, no mask": {"softcap": 1.5, "causal": False},
    "sinks": {"sinks": True},
    "sinks, grouped": {"sinks": True, "num_heads": 6},
    "all at once": {"window": 8, "softcap": 3.0, "sinks": True},
    "prefix, softcap and sinks": {"prefix_len": 6, "softcap": 3.0, "sinks": True},
    "later queries": {"shift": 4, "window": 20},
    "earlier queries": {"shift": -6},
}

DENSE = [
    name
    for name in BACKENDS.names()
    if name not in COMPILING + INTERPRETED
    and issubclass(BACKENDS[name].target, Attention)
    and backend_of(name).takes
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DENSE)
def test_mask(name: str, kind: str) -> None:
    problem = problem_of(**KINDS[kind])
    check_mask(backend_of(name), problem)


def check_mask(backend: Attention, problem) -> None:
    """A backend's output and gradients through autograd, and its lse, against the definition."""
    reason = backend.why_unsupported(problem)
    if reason is not None:
        pytest.skip(f"{backend.name}: {reason}")
    want = masked_attention(problem)
    leaves = [x.clone().requires_grad_() for x in (want.q, want.k, want.v)]
    spec = want.spec
    if want.sinks is not None:
        spec = replace(spec, sinks=want.sinks.clone().requires_grad_())
        leaves.append(spec.sinks)
    o = backend.attend(*leaves[:3], spec)
    assert_close(o, want.o, problem.dtype, "o")
    gradients = torch.autograd.grad(o, leaves, want.do)
    names = ("dq", "dk", "dv", "dsinks")
    for name, gradient in zip(names, gradients, strict=False):
        assert_close(gradient, getattr(want, name), problem.dtype, name)
    if backend.gives_lse:
        _, lse = backend.attend_with_lse(want.q, want.k, want.v, want.spec)
        assert_close(lse, want.lse, problem.dtype, "lse")


def test_pairs_and_keys_of_a_mask_are_counted_as_seen() -> None:
    draw = random.Random(3)
    for _ in range(300):
        causal = draw.random() < 0.6
        window = draw.choice((None, 1, 2, 5, 9))
        problem = problem_of(
            q_len=draw.randint(1, 9),
            kv_len=draw.randint(1, 9),
            causal=causal,
            window=window,
            prefix_len=draw.choice((0, 3, 8)) if causal and window is None else 0,
            shift=draw.randint(-12, 12),
        )
        pairs = 0
        for query in range(problem.q_len):
            seen = [key for key in range(problem.kv_len) if is_seen(problem, query, key)]
            start, stop = problem.mask.keys(query, problem.q_len, problem.kv_len)
            assert list(range(start, stop)) == seen
            pairs += len(seen)
        assert problem.mask.pairs(problem.q_len, problem.kv_len) == pairs


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ({"causal": True, "window": 0}, "window=0: must be at least 1"),
        ({"causal": True, "window": 4, "prefix_len": 2}, "cannot be combined with window=4"),
        ({"causal": False, "prefix_len": 2}, "needs a causal mask"),
    ],
)
def test_masks_that_make_no_sense(mask, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Mask(**mask)


def test_a_mask_that_a_backend_does_not_name_is_refused() -> None:
    for kind in ({"window": 4}, {"prefix_len": 4}, {"softcap": 4.0}, {"sinks": True}):
        (name,) = kind
        reason = backend_of("sdpa").why_unsupported(problem_of(**kind))
        assert reason is not None
        assert f"attention.{name}=" in reason
