"""Launches the kernels for any CUDA GPU that Triton knows, and for Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import triton
from torch import Tensor
from triton.testing import do_bench

from kernels.flash.any_gpu import chunks, configs
from kernels.flash.any_gpu.backward import (
    backward_dkv_kernel,
    backward_dq_kernel,
    row_terms_kernel,
    sum_kernel,
)
from kernels.flash.any_gpu.configs import TileConfig
from kernels.flash.any_gpu.forward import forward_kernel, merge_kernel
from kernels.flash.call.arguments import BackwardPass, ForwardPass
from kernels.flash.call.problem import Problem, padded, why_not_split
from kernels.launching.prepared import PlannedPass, PreparedLaunch, Step, planned, run
from kernels.problem import Packing

INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)
"""Whether triton was first imported under TRITON_INTERPRET=1; it cannot change later."""

FORWARD_TAKES = frozenset(("window", "prefix_len", "shift", "softcap"))
"""What the forward pass takes besides a causal mask, of ``Problem.asks_for``."""
BACKWARD_TAKES = FORWARD_TAKES
"""The same of the backward pass."""

_ROW_TERMS_BLOCK_Q = 32
_MERGE_BLOCK_Q = 32
_SUM_ROWS = 16

_SMALLEST = torch.finfo(torch.float32).tiny

_MAX_REMEMBERED = 4096

_configs: dict[tuple[str, Problem], TileConfig] = {}

_plans: dict[tuple, _Plan] = {}
_row_terms: dict[tuple, PreparedLaunch] = {}


def why_not(problem: Problem) -> str | None:
    """None if these kernels can run ``problem`` here, else the reason."""
    if INTERPRETED:
        return None
    if problem.precision == "bf16x6" and (reason := why_not_split(problem.device)) is not None:
        return f"{reason}; precision=ieee runs here"
    if problem.device.type != "cuda":
        return "runs on a CUDA device; TRITON_INTERPRET=1 runs it on a CPU, slowly"
    if problem.dtype == torch.bfloat16 and torch.cuda.get_device_capability(problem.device) < (8,):
        return "bfloat16 needs a GPU of compute capability 8.0 or higher"
    return None


def forward(call: ForwardPass) -> None:
    """Fill o and lse; continue from them if the problem accumulates."""
    if call.q.numel() == 0:
        return

    def measure(config: TileConfig) -> float:
        # On copies: every run of an accumulating kernel changes what it starts from.
        copy = replace(call, o=call.o.clone(), lse=call.lse.clone())
        return _milliseconds(lambda: _forward_by(config, copy))

    _forward_by(_config("forward", call.problem, measure), call)


def planned_forward(call: ForwardPass) -> PlannedPass | None:
    """The launches of a call; None unless they are planned, and all that :func:`forward` does."""
    config = _configs.get(("forward", call.problem))
    plan = None if config is None else _plans.get(_forward_key(config, call))
    if plan is None:
        return None
    parts = _without_memory(plan.parts)
    return PlannedPass(_forward_steps(plan, call, parts), parts)


def _forward_by(config: TileConfig, call: ForwardPass) -> None:
    """The forward pass with these tiles."""
    plan = planned(_plans, _plan_forward, _forward_key(config, call), call, config)
    run(_forward_steps(plan, call, [call.lse.new_empty(shape) for shape in plan.parts]))


def _forward_key(config: TileConfig, call: ForwardPass) -> tuple:
    """All that the plan depends on."""
    tensors = (call.q, call.k, call.v, call.o, call.lse)
    is_whole = call.rest is None
    return (call.problem, config, _sign(call.scale), is_whole, *[x.stride() for x in tensors])


def _sign(scale: float) -> int:
    # A scale below float32's range is a zero, and minus infinity times zero is not a number.
    return (scale > _SMALLEST) - (scale < -_SMALLEST)


def _forward_steps(plan: _Plan, call: ForwardPass, parts: Sequence[Tensor]) -> list[Step]:
    problem, lse = call.problem, call.lse
    results = call.o, lse, lse if call.rest is None else call.rest
    given = (call.q, call.k, call.v)
    scale = abs(call.scale) * _unit(problem) if _sign(call.scale) else 1.0
    floats = _floats(problem, scale)
    if plan.together is None:
        return [Step(plan.kernel, (*given, *results, *_cu_seqlens(call.packing, lse)), floats)]
    return [
        Step(plan.kernel, (*given, *parts, lse, lse), floats),
        Step(plan.together, (*parts, *results)),
    ]


@dataclass(kw_only=True, slots=True, frozen=True)
class _Plan:
    """Launches of a pass, of which all but addresses and floats is known."""

    kernel: PreparedLaunch
    parts: tuple[tuple[int, ...], ...] = ()
    """Shapes of the results of chunks, in float32."""
    together: PreparedLaunch | None = None
    """What puts these together; None of loops that are whole."""


def _plan_forward(call: ForwardPass, config: TileConfig) -> _Plan:
    problem, o, lse = call.problem, call.o, call.lse
    chunk_rows = chunks.chunk_rows(problem, "forward", config.block_q)
    num_chunks, merge = 1, None
    parts: tuple[tuple[int, ...], ...] = ()
    o_strides, lse_strides = (*_strides(problem, o), 0), (*_lse_strides(problem, lse), 0)
    if chunk_rows is not None:
        num_chunks = chunks.num_chunks(problem, "forward", chunk_rows)
        merge = _plan_merge(call, num_chunks)
        # Sums, and of each row the maximum and the total that they are of.
        parts = (num_chunks, *o.shape), (num_chunks, *lse.shape), (num_chunks, *lse.shape)
        # Those of contiguous tensors, and of the chunks before them.
        row = problem.v_dim
        o_strides = (row * lse.stride(0), row * lse.stride(1), row, row * lse.numel())
        lse_strides = (lse.stride(0), lse.stride(1), lse.numel())
    num_q_tiles = -(-problem.q_len // config.block_q)
    kernel = PreparedLaunch(
        forward_kernel,
        (num_q_tiles * problem.num_heads * problem.batch_size, num_chunks, 1),
        {
            "SCALE_SIGN": _sign(call.scale),
            "ACCUMULATE": problem.accumulates,
            "GIVES_REST": call.rest is not None,
            **_constants(problem, config),
        },
        integers=(
            *_strides(problem, call.q), *_strides(problem, call.k), *_strides(problem, call.v),
            *o_strides, *lse_strides, problem.num_heads, problem.q_len, problem.kv_len, num_q_tiles,
            *_mask_numbers(problem, chunk_rows),
        ),
    )  # fmt: skip
    return _Plan(kernel=kernel, parts=parts, together=merge)


def _plan_merge(call: ForwardPass, num_chunks: int) -> PreparedLaunch:
    problem = call.problem
    num_q_tiles = -(-problem.q_len // _MERGE_BLOCK_Q)
    return PreparedLaunch(
        merge_kernel,
        (num_q_tiles * problem.num_heads * problem.batch_size, 1, 1),
        {
            "VALUE_DIM": problem.v_dim,
            "BLOCK_DV": padded(problem.v_dim),
            "BLOCK_Q": _MERGE_BLOCK_Q,
            "NATURAL": _is_natural(problem),
            "GIVES_REST": call.rest is not None,
        },
        integers=(*_strides(problem, call.o), call.lse.numel(), problem.num_heads, problem.q_len,
                  num_q_tiles, num_chunks),
    )  # fmt: skip


def backward(call: BackwardPass) -> None:
    """Fill dq, dk and dv."""
    # Apart, so that both begin where launches can be prepared for.
    terms = [call.lse.new_empty(call.lse.shape) for _ in range(2)]
    if call.lse.numel():
        launch = planned(_row_terms, _plan_row_terms, _terms_key(call), call)
        run([_terms_step(launch, call, terms)])
    given = _given(call, *terms)
    for name, results in _passes(call):
        if results[0].numel():
            measure = _timed(name, call, given, results)
            _backward_by(_config(name, call.problem, measure), name, call, given, results)


def planned_backward(call: BackwardPass) -> PlannedPass | None:
    """The launches of a call; None unless they are planned, and all that :func:`backward` does."""
    problem = call.problem
    launch = _row_terms.get(_terms_key(call))
    # Zeros that stand for a rest are filled by another launch.
    if launch is None or (call.rest is None and _is_natural(problem)):
        return None
    terms = _without_memory([call.lse.shape] * 2)
    given = _given(call, *terms)
    steps, stages = [_terms_step(launch, call, terms)], []
    for name, results in _passes(call):
        config = _configs.get((name, problem))
        plan = None if config is None else _plans.get(_backward_key(config, name, call, results))
        if plan is None:
            return None
        stages.append(_without_memory(plan.parts))
        steps += _backward_steps(plan, call, given, results, stages[-1])
    return PlannedPass(steps, terms, stages)


def _without_memory(shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return [torch.empty(shape, dtype=torch.float32, device="meta") for shape in shapes]


def _passes(call: BackwardPass) -> tuple[tuple[str, tuple[Tensor, ...]], ...]:
    """The names of both kernels, and what they fill."""
    return ("backward_dkv", (call.dk, call.dv)), ("backward_dq", (call.dq,))


def _given(call: BackwardPass, row_lse: Tensor, row_dots: Tensor) -> tuple[Tensor, ...]:
    """What both kernels read."""
    rest = call.rest
    if rest is None:
        # Not read unless scores are in natural units.
        rest = torch.zeros_like(row_lse) if _is_natural(call.problem) else row_lse
    return call.q, call.k, call.v, call.do, row_lse, rest, row_dots


def _timed(
    name: str, call: BackwardPass, given: Sequence[Tensor], results: Sequence[Tensor]
) -> Callable[[TileConfig], float]:
    return lambda config: _milliseconds(lambda: _backward_by(config, name, call, given, results))


def _backward_by(
    config: TileConfig,
    name: str,
    call: BackwardPass,
    given: Sequence[Tensor],
    results: Sequence[Tensor],
) -> None:
    """Fill dk and dv, or dq, with these tiles."""
    key = _backward_key(config, name, call, results)
    plan = planned(_plans, _plan_backward, key, name, config, call, results)
    parts = [call.lse.new_empty(shape) for shape in plan.parts]
    run(_backward_steps(plan, call, given, results, parts))


def _backward_key(
    config: TileConfig, name: str, call: BackwardPass, results: Sequence[Tensor]
) -> tuple:
    """All that the plan depends on."""
    tensors = (call.q, call.k, call.v, call.do, *results, call.lse)
    return (name, call.problem, config, *[x.stride() for x in tensors])


def _backward_steps(
    plan: _Plan,
    call: BackwardPass,
    given: Sequence[Tensor],
    results: Sequence[Tensor],
    parts: Sequence[Tensor],
) -> list[Step]:
    lse = call.lse
    floats = _floats(call.problem, call.scale)
    if plan.together is None:
        cu_seqlens = _cu_seqlens(call.packing, lse)
        return [Step(plan.kernel, (*given, *results, *cu_seqlens), floats)]
    return [
        Step(plan.kernel, (*given, *parts, lse, lse), floats),
        Step(plan.together, (parts[0], parts[-1], results[0], results[-1])),
    ]


def _plan_backward(
    name: str, config: TileConfig, call: BackwardPass, results: Sequence[Tensor]
) -> _Plan:
    problem = call.problem
    of_keys = name == "backward_dkv"
    num_heads = problem.num_kv_heads if of_keys else problem.num_heads
    owned, tile_rows = (
        (problem.kv_len, config.block_k) if of_keys else (problem.q_len, config.block_q)
    )
    num_tiles = -(-owned // tile_rows)
    chunk_rows = chunks.chunk_rows(problem, name, tile_rows)
    num_chunks, total, chunk_stride = 1, None, 0
    parts: tuple[tuple[int, ...], ...] = ()
    result_strides = [_strides(problem, x) for x in results]
    if chunk_rows is not None:
        num_chunks = chunks.num_chunks(problem, name, chunk_rows)
        total = _plan_sum(problem, results, num_chunks)
        parts = tuple((num_chunks, *x.shape) for x in results)
        chunk_stride = results[0].numel()
        # Those of contiguous tensors.
        rows = [x.shape[-1] for x in results]
        result_strides = [(row * owned * num_heads, row * owned, row) for row in rows]
    given = (call.q, call.k, call.v, call.do)
    kernel = PreparedLaunch(
        backward_dkv_kernel if of_keys else backward_dq_kernel,
        (num_tiles * num_heads * problem.batch_size, num_chunks, 1),
        _constants(problem, config),
        integers=(
            *chain.from_iterable(_strides(problem, x) for x in given),
            *chain.from_iterable(result_strides), *_lse_strides(problem, call.lse), chunk_stride,
            num_heads, problem.q_len, problem.kv_len, num_tiles,
            *_mask_numbers(problem, chunk_rows),
        ),
    )  # fmt: skip
    return _Plan(kernel=kernel, parts=parts, together=total)


def _plan_sum(problem: Problem, results: Sequence[Tensor], num_chunks: int) -> PreparedLaunch:
    batch_size, num_heads, num_rows, columns = results[0].shape
    last_columns = results[-1].shape[-1]
    num_tiles = -(-num_rows // _SUM_ROWS)
    return PreparedLaunch(
        sum_kernel,
        (num_tiles * num_heads * batch_size, len(results), 1),
        {
            "HEAD_DIM": columns,
            "BLOCK_D": padded(columns),
            "VALUE_DIM": last_columns,
            "BLOCK_DV": padded(last_columns),
            "ROWS": _SUM_ROWS,
        },
        integers=(*_strides(problem, results[0]), *_strides(problem, results[-1]),
                  results[0].numel(), num_heads, num_rows, num_tiles, num_chunks),
    )  # fmt: skip


def _terms_key(call: BackwardPass) -> tuple:
    """All that the launch depends on."""
    o, do = call.o, call.do
    return call.problem, call.lse.shape, o.dtype, o.stride(), do.stride(), call.dlse is None


def _terms_step(launch: PreparedLaunch, call: BackwardPass, terms: Sequence[Tensor]) -> Step:
    """lse in the units of scores, and D = rowsum(o * do) - dlse; both [B, H, S] float32.

    For a query without any key they are plus infinity and 0, which make its gradients zero.
    """
    dlse = call.lse if call.dlse is None else call.dlse
    return Step(launch, (call.o, call.do, call.lse, dlse, *terms))


def _plan_row_terms(call: BackwardPass) -> PreparedLaunch:
    problem, do, o = call.problem, call.do, call.o
    # A packed batch needs no cu_seqlens here: rows are independent.
    batch_size, num_heads, q_len = call.lse.shape
    num_q_tiles = -(-q_len // _ROW_TERMS_BLOCK_Q)
    return PreparedLaunch(
        row_terms_kernel,
        (num_q_tiles * num_heads * batch_size, 1, 1),
        {
            "VALUE_DIM": problem.v_dim,
            "BLOCK_DV": padded(problem.v_dim),
            "BLOCK_Q": _ROW_TERMS_BLOCK_Q,
            "HAS_DLSE": call.dlse is not None,
            "NATURAL": _is_natural(problem),
        },
        integers=(*o.stride()[:3], *do.stride()[:3], num_heads, q_len, num_q_tiles),
    )


def forget_tiles() -> None:
    """Choose the tiles of every problem anew at its next call, from tables and rule."""
    _configs.clear()


def _config(
    kernel: str, problem: Problem, measure: Callable[[TileConfig], float]
) -> TileConfig:  # fmt: skip
    key = (kernel, problem)
    config = _configs.get(key)
    if config is None:
        config = (
            configs.INTERPRETER[kernel] if INTERPRETED else configs.choose(kernel, problem, measure)
        )
        if len(_configs) >= _MAX_REMEMBERED:
            _configs.clear()
        _configs[key] = config
    return config


def _constants(problem: Problem, config: TileConfig) -> dict[str, Any]:
    """Compile-time arguments that all kernels have."""
    return {
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": problem.block_d,
        "VALUE_DIM": problem.v_dim,
        "BLOCK_DV": padded(problem.v_dim),
        "GROUP_SIZE": problem.group_size,
        "BLOCK_Q": config.block_q,
        "BLOCK_K": config.block_k,
        "CAUSAL": problem.causal,
        "PACKED": problem.packed,
        "NATURAL": _is_natural(problem),
        "PRECISION": problem.precision,
        "UPCAST": INTERPRETED
        and (problem.dtype == torch.bfloat16 or problem.precision == "bf16x6"),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **({"softcap": None} if problem.softcap is None else {}),
    }


def _is_natural(problem: Problem) -> bool:
    """Whether scores are in natural units in the kernels, and not in those of log2."""
    return problem.dtype == torch.float32


def _unit(problem: Problem) -> float:
    """One, in the units of scores in the kernels."""
    return 1.0 if _is_natural(problem) else math.log2(math.e)


def _mask_numbers(problem: Problem, chunk_rows: int | None) -> tuple[Any, ...]:
    """Window, prefix, shift and rows of a chunk; None, which the compiler leaves out, if none."""
    return problem.window, problem.prefix_len or None, problem.shift or None, chunk_rows


def _floats(problem: Problem, scale: float) -> tuple[float, ...]:
    """The scale, and the cap of the scores if there is one, in the units of scores."""
    softcap = problem.softcap
    if softcap is None:
        return (scale,)
    # Beyond, all scores are equal, or all are as without a cap, as far as float32 can tell.
    return scale, min(max(softcap, 1e-20), 1e20) * _unit(problem)


def _cu_seqlens(packing: Packing | None, any_tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets of the sequences; a dense batch passes tensors that nobody reads."""
    if packing is None:
        return any_tensor, any_tensor
    return packing.cu_seqlens_q, packing.cu_seqlens_k


def _strides(problem: Problem, x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and row; the sequences of a packed batch begin at cu_seqlens."""
    batch, head, row, _ = x.stride()
    return (0 if problem.packed else batch), head, row


def _lse_strides(problem: Problem, lse: Tensor) -> tuple[int, int]:
    batch, head, _ = lse.stride()
    return (0 if problem.packed else batch), head


def _milliseconds(run: Callable[[], None]) -> float:
    """Median of some runs, after warming up."""
    return do_bench(run, warmup=5, rep=30, return_mode="median")
