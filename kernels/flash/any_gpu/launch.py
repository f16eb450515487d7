"""Launches the plain kernels: any CUDA GPU that Triton knows, and Triton's interpreter.

An implementation, as this one, is a module with three functions on tensors seen as
[batch, heads, seq, head_dim] with a last stride of 1: ``why_not`` a problem is not for it,
and ``forward`` and ``backward``, which fill the results they are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.flash.any_gpu import configs
from kernels.flash.any_gpu.backward import (
    backward_dkv_kernel,
    backward_dq_kernel,
    row_terms_kernel,
)
from kernels.flash.any_gpu.configs import TileConfig
from kernels.flash.any_gpu.forward import forward_kernel
from kernels.flash.problem import Problem
from kernels.problem import Packing

INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)
"""Whether triton was first imported under TRITON_INTERPRET=1; it cannot change later."""

_ROW_TERMS_BLOCK_Q = 32

_SMALLEST = torch.finfo(torch.float32).tiny

_MAX_REMEMBERED = 4096

_configs: dict[tuple[str, Problem], TileConfig] = {}


def why_not(problem: Problem) -> str | None:
    """None if these kernels can run ``problem`` here, else the reason."""
    if INTERPRETED:
        return None
    if problem.device.type != "cuda":
        return "runs on a CUDA device; TRITON_INTERPRET=1 runs it on a CPU, slowly"
    if problem.dtype == torch.bfloat16 and torch.cuda.get_device_capability(problem.device) < (8,):
        return "bfloat16 needs a GPU of compute capability 8.0 or higher"
    return None


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    scale: float,
    packing: Packing | None,
) -> None:
    """Fill o [B, H, S, D] and lse [B, H, S] (contiguous); continue from them if it accumulates."""
    if q.numel() == 0:
        return
    # A scale below float32's range is a zero, and minus infinity times zero is not a number.
    sign = (scale > _SMALLEST) - (scale < -_SMALLEST)
    arguments = (
        *_cu_seqlens(packing),
        *_strides(problem, q),
        *_strides(problem, k),
        *_strides(problem, v),
        *_strides(problem, o),
        *_lse_strides(problem, lse),
        problem.num_heads,
        problem.q_len,
        problem.kv_len,
    )
    scale_log2 = abs(scale) * math.log2(math.e) if sign else 1.0

    def launch(config: TileConfig, o: Tensor = o, lse: Tensor = lse) -> None:
        num_q_tiles = -(-problem.q_len // config.block_q)
        grid = (num_q_tiles * problem.num_heads * problem.batch_size,)
        forward_kernel[grid](
            q, k, v, o, lse, *arguments, num_q_tiles, scale_log2,
            SCALE_SIGN=sign, ACCUMULATE=problem.accumulates, **_constants(problem, config),
        )  # fmt: skip

    def measure(config: TileConfig) -> float:
        # On copies: every run of an accumulating kernel changes what it starts from.
        copies = (o.clone(), lse.clone())
        return _milliseconds(lambda: launch(config, *copies))

    launch(_config("forward", problem, measure))


def backward(
    problem: Problem,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    scale: float,
    packing: Packing | None,
) -> None:
    """Fill dq, dk, dv; lse and dlse are contiguous [B, H, S]."""
    lse_log2, row_dots = row_terms(problem, do, o, lse, dlse)
    shared = (
        *_cu_seqlens(packing),
        *_strides(problem, q),
        *_strides(problem, k),
        *_strides(problem, v),
        *_strides(problem, do),
    )
    row_strides = _lse_strides(problem, lse)

    def launch_dkv(config: TileConfig) -> None:
        num_k_tiles = -(-problem.kv_len // config.block_k)
        grid = (num_k_tiles * problem.num_kv_heads * problem.batch_size,)
        backward_dkv_kernel[grid](
            q, k, v, do, lse_log2, row_dots, dk, dv, *shared,
            *_strides(problem, dk), *_strides(problem, dv), *row_strides,
            problem.num_kv_heads, problem.q_len, problem.kv_len, num_k_tiles, scale,
            **_constants(problem, config),
        )  # fmt: skip

    def launch_dq(config: TileConfig) -> None:
        num_q_tiles = -(-problem.q_len // config.block_q)
        grid = (num_q_tiles * problem.num_heads * problem.batch_size,)
        backward_dq_kernel[grid](
            q, k, v, do, lse_log2, row_dots, dq, *shared,
            *_strides(problem, dq), *row_strides,
            problem.num_heads, problem.q_len, problem.kv_len, num_q_tiles, scale,
            **_constants(problem, config),
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
    """lse in units of log2, and D = rowsum(o * do) - dlse; both [B, H, S] float32.

    For a query without any key they are plus infinity and 0, which make its gradients zero.
    """
    lse_log2, row_dots = torch.empty((2, *lse.shape), dtype=torch.float32, device=lse.device)
    if lse.numel():
        # A packed batch needs no cu_seqlens here: rows are independent.
        batch_size, num_heads, q_len = lse.shape
        num_q_tiles = -(-q_len // _ROW_TERMS_BLOCK_Q)
        row_terms_kernel[(num_q_tiles * num_heads * batch_size,)](
            o, do, lse, dlse, lse_log2, row_dots, *o.stride()[:3], *do.stride()[:3],
            num_heads, q_len, num_q_tiles,
            HEAD_DIM=problem.head_dim, BLOCK_D=problem.block_d, BLOCK_Q=_ROW_TERMS_BLOCK_Q,
            HAS_DLSE=dlse is not None,
        )  # fmt: skip
    return lse_log2, row_dots


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
    """What a kernel is compiled for, without what only one of them knows."""
    return {
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": problem.block_d,
        "GROUP_SIZE": problem.group_size,
        "BLOCK_Q": config.block_q,
        "BLOCK_K": config.block_k,
        "CAUSAL": problem.causal,
        "PACKED": problem.packed,
        "PRECISION": problem.precision,
        "UPCAST": INTERPRETED and problem.dtype == torch.bfloat16,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _cu_seqlens(packing: Packing | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if packing is None else (packing.cu_seqlens_q, packing.cu_seqlens_k)


def _strides(problem: Problem, x: Tensor) -> tuple[int, int, int]:
    """Of batch, head and row; the sequences of a packed batch all begin at cu_seqlens."""
    batch, head, row, _ = x.stride()
    return (0 if problem.packed else batch), head, row


def _lse_strides(problem: Problem, lse: Tensor) -> tuple[int, int]:
    batch, head, _ = lse.stride()
    return (0 if problem.packed else batch), head


def _timed(launch: Callable[[TileConfig], None]) -> Callable[[TileConfig], float]:
    return lambda config: _milliseconds(lambda: launch(config))


def _milliseconds(run: Callable[[], None]) -> float:
    """Median of some runs, after warming up."""
    from triton.testing import do_bench

    return do_bench(run, warmup=5, rep=30, return_mode="median")
