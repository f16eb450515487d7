"""The programs of the Hopper forward kernels: how large they are, and whose heads take turns."""

from __future__ import annotations

import torch

from kernels.flash.call.problem import Problem
from kernels.flash.hopper import program_size
from kernels.flash.hopper.program_size import ProgramSize
from kernels.flash.hopper.schedule import block_d, block_v, columns


def size_of_program(problem: Problem) -> ProgramSize:
    """How large a program of the forward pass is.

    The lengths of a packed batch are known to the GPU alone: all are taken to be the longest, in
    which most of the work is. Shared memory has no room for the next queries of more than 128
    columns. Costs were measured with windows and without, but not for prefixes and caps. Small
    programs do not gain where some columns take matmuls of their own: at head_dim 96 they took 1.11
    times as long.
    """
    unmeasured = problem.asks_for() - {"window"}
    if unmeasured or block_d(problem) > 128:
        return ProgramSize(consumers=2, tiles=1)
    processors = torch.cuda.get_device_properties(problem.device).multi_processor_count
    return program_size.size_of_program(
        q_len=problem.q_len,
        kv_len=problem.kv_len,
        heads=problem.batch_size * problem.num_heads,
        heads_at_once=heads_at_once(problem),
        block_d=block_d(problem),
        causal=problem.causal,
        window=problem.window,
        processors=processors,
        packed=problem.packed,
        small=columns(problem.head_dim).tail == 0,
    )


def heads_at_once(problem: Problem) -> int:
    """The number of heads whose forward programs take turns (forward_tile.place_in_order).

    Under a causal mask they leave short programs for the end, and their keys and values should stay
    in the L2 cache: a third of it, and a power of two as in backward_schedule.heads_at_once. More
    than 16 leave nothing shorter: on an H100 32 and 48 heads take 1.01 to 1.03 of the time of 16,
    and one at a time takes 1.02 to 1.08. In a window, and without a mask, programs are as long as
    each other.
    """
    if not problem.causal or problem.window is not None:
        return 1
    cache = torch.cuda.get_device_properties(problem.device).L2_cache_size
    row = (block_d(problem) + block_v(problem)) * problem.dtype.itemsize
    one_head = problem.kv_len * row
    members = problem.group_size << max(0, (cache // (3 * one_head)).bit_length() - 1)
    return max(problem.group_size, min(16, members))
