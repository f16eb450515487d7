"""FlashAttention in Triton at real sizes, beside PyTorch's kernels."""

from __future__ import annotations

import pytest
import torch
from exact_attention import exact, exact_gradients, gives_equal_bits, inputs
from grids import covering
from torch import Tensor
from triton_device import CLOSENESS, DEVICE

from kernels import BACKENDS
from kernels.flash import flash_attention
from kernels.flash.call.arguments import FlashOptions
from kernels.problem import AttentionSpec

pytestmark = pytest.mark.usefixtures("exact_float32")

REAL = {
    "leaderboard": {"heads": 16, "kv_heads": 16, "length": 4096, "head_dim": 64},
    "llama3_8b": {"heads": 32, "kv_heads": 8, "length": 2048, "head_dim": 128},
    "odd length": {"heads": 4, "kv_heads": 4, "length": 1027, "head_dim": 64},
    "padded head": {"heads": 4, "kv_heads": 2, "length": 1500, "head_dim": 80},
    "wide head": {"heads": 2, "kv_heads": 2, "length": 1024, "head_dim": 256},
}


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device, and torch sees none")
class TestOnCuda:
    @pytest.mark.parametrize(("shape", "causal", "dtype"), covering(REAL, [True, False], CLOSENESS))
    def test_as_exact_as_pytorch(self, shape: str, causal: bool, dtype: torch.dtype) -> None:
        """Relative errors at most twice those of PyTorch's flash kernel, or math in float32."""
        sizes = REAL[shape]
        length, head_dim = sizes["length"], sizes["head_dim"]
        tensors = inputs(
            1, sizes["heads"], sizes["kv_heads"], length, length, head_dim, dtype
        )  # fmt: skip
        q, k, v, do = tensors
        scale = head_dim**-0.5
        expected = [exact(q, k, v, causal, scale)[0], *exact_gradients(*tensors, causal, scale)]
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        name = "sdpa_math" if dtype == torch.float32 else "sdpa_flash"
        peer = BACKENDS[name].target(name=name, **BACKENDS[name].preset)  # type: ignore[call-arg]
        theirs_o = peer.attend(*leaves, AttentionSpec(causal=causal, scale=scale))
        theirs = [theirs_o, *torch.autograd.grad(theirs_o, leaves, do)]
        limits = [2 * relative_error(y, z) for y, z in zip(theirs, expected, strict=True)]
        for implementation in ("auto", "plain"):
            options = FlashOptions(precision="ieee", implementation=implementation)
            o = flash_attention(*leaves, causal=causal, options=options)
            got = [o, *torch.autograd.grad(o, leaves, do)]
            errors = [relative_error(x, z) for x, z in zip(got, expected, strict=True)]
            for what, error, limit in zip(("o", "dq", "dk", "dv"), errors, limits, strict=True):
                assert error <= limit, f"{implementation}, {what}: {error:.3g} > {limit:.3g}"

    def test_tf32(self) -> None:
        q, k, v, _ = inputs(1, 4, 4, 512, 512, 64)
        expected = exact(q, k, v, True, 0.125)[0]
        errors = {
            precision: relative_error(
                flash_attention(q, k, v, causal=True, options=FlashOptions(precision=precision)),
                expected,
            )
            for precision in ("ieee", "tf32")
        }
        assert errors["ieee"] < 2e-6
        assert errors["ieee"] < errors["tf32"] < 2e-3

    def test_equal_bits_at_real_sizes(self) -> None:
        assert gives_equal_bits(*inputs(1, 8, 2, 4096, 4096, 128, torch.bfloat16))
