"""What hybrids support and refuse, their layout, their balance, and their predicted memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from split_attention import PROBLEM, scheme_of

from parallel.context.blocks.layouts import Contiguous, Layout, Striped, Zigzag
from parallel.context.heads.nested import Nested

HYBRIDS = ("ulysses_ring", "ulysses_zigzag")


class TestLayout:
    def test_by_hand(self) -> None:
        """16 tokens; groups 0, 1 and 2, 3 hold chunks 0, 3 and 1, 2 of four tokens."""
        layout = scheme_of("ulysses_zigzag", ulysses=2).layout(4)
        held = [layout.positions(rank, 16).tolist() for rank in range(4)]
        assert held == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]

    def test_a_rank_between_chunks(self) -> None:
        """Three ranks cut two chunks: the one in the middle has the ends of both."""
        layout = Nested(num_ranks=6, outer=Zigzag(num_ranks=2))
        assert layout.multiple == 12
        assert [layout.runs(rank, 12) for rank in range(3)] == [
            [range(2)],
            [range(2, 3), range(9, 10)],
            [range(10, 12)],
        ]

    @pytest.mark.parametrize("outer", [Contiguous, Zigzag, Striped])
    @pytest.mark.parametrize(("groups", "degree"), [(2, 2), (2, 3), (3, 2), (2, 4), (4, 2)])
    @pytest.mark.parametrize("length", [1, 23, 48])
    def test_a_group_holds_what_a_rank_of_the_outer_layout_does(
        self, outer: type[Layout], groups: int, degree: int, length: int
    ) -> None:
        layout = Nested(num_ranks=groups * degree, outer=outer(num_ranks=groups))
        padded = layout.padded(length)
        assert length <= padded < length + layout.multiple
        for group in range(groups):
            ranks = range(group * degree, (group + 1) * degree)
            parts = [layout.positions(rank, length) for rank in ranks]
            assert {len(part) for part in parts} == {layout.local_len(length)}
            assert torch.equal(torch.cat(parts), layout.outer.positions(group, padded))

    def test_parts_become_the_whole_again(self) -> None:
        layout = Nested(num_ranks=6, outer=Zigzag(num_ranks=3))
        lengths = (25, 7, 1)
        x = torch.randn(sum(lengths), 2)
        parts = [layout.shard_packed(x, lengths, rank) for rank in range(6)]
        assert torch.equal(layout.unshard_packed(parts, lengths), x)


class TestDegree:
    @pytest.mark.parametrize(
        ("num_ranks", "degree"), [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (8, 4), (16, 8), (64, 8)]
    )
    def test_automatic(self, num_ranks: int, degree: int) -> None:
        """The largest divisor below the number of ranks, up to 8."""
        assert scheme_of("ulysses_ring").inner_degree(num_ranks) == degree

    def test_one_axis_is_its_scheme(self) -> None:
        assert scheme_of("ulysses_zigzag", ulysses=1).layout(4) == Zigzag(num_ranks=4)
        assert scheme_of("ulysses_zigzag", ulysses=4).layout(4) == Contiguous(num_ranks=4)

    def test_a_layout_that_cannot_be(self) -> None:
        with pytest.raises(ValueError, match=r"attention\.ulysses=3: must divide parallel\.cp=4"):
            scheme_of("ulysses_zigzag", ulysses=3).layout(4)


class TestSupport:
    @pytest.mark.parametrize(
        ("name", "options", "changes", "reason"),
        [
            ("ulysses_ring", {"ulysses": 3}, {}, "attention.ulysses=3: must divide parallel.cp=4"),
            ("ulysses_zigzag", {}, {"causal": False}, "zigzag balances a causal mask"),
            ("ulysses_ring", {}, {"kv_len": 32}, "queries and keys of a split sequence are the"),
            (
                "ulysses_ring",
                {},
                {"causal": False, "q_len": 63, "kv_len": 63},
                "63 tokens do not divide by 4, and without a causal mask",
            ),
            (
                "ulysses_zigzag",
                {"ulysses": 4},
                {"cp": 8, "num_heads": 3, "num_kv_heads": 1},
                "3 query heads are too few for groups of 4 ranks",
            ),
            (
                "ulysses_ring",
                {"head_groups": 3},
                {},
                "attention.head_groups=3: 4 query heads on 2 ranks make at most 2",
            ),
            (
                "ulysses_ring",
                {"head_groups": 2, "ulysses": 1},
                {},
                "attention.head_groups=2: groups of one rank exchange no heads; leave it out, or",
            ),
            (
                "ulysses_ring",
                {"head_groups": 2},
                {"cp": 3},
                "attention.head_groups=2: groups of one rank exchange no heads; leave it out, or",
            ),
            ("ulysses_ring", {"kernel": "sdpa"}, {}, "attention.kernel=sdpa gives no log-sum-exp"),
            ("ulysses_ring", {"kernel": "sdpa_cudnn"}, {}, "attention.kernel=sdpa_cudnn: "),
        ],
    )
    def test_reasons(
        self, name: str, options: dict[str, Any], changes: dict[str, Any], reason: str
    ) -> None:
        found = scheme_of(name, **options).supports(replace(PROBLEM, **changes))
        assert found is not None
        assert found.startswith(reason)
        assert "\n" not in found

    @pytest.mark.parametrize("name", HYBRIDS)
    @pytest.mark.parametrize("kernel", ["auto", "naive", "flash_torch"])
    @pytest.mark.parametrize("cp", [1, 2, 4, 8])
    def test_what_works_is_supported(self, name: str, kernel: str, cp: int) -> None:
        scheme = scheme_of(name, kernel=kernel)
        assert scheme.supports(replace(PROBLEM, cp=cp, q_len=61, kv_len=61)) is None

    def test_whole_sequences_need_no_lse(self) -> None:
        scheme = scheme_of("ulysses_ring", kernel="sdpa", ulysses=4)
        assert scheme.supports(PROBLEM) is None

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"ulysses": -1}, "attention.ulysses=-1: must be a divisor of parallel.cp, or 0"),
            ({"transport": "all_to_all"}, "attention.transport=all_to_all: must be one of auto, s"),
            ({"kernel": "ulysses"}, "attention.kernel=ulysses: must be an attention on one device"),
        ],
    )
    def test_what_cannot_be_is_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match="attention") as caught:
            scheme_of("ulysses_zigzag", **options)
        assert str(caught.value).startswith(message)

    @pytest.mark.parametrize(
        ("degree", "said"),
        [
            (1, "transport=send_recv, 4 x 1 ranks, no heads exchanged"),
            (2, "transport=send_recv, 2 x 2 ranks"),
            (4, "transport=all_to_all, 1 x 4 ranks, no keys travel"),
        ],
    )
    def test_the_choice_tells_the_mesh(self, degree: int, said: str) -> None:
        scheme = scheme_of("ulysses_zigzag", kernel="naive", ulysses=degree)
        assert scheme.choice(PROBLEM) == f"ulysses_zigzag(kernel=naive, {said})"


class TestPredictedMemory:
    """65,536 tokens on 8 ranks, 32 query and 8 KV heads of 128, bfloat16; q is 67.1 MB."""

    GUIDE = replace(
        PROBLEM,
        num_heads=32,
        num_kv_heads=8,
        q_len=65_536,
        kv_len=65_536,
        head_dim=128,
        dtype="bfloat16",
        device="cuda",
        cp=8,
    )
    Q = 65_536 // 8 * 32 * 128 * 2.0

    def peak(self, name: str, **options: Any) -> dict[str, float]:
        """In bytes of q; k and v together are half as many."""
        changes = options.pop("problem", {})
        found = scheme_of(name, **options).peak_memory(replace(self.GUIDE, **changes))
        assert found is not None
        return {part: size / self.Q for part, size in found.items()}

    def test_ulysses_by_hand(self) -> None:
        """cuDNN's backward pass, between two exchanges of as many bytes."""
        found = self.peak("ulysses", kernel="sdpa_cudnn", transport="all_to_all")
        assert found == {
            "inputs": 1.5,
            "output": 1,
            "output_gradient": 1,
            "whole_inputs": 1.5,
            "whole_output": 1,
            "whole_output_gradient": 1,
            "lse": 1 / 64,
            "gradients": 1.5,
            # Float32 sums of dq, a number a row, and dk and dv of every query head.
            "workspace": 2 + 1 / 64 + 2,
        }

    def test_an_exchange_can_be_the_peak(self) -> None:
        """dq, dk and dv of whole sequences, those that arrived, and dv put in order last."""
        problem = {"num_kv_heads": 32, "dtype": "float32", "batch_size": 2}
        options = {"kernel": "flash_torch", "transport": "all_to_all"}
        found = self.peak("ulysses", problem=problem, **options)
        # Batches of two in four bytes instead of two.
        assert {part: size / 4 for part, size in found.items()} == {
            "inputs": 3,
            "output": 1,
            "output_gradient": 1,
            "whole_gradients": 3,
            "received": 3,
            "gradients": 3 + 1,
        }

    def test_shared_key_heads_are_copied(self) -> None:
        """Two ranks to each of four key heads."""
        problem = {"num_kv_heads": 4}
        found = self.peak("ulysses", kernel="sdpa_cudnn", problem=problem)
        assert found["inputs"] == 1 + 1 / 4
        assert found["whole_inputs"] == 1 + 1 / 2

    def test_a_hybrid_holds_its_ring_and_two_exchanges(self) -> None:
        options = {"kernel": "sdpa_cudnn", "transport": "send_recv"}
        found = self.peak("ulysses_zigzag", ulysses=4, **options)
        # The same ring of two ranks over a part of a sequence that four ranks share.
        few = replace(self.GUIDE, cp=2, num_heads=8, num_kv_heads=2)
        ring = scheme_of("zigzag", **options).peak_memory(few)
        assert ring is not None
        assert sum(found.values()) == pytest.approx(3.5 + sum(ring.values()) / self.Q)

    def test_without_gradients(self) -> None:
        """q, k, v here and together, the results of all heads, in rows, and those that arrive."""
        options = {"kernel": "flash_triton", "transport": "all_to_all"}
        found = self.peak("ulysses", problem={"needs_grad": False}, **options)
        assert sum(found.values()) == 1.5 + 1.5 + 1 + 1 + 1

    def test_published_by_hand(self) -> None:
        """Buffers of q, k and v and of all results beside what the kernel needs, no messages."""
        messages, published = (
            self.peak("ulysses", kernel="sdpa_cudnn", transport=transport)
            for transport in ("all_to_all", "symmetric")
        )
        assert published == messages | {"published": 1.5 + 1.5}

    def test_published_in_groups(self) -> None:
        """Half of the results at a time, and kernels with half of the heads each."""
        options = {"kernel": "sdpa_cudnn", "transport": "symmetric", "head_groups": 2}
        problem = {"num_heads": 64, "num_kv_heads": 16}
        two = self.peak("ulysses", problem=problem, **options)
        one = self.peak("ulysses", problem=problem, **(options | {"head_groups": 1}))
        assert two["published"] == 2 * (1.5 + 1.5 / 2)
        assert two["workspace"] == one["workspace"] / 2

    def test_published_without_gradients(self) -> None:
        """Buffers of q, k, v and o; whole sequences of them; what came in, and o."""
        options = {"kernel": "flash_triton", "transport": "symmetric"}
        found = self.peak("ulysses", problem={"needs_grad": False}, **options)
        assert found["published"] == 1.5 + 1
        assert sum(found.values()) == 1.5 + 2.5 + 1.5 + 1 + 1

    @pytest.mark.parametrize(("degree", "alone"), [(1, "zigzag"), (8, "ulysses")])
    def test_one_axis_is_its_scheme(self, degree: int, alone: str) -> None:
        kernel = {"kernel": "flash_triton"}
        assert self.peak("ulysses_zigzag", ulysses=degree, **kernel) == self.peak(alone, **kernel)

    def test_kernels_of_which_nothing_is_known(self) -> None:
        packed = replace(self.GUIDE, packed=True)
        assert scheme_of("ulysses", kernel="naive").peak_memory(packed) is None


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("changes", [{"cp": 4}, {"cp": 9, "num_heads": 2, "num_kv_heads": 2}])
def test_no_memory_is_predicted_of_what_is_no_mesh(name: str, changes: dict[str, Any]) -> None:
    """A plan predicts before it asks whether a case is supported."""
    problem = replace(PROBLEM, **changes)
    assert scheme_of(name, ulysses=3).supports(problem) is not None
    assert scheme_of(name, ulysses=3).peak_memory(problem) is None
