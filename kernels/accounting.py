"""FLOPs and bytes of one attention call, by formula.

One matmul of M x K by K x N is 2MKN FLOPs. The forward pass is two matmuls over the
query-key pairs that the mask keeps, the backward pass five with recomputation of the scores
(FlashAttention-2, section 3.1), so that backward is 2.5 times forward, where values have as many
columns as keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernels.problem import AttentionProblem

_SPLIT_SLOTS = 2 * 132
"""Twice the multiprocessors of an H100 or H200 (SXM): predictions are made without a device."""

_SPLIT_QUERY_BLOCK = 64
_SPLIT_KEY_BLOCKS = ((64, 256), (128, 128), (math.inf, 64))
"""Keys in a block of FlashAttention-2's forward pass, for widths of a head up to each."""

_MOST_SPLITS = 128
_SPLIT_WIDTH = 32
"""The parts' results have the width of a head rounded up to a multiple of this."""

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def attended_pairs(q_len: int, kv_len: int, causal: bool) -> float:
    """Query-key pairs of one head; a causal mask, aligned bottom right, halves the square."""
    if not causal:
        return q_len * kv_len
    if kv_len >= q_len:
        return q_len * (2 * kv_len - q_len) / 2
    return kv_len * kv_len / 2


def problem_pairs(problem: AttentionProblem) -> float:
    """Query-key pairs of one head; of a window or a prefix exactly those that the mask keeps."""
    if problem.mask.is_plain:
        return attended_pairs(problem.q_len, problem.kv_len, problem.causal)
    return problem.mask.pairs(problem.q_len, problem.kv_len)


def forward_flops(problem: AttentionProblem) -> float:
    """2 B H S^2 (D + D_v), halved when causal, and less where a window hides keys."""
    pairs = problem.batch_size * problem.num_heads * problem_pairs(problem)
    return 2 * pairs * (problem.head_dim + problem.v_dim)


def backward_flops(problem: AttentionProblem) -> float:
    """2 B H S^2 (3 D + 2 D_v), masked like the forward pass: of scores, dq, dk, and dp, dv."""
    pairs = problem.batch_size * problem.num_heads * problem_pairs(problem)
    return 2 * pairs * (3 * problem.head_dim + 2 * problem.v_dim)


def forward_bytes(problem: AttentionProblem) -> float:
    """The fewest bytes the forward pass moves: q, k, v read once, o and lse written once.

    Of k and v those rows that some query sees; the sinks are nothing beside them.
    """
    size = tensor_bytes(problem)
    return size.q + size.o + (size.k + size.v) * _seen_share(problem) + size.lse


def backward_bytes(problem: AttentionProblem) -> float:
    """q, k, v, o, do and lse read once, dq, dk, dv written once."""
    size = tensor_bytes(problem)
    of_keys = (size.k + size.v) * (1 + _seen_share(problem))
    return 2 * size.q + 2 * size.o + of_keys + size.lse


def _seen_share(problem: AttentionProblem) -> float:
    """The share of the keys that any query sees, which a window may leave out."""
    if problem.window is None or not problem.q_len or not problem.kv_len:
        return 1.0
    first, _ = problem.mask.keys(0, problem.q_len, problem.kv_len)
    _, last = problem.mask.keys(problem.q_len - 1, problem.q_len, problem.kv_len)
    return max(0, last - first) / problem.kv_len


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorBytes:
    """Bytes of each tensor of a call; gradients are as large as what they are of."""

    q: float
    k: float
    v: float
    o: float
    lse: float
    """Of the float32 log-sum-exp."""

    @property
    def inputs(self) -> float:
        """Bytes of q, k and v."""
        return self.q + self.k + self.v


def tensor_bytes(problem: AttentionProblem) -> TensorBytes:
    """Bytes of each tensor of a call, all contiguous."""
    element = _BYTES[problem.dtype]
    rows = problem.batch_size * problem.num_heads * problem.q_len
    kv_rows = problem.batch_size * problem.num_kv_heads * problem.kv_len
    return TensorBytes(
        q=element * rows * problem.head_dim,
        k=element * kv_rows * problem.head_dim,
        v=element * kv_rows * problem.v_dim,
        o=element * rows * problem.v_dim,
        lse=4.0 * rows,
    )


def kernel_peak(problem: AttentionProblem, *, workspace: float) -> dict[str, float]:
    """Bytes at the peak of a pass by a kernel that never has the scores in memory.

    Without gradients q, k, v, o and the log-sum-exp. With them the peak is in the backward pass,
    which holds do, dq, dk and dv besides. ``workspace`` is the kernel's in that pass.
    """
    size = tensor_bytes(problem)
    values = {"inputs": size.inputs, "output": size.o, "lse": size.lse}
    if problem.needs_grad:
        values |= {"output_gradient": size.o, "gradients": size.inputs}
    if workspace:
        values["workspace"] = workspace
    return values


def split_forward_peak(problem: AttentionProblem) -> dict[str, float]:
    """Bytes at the peak of a forward pass of FlashAttention-2, which may split the keys.

    A call of few heads and rows has too few blocks of queries for the device. The kernel then
    splits the keys, keeps a result and a log-sum-exp of each part in float32, and merges them at
    the end. The output gradient is there already.
    """
    values = kernel_peak(problem, workspace=0.0)
    values.pop("gradients", None)
    num_parts = flash_splits(problem)
    if num_parts > 1:
        rows = problem.batch_size * problem.num_heads * problem.q_len
        width = rounded(problem.head_dim, _SPLIT_WIDTH)
        values["partial_results"] = 4.0 * num_parts * rows * (width + 1)
    return values


def flash_splits(problem: AttentionProblem) -> int:
    """Parts into which FlashAttention-2's dense forward pass splits the keys.

    The fewest that fill the device nearly as evenly as any number of them. Source: PyTorch's copy
    of the library, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp,
    ``num_splits_heuristic`` and ``set_params_splitkv``.
    """
    num_blocks = -(-problem.q_len // _SPLIT_QUERY_BLOCK) * problem.batch_size * problem.num_heads
    key_block = next(size for width, size in _SPLIT_KEY_BLOCKS if problem.head_dim <= width)
    key_blocks = -(-problem.kv_len // key_block)
    if num_blocks >= 0.8 * _SPLIT_SLOTS:
        return 1
    evenness: dict[int, float] = {}
    for parts in range(1, min(_MOST_SPLITS, key_blocks) + 1):
        # One more part that leaves the longest part as long as it was gains nothing.
        if parts == 1 or -(-key_blocks // parts) != -(-key_blocks // (parts - 1)):
            waves = num_blocks * parts / _SPLIT_SLOTS
            evenness[parts] = waves / math.ceil(waves)
    return min(parts for parts, even in evenness.items() if even >= 0.85 * max(evenness.values()))


def rounded(size: int, multiple: int) -> int:
    """``size`` rounded up to a multiple, as kernels round heads' widths and rows."""
    return -(-size // multiple) * multiple


def memory(problem: AttentionProblem, *, keeps_scores: bool) -> dict[str, float]:
    """Bytes in use between forward and backward, by category.

    q, k, v and o stay for the backward pass, and either the probabilities (with the mask, of
    one byte per pair) or the log-sum-exp of every row. Of scores with a cap their tanh stays too,
    of float16 in float32, and of those with sinks a column more.
    """
    size = tensor_bytes(problem)
    values = {"inputs": size.inputs, "output": size.o}
    if keeps_scores:
        column = size.q / problem.head_dim
        values["probabilities"] = column * (problem.kv_len + problem.sinks)
        if problem.softcap is not None:
            wide = 2 if problem.dtype == "float16" else 1
            values["capped_scores"] = wide * column * problem.kv_len
        if problem.causal or problem.window is not None:
            values["mask"] = float(problem.q_len * problem.kv_len)
    else:
        values["lse"] = size.lse
    return values
