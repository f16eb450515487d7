"""FLOPs and bytes of one decoding step, by formula.

Bytes are the fewest that have to move: each token in the cache read once, the new ones written
once, queries read, the result written, and in latent attention the up-projections read. FLOPs of
latent attention are those of the absorbed form, also where the materialised one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.cases.precision import DTYPE_BYTES
from harness.cases.task import Work
from kernels import AttentionProblem, accounting
from kernels.decoding import DecodeProblem


def decode_work(problem: DecodeProblem, lengths: Sequence[int], num_layers: int) -> Work:
    """Work of a step of all layers over sequences that hold ``lengths`` tokens before it."""
    new = problem.batch_size * problem.new_tokens
    held = sum(lengths)
    # Each new token sees the cache, itself, and the new ones before it.
    pairs = held * problem.new_tokens + problem.batch_size * (
        problem.new_tokens * (problem.new_tokens + 1) / 2
    )
    rows = new * problem.num_heads
    if problem.is_latent:
        rank, rope, width = problem.kv_lora_rank, problem.rope_head_dim, problem.head_dim
        token = rank + rope
        weights = 2 * problem.num_heads * width * rank
        elements = token * (held + 2 * new) + rows * (2 * width + rope) + weights
        flops = 2 * problem.num_heads * pairs * (token + rank) + 2 * new * weights
    else:
        token = 2 * problem.num_kv_heads * problem.head_dim
        elements = token * (held + 2 * new) + 2 * rows * problem.head_dim
        flops = 4 * problem.num_heads * pairs * problem.head_dim
    return Work(
        flops=float(num_layers * flops),
        bytes=float(num_layers * elements * DTYPE_BYTES[problem.dtype]),
        tokens=new,
    )


def mixed_batch_work(decode: Work, prompts: AttentionProblem, num_layers: int) -> dict[str, Work]:
    """Work by phase of a step that also prefills prompts, which are one packed attention call."""
    flops = num_layers * accounting.forward_flops(prompts)
    moved = num_layers * accounting.forward_bytes(prompts)
    tokens = prompts.batch_size * prompts.q_len
    assert decode.bytes is not None
    assert decode.tokens is not None
    return {
        "decode": decode,
        "prefill": Work(flops=flops, bytes=moved, tokens=tokens),
        "step": Work(
            flops=decode.flops + flops, bytes=decode.bytes + moved, tokens=decode.tokens + tokens
        ),
    }


def input_and_output_bytes(problem: DecodeProblem) -> dict[str, float]:
    """Inputs, weights and output of one layer, in bytes."""
    size = DTYPE_BYTES[problem.dtype]
    new = problem.batch_size * problem.new_tokens
    rows = new * problem.num_heads
    if problem.is_latent:
        rank, rope, width = problem.kv_lora_rank, problem.rope_head_dim, problem.head_dim
        inputs = rows * (width + rope) + new * (rank + rope)
        weights = 2 * problem.num_heads * width * rank
    else:
        inputs = rows * problem.head_dim + 2 * new * problem.num_kv_heads * problem.head_dim
        weights = 0
    return {
        "inputs": float(size * inputs),
        "weights": float(size * weights),
        "output": float(size * rows * problem.head_dim),
    }


def prefill_memory(
    problem: AttentionProblem, lengths: Sequence[int], *, rotary: str
) -> dict[str, float]:
    """Peak bytes of a pass over prompts beside their cache, padding included in ``lengths``.

    The peak is the rotation of queries (:func:`kernels.rotary.rotate`), which holds them in
    float32, their halves, the halves interleaved again and, in a narrower dtype, the result,
    beside the angles of every token. Without a rotation it is attention.
    """
    tokens = sum(lengths)
    call = replace(problem, batch_size=1, q_len=tokens, kv_len=tokens, packed=True)
    attention = accounting.kernel_peak(call, workspace=0.0)
    if rotary == "none":
        return attention
    wide = 4.0 * tokens * problem.num_heads * problem.head_dim
    # A float32 query is its own copy in float32, and its own result.
    rotating = 2 * wide if problem.dtype == "float32" else 3 * wide + attention["output"]
    return {
        "inputs": attention["inputs"],
        "angles": 4.0 * problem.head_dim * (tokens + max(lengths)),
        "rotating_queries": rotating,
    }
