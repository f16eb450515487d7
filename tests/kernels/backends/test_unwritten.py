"""Backends that lack what their role asks for say so in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kernels import Attention, AttentionSpec, Decoding, DenseAttention
from kernels.backend import DelegatedAttention
from kernels.decoding import Decoder, LatentDecoder
from parallel.context.attention import SequenceParallelAttention

SPEC = AttentionSpec(causal=True, scale=0.3)


@dataclass(kw_only=True, slots=True)
class OnlyAttention(Attention):
    """No method at all."""


@dataclass(kw_only=True, slots=True)
class OnlyForward(Attention):
    """Half of what it needs."""

    def forward(self, q: Any, k: Any, v: Any, spec: AttentionSpec) -> Any:
        return q.clone(), q[..., 0].detach()


@dataclass(kw_only=True, slots=True)
class OnlyAttend(Attention):
    """Whole, but not for a ring."""

    def attend(self, q: Any, k: Any, v: Any, spec: AttentionSpec) -> Any:
        return q


@dataclass(kw_only=True, slots=True)
class OnlyDense(DenseAttention):
    """No method at all."""


@dataclass(kw_only=True, slots=True)
class OnlyDelegated(DelegatedAttention):
    """No method at all."""


@dataclass(kw_only=True, slots=True)
class OnlyDecoding(Decoding):
    """No method at all."""


@dataclass(kw_only=True, slots=True)
class OnlySplit(SequenceParallelAttention):
    """No method at all."""

    kernel: str = "naive"


def attend(backend: Any) -> None:
    x = torch.ones(1, 1, 2, 4, requires_grad=True)
    backend.attend(x, x, x, SPEC).sum().backward()


def decoder(backend: Any) -> None:
    backend.decoder(None, None, rotary=None, scale=1.0)


@pytest.mark.parametrize(
    ("backend", "call", "methods"),
    [
        (OnlyAttention, attend, r"forward\(\) and backward\(\), or attend\(\)"),
        (OnlyForward, attend, r"backward\(\)"),
        (OnlyDense, attend, r"dense_forward\(\)"),
        (OnlyDelegated, attend, r"delegate\(\)"),
        (OnlyDecoding, decoder, r"decoder\(\)"),
        (OnlySplit, lambda backend: backend.layout(2), r"layout\(\)"),
        (OnlySplit, lambda backend: backend.bind(None, None), r"bind\(\)"),
    ],
)
def test_the_method_to_write_is_named(
    backend: Any, call: Callable[[Any], None], methods: str
) -> None:
    words = (
        rf"attention=mine: \S*test_unwritten\.{backend.__name__} must define {methods}; its base"
    )
    with pytest.raises(NotImplementedError, match=words) as caught:
        call(backend(name="mine"))
    assert "\n" not in str(caught.value)


def test_a_backend_of_attend_alone_is_whole() -> None:
    backend = OnlyAttend(name="mine")
    attend(backend)
    with pytest.raises(NotImplementedError, match="attention=mine gives no log-sum-exp"):
        backend.forward(torch.ones(1), torch.ones(1), torch.ones(1), SPEC)


@pytest.mark.parametrize("base", [Decoder, LatentDecoder])
def test_a_decoder_without_a_step(base: Any) -> None:
    step = type("Mine", (base,), {})()
    arguments = (0, None, None, None)[: 4 if base is Decoder else 2]
    with pytest.raises(NotImplementedError, match=r"\.Mine must define __call__\(\)"):
        step(*arguments)
