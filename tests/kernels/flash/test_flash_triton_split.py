"""Float32 by bf16x6: as exact as PyTorch's float32, and what runs where."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from exact_attention import exact, inputs
from torch import Tensor
from triton_device import DEVICE, RUNS_TRITON, randn

from kernels import BACKENDS
from kernels.backends.flash_triton import FlashTriton
from kernels.flash import flash_attention
from kernels.flash.any_gpu import configs, launch
from kernels.flash.call import problem as problem_facts
from kernels.flash.call.arguments import FlashOptions
from kernels.problem import AttentionProblem, AttentionSpec

pytestmark = [*RUNS_TRITON, pytest.mark.usefixtures("exact_float32")]

SPLIT = FlashOptions(precision="bf16x6")

RESULTS = ("o", "lse", "dq", "dk", "dv")


def results(q: Tensor, k: Tensor, v: Tensor, do: Tensor, precision: str) -> list[Tensor]:
    """o, lse, dq, dk, dv of our kernels; causal."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    options = FlashOptions(precision=precision)
    o, lse = flash_attention(*leaves, causal=True, return_lse=True, options=options)
    gradients = torch.autograd.grad(o, leaves, do)
    return [o.detach(), lse.detach(), *gradients]


def by_formula(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
    """The same by PyTorch in the dtype of the inputs, with every matrix in memory."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    hidden = torch.ones(q.shape[2], k.shape[2], device=q.device, dtype=torch.bool).triu(1)
    scores = (leaves[0] @ leaves[1].mT) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(hidden, -math.inf)
    o = scores.softmax(-1) @ leaves[2]
    return [o.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(o, leaves, do)]


def scaled_inputs(length: int, head_dim: int, magnitude: float) -> tuple[Tensor, ...]:
    """Scores stay of the same size, else softmax would pick one key and no sum be tested."""
    q, k, v, do = inputs(1, 2, 2, length, length, head_dim)
    return q * magnitude, k / magnitude, v * magnitude, do * magnitude


def assert_as_exact_as_pytorch(given: tuple[Tensor, ...]) -> None:
    truth = by_formula(*(x.double() for x in given))
    theirs, ours = by_formula(*given), results(*given, precision="bf16x6")
    for name, x, y, z in zip(RESULTS, ours, theirs, truth, strict=True):
        error, limit = (float((found.double() - z).norm() / z.norm()) for found in (x, y))
        # Nothing in float32 is closer than half a unit in the last place.
        limit = max(1.1 * limit, torch.finfo(torch.float32).eps / 2)
        assert error <= limit, f"{name}: {error:.3g} > {limit:.3g}"


class TestErrors:
    @pytest.mark.parametrize("magnitude", [1.0, 1e3, 1e-3])
    def test_no_larger_than_those_of_pytorch(self, magnitude: float) -> None:
        assert_as_exact_as_pytorch(scaled_inputs(80, 64, magnitude))

    def test_far_below_those_of_three_products(self) -> None:
        """A sum without any of the six products is off by 2^-17 or more of its terms."""
        q, k, v, _ = inputs(1, 1, 1, 33, 33, 32)
        o = flash_attention(q, k, v, options=SPLIT)
        truth = exact(q, k, v, False, 32**-0.5)[0]
        assert float((o.double() - truth).norm() / truth.norm()) < 2.0**-21


class TestNotFinite:
    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
    @pytest.mark.parametrize("which", ["q", "k", "v", "do"])
    def test_as_with_ieee(self, which: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
        """Parts of an infinity are not numbers, and yet it stays one wherever ieee keeps it.

        With the same tiles: a query that is no number reaches hidden keys of its tile as well.
        """
        monkeypatch.setattr(launch, "_config", lambda kernel, *_: configs.INTERPRETER[kernel])
        given = dict(zip(("q", "k", "v", "do"), inputs(1, 1, 1, 40, 40, 16), strict=True))
        given[which][0, 0, 20, 3] = value
        split, ieee = (results(**given, precision=name) for name in ("bf16x6", "ieee"))
        for name, x, y in zip(RESULTS, split, ieee, strict=True):
            assert torch.equal(x.isnan(), y.isnan()), name
            assert torch.equal(x[x.isinf()], y[y.isinf()]), name
            assert torch.allclose(
                x.nan_to_num(0, 0, 0), y.nan_to_num(0, 0, 0), rtol=1e-4, atol=1e-5
            )

    def test_beyond_bfloat16(self) -> None:
        """Documented: what bfloat16 rounds to infinity is infinite, where ieee is not."""
        q, k, v, _ = inputs(1, 1, 1, 16, 16, 16)
        v[0, 0, 0, 0] = 3.4e38
        o = flash_attention(q, k, v, causal=True, options=SPLIT)
        assert bool(o[0, 0, :, 0].isinf().all())
        assert bool(o[..., 1:].isfinite().all())
        v[0, 0, 0, 0] = 3.38e38
        assert bool(flash_attention(q, k, v, causal=True, options=SPLIT).isfinite().all())


class FakeGpu:
    """Facts of a GPU that is not here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        problem_facts.why_not_split.cache_clear()


@pytest.fixture
def forgets() -> Any:
    """What is remembered of devices, forgotten again."""
    yield
    problem_facts.why_not_split.cache_clear()


@pytest.mark.usefixtures("forgets")
class TestChoice:
    GPU = torch.device("cuda", 0)

    @pytest.mark.parametrize(
        ("capability", "chosen"),
        [((7, 5), "ieee"), ((8, 0), "bf16x6"), ((9, 0), "bf16x6"), ((10, 0), "ieee")],
    )
    def test_auto(
        self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], chosen: str
    ) -> None:
        FakeGpu(monkeypatch, capability)
        monkeypatch.setattr(problem_facts, "_triton_precisions", lambda: ("tf32", "ieee", "bf16x6"))
        assert problem_facts.full_precision(self.GPU, 128) == chosen
        assert problem_facts.full_precision(self.GPU, 129) == "ieee"
        assert problem_facts.full_precision(torch.device("cpu"), 64) == "ieee"

    def test_triton_without_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeGpu(monkeypatch, (9, 0))
        monkeypatch.setattr(problem_facts, "_triton_precisions", lambda: ("tf32", "ieee"))
        assert problem_facts.full_precision(self.GPU, 64) == "ieee"
        assert problem_facts.why_not_split(self.GPU) == "bf16x6 needs Triton 3.6 or newer"

    def test_pytorchs_switch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(problem_facts, "full_precision", lambda *facts: "bf16x6")
        q = randn(1, 1, 4, 16)

        def chosen(x: Tensor, precision: str = "auto") -> str:
            return problem_facts.describe(x, x, x, causal=True, precision=precision).precision

        assert chosen(q) == "bf16x6"
        assert chosen(q, "ieee") == "ieee"
        assert chosen(q.half()) == "ieee", "is of float32 alone"
        torch.set_float32_matmul_precision("high")
        assert chosen(q) == "tf32"
        assert chosen(q, "bf16x6") == "bf16x6"

    @pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter runs everything")
    def test_kernels_refuse_what_a_gpu_lacks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeGpu(monkeypatch, (7, 5))
        q = randn(1, 1, 4, 16)
        with pytest.raises(ValueError, match=r"bf16x6 needs a GPU of .* 8\.0 or higher"):
            flash_attention(q, q, q, options=FlashOptions(precision="bf16x6"))

    def test_a_backend_says_why_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeGpu(monkeypatch, (7, 5))
        monkeypatch.setattr(launch, "INTERPRETED", False)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        problem = AttentionProblem(
            batch_size=1, num_heads=1, num_kv_heads=1, q_len=8, kv_len=8, head_dim=16,
            dtype="float32", device="cuda", causal=True, needs_grad=True,
        )  # fmt: skip

        def reason(precision: str) -> str | None:
            return FlashTriton(
                name="flash_triton", implementation="plain", float32_precision=precision
            ).supports(problem)

        assert reason("auto") is None
        wanted = "bf16x6 needs a GPU of compute capability 8.0 or higher; precision=ieee runs here"
        assert reason("bf16x6") == f"plain: {wanted}"

    def test_misspelt(self) -> None:
        with pytest.raises(ValueError, match="must be one of auto, ieee, bf16x6, tf32"):
            BACKENDS["flash_triton"].target(name="flash_triton", float32_precision="bf16x3")

    @pytest.mark.parametrize("precision", ["ieee", "bf16x6"])
    def test_records_say_what_ran(self, precision: str) -> None:
        backend = FlashTriton(name="flash_triton", float32_precision=precision)
        notes: dict[str, Any] = {}
        q = randn(1, 1, 8, 16)
        with backend.noting(notes):
            backend.attend(q, q, q, AttentionSpec(causal=True, scale=0.25))
        # On a GPU they say where the tiles come from, too.
        assert {key: notes[key] for key in notes if key != "tiles"} == {
            "float32_precision": precision
        }
        notes.clear()
        with backend.noting(notes):
            backend.attend(q.half(), q.half(), q.half(), AttentionSpec(causal=True, scale=0.25))
        assert "float32_precision" not in notes


class TestTiles:
    @pytest.mark.parametrize("kernel", ["forward", "backward_dkv", "backward_dq"])
    @pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
    def test_every_gpu_has_tiles(self, kernel: str, head_dim: int) -> None:
        q = torch.empty(1, 1, 64, head_dim, device="meta")
        problem = problem_facts.describe(q, q, q, causal=True, precision="bf16x6")
        # 99 KiB on compute capability 8.6 and 8.9, 163 on 8.0, 227 on 9.0.
        found = [configs.candidates(kernel, problem, kib * 1024) for kib in (99, 163, 227)]
        assert all(found)
        assert len(found[0]) <= len(found[1]) <= len(found[2])
        rows = [max(tiles.block_q, tiles.block_k) for tiles in found[1]]
        assert head_dim != 128 or rows[0] <= 32, "64 rows spill 1 KB a thread and more there"
        assert configs.shape_class(kernel, problem) == f"{kernel}/bf16x6/d{head_dim}/causal/few"

    @pytest.mark.parametrize(
        ("kernel", "head_dim", "tiles", "compiled_bytes"),
        [
            ("forward", 64, (128, 32, 8, 2), 77824),
            ("forward", 128, (128, 32, 8, 3), 188416),
            ("backward_dq", 64, (128, 32, 8, 2), 126976),
            ("backward_dq", 128, (128, 32, 8, 1), 221184),
            ("backward_dkv", 64, (16, 64, 8, 2), 63616),
            ("backward_dkv", 64, (32, 32, 8, 1), 40960),
            ("backward_dkv", 128, (32, 16, 8, 1), 57344),
        ],
    )
    def test_shared_memory_is_foreseen(
        self, kernel: str, head_dim: int, tiles: tuple[int, ...], compiled_bytes: int
    ) -> None:
        """As Triton 3.6 compiled these for compute capability 9.0, or up to a quarter more."""
        q = torch.empty(1, 1, 64, head_dim, device="meta")
        problem = problem_facts.describe(q, q, q, causal=True, precision="bf16x6")
        sizes = dict(zip(("block_q", "block_k", "num_warps", "num_stages"), tiles, strict=True))
        found = configs._needs_bytes_split(kernel, problem, configs.TileConfig(**sizes))
        assert compiled_bytes <= found <= 1.25 * compiled_bytes


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device, and torch sees none")
class TestOnCuda:
    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("length", [512, 2048])
    @pytest.mark.parametrize("magnitude", [1.0, 1e3, 1e-3])
    def test_no_larger_than_those_of_pytorch(
        self, length: int, head_dim: int, magnitude: float
    ) -> None:
        assert_as_exact_as_pytorch(scaled_inputs(length, head_dim, magnitude))

    def test_is_the_default(self) -> None:
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("is about compute capability 9.0")
        q = randn(1, 1, 8, 16)
        assert problem_facts.full_precision(q.device, 64) == "bf16x6"
