"""Compiled backends that meet ever new shapes, with torch.compile's front end alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from attention_by_definition import backend_of

from kernels import AttentionSpec
from kernels.recompiling import CompiledForEach

LENGTHS = range(3, 14)
"""More than the eight versions of a function that torch.compile keeps."""


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and guarded as ever; operators are run as they are, since Inductor takes seconds."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.mark.parametrize("name", ["compiled", "flex"])
def test_ever_new_shapes(name: str) -> None:
    config = importlib.import_module("torch._dynamo.config")
    limits = config.recompile_limit, config.accumulated_recompile_limit
    assert len(LENGTHS) > limits[0]
    backend, spec = backend_of(name), AttentionSpec(causal=True, scale=0.3)
    for length in LENGTHS:
        q, k, v = torch.randn(3, 1, 2, length, 8)
        with torch.no_grad():
            o = backend.attend(q, k, v, spec)
        scores = (q @ k.mT).double() * 0.3
        hidden = torch.ones(length, length).triu(1) > 0
        expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.double()
        torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-5)
    assert (config.recompile_limit, config.accumulated_recompile_limit) == limits


class TestKinds:
    @pytest.fixture
    def made(self, monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., Any]]:
        """Every function that is given to torch.compile."""
        functions: list[Callable[..., Any]] = []

        def compile_(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
            assert options == {"dynamic": False, "fullgraph": True}
            functions.append(function)
            return function

        monkeypatch.setattr(torch, "compile", compile_)
        return functions

    def test_each_has_code_of_its_own(self, made: list[Callable[..., Any]]) -> None:
        doubled = CompiledForEach(double, kept=8)
        x = torch.ones(4, 3)
        calls = [x, x[:2], x.mT, x.bfloat16(), x.clone().requires_grad_()]
        for _ in range(2):
            for given in calls:
                assert torch.equal(doubled(given, 2.0), 2 * given)
        doubled(x, 3.0)
        with torch.no_grad():
            doubled(x, 2.0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            doubled(x, 2.0)
        assert len({id(function.__code__) for function in made}) == len(made) == len(calls) + 3

    def test_those_called_last_are_kept(self, made: list[Callable[..., Any]]) -> None:
        doubled = CompiledForEach(double, kept=2)
        for length in (1, 2, 1, 3, 1):
            doubled(torch.ones(length), 2.0)
        assert len(made) == 3
        doubled(torch.ones(2), 2.0)
        assert len(made) == 4


def double(x: torch.Tensor, factor: float) -> torch.Tensor:
    return factor * x
