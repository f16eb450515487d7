"""The decode kernels compiled: for Hopper without a GPU, and at real sizes on one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import ROOT
from decode_checks import (
    LatentSetting,
    Setting,
    angles,
    attention,
    check,
    check_latent,
    int32,
    rotated,
)
from grids import covering
from torch import Tensor
from triton_device import randn

from kernels.decode import flash_decode, latent_append, mla_decode
from kernels.launching import prepared as _launch
from kernels.launching.driver import DriverLaunch

CUDA = torch.cuda.is_available()
HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)

needs_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device, and torch sees none")
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def test_compiles_for_hopper() -> None:
    """Types that the interpreter does not check; and that the Gluon kernel spills nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compile_decode", "flash_paged16", "hopper_latent"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 2


RAGGED = [0, 1, 63, 64, 65, 1000, 2047]


@pytest.mark.gpu
@needs_cuda
class TestFlashDecode:
    @pytest.mark.parametrize(
        ("head_dim", "page", "dtype"), covering([64, 80, 128, 256], [0, 16, 64, 24], DTYPES)
    )
    def test_ragged_lengths(self, head_dim: int, page: int, dtype: torch.dtype) -> None:
        setting = Setting(
            lengths=RAGGED, heads=16, kv_heads=4, new=2, head_dim=head_dim, page=page,
            max_len=2052, dtype=dtype, rotary=angles(2100, head_dim // 2), scale=head_dim**-0.5,
        )  # fmt: skip
        check(setting, also_split=[7])

    @pytest.mark.parametrize(
        ("new", "group_size"), [(3, 1), (1, 4), (1, 7), (3, 7), (3, 16), (1, 128), (3, 128)]
    )
    def test_grouped_queries(self, new: int, group_size: int) -> None:
        check(
            Setting(
                lengths=[2000, 5], heads=2 * group_size, kv_heads=2, new=new, head_dim=128,
                max_len=2048, dtype=torch.bfloat16, scale=0.1,
            )
        )  # fmt: skip

    def test_many_sequences(self) -> None:
        lengths = [(37 * i) % 700 for i in range(256)]
        check(Setting(lengths=lengths, head_dim=64, max_len=704, dtype=torch.bfloat16))

    def test_rotary_interleaved(self) -> None:
        rotary = angles(1100, 128, interleaved=True)
        check(
            Setting(lengths=[1000, 3], head_dim=128, max_len=1024, rotary=rotary, scale=0.1), 1e-4
        )  # fmt: skip

    def test_equal_bits(self) -> None:
        """Whoever merges: pieces are added in the order of the keys."""
        q = randn(4, 32, 1, 128, dtype=torch.bfloat16)
        new = [randn(4, 8, 1, 128, dtype=torch.bfloat16, seed=i) for i in (1, 2)]
        caches = [randn(4, 8, 8192, 128, dtype=torch.bfloat16, seed=i) for i in (3, 4)]
        lengths = int32([8000, 17, 4321, 0])
        first = flash_decode(q, *new, *caches, lengths)
        for _ in range(50):
            assert torch.equal(flash_decode(q, *new, *caches, lengths), first)

    def test_on_two_streams_at_once(self) -> None:
        """Each stream has counters of its own."""
        q = randn(1, 32, 1, 128, dtype=torch.bfloat16)
        new = [randn(1, 8, 1, 128, dtype=torch.bfloat16, seed=i) for i in (1, 2)]
        caches = [randn(1, 8, 32768, 128, dtype=torch.bfloat16, seed=i) for i in (3, 4)]
        lengths = int32([32000])
        first = flash_decode(q, *new, *caches, lengths)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(2)]
        results = []
        for _ in range(20):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(flash_decode(q, *new, *caches, lengths))
        torch.cuda.synchronize()
        assert all(torch.equal(x, first) for x in results)

    @pytest.mark.parametrize("page", [0, 64])
    def test_graph_with_other_lengths(self, page: int) -> None:
        """A graph of two layers, captured once: as eager calls with the lengths of each replay."""
        batch, max_len, layers = 3, 4096, 2
        dtype = torch.bfloat16
        rotary = angles(max_len, 128)
        q = randn(batch, 8, 1, 128, dtype=dtype)
        new = [randn(batch, 2, 1, 128, dtype=dtype, seed=i) for i in (1, 2)]
        options: dict[str, Any] = {"rotary": rotary}
        shape = (batch, 2, max_len, 128)
        if page:
            blocks = batch * max_len // page
            options["block_table"] = torch.randperm(blocks, device="cuda").view(batch, -1).int()
            shape = (blocks, 2, page, 128)
        start = [
            [randn(*shape, dtype=dtype, seed=3 * i + j) for j in (0, 1)] for i in range(layers)
        ]
        lengths = int32([5, 9, 1])

        def run(caches: list[list[Tensor]]) -> Tensor:
            x = q
            for pair in caches:
                x = flash_decode(x, *new, *pair, lengths, **options)
            return x

        captured = [[x.clone() for x in pair] for pair in start]
        run([[x.clone() for x in pair] for pair in start])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run(captured)
        for values in ([4000, 3, 64], [0, 4095, 63], [1, 2, 3]):
            lengths.copy_(int32(values))
            for pair, fresh in zip(captured, start, strict=True):
                for x, y in zip(pair, fresh, strict=True):
                    x.copy_(y)
            eager = [[x.clone() for x in pair] for pair in start]
            graph.replay()
            got = result.clone()
            assert torch.equal(got, run(eager))
            for pair, other in zip(captured, eager, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(pair, other, strict=True))

    def test_graph_beside_another(self) -> None:
        """Two graphs of the same call replayed on two streams: captures share no counters."""
        q = randn(1, 32, 1, 128, dtype=torch.bfloat16)
        new = [randn(1, 8, 1, 128, dtype=torch.bfloat16, seed=i) for i in (1, 2)]
        caches = [randn(1, 8, 32768, 128, dtype=torch.bfloat16, seed=i) for i in (3, 4)]
        lengths = int32([32000])
        first = flash_decode(q, *new, *caches, lengths)
        graphs, results = [], []
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results.append(flash_decode(q, *new, *caches, lengths))
            graphs.append(graph)
        streams = [torch.cuda.Stream() for _ in graphs]
        for _ in range(30):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, first) for x in results)

    def test_offsets_beyond_32_bits(self) -> None:
        """2^31 elements and more before the last sequence's keys."""
        if torch.cuda.mem_get_info()[0] < 12 * 2**30:
            pytest.skip("needs 12 GiB of free GPU memory")
        shape = (2, 8, 2**20 + 2**17, 128)
        caches = [torch.zeros(shape, device="cuda", dtype=torch.float16) for _ in range(2)]
        assert caches[0].numel() > 2**31
        q = randn(2, 8, 1, 128, dtype=torch.float16)
        new = [randn(2, 8, 1, 128, dtype=torch.float16, seed=i) for i in (1, 2)]
        length = shape[2] - 1
        # One key far away that every query looks at: e^(0.5 * 128) of a million e^0.
        caches[0][1, :, length - 5] = q[1, :, 0]
        caches[1][1, :, length - 5] = 3.0
        o = flash_decode(q, *new, *caches, int32([3, length]), scale=0.5)
        assert float((o[1] - 3.0).abs().max()) < 0.05
        assert torch.equal(caches[0][1, :, length], new[0][1, :, 0])
        assert torch.equal(caches[1][1, :, length], new[1][1, :, 0])


@pytest.mark.gpu
@needs_cuda
class TestLatentDecode:
    @pytest.mark.parametrize(
        ("heads", "page", "dtype"), covering([16, 24, 128], [0, 64, 16], DTYPES)
    )
    def test_plain(self, heads: int, page: int, dtype: torch.dtype) -> None:
        setting = LatentSetting(
            lengths=[1, 63, 64, 65, 1000, 3000], heads=heads, rank=512, rope_dim=64, page=page,
            max_len=3008, dtype=dtype, scale=0.05,
        )  # fmt: skip
        check_latent(setting, implementation="plain", also_split=[5])

    @needs_hopper
    @pytest.mark.parametrize(
        ("queries", "page", "dtype"),
        covering([(128, 1), (128, 2), (40, 1), (50, 3)], [0, 64, 128], DTYPES[1:]),
    )
    def test_hopper(self, queries: tuple[int, int], page: int, dtype: torch.dtype) -> None:
        """Every way to cut lines into pieces; tiles behind a length hold not-a-numbers."""
        heads, new = queries
        for lengths in ([3, 63, 64, 65, 129, 1000, 3000], [3] * 70, [3000], [3, 2999, 66]):
            setting = LatentSetting(
                lengths=lengths, heads=heads, new=new, rank=512, rope_dim=64, page=page,
                max_len=3072, dtype=dtype, scale=0.05,
            )  # fmt: skip
            check_latent(setting, implementation="hopper", also_split=[1, 2, 5])

    @needs_hopper
    def test_hopper_of_nothing(self) -> None:
        setting = LatentSetting(
            lengths=[0, 200, 0], heads=64, rank=512, rope_dim=64, max_len=256,
            dtype=torch.bfloat16, scale=0.05,
        )  # fmt: skip
        o = check_latent(setting, implementation="hopper")
        assert (o[[0, 2]] == 0).all()

    @needs_hopper
    @pytest.mark.parametrize("implementation", ["hopper", "plain"])
    def test_equal_bits_and_graphs(self, implementation: str) -> None:
        q = randn(8, 128, 1, 512, dtype=torch.bfloat16)
        q_rope = randn(8, 128, 1, 64, dtype=torch.bfloat16)
        cache = randn(8, 8192, 576, dtype=torch.bfloat16)
        lengths = int32([8192, 17, 4321, 64, 1, 700, 8000, 65])

        def run() -> Tensor:
            return mla_decode(q, q_rope, cache, lengths, scale=0.05, implementation=implementation)

        first = run()
        for _ in range(20):
            assert torch.equal(run(), first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run()
        for values in ([1, 2, 3, 4, 5, 6, 7, 8], [8192] * 8):
            lengths.copy_(int32(values))
            graph.replay()
            got = result.clone()
            assert torch.equal(got, run())


@pytest.mark.gpu
@needs_cuda
class TestLaunchedAgain:
    """Without Triton, with other tensors that lie alike: as a launch of Triton's own."""

    @pytest.fixture
    def by_the_driver(self, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
        launched: list[bool] = []
        launch = DriverLaunch.__call__

        def counted(self: DriverLaunch, addresses: list[int], floats: list[float]) -> bool:
            launched.append(launch(self, addresses, floats))
            return launched[-1]

        monkeypatch.setattr(DriverLaunch, "__call__", counted)
        return launched

    def agree(self, run: Callable[[list[Tensor]], Tensor], shapes: list[tuple[int, ...]]) -> None:
        """Results of three sets of tensors, launched by Triton and then repeated."""
        sets = [
            [randn(*shape, dtype=torch.bfloat16, seed=10 * i + j) for j, shape in enumerate(shapes)]
            for i in range(3)
        ]
        again = [[x.clone() for x in given] for given in sets]
        expected = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_launch, "is_watched", lambda: True)
            for given in sets:
                expected.append(run(given).clone())
        for given, wanted in zip(again, expected, strict=True):
            assert torch.equal(run(given), wanted)
        for one, other in zip(sets, again, strict=True):
            assert all(map(torch.equal, one, other))

    @pytest.mark.parametrize("num_splits", [1, 6])
    def test_flash(self, by_the_driver: list[bool], num_splits: int) -> None:
        lengths, rotary = int32([1000, 3]), angles(1100, 128)
        shapes = [(2, 8, 1, 128), *[(2, 2, 1, 128)] * 2, *[(2, 2, 1024, 128)] * 2]
        self.agree(
            lambda given: flash_decode(*given, lengths, rotary=rotary, num_splits=num_splits),
            shapes,
        )
        assert by_the_driver == [True] * 3

    @pytest.mark.parametrize(
        "implementation", ["plain", pytest.param("hopper", marks=needs_hopper)]
    )
    def test_latent(self, by_the_driver: list[bool], implementation: str) -> None:
        lengths = int32([1000, 3])
        self.agree(
            lambda given: mla_decode(
                *given, lengths, scale=0.05, num_splits=6, implementation=implementation
            ),
            [(2, 128, 1, 512), (2, 128, 1, 64), (2, 1024, 576)],
        )
        assert by_the_driver == [True] * (6 if implementation == "hopper" else 3)

    def test_append(self, by_the_driver: list[bool]) -> None:
        lengths, rotary = int32([1000, 3]), angles(1100, 64)
        self.agree(
            lambda given: latent_append(*given, lengths, rotary=rotary),
            [(2, 128, 1, 64), (2, 1, 512), (2, 1, 64), (2, 1024, 576)],
        )
        assert by_the_driver == [True] * 3

    def test_misaligned(self, by_the_driver: list[bool]) -> None:
        """Not by the driver, whose kernel loads 16 bytes at once, and with equal results."""
        lengths = int32([1000, 3])
        q, k, v = (randn(2, h, 1, 128, dtype=torch.bfloat16, seed=h) for h in (8, 2, 3))
        v = v[:, :2].contiguous()
        caches = [randn(2, 2, 1024, 128, dtype=torch.bfloat16, seed=i) for i in (5, 6)]
        expected = flash_decode(q, k, v, *[x.clone() for x in caches], lengths, num_splits=2)
        shifted = [x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x) for x in caches]
        before = len(by_the_driver)
        for _ in range(2):
            got = flash_decode(q, k, v, *shifted, lengths, num_splits=2)
            assert float((got - expected).abs().max()) < 4e-2
        assert len(by_the_driver) == before


@pytest.mark.gpu
@needs_cuda
def test_steps_of_a_long_sequence() -> None:
    """Two hundred tokens appended by twos to 3,000, against one attention over all of them."""
    total, history = 3200, 3000
    rotary = angles(total, 128)
    q, k, v = (randn(1, h, total, 128, seed=h) for h in (8, 2, 3))
    v = v[:, :2]
    everywhere = torch.arange(total, device="cuda")
    caches = [torch.zeros(1, 2, total, 128, device="cuda") for _ in range(2)]
    caches[0][:, :, :history] = rotated(k[0], everywhere, rotary)[:, :history].float()
    caches[1][:, :, :history] = v[:, :, :history]
    lengths = int32([history])
    rows = []
    for start in range(history, total, 2):
        part = slice(start, start + 2)
        rows.append(
            flash_decode(
                q[:, :, part], k[:, :, part], v[:, :, part], *caches, lengths, rotary=rotary
            )
        )  # fmt: skip
        lengths += 2
    expected = attention(
        rotated(q[0], everywhere, rotary)[:, history:], rotated(k[0], everywhere, rotary),
        v[0].double(), 128**-0.5,
    )  # fmt: skip
    error = (torch.cat(rows, dim=2)[0].double() - expected).norm() / expected.norm()
    assert float(error) < 1e-5
