"""Runs one call: checks it, chooses an implementation, and has it fill the results.

An implementation is a module with three functions: ``why_not(problem)``, which is None or the
reason why it cannot run a problem here, and ``forward`` and ``backward``, which run a
:class:`ForwardPass` and a :class:`BackwardPass`. ``FORWARD_TAKES`` and ``BACKWARD_TAKES`` name the
masks that each of them knows (:meth:`Problem.asks_for`); a pass that one implementation does not
know is another's. One that can go on with its sums of dq from block to block has
``query_gradient`` besides, which gives a class like
:class:`kernels.query_gradient.QueryGradient`, or None. ``IMPLEMENTATIONS`` is tried in its order.
Its modules are imported when they are first asked. They stand there in import statements, which the
harness follows to know what a record has measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels.flash.call.arguments import BackwardPass, FlashCall, FlashOptions, ForwardPass
from kernels.flash.call.problem import Problem, check_gradient, check_room
from kernels.launching.device import on
from kernels.problem import Packing
from kernels.query_gradient import QueryBlock, QueryGradient


def _hopper() -> Any:
    from kernels.flash.hopper import launch

    return launch


def _plain() -> Any:
    from kernels.flash.any_gpu import launch

    return launch


IMPLEMENTATIONS = {"hopper": _hopper, "plain": _plain}
"""Name and what imports the module, the preferred first."""


def why_not(problem: Problem, implementation: str = "auto") -> str | None:
    """None if ``implementation`` (or with ``auto`` any) can run a problem here, else why not."""
    try:
        names = _names(implementation)
    except ValueError as error:
        return str(error)
    reasons = []
    for name in names:
        reason = _why_not_one(_module(name), problem, ("forward", "backward"))
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
    return IMPLEMENTATIONS[name]()


@lru_cache(maxsize=4096)
def _choose(problem: Problem, implementation: str, direction: str) -> Any:
    """The module to run the ``forward`` or ``backward`` pass of a problem with."""
    for name in _names(implementation):
        if _why_not_one(_module(name), problem, (direction,)) is None:
            return _module(name)
    raise ValueError(f"flash attention: {why_not(problem, implementation)}")


def _why_not_one(module: Any, problem: Problem, directions: Sequence[str]) -> str | None:
    reason: str | None = module.why_not(problem)
    asked = problem.asks_for()
    for direction in directions:
        if reason is None and (missing := asked - getattr(module, f"{direction.upper()}_TAKES")):
            reason = f"its {direction} pass takes no {' or '.join(sorted(missing))}"
    return reason


_MAX_ROW_STRIDE = 2**22

_float32_calls: Counter[str] = Counter()


def float32_calls() -> Counter[str]:
    """How many calls in float32 this process has run, by the precision of their products."""
    return _float32_calls.copy()


def run_forward(
    call: FlashCall, accumulator: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """o and lse, as :func:`kernels.flash.operator.forward` returns them."""
    return forward_of(call.problem(accumulator), call, accumulator)


def forward_into(call: FlashCall, o: Tensor) -> Tensor:
    """lse of a call whose o goes into a tensor that there is; raises ValueError if it has no room.

    Args:
        o: in the shape that o has, and q's dtype and device; its elements do not overlap.
    """
    problem = call.problem()
    q = call.q
    check_room(q if problem.value_dim is None else q[..., : problem.v_dim], o, "o")
    if not _has_dense_rows(o):
        part, lse = forward_of(problem, call)
        o.copy_(part)
        return lse
    return forward_of(problem, call, o=o)[1]


def forward_of(
    problem: Problem,
    call: FlashCall,
    accumulator: tuple[Tensor, Tensor] | None = None,
    rest: Tensor | None = None,
    o: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o and lse of a call that ``problem`` describes; fills a ``rest`` of :func:`empty_rest`."""
    packing = call.spec.packing
    if accumulator is None:
        o = empty_o(call.q, problem.value_dim) if o is None else o
        lse = empty_lse(call.q, packing is not None)
    else:
        o, lse = _writable(accumulator[0]), accumulator[1].contiguous()
    q, k, v = _normalised(packing, call.q, call.k, call.v)
    (batched_o,) = _as_batch(packing, o)
    forward_pass = ForwardPass(
        problem=problem,
        q=q,
        k=k,
        v=v,
        o=batched_o,
        lse=lse if packing is None else lse.unsqueeze(0),
        scale=float(call.spec.scale),
        packing=packing,
        rest=rest if rest is None or packing is None else rest.unsqueeze(0),
    )
    if problem.dtype == torch.float32:
        _float32_calls[problem.precision] += 1
    with on(problem.device):
        _choose(problem, call.options.implementation, "forward").forward(forward_pass)
    return o, lse


def run_backward(
    call: FlashCall,
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, as :func:`kernels.flash.operator.backward` returns them."""
    problem = call.problem()
    check_gradient(do, call.q, o, lse, dlse, v_dim=problem.v_dim, packed=problem.packed)
    return backward_of(problem, call, do, o, lse, dlse, rest)


def backward_into(
    call: FlashCall, gradients: tuple[Tensor, Tensor, Tensor], do: Tensor, o: Tensor, lse: Tensor
) -> None:
    """dq, dk and dv, into tensors that there are, each like ``o`` of :func:`forward_into`."""
    problem = call.problem()
    check_gradient(do, call.q, o, lse, v_dim=problem.v_dim, packed=problem.packed)
    for name, x, into in zip("qkv", (call.q, call.k, call.v), gradients, strict=True):
        check_room(x, into, f"d{name}")
    if all(map(_has_dense_rows, gradients)):
        backward_of(problem, call, do, o, lse, None, gradients=gradients)
        return
    found = backward_of(problem, call, do, o, lse, None)
    for into, part in zip(gradients, found, strict=True):
        into.copy_(part)


def backward_of(
    problem: Problem,
    call: FlashCall,
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    rest: Tensor | None = None,
    gradients: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a call that ``problem`` describes; do, o, lse, dlse and rest fit it."""
    packing = call.spec.packing
    if gradients is None:
        gradients = empty_like(call.q), empty_like(call.k), empty_like(call.v)
    lse = lse.contiguous()
    if dlse is not None:
        dlse = dlse.float().contiguous()
    if rest is not None:
        rest = rest.contiguous()
    if packing is not None:
        lse = lse.unsqueeze(0)
        dlse = None if dlse is None else dlse.unsqueeze(0)
        rest = None if rest is None else rest.unsqueeze(0)
    do, q, k, v, o = _normalised(packing, do, call.q, call.k, call.v, o)
    dq, dk, dv = _as_batch(packing, *gradients)
    backward_pass = BackwardPass(
        problem=problem,
        do=do,
        q=q,
        k=k,
        v=v,
        o=o,
        lse=lse,
        dlse=dlse,
        dq=dq,
        dk=dk,
        dv=dv,
        scale=float(call.spec.scale),
        packing=packing,
        rest=rest,
    )
    with on(problem.device):
        _choose(problem, call.options.implementation, "backward").backward(backward_pass)
    return gradients


def query_gradient(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    o: Tensor,
    lse: Tensor,
    blocks: Sequence[QueryBlock],
    options: FlashOptions,
) -> QueryGradient | None:
    """dq summed over blocks by an implementation that all of them would run with; None without one.

    Args:
        do, q, o, lse: of a dense batch, over all blocks.
        k: of which the shape [B, H_kv, ...] is taken.
        blocks: all that will be added, in their order.

    Raises:
        ValueError: do, o or lse do not fit q.
    """
    v_dim = do.shape[-1]
    found = _that_sums(tuple(blocks), q.shape, k.shape[1], v_dim, q.dtype, q.device, options)
    if found is None:
        return None
    check_gradient(do, q, o, lse, v_dim=v_dim, packed=False)
    do, q, o = (x if _has_dense_rows(x) else x.contiguous() for x in (do, q, o))
    gradient: QueryGradient = found(do, q, o, lse.contiguous(), empty_like(q), options)
    return gradient


@lru_cache(maxsize=1024)
def _that_sums(
    blocks: tuple[QueryBlock, ...],
    q_shape: torch.Size,
    num_kv_heads: int,
    v_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    options: FlashOptions,
) -> Any:
    """The class whose objects sum dq over these blocks, or None."""
    batch_size, num_heads, num_queries, head_dim = q_shape
    problems = []
    for block in blocks:
        q, k = (
            torch.empty((batch_size, heads, length, head_dim), dtype=dtype, device="meta")
            for heads, length in (
                (num_heads, block.stop - block.start),
                (num_kv_heads, block.num_keys),
            )
        )
        v = k.new_empty((*k.shape[:-1], v_dim))
        call = FlashCall(q=q, k=k, v=v, spec=block.spec, options=options)
        problems.append(replace(call.problem(), device=device))
    chosen = {_choose(problem, options.implementation, "backward") for problem in problems}
    if len(chosen) != 1:
        return None
    of_module = getattr(chosen.pop(), "query_gradient", None)
    return None if of_module is None else of_module(problems, blocks, num_queries)


def _normalised(packing: Packing | None, *tensors: Tensor) -> Sequence[Tensor]:
    """The tensor as [B, H, S, D] (a packed batch as [1, H, T, D]) with a last stride of 1."""
    return _as_batch(packing, *[x if _has_dense_rows(x) else x.contiguous() for x in tensors])


def _as_batch(packing: Packing | None, *tensors: Tensor) -> Sequence[Tensor]:
    if packing is None:
        return tensors
    return [x.transpose(0, 1).unsqueeze(0) for x in tensors]


def empty_results(q: Tensor, v: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    """o and lse to be filled, in shapes and strides that follow from q and from v's columns."""
    value_dim = None if v.shape[-1] == q.shape[-1] else v.shape[-1]
    return empty_o(q, value_dim), empty_lse(q, packed)


def empty_o(q: Tensor, value_dim: int | None) -> Tensor:
    """The first of :func:`empty_results`; ``value_dim`` is :class:`Problem`'s."""
    return empty_like(q if value_dim is None else q[..., :value_dim])


def empty_lse(q: Tensor, packed: bool) -> Tensor:
    """The second of :func:`empty_results`."""
    shape = (q.shape[1], q.shape[0]) if packed else q.shape[:-1]
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def empty_rest(q: Tensor, packed: bool) -> Tensor | None:
    """For what float32 rounds away of lse, like lse; None unless q is float32.

    The backward pass takes exp(score - lse). At an lse of 4e4 float32 has steps of 0.004, which are
    an error of as much in every probability; inputs of 16 bits have it from their own rounding.
    """
    if q.dtype != torch.float32:
        return None
    shape = (q.shape[1], q.shape[0]) if packed else q.shape[:-1]
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def empty_like(x: Tensor) -> Tensor:
    """An empty tensor in the layout of x, so that views of it cost nothing, but with dense rows."""
    empty = torch.empty_like(x)
    if _has_dense_rows(empty):
        return empty
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _writable(o: Tensor) -> Tensor:
    """The tensor, or a contiguous copy if its rows are not dense or its elements overlap."""
    return o if _has_dense_rows(o) and 0 not in o.stride() else o.contiguous()


def _has_dense_rows(x: Tensor) -> bool:
    """Whether a row is contiguous, and the next not too far for offsets of 32 bits in a tile."""
    strides = x.stride()
    return strides[-1] == 1 and strides[-2 if len(strides) == 4 else 0] <= _MAX_ROW_STRIDE
