"""Loops of the any-GPU kernels, cut into chunks where a call has few programs.

A program owns a tile and walks over all rows that its tile has to do with. One head of a short
sequence has fewer tiles than a large GPU has multiprocessors, and under a causal mask the longest
loop is twice the mean. Then each loop is cut into chunks, which are programs of their own (the
second axis of the grid), and their results are put together afterwards: those of the forward pass
by :func:`kernels.flash.any_gpu.forward.merge_kernel`, gradients by a sum over chunks in a fixed
order, so that two runs give the same bits.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch

from kernels.flash.any_gpu import configs
from kernels.flash.call.problem import MAX_SPLIT_HEAD_DIM, Problem
from kernels.problem import AttentionProblem

ROWS = 128
"""Chunks are multiples of it, and it is a multiple of every tile's rows."""

_MOST_OF_A_SHARE = 1.3
"""A loop that takes longer than so many even shares of the work is cut."""

_CHUNKS_OF_A_SHARE = 2
"""Programs of one multiprocessor, about: they run side by side, or one after another if unequal."""

_OF_AN_H200 = 132


@lru_cache(maxsize=4096)
def chunk_rows(problem: Problem, kernel: str, tile_rows: int) -> int | None:
    """Rows of one chunk of a kernel's loop, a multiple of ``ROWS``; None to leave the loop whole.

    Args:
        kernel: forward, backward_dkv or backward_dq.
        tile_rows: rows that one of its programs owns.

    Left whole are calls with a window, whose loops are short already, packed ones, whose lengths
    the host does not know, and forward passes that continue from an accumulator.
    """
    if problem.packed or problem.window is not None:
        return None
    if problem.accumulates and kernel == "forward":
        return None
    owned, visited, heads = _lengths(problem, kernel)
    num_programs = -(-owned // tile_rows) * heads * problem.batch_size
    pairs = problem.mask.pairs(problem.q_len, problem.kv_len)
    # A loop's mean length, times the programs.
    rows = pairs / owned * (problem.group_size if kernel == "backward_dkv" else 1) * num_programs
    share = rows / num_multiprocessors(problem.device)
    longest = visited * (problem.group_size if kernel == "backward_dkv" else 1)
    if longest <= _MOST_OF_A_SHARE * share:
        return None
    num_chunks = -(-longest * _CHUNKS_OF_A_SHARE // max(1, int(share)))
    size = -(-visited // num_chunks)
    size = -(-size // ROWS) * ROWS
    return size if size < visited else None


def num_chunks(problem: Problem, kernel: str, size: int) -> int:
    """How many chunks of ``size`` rows a kernel's loop has."""
    return -(-_lengths(problem, kernel)[1] // size)


def _lengths(problem: Problem, kernel: str) -> tuple[int, int, int]:
    """Rows that all programs of a head own together, rows they walk over at most, and heads."""
    if kernel == "backward_dkv":
        return problem.kv_len, problem.q_len, problem.num_kv_heads
    return problem.q_len, problem.kv_len, problem.num_heads


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU, or of an H200 where none is here; of Triton's interpreter one."""
    if device.type != "cuda":
        return 1
    if not torch.cuda.is_available():
        return _OF_AN_H200
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def forward_workspace(call: AttentionProblem, precision: str) -> float:
    """Predicted bytes of the chunks' results in the forward pass: of each row acc, m and l.

    Args:
        precision: of float32 matmuls, as in ``FlashOptions``.
    """
    problem = _as_run(call, precision)
    size = chunk_rows(problem, "forward", configs.without_search("forward", problem)[0].block_q)
    if size is None:
        return 0.0
    rows = num_chunks(problem, "forward", size) * problem.batch_size * problem.num_heads
    return 4.0 * rows * problem.q_len * (problem.v_dim + 2)


def backward_workspace(call: AttentionProblem, precision: str) -> float:
    """The same of the chunks' gradients: those of dk and dv, or of dq, which come after them."""
    problem = _as_run(call, precision)
    found = [0.0]
    both = problem.head_dim + problem.v_dim
    for kernel, columns in (("backward_dkv", both), ("backward_dq", problem.head_dim)):
        tiles, _ = configs.without_search(kernel, problem)
        tile_rows = tiles.block_k if kernel == "backward_dkv" else tiles.block_q
        size = chunk_rows(problem, kernel, tile_rows)
        if size is not None:
            owned, _, heads = _lengths(problem, kernel)
            rows = num_chunks(problem, kernel, size) * problem.batch_size * heads * owned
            found.append(4.0 * rows * columns)
    return max(found)


def _as_run(call: AttentionProblem, precision: str) -> Problem:
    """A call as these kernels would see it, on a GPU that need not be here.

    With ``precision=auto`` on one that has bf16x6, while torch asks for full float32.
    """
    if call.dtype != "float32":
        precision = "ieee"
    elif precision == "auto":
        precision = "bf16x6" if call.head_dim <= MAX_SPLIT_HEAD_DIM else "ieee"
    return Problem(
        device=torch.device(call.device),
        dtype=getattr(torch, call.dtype),
        batch_size=call.batch_size,
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        q_len=call.q_len,
        kv_len=call.kv_len,
        head_dim=call.head_dim,
        causal=call.causal,
        packed=call.packed,
        accumulates=False,
        precision=precision,
        window=call.window,
        prefix_len=call.prefix_len,
        shift=call.shift,
        softcap=call.softcap,
        value_dim=call.value_dim,
    )
