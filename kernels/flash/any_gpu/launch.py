"""Launches the kernels for any CUDA GPU that Triton knows, and for Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.testing import do_bench

from kernels.flash.any_gpu import configs
from kernels.flash.any_gpu.backward import (
    backward_dkv_kernel,
    backward_dq_kernel,
    row_terms_kernel,
)
from kernels.flash.any_gpu.configs import TileConfig
from kernels.flash.any_gpu.forward import forward_kernel
from kernels.flash.call.arguments import BackwardPass, ForwardPass
from kernels.flash.call.problem import Problem, why_not_split
from kernels.problem import Packing

INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)
"""Whether triton was first imported under TRITON_INTERPRET=1; it cannot change later."""

FORWARD_TAKES = frozenset(("window", "prefix_len", "shift", "softcap"))
"""What the forward pass takes besides a causal mask, of ``Problem.asks_for``."""
BACKWARD_TAKES = FORWARD_TAKES
"""The same of the backward pass."""

_ROW_TERMS_BLOCK_Q = 32

_SMALLEST = torch.finfo(torch.float32).tiny

_MAX_REMEMBERED = 4096

_configs: dict[tuple[str, Problem], TileConfig] = {}


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
    problem, q, k, v, scale = call.problem, call.q, call.k, call.v, call.scale
    if q.numel() == 0:
        return
    # A scale below float32's range is a zero, and minus infinity times zero is not a number.
    sign = (scale > _SMALLEST) - (scale < -_SMALLEST)
    arguments = (
        *_cu_seqlens(call.packing),
        *_strides(problem, q),
        *_strides(problem, k),
        *_strides(problem, v),
        *_strides(problem, call.o),
        *_lse_strides(problem, call.lse),
        problem.num_heads,
        problem.q_len,
        problem.kv_len,
    )
    unit_scale = abs(scale) * _unit(problem) if sign else 1.0
    mask = _mask(problem)

    def launch(config: TileConfig, o: Tensor = call.o, lse: Tensor = call.lse) -> None:
        num_q_tiles = -(-problem.q_len // config.block_q)
        grid = (num_q_tiles * problem.num_heads * problem.batch_size,)
        forward_kernel[grid](
            q, k, v, o, lse, lse if call.rest is None else call.rest, *arguments, num_q_tiles,
            unit_scale, *mask, SCALE_SIGN=sign, ACCUMULATE=problem.accumulates,
            GIVES_REST=call.rest is not None, **_constants(problem, config),
        )  # fmt: skip

    def measure(config: TileConfig) -> float:
        # On copies: every run of an accumulating kernel changes what it starts from.
        copies = (call.o.clone(), call.lse.clone())
        return _milliseconds(lambda: launch(config, *copies))

    launch(_config("forward", problem, measure))


def backward(call: BackwardPass) -> None:
    """Fill dq, dk and dv."""
    problem, q, k, v, do, scale = call.problem, call.q, call.k, call.v, call.do, call.scale
    dq, dk, dv = call.dq, call.dk, call.dv
    row_lse, row_dots = row_terms(problem, do, call.o, call.lse, call.dlse)
    rest = call.rest
    if rest is None:
        # Not read unless scores are in natural units.
        rest = torch.zeros_like(row_lse) if _is_natural(problem) else row_lse
    shared = (
        *_cu_seqlens(call.packing),
        *_strides(problem, q),
        *_strides(problem, k),
        *_strides(problem, v),
        *_strides(problem, do),
    )
    row_strides = _lse_strides(problem, call.lse)
    mask = _mask(problem)

    def launch_dkv(config: TileConfig) -> None:
        num_k_tiles = -(-problem.kv_len // config.block_k)
        grid = (num_k_tiles * problem.num_kv_heads * problem.batch_size,)
        backward_dkv_kernel[grid](
            q, k, v, do, row_lse, rest, row_dots, dk, dv, *shared,
            *_strides(problem, dk), *_strides(problem, dv), *row_strides,
            problem.num_kv_heads, problem.q_len, problem.kv_len, num_k_tiles, scale,
            *mask, **_constants(problem, config),
        )  # fmt: skip

    def launch_dq(config: TileConfig) -> None:
        num_q_tiles = -(-problem.q_len // config.block_q)
        grid = (num_q_tiles * problem.num_heads * problem.batch_size,)
        backward_dq_kernel[grid](
            q, k, v, do, row_lse, rest, row_dots, dq, *shared,
            *_strides(problem, dq), *row_strides,
            problem.num_heads, problem.q_len, problem.kv_len, num_q_tiles, scale,
            *mask, **_constants(problem, config),
        )  # fmt: skip

    for kernel, launch, result in (
        ("backward_dkv", launch_dkv, dk),
        ("backward_dq", launch_dq, dq),
    ):
        if result.numel():
            launch(_config(kernel, problem, _timed(launch)))


def row_terms(
    problem: Problem, do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """lse in the units of scores, and D = rowsum(o * do) - dlse; both [B, H, S] float32.

    For a query without any key they are plus infinity and 0, which make its gradients zero.
    """
    row_lse, row_dots = torch.empty((2, *lse.shape), dtype=torch.float32, device=lse.device)
    if lse.numel():
        # A packed batch needs no cu_seqlens here: rows are independent.
        batch_size, num_heads, q_len = lse.shape
        num_q_tiles = -(-q_len // _ROW_TERMS_BLOCK_Q)
        row_terms_kernel[(num_q_tiles * num_heads * batch_size,)](
            o, do, lse, dlse, row_lse, row_dots, *o.stride()[:3], *do.stride()[:3],
            num_heads, q_len, num_q_tiles,
            HEAD_DIM=problem.head_dim, BLOCK_D=problem.block_d, BLOCK_Q=_ROW_TERMS_BLOCK_Q,
            HAS_DLSE=dlse is not None, NATURAL=_is_natural(problem),
        )  # fmt: skip
    return row_lse, row_dots


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
    }


def _is_natural(problem: Problem) -> bool:
    """Whether scores are in natural units in the kernels, and not in those of log2."""
    return problem.dtype == torch.float32


def _unit(problem: Problem) -> float:
    """One, in the units of scores in the kernels."""
    return 1.0 if _is_natural(problem) else math.log2(math.e)


def _mask(problem: Problem) -> tuple[int | None, int | None, int | None, float | None]:
    """Window, prefix, shift and cap, each None if it changes nothing."""
    softcap = problem.softcap
    if softcap is not None:
        # Beyond, all scores are equal, or all are as without a cap, as far as float32 can tell.
        softcap = min(max(softcap, 1e-20), 1e20) * _unit(problem)
    return problem.window, problem.prefix_len or None, problem.shift or None, softcap


def _cu_seqlens(packing: Packing | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if packing is None else (packing.cu_seqlens_q, packing.cu_seqlens_k)


def _strides(problem: Problem, x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and row; the sequences of a packed batch begin at cu_seqlens."""
    batch, head, row, _ = x.stride()
    return (0 if problem.packed else batch), head, row


def _lse_strides(problem: Problem, lse: Tensor) -> tuple[int, int]:
    batch, head, _ = lse.stride()
    return (0 if problem.packed else batch), head


def _timed(launch: Callable[[TileConfig], None]) -> Callable[[TileConfig], float]:
    return lambda config: _milliseconds(lambda: launch(config))


def _milliseconds(run: Callable[[], None]) -> float:
    """Median of some runs, after warming up."""
    return do_bench(run, warmup=5, rep=30, return_mode="median")
