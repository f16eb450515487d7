"""Keys gathered over symmetric memory: where they go, what is left out, how gradients add up."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from live_tensors import LiveTensors
from masked_split import MaskedBatch, exact
from ranks import on_ranks
from split_attention import CPU, PROBLEM, Batch, scheme_of, shard
from torch import Tensor
from torch.utils import deterministic

from kernels import Attention, AttentionSpec
from kernels.problem import Mask
from parallel.context.blocks.arrangement import Arrangement, joined, sums_of
from parallel.context.blocks.layouts import LAYOUTS
from parallel.context.blocks.schedule import DenseSchedule, PackedSchedule, Scores
from parallel.context.memory.sizes import CallReader, LocalSizes
from parallel.context.memory.walk import PassMemory
from parallel.context.transports import peer_memory
from parallel.context.transports.strided_copy import StridedCopy

SCHEMES = ("llama3", "zigzag_llama3")

MASKS: tuple[dict[str, Any], ...] = ({}, {"window": 5}, {"window": 14}, {"prefix_len": 7})


def schedule_of(
    layout: str, num_ranks: int, rank: int, batch: MaskedBatch, *, takes_rectangles: bool = True
) -> DenseSchedule:
    return DenseSchedule(
        LAYOUTS[layout](num_ranks=num_ranks),
        rank,
        batch.lengths[0] // num_ranks,
        batch.spec(None).mask,
        Scores(scale=batch.scale),
        prefixes=True,
        takes_rectangles=lambda q_len, kv_len: takes_rectangles or q_len == kv_len,
    )


def arrangement_of(*arguments: Any, **options: Any) -> Arrangement:
    found = schedule_of(*arguments, **options).arrangement
    assert found is not None
    return found


@pytest.mark.parametrize("mask", [*MASKS, {"causal": False}, {"causal": False, "window": 6}])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_rows_move_to_their_positions(num_ranks: int, layout: str, mask: dict[str, Any]) -> None:
    """Those that any query of the reader sees, asked pair by pair, and no others."""
    batch = MaskedBatch(lengths=(48,), **mask)
    split = LAYOUTS[layout](num_ranks=num_ranks)
    positions = [split.positions(rank, 48).tolist() for rank in range(num_ranks)]
    for rank in range(num_ranks):
        arrangement = arrangement_of(layout, num_ranks, rank, batch)
        assert (arrangement.dim, arrangement.num_rows) == (2, 48)
        for source in range(num_ranks):
            for reader in range(num_ranks):
                moved = [
                    (own, row)
                    for own_rows, rows in arrangement.moves(source, reader)
                    for own, row in zip(own_rows, rows, strict=True)
                ]
                seen = [
                    (own, key)
                    for own, key in enumerate(positions[source])
                    if any(batch.sees(query, key) for query in positions[reader])
                ]
                assert sorted(moved) == seen


@pytest.mark.parametrize("mask", [*MASKS, {"causal": False}])
@pytest.mark.parametrize("takes_rectangles", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_each_row_is_the_sum_of_the_calls_that_read_it(
    layout: str, takes_rectangles: bool, mask: dict[str, Any]
) -> None:
    batch = MaskedBatch(lengths=(48,), **mask)
    for rank in range(4):
        schedule = schedule_of(layout, 4, rank, batch, takes_rectangles=takes_rectangles)
        readers: dict[int, list[tuple[int, int]]] = {}
        for number, call in enumerate(schedule.of_all()):
            (part,) = call.kv.slices or ()
            for row in range(part.start, part.stop):
                readers.setdefault(row, []).append((number, row - part.start))
        arrangement = schedule.arrangement
        assert arrangement is not None
        assert arrangement.sums is not None
        found = [
            (row, [(number, part[row - rows.start]) for number, part in calls])
            for rows, calls in arrangement.sums
            for row in rows
        ]
        assert found == sorted(readers.items())
        assert [row for row, _ in found] == [row for rows in arrangement.seen[rank] for row in rows]


def test_three_parts_of_a_row_are_summed_otherwise() -> None:
    assert sums_of([slice(0, 4), slice(2, 6), slice(3, 5)]) is None
    assert joined([range(4, 6), range(2), range(2, 4), range(7, 8)]) == [range(6), range(7, 8)]


def test_packed_ranks_follow_on_each_other() -> None:
    schedule = PackedSchedule(
        LAYOUTS["zigzag"](num_ranks=2), 1, [8, 4], Mask(causal=True), Scores(scale=1.0),
        prefixes=True, fused=False, device=CPU,
    )  # fmt: skip
    arrangement = schedule.arrangement
    assert arrangement is not None
    assert arrangement.sums is None
    for reader in range(2):
        assert arrangement.moves(0, reader) == [(range(6), range(6))]
        assert arrangement.moves(1, reader) == [(range(6), range(6, 12))]


@dataclass(kw_only=True, slots=True)
class Marked(Attention):
    """Gradients that tell which rows of q and of keys met, in their dtype."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        return q.clone(), q.new_zeros(q.shape[:3], dtype=torch.float32)

    def backward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        _, q, k, v, *_ = arguments
        sums = q.unflatten(1, (k.shape[1], -1)).double().sum((2, 3)).float()[:, :, None]
        return q.clone(), (k * sums).to(k.dtype), (v.float().cos() + sums).to(v.dtype)


class MarkedSquares(Marked):
    """Of kernels that take a causal mask of as many queries as keys alone."""

    takes_causal_rectangles: ClassVar[bool] = False


def gradients_by_hand(
    kernel: Attention, layout: Any, rank: int, batch: MaskedBatch
) -> tuple[Tensor, Tensor]:
    """Each rank's part rounded once, and parts added in the order of the ranks before ``rank``."""
    q, k, v, _ = batch.tensors()
    local = batch.lengths[0] // layout.num_ranks
    parts = []
    for reader in range(layout.num_ranks):
        own_q = layout.shard(q, reader, 2)
        schedule = schedule_of(
            layout.name, layout.num_ranks, reader, batch,
            takes_rectangles=type(kernel).takes_causal_rectangles,
        )  # fmt: skip
        totals = [torch.zeros_like(x, dtype=torch.float32) for x in (k, v)]
        for call in schedule.of_all():
            (rows,) = call.kv.slices or ()
            (queries,) = call.q.slices or ()
            keys = k[:, :, rows], v[:, :, rows]
            _, *found = kernel.backward(None, own_q[:, :, queries], *keys, None, None, call.spec)
            for total, part in zip(totals, found, strict=True):
                total[:, :, rows] += part.float()
        parts.append([layout.shard(x.to(batch.dtype), rank, 2) for x in totals])
    sums = [x.float() for x in parts[rank]]
    for step in range(1, layout.num_ranks):
        for total, part in zip(sums, parts[rank - step], strict=True):
            total += part
    assert sums[0].shape[2] == local
    return sums[0].to(batch.dtype), sums[1].to(batch.dtype)


def bits_as_by_hand(
    group: dist.ProcessGroup,
    name: str,
    kernel_type: type[Attention],
    batch: MaskedBatch,
    at_once: int,
) -> bool:
    """Whether dk and dv of two passes have the bits that they should, in memory full of NaNs."""
    kernel, wrong = kernel_type(name="marked"), 0
    options = {"kernel": "naive", "transport": "symmetric", "kv_heads_at_once": at_once}
    with scheme_of(name, **options).bind(group, CPU) as bound:
        bound._kernel = kernel
        expected = gradients_by_hand(kernel, bound.layout, bound.rank, batch)
        q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
        for _ in range(2):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            o = bound.attend(*leaves, batch.spec(None))
            found = torch.autograd.grad(o, leaves[1:], do)
            wrong += sum(not torch.equal(x, y) for x, y in zip(found, expected, strict=True))
            for memory in bound._transports.buffers._memory.values():
                memory._buffers[bound.rank].fill_(255)
    return wrong == 0


@pytest.mark.parametrize("kernel", [Marked, MarkedSquares])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_parts_are_rounded_once_and_added_in_one_order(
    num_ranks: int, name: str, kernel: type[Attention]
) -> None:
    # In float32 another order gives other bits; in bfloat16 float32 sums of few parts are exact.
    for number, dtype in enumerate((torch.bfloat16, torch.float32)):
        for mask in MASKS:
            batch = MaskedBatch(
                lengths=(48,) * (1 + number), head_dim=(8, 6)[number], dtype=dtype, **mask
            )
            assert all(on_ranks(num_ranks, bits_as_by_hand, name, kernel, batch, number))


def worst_beside_nans(
    group: dist.ProcessGroup, name: str, kernel: str, batch: MaskedBatch
) -> float:
    """Largest error of a second pass, where all memory that nothing has been written to is NaN."""
    options = {"kernel": kernel, "transport": "symmetric"}
    with scheme_of(name, **options).bind(group, CPU) as bound:
        q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
        torch.use_deterministic_algorithms(True)
        assert deterministic.fill_uninitialized_memory
        try:
            for _ in range(2):
                leaves = [x.clone().requires_grad_() for x in (q, k, v)]
                o = bound.attend(*leaves, batch.spec(None))
                found = [o.detach(), *torch.autograd.grad(o, leaves, do)]
                for memory in bound._transports.buffers._memory.values():
                    memory._buffers[bound.rank].fill_(255)
        finally:
            torch.use_deterministic_algorithms(False)
        (o, _, *gradients), _ = exact(batch)
        wanted = [shard(bound, x, batch) for x in (o, *gradients)]
    errors = [(x.double() - y).abs().max() for x, y in zip(found, wanted, strict=True)]
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("kernel", ["naive", "flash_torch", "sdpa_flash"])
@pytest.mark.parametrize("name", SCHEMES)
def test_nothing_that_is_left_out_is_read(name: str, kernel: str) -> None:
    """Rows that no query of a rank sees are whatever was in memory before."""
    for mask in MASKS if kernel != "sdpa_flash" else MASKS[:1]:
        errors = on_ranks(3, worst_beside_nans, name, kernel, MaskedBatch(lengths=(48,), **mask))
        assert max(errors) < 2e-5


def copies_made(group: dist.ProcessGroup, name: str, packed: bool) -> list[int]:
    """Prepared copies that each of several passes makes, over the same shape, another and it again.

    Offsets of a packed batch are new ones each time.
    """
    made, found = [], []
    init = StridedCopy.__init__

    def note(copy: StridedCopy, *arguments: Any) -> None:
        made.append(copy)
        init(copy, *arguments)

    with (
        patch.object(StridedCopy, "__init__", note),
        scheme_of(name, kernel="naive", transport="symmetric").bind(group, CPU) as bound,
    ):
        for lengths in ((24,), (24,), (12,), (24,)) if not packed else ((16, 8),) * 3:
            batch = MaskedBatch(lengths=lengths, packed=packed)
            one_pass(bound, batch)
            found.append(len(made))
            made.clear()
    return found


def one_pass(bound: Any, batch: MaskedBatch) -> None:
    q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(bound.attend(*leaves, batch.spec(None)), leaves, do)


def test_copies_are_prepared_once_for_a_shape() -> None:
    # Keys and values of two runs of both ranks, and gradients of two runs; of rank 1's queries all
    # keys but the last run.
    assert on_ranks(2, copies_made, "zigzag_llama3", False) == [
        [8 + 2, 0, 8 + 2, 0],
        [6 + 4, 0, 6 + 4, 0],
    ]
    assert on_ranks(2, copies_made, "llama3", True) == [[4 + 2, 0, 0]] * 2


def alive_in_growth(group: dist.ProcessGroup) -> list[int]:
    """Buffers that were alive when each one was made, over longer and longer batches."""
    made: list[Any] = []
    alive = []
    init = peer_memory.HostPeerMemory.__init__

    def note(memory: Any, group: dist.ProcessGroup, num_bytes: int) -> None:
        alive.append(sum(one() is not None for one in made))
        init(memory, group, num_bytes)
        # Views keep what they are views of, whatever has become of the buffer's own object.
        made.append(weakref.ref(memory._buffers[0].untyped_storage()))

    with (
        patch.object(peer_memory.HostPeerMemory, "__init__", note),
        scheme_of("zigzag_llama3", kernel="naive", transport="symmetric").bind(group, CPU) as bound,
    ):
        for length in (8, 12, 48):
            one_pass(bound, MaskedBatch(lengths=(length,)))
    return alive


def test_buffers_that_were_too_small_are_let_go_before_larger_ones_are_made() -> None:
    assert on_ranks(2, alive_in_growth) == [[0, 1, 1, 1, 1, 1]] * 2


@dataclass(kw_only=True, slots=True)
class Sized(Attention):
    """Results of the right sizes, and nothing beside them."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        shape = q.shape[:3] if spec.packing is None else (q.shape[1], q.shape[0])
        return q.clone(), q.new_zeros(shape, dtype=torch.float32)

    def backward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = arguments[1:4]
        return q.clone(), k.clone(), v.clone()


def measured_over_predicted(
    group: dist.ProcessGroup, name: str, at_once: int, packed: bool, needs_grad: bool
) -> float:
    """Bytes of the tensors that live at the peak of a pass, beside those of the formulas."""
    options = {"kernel": "naive", "transport": "symmetric", "kv_heads_at_once": at_once}
    scheme, length, heads = scheme_of(name, **options), 512, {"num_heads": 8, "num_kv_heads": 4}
    problem = replace(
        PROBLEM, q_len=length, kv_len=length, head_dim=64, cp=group.size(), dtype="bfloat16",
        packed=packed, needs_grad=needs_grad, **heads,
    )  # fmt: skip
    kernel = Sized(name="sized")
    sizes = LocalSizes(problem=problem, layout=scheme.layout(group.size()))
    memory = PassMemory(
        sizes=sizes,
        kernel=scheme.on_one_device,
        transport=scheme._transport_memory(problem),
        keys_in_turn=False,
    )
    calls = scheme._visits(CallReader(sizes=sizes, kernel=kernel), dist.get_rank(group))
    predicted = memory.peak(calls)
    lengths = (length // 2,) * 2 if packed else (length,)
    batch = Batch(lengths=lengths, packed=packed, head_dim=64, dtype=torch.bfloat16, **heads)
    with scheme.bind(group, CPU) as bound:
        bound._kernel = kernel
        q, k, v, do = (shard(bound, x, batch).clone() for x in batch.tensors())
        leaves = [x.detach().requires_grad_(needs_grad) for x in (q, k, v)]
        packing = batch.packing() if packed else None
        spec = AttentionSpec(causal=True, scale=1.0, packing=packing)

        def run() -> None:
            o = bound.attend(*leaves, spec)
            if needs_grad:
                torch.autograd.grad(o, leaves, do)

        run()
        buffers = bound._transports.buffers._memory.values()
        published = sum(buffer.num_bytes for buffer in buffers)
        assert published == predicted["published"]
        live = LiveTensors()
        live.ignore([*leaves, do, *(x for buffer in buffers for x in buffer._buffers)])
        with live:
            run()
    given = sum(x.nbytes for x in ((q, k, v, do) if needs_grad else (q, k, v)))
    return (given + live.peak + published) / sum(predicted.values())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "needs_grad"),
    [("llama3", False), ("llama3", True), ("zigzag_llama3", False), ("zigzag_llama3", True)],
)
@pytest.mark.parametrize("at_once", [0, 1, 2])
def test_tensors_that_live(at_once: int, name: str, needs_grad: bool, packed: bool) -> None:
    for ratio in on_ranks(2, measured_over_predicted, name, at_once, packed, needs_grad):
        assert 0.99 < ratio < 1.01
