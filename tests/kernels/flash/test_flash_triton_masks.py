"""Windows, prefixes, shifts, caps and sinks of the FlashAttention kernels against their definition.

Without a GPU the kernels run under Triton's interpreter, with tiles of 16 and 32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from exact_attention import assert_close, backend
from torch import Tensor
from triton_device import CLOSENESS, DEVICE, RUNS_TRITON

from kernels import AttentionProblem
from kernels.flash.call.arguments import FlashOptions
from kernels.problem import AttentionSpec
from tests.support.attention_by_definition import problem_of
from tests.support.masked_attention import Masked, masked_attention

pytestmark = pytest.mark.usefixtures("exact_float32")
runs_triton = [*RUNS_TRITON]

PLAIN = FlashOptions(implementation="plain")


def small(**changes: object) -> AttentionProblem:
    """One batch of one head, of five tiles of 16 queries and a part."""
    shape = {"batch_size": 1, "num_heads": 1, "num_kv_heads": 1, "q_len": 85, "kv_len": 85}
    return problem_of(**{**shape, "device": DEVICE, **changes})


KINDS: dict[str, dict[str, Any]] = {
    "window of one": {"window": 1},
    "window within a tile": {"window": 7, "num_heads": 2, "batch_size": 2, "q_len": 33},
    "window over tiles": {"window": 50},
    "window on both sides": {"window": 20, "causal": False},
    "window on both sides, fewer keys": {"window": 18, "causal": False, "kv_len": 60},
    "window, fewer keys": {"window": 9, "q_len": 70, "kv_len": 30},
    "window, grouped": {"window": 20, "num_heads": 2, "q_len": 37},
    "prefix": {"prefix_len": 21},
    "prefix beyond the sequence": {"prefix_len": 99, "q_len": 33, "kv_len": 33},
    "prefix, fewer keys": {"prefix_len": 20, "q_len": 70, "kv_len": 40},
    "later queries": {"shift": 40, "window": 50},
    "much later queries, which see nothing": {"shift": 200, "window": 30},
    "earlier queries": {"shift": -30},
    "softcap": {"softcap": 0.7, "q_len": 37},
    "softcap, no mask": {"softcap": 3.0, "causal": False, "q_len": 37},
    "sinks": {"sinks": True, "num_heads": 2, "q_len": 37},
    "sinks and rows without keys": {"sinks": True, "q_len": 37, "kv_len": 20},
    "all at once": {"window": 18, "softcap": 2.0, "sinks": True, "num_heads": 2, "q_len": 37},
}

NARROW = ("window over tiles", "prefix", "softcap", "all at once")
"""Tried in 16 bits too: what differs there are the units of scores."""

LARGE: dict[str, dict[str, Any]] = {
    "window": {"window": 300},
    "window, softcap and sinks": {"window": 513, "softcap": 5.0, "sinks": True},
    "window on both sides": {"window": 200, "causal": False},
    "prefix": {"prefix_len": 400},
    "later queries": {"shift": 150, "window": 400},
}
"""Of tiles as a GPU has them, which leave some in the middle whole."""

CASES = [
    *(pytest.param("float32", kind, id=f"{name}") for name, kind in KINDS.items()),
    *(
        pytest.param(dtype, KINDS[name], id=f"{name}-{dtype}")
        for name in NARROW
        for dtype in ("bfloat16", "float16")
    ),
    *(
        pytest.param(
            dtype,
            {"q_len": 900, "kv_len": 1000, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
            | kind,
            id=f"large-{name}-{dtype}",
            marks=pytest.mark.skipif(DEVICE == "cpu", reason="minutes in Triton's interpreter"),
        )
        for name, kind in LARGE.items()
        for dtype in ("float32", "bfloat16")
    ),
]


def spec_on_device(want: Masked) -> AttentionSpec:
    if want.sinks is None:
        return want.spec
    return replace(want.spec, sinks=want.sinks.to(DEVICE).requires_grad_())


def assert_near(got: Tensor, want: Tensor | None, dtype: str, what: str) -> None:
    assert want is not None
    assert_close(got.cpu(), want, what, CLOSENESS[getattr(torch, dtype)], floor=0.5)


class TestAgainstFloat64:
    pytestmark = runs_triton

    @pytest.mark.parametrize(("dtype", "kind"), CASES)
    def test_output_lse_and_gradients(self, dtype: str, kind: dict[str, Any]) -> None:
        want = masked_attention(small(dtype=dtype, **kind))
        spec = spec_on_device(want)
        leaves = [x.clone().requires_grad_() for x in (want.q, want.k, want.v)]
        inputs = leaves if spec.sinks is None else [*leaves, spec.sinks]
        o = backend().attend(*leaves, spec)
        gradients = torch.autograd.grad(o, inputs, want.do)
        assert_near(o.detach(), want.o, dtype, "o")
        for what, got in zip(("dq", "dk", "dv", "dsinks"), gradients, strict=False):
            assert_near(got, getattr(want, what), dtype, what)
        _, lse = backend().attend_with_lse(want.q, want.k, want.v, spec)
        assert_near(lse.detach(), want.lse, dtype, "lse")
