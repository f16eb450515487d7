"""Parts of FlashAttention-2's forward pass, against what H200s held."""

from __future__ import annotations

import pytest

from kernels.accounting import flash_splits, split_forward_peak
from kernels.problem import AttentionProblem


def problem(num_heads: int, seq_len: int, head_dim: int) -> AttentionProblem:
    return AttentionProblem(
        batch_size=1,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        q_len=seq_len,
        kv_len=seq_len,
        head_dim=head_dim,
        causal=True,
        dtype="bfloat16",
        device="cuda",
        needs_grad=True,
    )


@pytest.mark.parametrize(
    ("seq_len", "head_dim", "splits"),
    [(128, 16, 1), (1024, 16, 4), (2048, 128, 8), (16384, 64, 1)],
)
def test_one_head(seq_len: int, head_dim: int, splits: int) -> None:
    """Two of these are worked out from peaks of records, within 1 KiB."""
    assert flash_splits(problem(1, seq_len, head_dim)) == splits


def test_a_full_device_splits_nothing() -> None:
    """212 blocks of queries are 0.8 of 264 slots; with fewer, even parts are worth it."""
    assert flash_splits(problem(212, 64, 128)) == 1
    # Six blocks of queries a head. Of 216 and of 210, six parts are the most even.
    assert flash_splits(problem(36, 384, 256)) == 1
    assert flash_splits(problem(35, 384, 256)) == 6
    assert flash_splits(problem(14, 1024, 128)) == 1
    assert flash_splits(problem(13, 1024, 128)) == 1
    assert flash_splits(problem(8, 1024, 128)) == 2


def test_bytes_of_the_parts() -> None:
    """Four results of 1,024 rows of 32 numbers and a log-sum-exp in float32."""
    assert split_forward_peak(problem(1, 1024, 16))["partial_results"] == 4 * 1024 * (32 + 1) * 4
    assert "partial_results" not in split_forward_peak(problem(1, 128, 16))
