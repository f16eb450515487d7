"""The example kernel against torch in float64, under Triton's interpreter or on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()),
        reason="needs a CUDA device or TRITON_INTERPRET=1",
    ),
    # Block pointers are what the example explains.
    pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated"),
]

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

SHAPES = [(1, 1), (16, 16), (17, 5), (3, 40), (33, 257), (2, 3, 20), (5,), (2, 1, 4, 33)]
CLOSENESS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(size, generator=generator).to(DEVICE, dtype)
        for size in (shape, shape[-1:], shape[:-1])
    ]


def check(x: torch.Tensor, weight: torch.Tensor, grad_y: torch.Tensor) -> None:
    from kernels.examples.weighted_sum import weighted_sum

    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    y = weighted_sum(*leaves)
    gradients = torch.autograd.grad(y, leaves, grad_y)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = (doubles[0] * doubles[1]).sum(dim=-1)
    wanted = torch.autograd.grad(expected, doubles, grad_y.double())
    for one, other in zip((y, *gradients), (expected, *wanted), strict=True):
        assert one.dtype == x.dtype
        assert one.shape == other.shape
        other = other.detach()
        closeness = CLOSENESS[x.dtype] * max(
            1.0, float(other.abs().amax()) if other.numel() else 0.0
        )
        torch.testing.assert_close(one.double(), other, rtol=0, atol=closeness)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", CLOSENESS)
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(*inputs(shape, dtype))


def test_strided_inputs() -> None:
    """Columns of a wider matrix, a transposed one, every other weight, an expanded gradient."""
    x, weight, _ = inputs((40, 70), torch.float32)
    grad_y = torch.ones((), device=DEVICE).expand(40)
    check(x[:, 3:50], weight[3:50], grad_y)
    check(x.T, weight.new_ones(40), torch.ones((), device=DEVICE).expand(70))
    check(x[:, :35], weight[::2], grad_y)


def test_the_gradient_of_the_weight_is_the_same_every_time() -> None:
    from kernels.examples.weighted_sum import weighted_sum

    x, weight, grad_y = inputs((200, 20), torch.float32)
    runs = []
    for _ in range(3):
        leaf = weight.detach().requires_grad_()
        runs.append(torch.autograd.grad(weighted_sum(x, leaf), leaf, grad_y)[0])
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_no_rows() -> None:
    check(*inputs((0, 8), torch.float32))


def test_a_weight_of_another_length_is_refused() -> None:
    from kernels.examples.weighted_sum import weighted_sum

    with pytest.raises(ValueError, match=r"weight has shape \(3,\), and x \(2, 4\) needs \(4,\)"):
        weighted_sum(torch.zeros(2, 4), torch.zeros(3))
