"""Runs one call: checks it, chooses an implementation, and has it fill the results.

A packed batch is seen as [1, H, T, D] from here on. ``IMPLEMENTATIONS`` is tried in its order;
the first whose ``why_not`` is None runs the problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kernels.flash.problem import Problem, check_gradient, describe
from kernels.launching.device import on
from kernels.problem import Packing

IMPLEMENTATIONS = {
    "hopper": "kernels.flash.hopper.launch",
    "plain": "kernels.flash.any_gpu.launch",
}
"""Name and module, the preferred first; :mod:`kernels.flash.any_gpu.launch` says what one has."""


def why_not(problem: Problem, implementation: str = "auto") -> str | None:
    """None if ``implementation`` (or with ``auto`` any) can run a problem here, else why not."""
    try:
        names = _names(implementation)
    except ValueError as error:
        return str(error)
    reasons = []
    for name in names:
        reason = _module(name).why_not(problem)
        if reason is None:
            return None
        reasons.append(reason if len(IMPLEMENTATIONS) == 1 else f"{name}: {reason}")
    return "; ".join(reasons)


def _names(implementation: str) -> list[str]:
    if implementation == "auto":
        return list(IMPLEMENTATIONS)
    if implementation not in IMPLEMENTATIONS:
        choices = ", ".join(("auto", *IMPLEMENTATIONS))
        raise ValueError(f"implementation is {implementation}: must be one of {choices}")
    return [implementation]


@cache
def _module(name: str) -> Any:
    return import_module(IMPLEMENTATIONS[name])


@lru_cache(maxsize=4096)
def _choose(problem: Problem, implementation: str) -> Any:
    """The module to run a problem with."""
    for name in _names(implementation):
        if _module(name).why_not(problem) is None:
            return _module(name)
    raise ValueError(f"flash attention: {why_not(problem, implementation)}")


_MAX_ROW_STRIDE = 2**22


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_q_len: int,
    max_kv_len: int,
    earlier_o: Tensor | None,
    earlier_lse: Tensor | None,
    precision: str,
    implementation: str,
    autotune: bool,
) -> tuple[Tensor, Tensor]:
    """o and lse; arguments as of :func:`kernels.flash.operator.forward`, packing in parts."""
    packing = _packing(cu_seqlens_q, cu_seqlens_k, max_q_len, max_kv_len)
    accumulator = None
    if earlier_o is not None and earlier_lse is not None:
        accumulator = (earlier_o, earlier_lse)
    problem = describe(
        q, k, v, causal=causal, packing=packing, accumulator=accumulator, precision=precision,
        autotune=autotune,
    )  # fmt: skip
    return forward_of(
        problem, q, k, v, scale=scale, packing=packing, accumulator=accumulator,
        implementation=implementation,
    )  # fmt: skip


def forward_of(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    packing: Packing | None,
    accumulator: tuple[Tensor, Tensor] | None = None,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """o and lse of a call that ``problem`` describes."""
    if accumulator is None:
        o, lse = empty_results(q, packing is not None)
    else:
        o, lse = _writable(accumulator[0]), accumulator[1].contiguous()
    with on(problem.device):
        _choose(problem, implementation).forward(
            problem,
            *_normalised(packing, q, k, v),
            *_as_batch(packing, o),
            lse if packing is None else lse.unsqueeze(0),
            scale=scale,
            packing=packing,
        )
    return o, lse


def run_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_q_len: int,
    max_kv_len: int,
    dlse: Tensor | None,
    precision: str,
    implementation: str,
    autotune: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; arguments as of :func:`kernels.flash.operator.backward`, packing in parts."""
    packing = _packing(cu_seqlens_q, cu_seqlens_k, max_q_len, max_kv_len)
    problem = describe(
        q, k, v, causal=causal, packing=packing, precision=precision, autotune=autotune
    )  # fmt: skip
    check_gradient(problem, do, q, o, lse, dlse)
    return backward_of(
        problem, do, q, k, v, o, lse, dlse, scale=scale, packing=packing,
        implementation=implementation,
    )  # fmt: skip


def backward_of(
    problem: Problem,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    *,
    scale: float,
    packing: Packing | None,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a call that ``problem`` describes; do, o, lse and dlse fit it."""
    dq, dk, dv = empty_like(q), empty_like(k), empty_like(v)
    lse = lse.contiguous()
    if dlse is not None:
        dlse = dlse.float().contiguous()
    if packing is not None:
        lse = lse.unsqueeze(0)
        dlse = None if dlse is None else dlse.unsqueeze(0)
    with on(problem.device):
        _choose(problem, implementation).backward(
            problem,
            *_normalised(packing, do, q, k, v, o),
            lse,
            dlse,
            *_as_batch(packing, dq, dk, dv),
            scale=scale,
            packing=packing,
        )
    return dq, dk, dv


def _packing(
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_q_len: int, max_kv_len: int
) -> Packing | None:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return None
    return Packing(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
    )


def _normalised(packing: Packing | None, *tensors: Tensor) -> Sequence[Tensor]:
    """As [B, H, S, D] (a packed batch as [1, H, T, D]) with a last stride of 1."""
    return _as_batch(packing, *[x if _has_dense_rows(x) else x.contiguous() for x in tensors])


def _as_batch(packing: Packing | None, *tensors: Tensor) -> Sequence[Tensor]:
    if packing is None:
        return tensors
    return [x.transpose(0, 1).unsqueeze(0) for x in tensors]


def empty_results(q: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    """o and lse to be filled, in shapes and strides that follow from q."""
    lse_shape = (q.shape[1], q.shape[0]) if packed else q.shape[:-1]
    return empty_like(q), torch.empty(lse_shape, dtype=torch.float32, device=q.device)


def empty_like(x: Tensor) -> Tensor:
    """In the layout of x, so that views of the result stay free, but for rows that are dense."""
    empty = torch.empty_like(x)
    if _has_dense_rows(empty):
        return empty
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _writable(o: Tensor) -> Tensor:
    """Itself, unless its rows are not dense or several of its elements are one."""
    return o if _has_dense_rows(o) and 0 not in o.stride() else o.contiguous()


def _has_dense_rows(x: Tensor) -> bool:
    """Whether a row is contiguous, and the next not too far for offsets of 32 bits in a tile."""
    strides = x.stride()
    return strides[-1] == 1 and strides[-2 if len(strides) == 4 else 0] <= _MAX_ROW_STRIDE
