"""Memory of attention over ranks: predicted, by hand, and buffers that grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from split_attention import (
    CPU,
    PROBLEM,
    SCHEMES,
    TRANSPORTS,
    Batch,
    attend,
    exact,
    scheme_of,
    shard,
)


class TestPredictedMemory:
    """65,536 tokens on 8 ranks, 32 query and 8 KV heads of 128, bfloat16; MB of 10^6 bytes."""

    GUIDE = replace(
        PROBLEM,
        num_heads=32,
        num_kv_heads=8,
        q_len=65_536,
        kv_len=65_536,
        head_dim=128,
        dtype="bfloat16",
        cp=8,
    )
    Q_MB, KV_MB, ALL_KV_MB = 67.1, 33.6, 268.4

    def test_local_tensors(self) -> None:
        found = scheme_of("zigzag", transport="send_recv").peak_memory(self.GUIDE)
        assert found["inputs"] / 1e6 == pytest.approx(self.Q_MB + self.KV_MB, rel=2e-3)
        assert found["output"] / 1e6 == pytest.approx(self.Q_MB, rel=2e-3)
        # A float32 sum beside the part that a kernel gives in bfloat16.
        assert found["dq"] / 1e6 == pytest.approx(3 * self.Q_MB, rel=2e-3)
        assert found["visiting_keys"] / 1e6 == pytest.approx(2 * self.KV_MB, rel=2e-3)

    def test_gathered_keys(self) -> None:
        found = scheme_of("llama3", transport="all_gather").peak_memory(self.GUIDE)
        assert found["gathered_keys"] / 1e6 == pytest.approx(self.ALL_KV_MB, rel=2e-3)

    def test_a_ring_by_hand(self) -> None:
        """A call on other ranks' keys, with sums of dk and dv under way in float32."""
        ring = scheme_of("ring", transport="send_recv", kernel="sdpa_cudnn")
        found = ring.peak_memory(replace(self.GUIDE, device="cuda"))
        expected = {
            "visiting_keys": 2 * self.KV_MB,
            "dq": 3 * self.Q_MB,
            # What leaves and what arrives, and the call's own.
            "dk_dv_sums": 2 * 2 * self.KV_MB,
            "dk_dv": self.KV_MB,
            # Float32 sums of dq, a number a row, and dk and dv of every query head.
            "kernel_workspace": 2 * self.Q_MB + 1.05 + 4 * self.KV_MB,
        }
        assert {name: found[name] / 1e6 for name in expected} == pytest.approx(expected, rel=2e-3)

    def test_a_gather_by_hand(self) -> None:
        """When dv is put in the order of the ranks, beside dk, which has been."""
        gather = scheme_of("zigzag_llama3", transport="all_gather", kernel="sdpa_cudnn")
        found = gather.peak_memory(replace(self.GUIDE, device="cuda"))
        expected = {
            # In the ranks' order, which the collective keeps, and in that of their positions.
            "gathered_keys": self.ALL_KV_MB,
            "arranged_keys": self.ALL_KV_MB,
            # Causal rectangles are two calls, whose results are summed in float32.
            "dq": 2 * self.Q_MB,
            # Of both calls, which see 17 times a sixteenth of all keys together.
            "dk_dv": self.ALL_KV_MB * 17 / 16,
            # Float32 dv of all ranks: the sum, the chunks in the order of ranks, and as one tensor.
            "summed": 3 * self.ALL_KV_MB,
            "reduced_dk_dv": self.ALL_KV_MB * (1 + 1 / 8),
        }
        assert {name: found[name] / 1e6 for name in expected} == pytest.approx(expected, rel=2e-3)

    def test_parts_in_order_are_copied_once(self) -> None:
        """Contiguous parts have no chunks to sort: the sum of dv, and each rank's part of it."""
        gather = scheme_of("llama3", transport="all_gather", kernel="flash_torch")
        found = gather.peak_memory(replace(self.GUIDE, device="cuda"))
        expected = {
            "dq": self.Q_MB,
            "dk_dv": self.ALL_KV_MB,
            "summed": 2 * self.ALL_KV_MB,
            "reduced_dk_dv": self.ALL_KV_MB * (1 + 1 / 8),
        }
        assert {name: found[name] / 1e6 for name in expected} == pytest.approx(expected, rel=2e-3)

    def test_a_gather_in_place_by_hand(self) -> None:
        """Where parts of other ranks are added, by a kernel without a workspace: keys are in their
        places, and gradients have been written where others read them."""
        found = scheme_of("llama3", transport="symmetric").peak_memory(self.GUIDE)
        expected = {
            "published": self.KV_MB + self.ALL_KV_MB,
            "arranged_keys": self.ALL_KV_MB,
            "dq": self.Q_MB,
            "dk_dv": self.ALL_KV_MB,
            "own_dk_dv": 2 * self.KV_MB,
            "landed_dk_dv": self.KV_MB,
        }
        assert {name: found[name] / 1e6 for name in expected} == pytest.approx(expected, rel=2e-3)
        assert not {"summed", "narrow_dk_dv", "own_heads"} & found.keys()

    def test_heads_in_groups_bound_a_gather(self) -> None:
        whole, four = (
            scheme_of("llama3", transport="symmetric", kv_heads_at_once=heads) for heads in (0, 2)
        )
        more, less = (scheme.peak_memory(self.GUIDE) for scheme in (whole, four))
        assert less["arranged_keys"] == more["arranged_keys"] / 4
        gradients = [found["published"] / 1e6 - self.KV_MB for found in (more, less)]
        assert gradients == pytest.approx([self.ALL_KV_MB, self.ALL_KV_MB / 4], rel=2e-3)

    def test_a_window_brings_its_rows_alone(self) -> None:
        """4,096 of a rank's 8,192 keys leave and come, and no others."""
        problem = replace(self.GUIDE, window=4_097)
        for transport, shares in (("send_recv", 1.0), ("symmetric", 0.5)):
            ring = scheme_of("ring", transport=transport, kernel="flash_torch")
            found = ring.peak_memory(problem)
            assert found["visiting_keys"] / 1e6 == pytest.approx(shares * self.KV_MB, rel=2e-3)

    @pytest.mark.parametrize(
        ("window", "output", "rows", "dq", "dk_dv"),
        [(4_097, 1, 4 / 8, 1 + 4 / 8, 1), (9_217, 2, 1, 3, 2)],
    )
    def test_what_is_merged_once_is_not_float32(
        self, window: int, output: float, rows: float, dq: float, dk_dv: float
    ) -> None:
        """The keys of one other rank, in half of all rows, or of two: a sum, and a part to add."""
        ring = scheme_of("ring", transport="symmetric", kernel="flash_torch")
        found = ring.peak_memory(replace(self.GUIDE, window=window, needs_grad=False))
        assert found["output"] / 1e6 == pytest.approx(output * self.Q_MB, rel=2e-3)
        # What the last call gives of these rows, with its log-sum-exp.
        part = found["output_part"] - rows * found["lse"]
        assert part / 1e6 == pytest.approx(rows * self.Q_MB, rel=2e-3)
        found = ring.peak_memory(replace(self.GUIDE, window=window))
        assert found["dq"] / 1e6 == pytest.approx(dq * self.Q_MB, rel=2e-3)
        assert found["dk_dv_sums"] / 1e6 == pytest.approx(dk_dv * self.KV_MB, rel=2e-3)

    def test_few_keys_are_kept_by_hand(self) -> None:
        """1,024 of 8,192 rows; the peak is at the rank's own keys, after those of the other."""
        ring = scheme_of("ring", transport="symmetric", kernel="flash_torch")
        found = ring.peak_memory(replace(self.GUIDE, window=1_025))
        expected = {
            # One place, for keys and then for their gradients.
            "published": self.KV_MB / 8,
            # Kept since the forward pass.
            "visiting_keys": self.KV_MB / 8,
            # On their way home, and the call's own.
            "returning_dk_dv": self.KV_MB / 8,
            "dk_dv": self.KV_MB,
            # The rows to be added in the end.
            "dq": self.Q_MB * (1 + 1 / 8),
        }
        assert {name: found[name] / 1e6 for name in expected} == pytest.approx(expected, rel=2e-3)

    def test_without_gradients(self) -> None:
        """A ring: q, k, v, two visits' keys, o in float32, and a part of it."""
        problem = replace(self.GUIDE, needs_grad=False)
        found = scheme_of("ring", transport="send_recv").peak_memory(problem)
        assert found["visiting_keys"] / 1e6 == pytest.approx(2 * self.KV_MB, rel=2e-3)
        total = sum(found.values()) / 1e6
        assert total == pytest.approx(4 * self.Q_MB + 3 * self.KV_MB, rel=0.02)

    def test_a_fused_call_repeats_keys(self) -> None:
        """Chunks r and 2P-1-r of 16 see 17 chunks of keys in two calls or in one.

        Of a kernel whose workspace puts the peak into a call.
        """
        packed = replace(self.GUIDE, packed=True)
        options = {"transport": "all_gather", "kernel": "flash_torch"}
        two, one = (
            scheme_of("zigzag_llama3", backward_mode=mode, **options)
            for mode in ("two_kernels", "fused")
        )
        assert two.peak_memory(packed)["taken_keys"] / 1e6 == pytest.approx(268.4, rel=2e-3)
        assert one.peak_memory(packed)["taken_keys"] / 1e6 == pytest.approx(
            268.4 * 17 / 16, rel=2e-3
        )

    @pytest.mark.parametrize("name", SCHEMES)
    def test_rings_do_not_grow_with_ranks_and_gathers_do(self, name: str) -> None:
        """With as many tokens a rank."""
        scheme = scheme_of(name, transport=TRANSPORTS[name][0])
        half = replace(self.GUIDE, q_len=32_768, kv_len=32_768, cp=4)
        more, less = (sum(scheme.peak_memory(item).values()) for item in (self.GUIDE, half))
        assert more > 1.3 * less if scheme.gathers else more == less


def grown_buffers(group: dist.ProcessGroup, name: str) -> float:
    """A short batch, a longer one and the short one again, through one bound attention."""
    worst = 0.0
    with scheme_of(name, kernel="naive", transport="symmetric").bind(group, CPU) as bound:
        for length in (12, 48, 12):
            batch = Batch(lengths=(length,))
            q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            o = attend(bound, leaves, batch)
            found = [o.detach(), *torch.autograd.grad(o, leaves, do)]
            expected = [shard(bound, x, batch) for x in exact(batch)]
            for got, want in zip(found, expected, strict=True):
                worst = max(worst, float((got.double() - want).abs().max()))
    return worst


@pytest.mark.parametrize("name", [*SCHEMES, "ulysses"])
def test_memory_that_peers_read_grows_with_the_batch(name: str) -> None:
    assert max(on_ranks(3, grown_buffers, name)) < 1e-5
