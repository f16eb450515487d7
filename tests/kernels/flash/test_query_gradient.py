"""Sums of dq that the Hopper kernels go on with from one block of keys to the next."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from grids import covering
from torch import Tensor

from kernels import BACKENDS, AttentionProblem
from kernels.backend import Attention, DelegatedAttention
from kernels.backends.flash_triton import FlashTriton
from kernels.flash import dispatch, operator
from kernels.flash.call.arguments import FlashCall, FlashOptions
from kernels.problem import AttentionSpec
from kernels.query_gradient import QueryBlock, QueryGradient
from parallel.context.blocks.layouts import LAYOUTS, Layout

backward_memory = pytest.importorskip("kernels.flash.hopper.backward_memory")

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(
    not ON_HOPPER, reason="needs a CUDA device of compute capability 9.0"
)

SCALE = 0.1


class Part(NamedTuple):
    """Some queries against some of the keys of one rank, as a layout cuts them."""

    source: int
    first_key: int
    block: QueryBlock


def parts_of(layout: Layout, rank: int, local: int, causal: bool = True) -> list[Part]:
    """The blocks of a rank, its own keys first."""
    found = []
    for step in range(layout.num_ranks):
        source = (rank - step) % layout.num_ranks
        block = layout.block(rank, source, local, causal)
        if block is not None:
            spec = AttentionSpec(causal=block.causal, scale=SCALE)
            sums = QueryBlock(block.q.start, block.q.stop, block.kv_len, spec)
            found.append(Part(source, block.kv.start, sums))
    return found


def blocks_of(name: str, rank: int, local: int, num_ranks: int = 4) -> list[QueryBlock]:
    layout = LAYOUTS[name](num_ranks=num_ranks)
    return [part.block for part in parts_of(layout, rank, local)]


class TestWholeTurns:
    """A turn is 128 queries, and counts of programs lie at every 256."""

    @pytest.mark.parametrize("rank", range(4))
    @pytest.mark.parametrize(
        ("layout", "local", "fits"),
        [
            ("contiguous", 1000, True),
            ("striped", 1000, True),
            ("zigzag", 1024, True),
            # Chunks of 500 and of 384 tokens.
            ("zigzag", 1000, False),
            ("zigzag", 768, False),
        ],
    )
    def test_of_layouts(self, layout: str, local: int, rank: int, fits: bool) -> None:
        blocks = blocks_of(layout, rank, local)
        # The last rank of a zigzag reads the early chunks of the others with all of its queries.
        fits = fits or (layout == "zigzag" and rank == 3)
        assert backward_memory.are_whole_turns(blocks, local) is fits

    def test_the_query_before_a_strict_mask_sees_nothing(self) -> None:
        *_, block = blocks_of("striped", 0, 1000)
        assert (block.start, block.stop, block.num_keys) == (1, 1000, 999)
        assert backward_memory.first_query(block) == 0
        # Of one key more it would see the first.
        assert backward_memory.first_query(block._replace(num_keys=1000)) is None
        full = block._replace(spec=replace(block.spec, causal=False))
        assert backward_memory.first_query(full) is None

    @pytest.mark.parametrize(
        "first",
        [
            # Not all queries; a query that sees nothing; other masks; none.
            {"start": 256},
            {"stop": 512},
            {"num_keys": 1023},
            {"spec": AttentionSpec(causal=True, scale=SCALE, window=100)},
            {"spec": AttentionSpec(causal=True, scale=2 * SCALE)},
        ],
    )
    def test_the_first_block_writes_all(self, first: dict) -> None:
        blocks = blocks_of("contiguous", 1, 1024)
        assert backward_memory.are_whole_turns(blocks, 1024)
        assert not backward_memory.are_whole_turns([blocks[0]._replace(**first), *blocks[1:]], 1024)

    def test_a_window_of_a_later_block(self) -> None:
        first, second = blocks_of("contiguous", 1, 1024)[:2]
        windowed = AttentionSpec(causal=True, scale=SCALE, window=100)
        assert not backward_memory.are_whole_turns([first, second._replace(spec=windowed)], 1024)


class TestMemory:
    problem = AttentionProblem(
        batch_size=1, num_heads=32, num_kv_heads=8, q_len=4096, kv_len=4096, head_dim=128,
        dtype="bfloat16", device="cuda", causal=True, needs_grad=True,
    )  # fmt: skip

    def test_by_hand(self) -> None:
        """Float32 sums and two statistics of each query; sums of keys where heads share them."""
        backend = FlashTriton(name="flash_triton")
        memory = backend.query_gradient_memory(self.problem, blocks_of("striped", 3, 4096))
        assert memory is not None
        assert memory.kept == 32 * 4096 * (128 * 4 + 8)
        assert memory.of_blocks == (8 * 4096 * 2 * 128 * 4,) * 4

    def test_bands_have_sums_of_queries_and_of_keys(self) -> None:
        """One head of 4,096 tokens has four; blocks that are added to it have none."""
        backend = FlashTriton(name="flash_triton")
        problem = replace(self.problem, num_heads=1, num_kv_heads=1)
        memory = backend.query_gradient_memory(problem, blocks_of("striped", 3, 4096))
        assert memory is not None
        assert memory.kept == 4096 * (4 * 128 * 4 + 8)
        assert memory.of_blocks == (4096 * 2 * 128 * 4, 0, 0, 0)

    def test_a_whole_group_needs_no_sums_of_keys(self) -> None:
        """Without a mask, 256 programs of key heads fill 132 processors to 97%."""
        backend = FlashTriton(name="flash_triton")
        memory = backend.query_gradient_memory(self.problem, blocks_of("contiguous", 1, 4096))
        assert memory is not None
        assert memory.of_blocks[1] == 0

    @pytest.mark.parametrize(
        ("changes", "options"),
        [
            ({"device": "cpu"}, {}),
            ({"dtype": "float32"}, {}),
            ({}, {"implementation": "plain"}),
        ],
    )
    def test_none_of_other_kernels(self, changes: dict, options: dict) -> None:
        backend = FlashTriton(name="flash_triton", **options)
        problem = replace(self.problem, **changes)
        assert backend.query_gradient_memory(problem, blocks_of("striped", 3, 4096)) is None

    def test_none_beyond_a_slice_of_heads(self) -> None:
        backend = FlashTriton(name="flash_triton")
        problem = replace(self.problem, q_len=1 << 17, kv_len=1 << 17)
        assert backend.query_gradient_memory(problem, blocks_of("striped", 3, 1 << 17)) is None


class TestWho:
    q = torch.zeros(1, 4, 64, 16, dtype=torch.bfloat16)
    lse = torch.zeros(1, 4, 64)

    def test_no_kernel_on_a_cpu(self) -> None:
        blocks = blocks_of("striped", 3, 64)
        for name in ("flash_triton", "flash_torch", "naive"):
            backend = BACKENDS[name].target(name=name).role(Attention)
            found = backend.query_gradient(self.q, self.q, self.q, self.q, self.lse, blocks)
            assert found is None
        options = FlashOptions(implementation="plain")
        found = dispatch.query_gradient(self.q, self.q, self.q, self.q, self.lse, blocks, options)
        assert found is None

    @pytest.mark.parametrize(
        ("name", "wrong", "said"),
        [
            ("do", torch.zeros(1, 4, 64, 16), "do is float32: must be bfloat16, like q"),
            ("o", torch.zeros(1, 4, 63, 16), "o is [1, 4, 63, 16]: must be [1, 4, 64, 16]"),
            ("lse", torch.zeros(1, 4, 64, dtype=torch.float64), "lse is float64: must be float32"),
        ],
    )
    def test_arguments_that_do_not_fit(
        self, monkeypatch: pytest.MonkeyPatch, name: str, wrong: Tensor, said: str
    ) -> None:
        monkeypatch.setattr(dispatch, "_that_sums", lambda *_: pytest.fail)
        given = {"do": self.q, "q": self.q, "k": self.q, "o": self.q, "lse": self.lse, name: wrong}
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            dispatch.query_gradient(
                **given, blocks=blocks_of("striped", 3, 64), options=FlashOptions()
            )

    @pytest.mark.parametrize("same", [True, False])
    def test_of_the_backend_that_takes_all_blocks(self, same: bool) -> None:
        class Sums(FlashTriton):
            def query_gradient(self, *arguments: object) -> QueryGradient | None:
                return "sums"  # type: ignore[return-value]

        class Picks(DelegatedAttention):
            def delegate(
                self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, with_lse: bool
            ) -> Attention:
                assert with_lse
                return Sums(name="sums" if same or spec.causal else "others")

        found = Picks(name="picks").query_gradient(
            self.q, self.q, self.q, self.q, self.lse, blocks_of("contiguous", 1, 64)
        )
        assert found == ("sums" if same else None)


@pytest.mark.gpu
@needs_hopper
class TestOnHopper:
    """Against one call for each block, and against float64."""

    @pytest.mark.parametrize(
        ("head_dim_heads", "layout_local", "rank"),
        covering(
            [(64, (4, 4)), (96, (4, 2)), (128, (8, 2)), (192, (2, 2)), (256, (4, 1))],
            [("contiguous", 1000), ("contiguous", 128), ("striped", 1000), ("zigzag", 1536)],
            [0, 1, 3],
        ),
    )
    def test_against_calls_of_each_block(
        self,
        head_dim_heads: tuple[int, tuple[int, int]],
        layout_local: tuple[str, int],
        rank: int,
    ) -> None:
        (head_dim, heads), (layout, local) = head_dim_heads, layout_local
        ring = Ring(LAYOUTS[layout](num_ranks=4), rank, local, head_dim, heads)
        gradient = ring.gradient()
        assert gradient is not None
        total = torch.zeros(ring.q.shape, dtype=torch.float64, device="cuda")
        for part in ring.parts:
            rows = slice(part.block.start, part.block.stop)
            dk, dv = gradient.add(part.block, *ring.keys(part))
            dq, *expected = ring.backward(part)
            total[:, :, rows] += dq.double()
            for found, wanted in zip((dk, dv), expected, strict=True):
                if layout != "striped":
                    # The same tiles in the same order.
                    assert torch.equal(found, wanted)
                assert distance(found, wanted) < 4e-3
        dq = gradient.result()
        assert distance(dq, total) < 4e-3
        exact = ring.exact_dq()
        # It rounds once what calls of each block round as often as there are blocks.
        assert distance(dq, exact) < 1.02 * distance(total.to(dq.dtype), exact) + 1e-5

    @pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
    def test_equal_bits_in_every_run(self, layout: str) -> None:
        ring = Ring(LAYOUTS[layout](num_ranks=4), 3, 2048, 128, (8, 2))
        runs = []
        for _ in range(20):
            gradient = ring.gradient()
            assert gradient is not None
            keys = [x for part in ring.parts for x in gradient.add(part.block, *ring.keys(part))]
            runs.append([gradient.result(), *keys])
        for run in runs[1:]:
            assert all(map(torch.equal, run, runs[0]))

    @pytest.mark.parametrize("strides", ["BSHD", "odd rows"])
    def test_other_layouts_in_memory(self, strides: str) -> None:
        ring = Ring(LAYOUTS["zigzag"](num_ranks=4), 2, 512, 64, (4, 2))
        expected = ring.dq()
        for name in ("do", "q", "o"):
            x = getattr(ring, name)
            if strides == "BSHD":
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            else:
                wide = torch.zeros(*x.shape[:3], x.shape[3] + 1, dtype=x.dtype, device="cuda")
                wide[..., :-1] = x
                x = wide[..., :-1]
            setattr(ring, name, x)
        found = ring.dq()
        assert found.stride() == ring.q.stride() or strides == "odd rows"
        assert torch.equal(found, expected)

    def test_none_for_other_blocks(self) -> None:
        ring = Ring(LAYOUTS["zigzag"](num_ranks=4), 1, 1000, 64, (2, 2))
        assert ring.gradient() is None

    def test_none_in_float32(self) -> None:
        ring = Ring(LAYOUTS["contiguous"](num_ranks=4), 1, 256, 64, (2, 2))
        for name in ("do", "q", "o"):
            setattr(ring, name, getattr(ring, name).float())
        assert ring.gradient() is None


class Ring:
    """One rank's queries, and the keys of all."""

    def __init__(
        self, layout: Layout, rank: int, local: int, head_dim: int, heads: tuple[int, int]
    ) -> None:
        generator = torch.Generator("cuda").manual_seed(3)

        def randn(num_heads: int) -> Tensor:
            shape = (2, num_heads, local, head_dim)
            x = torch.randn(shape, generator=generator, device="cuda")
            return x.to(torch.bfloat16)

        self.q, self.do = randn(heads[0]), randn(heads[0])
        self.k, self.v = ([randn(heads[1]) for _ in range(layout.num_ranks)] for _ in "kv")
        self.parts = parts_of(layout, rank, local)
        self.group = heads[0] // heads[1]
        self._exact()

    def keys(self, part: Part) -> tuple[Tensor, Tensor]:
        rows = slice(part.first_key, part.first_key + part.block.num_keys)
        return self.k[part.source][:, :, rows], self.v[part.source][:, :, rows]

    def gradient(self) -> QueryGradient | None:
        blocks = [part.block for part in self.parts]
        backend = FlashTriton(name="flash_triton")
        return backend.query_gradient(self.do, self.q, self.k[0], self.o, self.lse, blocks)

    def dq(self) -> Tensor:
        gradient = self.gradient()
        assert gradient is not None
        for part in self.parts:
            gradient.add(part.block, *self.keys(part))
        return gradient.result()

    def backward(self, part: Part) -> tuple[Tensor, Tensor, Tensor]:
        rows = slice(part.block.start, part.block.stop)
        q, do, o, lse = (x[:, :, rows] for x in (self.q, self.do, self.o, self.lse))
        k, v = self.keys(part)
        call = FlashCall(
            q=q, k=k, v=v, spec=part.block.spec, options=FlashOptions(implementation="hopper")
        )
        return operator.backward(call, do, o, lse)

    def _scores(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scores over the keys of all ranks in float64, and these keys and values."""
        k, v = (torch.cat(x, 2).double().repeat_interleave(self.group, 1) for x in (self.k, self.v))
        scores = torch.full((*self.q.shape[:3], k.shape[2]), -torch.inf, device="cuda").double()
        local = self.q.shape[2]
        for part in self.parts:
            block = part.block
            first = part.source * local + part.first_key
            keys = slice(first, first + block.num_keys)
            q = self.q[:, :, block.start : block.stop].double()
            found = q @ k[:, :, keys].transpose(2, 3) * SCALE
            if block.spec.causal:
                ones = torch.ones(found.shape[2:], device="cuda", dtype=torch.bool)
                found.masked_fill_(ones.triu(1 + block.num_keys - found.shape[2]), -torch.inf)
            scores[:, :, block.start : block.stop, keys] = found
        return scores, k, v

    def _exact(self) -> None:
        scores, _, v = self._scores()
        self.o = (scores.softmax(-1) @ v).to(torch.bfloat16)
        self.lse = scores.logsumexp(-1).float()

    def exact_dq(self) -> Tensor:
        scores, k, v = self._scores()
        p = scores.softmax(-1)
        dp = self.do.double() @ v.transpose(2, 3)
        delta = (p * dp).sum(-1, keepdim=True)
        return SCALE * (p * (dp - delta)) @ k


def distance(x: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over that of what is wanted."""
    return float((x.double() - wanted.double()).norm() / wanted.double().norm())
