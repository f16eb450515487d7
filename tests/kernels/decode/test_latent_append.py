"""New tokens of latent attention: rotated and appended in one launch, and the steps around it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from decode_checks import (
    PAGES,
    RAGGED,
    angles,
    assert_close,
    from_pages,
    int32,
    rotated,
    same,
    shuffled_table,
    to_pages,
)
from decoding import Step, backend_of
from grids import covering
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton_device import CLOSENESS, DEVICE, RUNS_TRITON, randn

from harness.bench.launches import count_launches
from kernels import decode
from kernels.decode import Rotary, latent_append
from kernels.decode.steps.absorbed_kernels import per_head_in_token_order

pytestmark = RUNS_TRITON

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@dataclass(kw_only=True, slots=True)
class Setting:
    """A latent cache with a history, and new tokens for it."""

    lengths: list[int]
    heads: int = 3
    new: int = 1
    rank: int = 24
    rope_dim: int = 16
    page: int = 0
    max_len: int = 80
    dtype: torch.dtype = torch.float32
    rotary: Rotary | None = None
    projected: bool = False
    """Inputs as slices of what a projection gives, heads inside tokens."""

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q_rope [B, H, T, R_rope], c_new [B, T, R], k_rope [B, T, R_rope]."""
        shape = (len(self.lengths), self.new)
        q = randn(*shape, self.heads, 5 + self.rope_dim, dtype=self.dtype, seed=1)
        down = randn(*shape, self.rank + self.rope_dim, dtype=self.dtype, seed=2)
        found = (q[..., 5:].transpose(1, 2), *down.split((self.rank, self.rope_dim), dim=-1))
        return found if self.projected else tuple(x.contiguous() for x in found)


def check(setting: Setting) -> None:
    """One call: rotated queries, appended tokens, and that nothing else has changed."""
    s = setting
    past = randn(len(s.lengths), s.max_len, s.rank + s.rope_dim, dtype=s.dtype, seed=3)
    for one, length in zip(past, s.lengths, strict=True):
        one[length:] = torch.nan
    q_rope, c_new, k_rope = s.inputs()
    held, table = past.clone(), None
    if s.page:
        used = [-(-(length + s.new) // s.page) for length in s.lengths]
        table = shuffled_table(len(s.lengths), -(-s.max_len // s.page), used)
        held = to_pages(past, table, s.page)
    before, lengths, after = held.clone(), int32(s.lengths), int32([-1] * len(s.lengths))
    turned = latent_append(
        q_rope, c_new, k_rope, held, lengths, block_table=table, rotary=s.rotary,
        lengths_after=after,
    )  # fmt: skip
    assert turned.dtype == q_rope.dtype
    assert lengths.tolist() == s.lengths, "lengths are the caller's"
    assert after.tolist() == [length + s.new for length in s.lengths]
    written = int((~held.isnan() & before.isnan()).sum())
    assert written == c_new.numel() + k_rope.numel(), "nothing is written outside of them"
    cache = held if table is None else from_pages(held, table, past)
    for b, length in enumerate(s.lengths):
        positions = torch.arange(length, length + s.new, device=DEVICE)
        limit = CLOSENESS[s.dtype]
        assert_close(turned[b], rotated(q_rope[b], positions, s.rotary), "q_rope", limit)
        keys = rotated(k_rope[b : b + 1], positions, s.rotary)[0]
        assert_close(cache[b, positions, s.rank :], keys, "appended keys", limit)
        assert torch.equal(cache[b, positions, : s.rank], c_new[b]), "appended latents"
        cache[b, positions] = torch.nan
    assert same(cache, past), "nothing else of the sequences' caches changes"


class TestLatentAppend:
    @pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
    @pytest.mark.parametrize(("new", "interleaved"), [(1, True), (3, False)])
    def test_ragged_lengths(self, page: int, new: int, interleaved: bool) -> None:
        rotary = angles(90, 16, interleaved)
        setting = Setting(lengths=RAGGED, new=new, page=page, rotary=rotary)
        check(setting)
        check(replace(setting, projected=True))

    @pytest.mark.parametrize("page", [0, 16])
    def test_no_rotary(self, page: int) -> None:
        check(Setting(lengths=[0, 15, 16], new=2, page=page, projected=True))
        q_rope, c_new, k_rope = Setting(lengths=[2]).inputs()
        cache = randn(1, 8, 40)
        assert latent_append(q_rope, c_new, k_rope, cache, int32([2])) is q_rope

    @pytest.mark.parametrize("interleaved", [True, False])
    @pytest.mark.parametrize("dtype", CLOSENESS, ids=lambda dtype: str(dtype)[6:])
    def test_dtypes_at_full_width(self, dtype: torch.dtype, interleaved: bool) -> None:
        """Rank 512 + 64, of which some entries are not rotated; more rows than a program has."""
        rotary = angles(40, 48, interleaved)
        check(
            Setting(
                lengths=[30, 9], heads=21, rank=512, rope_dim=64, max_len=40, dtype=dtype,
                rotary=rotary, projected=True,
            )
        )  # fmt: skip

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_wide_angles(self, dtype: torch.dtype) -> None:
        narrow = angles(40, 16)
        wide = Rotary(narrow.cos.double(), narrow.sin.double())
        check(Setting(lengths=[30, 9], max_len=40, dtype=dtype, rotary=wide))

    def test_tables_that_lie_apart(self) -> None:
        """The kernel knows one stride of both."""
        cos, sin, interleaved = angles(40, 16)
        apart = Rotary(cos, sin.repeat(1, 3)[:, :8], interleaved)
        check(Setting(lengths=[30, 9], max_len=40, rotary=apart))

    @pytest.mark.parametrize("page", [0, 4])
    def test_a_full_cache_is_not_overrun(self, page: int) -> None:
        """New tokens 2 and 3 of the first sequence have no place; the second has room."""
        cache = torch.zeros(2, 16, 6, device=DEVICE)
        table = None
        if page:
            cache = cache.view(8, 4, 6)
            table = torch.arange(8, device=DEVICE, dtype=torch.int32).view(2, 4)
        ones = [torch.ones(shape, device=DEVICE) for shape in ((2, 1, 3, 2), (2, 3, 4), (2, 3, 2))]
        latent_append(*ones, cache, int32([15, 3]), block_table=table, rotary=angles(16, 2))
        written = (cache.view(2, 16, 6)[..., 0] == 1).tolist()
        assert written == [[False] * 15 + [True], [False] * 3 + [True] * 3 + [False] * 10]

    @settings(max_examples=12)
    @given(data=st.data())
    def test_any_small_call(self, data: st.DataObject) -> None:
        draw = data.draw
        new, rope_dim = draw(st.integers(1, 9)), draw(st.integers(1, 24))
        max_len = draw(st.integers(new, 60))
        rotary_dim = 2 * draw(st.integers(0, rope_dim // 2))
        setting = Setting(
            lengths=draw(st.lists(st.integers(0, max_len - new), min_size=1, max_size=4)),
            heads=draw(st.integers(1, 20)), new=new, rank=draw(st.integers(1, 40)),
            rope_dim=rope_dim, page=draw(st.sampled_from([0, 5, 16, 32])), max_len=max_len,
            rotary=angles(max_len, rotary_dim, draw(st.booleans())) if rotary_dim else None,
            projected=draw(st.booleans()),
        )  # fmt: skip
        check(setting)

    def test_no_sequences(self) -> None:
        q_rope, c_new, k_rope = (x[:0] for x in Setting(lengths=[2]).inputs())
        turned = latent_append(
            q_rope, c_new, k_rope, randn(0, 8, 40), int32([]), rotary=angles(8, 16)
        )
        assert turned.shape == q_rope.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_rope": (2, 4, 8)}, r"q_rope is \[2, 4, 8\]: must be \[batch, heads, new tokens, rope"),
        ({"c_new": (2, 16)}, r"c_new is \[2, 16\]: must be \[batch, new tokens, rank\]"),
        ({"c_new": (2, 2, 16)}, r"c_new is .*: must be \[2, 1, 16\] float32"),
        ({"c_new": (2, 1, 0)}, "must have heads, a rank and a rope_dim of 1 or more"),
        ({"k_rope": (2, 1, 6)}, r"k_rope is .*: must be \[2, 1, 8\] float32"),
        ({"latent_cache": (2, 40, 16)}, r"latent_cache is .*: must be \[2, 40, 24\] float32"),
        ({"lengths": torch.tensor([3, 4])}, r"lengths is \[2\] int64 .*: must be \[2\] int32"),
        ({"lengths_after": torch.zeros(2)}, r"lengths_after is \[2\] float32 .*\[2\] int32"),
        ({"lengths_after": torch.zeros(4).int()[::2]}, "lengths_after has a last stride of 2"),
        ({"block_table": torch.zeros(1, 3).int()}, r"block_table is .*: must be \[2, blocks\]"),
        ({"rotary": Rotary(torch.ones(9, 5), torch.ones(9, 5))}, "turns 10 entries: must be at"),
        (
            {"rotary": Rotary(torch.ones(9, 4).half(), torch.ones(9, 4).half())},
            "rotary.cos is .*float16 .*float32 or float64",
        ),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    """One line that names the argument, before anything is written."""
    given: dict[str, Any] = {
        "q_rope": (2, 4, 1, 8), "c_new": (2, 1, 16), "k_rope": (2, 1, 8),
        "latent_cache": (2, 40, 24), "lengths": torch.tensor([3, 4]).int(),
    } | change  # fmt: skip
    for name, value in given.items():
        if isinstance(value, Rotary):
            given[name] = Rotary(value.cos.to(DEVICE), value.sin.to(DEVICE))
        else:
            # A copy to the device would lose the strides of what is there already.
            given[name] = randn(*value) if isinstance(value, tuple) else moved(value)
    cache = given["latent_cache"].clone()
    with pytest.raises(ValueError, match=message) as error:
        latent_append(**given)
    assert "\n" not in str(error.value)
    assert torch.equal(given["latent_cache"], cache)


def moved(x: Tensor) -> Tensor:
    """On the device, with the strides that it has."""
    there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
    return there.copy_(x)


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("batch", [1, 4])
def test_heads_by_their_own_matrices(batch: int, new: int) -> None:
    """The sum in float64; heads inside tokens, and contiguous where there is one token."""
    heads, given, wanted = 3, 8, 5
    flat = randn(batch, heads, new, given)
    projected = randn(batch, new, heads, given + 2)[..., :given].transpose(1, 2)
    weights = randn(heads, given, wanted)
    for x in (flat, projected):
        for matrix in (weights, weights.mT.contiguous().mT):
            o = per_head_in_token_order(x, matrix)
            expected = torch.einsum("bhti,hio->bhto", x.double(), matrix.double())
            assert_close(o, expected, "o", 1e-5)
            assert o.transpose(1, 2).is_contiguous()


class Operators(TorchDispatchMode):
    """Operators of PyTorch that launch a kernel on a GPU: neither views nor empty memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func).split(".")[1]
        if not func.is_view and not name.startswith(("empty", "new_empty", "_unsafe_view")):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def projected_step(new_tokens: int, **changes: Any) -> Step:
    """A step whose inputs are slices of what projections give, heads inside tokens."""
    step = Step(
        lengths=[5, 0, 7], new_tokens=new_tokens, kv_lora_rank=16, rope_head_dim=4, device=DEVICE,
        **changes,
    )  # fmt: skip
    (given,) = step.inputs
    q = torch.cat((given.q_BHTD, given.q_rope), dim=-1).transpose(1, 2).contiguous()
    down = torch.cat((given.c_BTR, given.k_rope), dim=-1)
    q_plain, q_rope = q.transpose(1, 2).split((step.head_dim, 4), dim=-1)
    c, k_rope = down.split((16, 4), dim=-1)
    step.inputs = (replace(given, q_BHTD=q_plain, q_rope=q_rope, c_BTR=c, k_rope=k_rope),)
    return step


@pytest.mark.parametrize("block_size", [None, 4])
@pytest.mark.parametrize("new_tokens", [1, 3])
def test_a_layer_is_two_matmuls_and_two_kernels(
    new_tokens: int, block_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing once a step, and no copy into another layout, of what projections give."""
    launched: list[str] = []
    step = projected_step(new_tokens, block_size=block_size)
    decoder = step.decoder(backend_of("mla_absorbed", implementation="triton"))
    # What happens inside the two kernels' entry points is counted as one each.
    operators = Operators()
    for name in ("latent_append", "mla_decode"):
        inner = getattr(decode, name)

        def outer(*args: Any, _inner: Any = inner, _name: str = name, **options: Any) -> Tensor:
            launched.append(_name)
            with _disable_current_modes():
                o: Tensor = _inner(*args, **options)
            return o

        monkeypatch.setattr(decode, name, outer)
    with operators:
        decoder.plan()
        decoder.begin()
        o = decoder(1, *step.inputs)
    assert operators.found == ["bmm", "bmm"]
    assert launched == ["latent_append", "mla_decode"]
    # As the output projection reads it.
    assert o.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("rotary", ["interleaved", "halves", "none"])
@pytest.mark.parametrize("new_tokens", [1, 3])
def test_steps_of_what_projections_give(new_tokens: int, rotary: str) -> None:
    step = projected_step(new_tokens, rotary=rotary, block_size=4)
    step.check(backend_of("mla_absorbed", implementation="triton"), tolerance=1e-4)


@pytest.mark.gpu
@needs_cuda
class TestOnAGpu:
    @pytest.mark.parametrize(
        ("dtype", "page", "interleaved"), covering(CLOSENESS, [0, 64, 24], [True, False])
    )
    def test_real_sizes(self, dtype: torch.dtype, page: int, interleaved: bool) -> None:
        for new in (1, 3):
            check(
                Setting(
                    lengths=[0, 1, 63, 64, 65, 1000, 2047], heads=128, new=new, rank=512,
                    rope_dim=64, page=page, max_len=2052, dtype=dtype, projected=True,
                    rotary=angles(2100, 64, interleaved),
                )
            )  # fmt: skip

    @pytest.mark.parametrize("page", [0, 64])
    def test_graph_with_other_lengths(self, page: int) -> None:
        """Captured once: as eager calls with the lengths and block tables of each replay."""
        batch, max_len, dtype = 3, 4096, torch.bfloat16
        q_rope, c_new, k_rope = Setting(
            lengths=[0] * batch, heads=128, rank=512, rope_dim=64, dtype=dtype, projected=True
        ).inputs()  # fmt: skip
        blocks = batch * max_len // (page or max_len)
        start = randn(blocks, page or max_len, 576, dtype=dtype, seed=4)
        table = torch.arange(blocks, device="cuda", dtype=torch.int32).view(batch, -1)
        lengths, rotary = int32([5, 9, 1]), angles(max_len, 64, True)

        def run(cache: Tensor, after: Tensor) -> Tensor:
            return latent_append(
                q_rope, c_new, k_rope, cache, lengths, rotary=rotary, lengths_after=after,
                block_table=table if page else None,
            )  # fmt: skip

        captured, after = start.clone(), torch.empty_like(lengths)
        run(start.clone(), after)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run(captured, after)
        for values in ([4000, 3, 64], [0, 4095, 63], [1, 2, 3]):
            lengths.copy_(int32(values))
            order = torch.randperm(blocks, device="cuda").to(torch.int32)
            table.copy_(order.view(batch, -1))
            captured.copy_(start)
            graph.replay()
            eager, eager_after = start.clone(), torch.empty_like(lengths)
            assert torch.equal(result, run(eager, eager_after))
            assert torch.equal(captured, eager)
            assert after.tolist() == eager_after.tolist() == [value + 1 for value in values]

    def test_matmuls_copy_nothing(self) -> None:
        """Beside the result no memory is taken, so neither rows nor result were laid out anew."""
        batch, heads = 32, 128
        x = randn(batch, 1, heads, 192, dtype=torch.bfloat16)[..., :128].transpose(1, 2)
        weights = randn(heads, 128, 512, dtype=torch.bfloat16)
        for rows, matrix in ((x, weights), (per_head_in_token_order(x, weights), weights.mT)):
            per_head_in_token_order(rows, matrix)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            o = per_head_in_token_order(rows, matrix)
            peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
            assert peak - before == o.nbytes

    @pytest.mark.parametrize("block_size", [None, 64])
    def test_launches_of_a_layer(self, block_size: int | None) -> None:
        """Append, two matmuls, attention, and the launch that merges on Hopper."""
        step = Step(
            lengths=[3000, 64, 0, 700], num_heads=128, head_dim=128, kv_lora_rank=512,
            rope_head_dim=64, dtype="bfloat16", device="cuda", block_size=block_size,
        )  # fmt: skip
        decoder = step.decoder(backend_of("mla_absorbed"))

        def layer() -> None:
            decoder.begin()
            decoder(1, *step.inputs)

        layer()
        # A matmul may add up its parts in a launch of its own.
        assert count_launches(layer, torch.device("cuda"))["launches"] <= 6
