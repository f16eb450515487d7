"""FLOPs, bytes and pairs of an attention call, against hand counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels import AttentionProblem, accounting

WIDE = AttentionProblem(
    batch_size=2,
    num_heads=4,
    num_kv_heads=2,
    q_len=32,
    kv_len=32,
    head_dim=16,
    dtype="bfloat16",
    device="cpu",
    causal=False,
    needs_grad=True,
)


def test_attention_flops_by_hand() -> None:
    problem = WIDE
    # Two matmuls over 2 x 4 heads of 32 x 32 pairs and 16 features, 2 FLOPs each.
    assert accounting.forward_flops(problem) == 2 * 2 * (2 * 4) * 32 * 32 * 16
    assert accounting.backward_flops(problem) == 2.5 * accounting.forward_flops(problem)
    # q and o: 2*4*32*16 elements; k and v: 2*2*32*16; two bytes each; lse: 2*4*32 floats.
    assert accounting.forward_bytes(problem) == 2 * 2 * 4096 + 2 * 2 * 2048 + 4 * 256
    assert accounting.backward_bytes(problem) == 4 * 2 * 4096 + 4 * 2 * 2048 + 4 * 256


def test_values_narrower_than_keys_by_hand() -> None:
    """192 columns beside 128, as DeepSeek-V3's latent attention trains."""
    problem = replace(WIDE, batch_size=1, kv_len=64, head_dim=192, value_dim=128)
    pairs = 4 * 32 * 64
    # Forward: q k^T of 192, p v of 128. Backward: q k^T, ds k and ds^T q of 192, do v^T and p^T do.
    assert accounting.forward_flops(problem) == 2 * pairs * (192 + 128)
    assert accounting.backward_flops(problem) == 2 * pairs * (3 * 192 + 2 * 128)
    size = accounting.tensor_bytes(problem)
    assert (size.q, size.o) == (2 * 4 * 32 * 192, 2 * 4 * 32 * 128)
    assert (size.k, size.v) == (2 * 2 * 64 * 192, 2 * 2 * 64 * 128)
    assert accounting.forward_bytes(problem) == size.q + size.k + size.v + size.o + size.lse
    both = 2 * (size.q + size.k + size.v + size.o) + size.lse
    assert accounting.backward_bytes(problem) == both
    peak = accounting.kernel_peak(problem, workspace=0.0)
    assert sum(peak.values()) == both


@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (3, 8), (8, 3)])
def test_causal_pairs_are_half_the_diagonal_beside_the_square(q_len: int, kv_len: int) -> None:
    """Counted one by one; the formula leaves out half of the diagonal, as S^2 / 2 does."""
    counted = sum(
        1 for row in range(q_len) for column in range(kv_len) if column <= row + kv_len - q_len
    )
    diagonal = min(q_len, kv_len)
    assert accounting.attended_pairs(q_len, kv_len, causal=True) == counted - diagonal / 2
    assert accounting.attended_pairs(q_len, kv_len, causal=False) == q_len * kv_len
