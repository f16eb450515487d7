"""FLOPs and bytes of one attention call, by formula.

One matmul of M x K by K x N is 2MKN FLOPs. The forward pass is two matmuls over the
query-key pairs that the mask keeps, the backward pass five with recomputation of the scores
(FlashAttention-2, section 3.1), so backward is 2.5 times forward.
"""

from __future__ import annotations

from kernels.problem import AttentionProblem

BACKWARD_OVER_FORWARD = 2.5

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def attended_pairs(q_len: int, kv_len: int, causal: bool) -> float:
    """Query-key pairs of one head; a causal mask, aligned bottom right, halves the square."""
    if not causal:
        return q_len * kv_len
    if kv_len >= q_len:
        return q_len * (2 * kv_len - q_len) / 2
    return kv_len * kv_len / 2


def forward_flops(problem: AttentionProblem) -> float:
    """4 B H S^2 D, halved when causal."""
    pairs = attended_pairs(problem.q_len, problem.kv_len, problem.causal)
    return 4 * problem.batch_size * problem.num_heads * pairs * problem.head_dim


def backward_flops(problem: AttentionProblem) -> float:
    """2.5 times the forward pass."""
    return BACKWARD_OVER_FORWARD * forward_flops(problem)


def forward_bytes(problem: AttentionProblem) -> float:
    """The fewest bytes the forward pass moves: q, k, v read once, o and lse written once."""
    q_bytes, kv_bytes, lse_bytes = tensor_bytes(problem)
    return 2 * q_bytes + 2 * kv_bytes + lse_bytes


def backward_bytes(problem: AttentionProblem) -> float:
    """q, k, v, o, do and lse read once, dq, dk, dv written once."""
    q_bytes, kv_bytes, lse_bytes = tensor_bytes(problem)
    return 4 * q_bytes + 4 * kv_bytes + lse_bytes


def tensor_bytes(problem: AttentionProblem) -> tuple[float, float, float]:
    """Bytes of q (or o), of k (or v), and of the float32 log-sum-exp."""
    size = _BYTES[problem.dtype]
    rows = problem.batch_size * problem.num_heads * problem.q_len
    kv_rows = problem.batch_size * problem.num_kv_heads * problem.kv_len
    return size * rows * problem.head_dim, size * kv_rows * problem.head_dim, 4.0 * rows


def kernel_peak(problem: AttentionProblem, *, backward_workspace: float) -> dict[str, float]:
    """Bytes at the peak of a pass by a kernel that never has the scores in memory.

    Without gradients q, k, v, o and the log-sum-exp. With them the peak is in the backward pass,
    which holds do, dq, dk and dv besides, and the kernel's workspace.
    """
    q_bytes, kv_bytes, lse_bytes = tensor_bytes(problem)
    inputs = q_bytes + 2 * kv_bytes
    values = {"inputs": inputs, "output": q_bytes, "lse": lse_bytes}
    if problem.needs_grad:
        values |= {"output_gradient": q_bytes, "gradients": inputs}
        if backward_workspace:
            values["workspace"] = backward_workspace
    return values


def rounded(size: int, multiple: int) -> int:
    """``size`` rounded up to a multiple, as kernels round heads' widths and rows."""
    return -(-size // multiple) * multiple


def memory(problem: AttentionProblem, *, keeps_scores: bool) -> dict[str, float]:
    """Bytes in use between forward and backward, by category.

    q, k, v and o stay for the backward pass, and either the probabilities (with the mask, of
    one byte per pair) or the log-sum-exp of every row.
    """
    q_bytes, kv_bytes, lse_bytes = tensor_bytes(problem)
    values = {"inputs": q_bytes + 2 * kv_bytes, "output": q_bytes}
    if keeps_scores:
        values["probabilities"] = q_bytes / problem.head_dim * problem.kv_len
        if problem.causal:
            values["mask"] = float(problem.q_len * problem.kv_len)
    else:
        values["lse"] = lse_bytes
    return values
