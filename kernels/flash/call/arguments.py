"""The arguments of a call of flash attention, and those of an implementation.

:class:`FlashCall` goes from the public functions to the dispatch, with tensors as
:mod:`kernels.problem` describes them, dense or packed. The dispatch makes of it one of
:class:`ForwardPass` and :class:`BackwardPass`, whose tensors are all [batch, heads, seq, head_dim]
with a last stride of 1; a packed batch is [1, H, T, D].
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.flash.call.problem import Problem, describe
from kernels.problem import AttentionSpec, Packing


@dataclass(kw_only=True, slots=True, frozen=True)
class FlashOptions:
    """How attention is computed."""

    precision: str = "auto"
    """Float32 matmuls: ``ieee``, ``bf16x6`` (as exact, on tensor cores), ``tf32``, or ``auto`` to
    follow torch.get_float32_matmul_precision(): tf32, or at ``highest`` the faster exact one."""
    implementation: str = "auto"
    """A name of ``dispatch.IMPLEMENTATIONS``, or ``auto`` for the first that can run the call."""
    autotune: bool = False
    """Search for tile sizes if none are known for these shapes."""
    autograd: str = "auto"
    """The autograd node: compiled (``native``), ``python``, or ``auto`` for native where it can be
    built. Masks other than a causal one, packed batches, values narrower than keys, and calls
    that return lse, are Python's."""


DEFAULT_OPTIONS = FlashOptions()


@dataclass(kw_only=True, slots=True, frozen=True)
class FlashCall:
    """o = softmax(q k^T * scale) v, and how to compute it."""

    q: Tensor
    """[B, H, S, D], or of a packed batch [T, H, D]."""
    k: Tensor
    """[B, H_kv, S_k, D] or [T_k, H_kv, D]; H_kv divides H."""
    v: Tensor
    """Like k, or narrower: [B, H_kv, S_k, D_v] or [T_k, H_kv, D_v], as o and do are then."""
    spec: AttentionSpec
    """Mask, scale and cap of the scores, and the packing of a packed batch; sinks play no part."""
    options: FlashOptions = DEFAULT_OPTIONS

    def problem(self, accumulator: tuple[Tensor, Tensor] | None = None) -> Problem:
        """The facts of this call; ValueError if it makes no sense."""
        return describe(
            self.q,
            self.k,
            self.v,
            causal=self.spec.causal,
            packing=self.spec.packing,
            accumulator=accumulator,
            precision=self.options.precision,
            autotune=self.options.autotune,
            window=self.spec.window,
            prefix_len=self.spec.prefix_len,
            shift=self.spec.shift,
            softcap=self.spec.softcap,
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class ForwardPass:
    """Fill o and lse; continue from them if the problem accumulates."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    """[B, H, S] float32, contiguous."""
    scale: float
    packing: Packing | None = None
    rest: Tensor | None = None
    """Where to write what float32 rounds away of lse, like lse; of float32 inputs, and not of a
    problem that accumulates."""


@dataclass(kw_only=True, slots=True, frozen=True)
class BackwardPass:
    """Fill dq, dk and dv."""

    problem: Problem
    do: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    """[B, H, S] float32, contiguous, like dlse."""
    dlse: Tensor | None
    """The gradient that reaches lse."""
    dq: Tensor
    dk: Tensor
    dv: Tensor
    scale: float
    packing: Packing | None = None
    rest: Tensor | None = None
    """That of the forward pass; None is zero, as of an lse that was merged."""
