"""Second derivatives through kernels with a backward pass by hand: an error, and never a number.

A gradient penalty adds a term of the gradient to the loss. Where autograd drops the derivative of
that term, training goes on, with another loss than the one that was written.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, RUNS_TRITON, randn

from kernels import BACKENDS
from kernels.problem import AttentionSpec

SPEC = AttentionSpec(causal=True, scale=0.3)

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def backend(name: str) -> Function:
    chosen = BACKENDS[name].target(name=name)  # type: ignore[call-arg]
    return lambda q, k, v: chosen.attend(q, k, v, SPEC)


def public_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from kernels.flash import flash_attention

    return flash_attention(q, k, v, causal=True, scale=0.3)


def with_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from kernels.flash import flash_attention

    return flash_attention(q, k, v, causal=True, scale=0.3, return_lse=True)[1]


def operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from kernels.flash.call.arguments import FlashCall
    from kernels.flash.operator import _flat, flash_forward

    return flash_forward(*_flat(FlashCall(q=q, k=k, v=v, spec=SPEC)), None, None)[0]


def course_triton(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from kernels.flash import FlashAttentionTriton

    return FlashAttentionTriton.apply(q, k, v, True)


def course_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from kernels.flash import FlashAttentionPyTorch

    return FlashAttentionPyTorch.apply(q, k, v, True)


def weighted_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from kernels.examples.weighted_sum import weighted_sum

    return weighted_sum(q.transpose(1, 2), k[0, 0, 0]) + (2 * v).sum()


FUNCTIONS = {
    "flash_attention": pytest.param(public_function, "flash_attention", marks=RUNS_TRITON),
    "lse": pytest.param(with_lse, "flash_attention", marks=RUNS_TRITON),
    "operator": pytest.param(operator, "attnbench::flash_forward", marks=RUNS_TRITON),
    "flash_triton": pytest.param(backend("flash_triton"), "flash_attention", marks=RUNS_TRITON),
    "FlashAttentionTriton": pytest.param(course_triton, "FlashAttentionTriton", marks=RUNS_TRITON),
    "FlashAttentionPyTorch": pytest.param(course_torch, "FlashAttentionPyTorch"),
    "flash_torch": pytest.param(backend("flash_torch"), "attention=flash_torch"),
    "weighted_sum": pytest.param(
        weighted_sum,
        "weighted_sum",
        marks=[*RUNS_TRITON, pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")],
    ),
}

LOSSES = {"linear": lambda o: o.sum(), "square": lambda o: o.square().sum()}


def leaves() -> list[Tensor]:
    return [randn(1, 2, 20, 16, seed=seed).requires_grad_() for seed in (1, 2, 3)]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize(("function", "name"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_penalty_on_the_gradient_raises(
    function: Function, name: str, loss: Callable[[Tensor], Tensor]
) -> None:
    """By backward and by grad, whichever inputs' gradient is asked for; also beside the loss."""
    q, k, v = leaves()
    value = loss(function(q, k, v))
    (dq,) = torch.autograd.grad(value, q, create_graph=True)
    penalty = dq.square().sum()
    asked = [
        lambda: torch.autograd.grad(penalty + value, q, retain_graph=True),
        lambda: torch.autograd.grad(penalty + value, k, retain_graph=True),
        lambda: (penalty + value).backward(retain_graph=True),
        lambda: torch.autograd.grad(penalty, k),
    ]
    for ask in asked:
        with pytest.raises(RuntimeError) as raised:
            ask()
        message = str(raised.value)
        assert message.startswith(f"{name}: second derivatives are not available; "), message
        assert "\n" not in message


@pytest.mark.parametrize(("function", "name"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_first_gradients_are_the_same(function: Function, name: str) -> None:
    """create_graph alone changes no number, and what it returns may be changed in place."""
    given = leaves()
    plain = torch.autograd.grad(function(*given).sum(), given)
    graphed = torch.autograd.grad(function(*given).sum(), given, create_graph=True)
    for one, other in zip(plain, graphed, strict=True):
        assert torch.equal(one, other)
        assert not one.requires_grad
        other.mul_(2)


def test_naive_has_them() -> None:
    """What the message promises, against float64 by its definition."""
    found = []
    for dtype in (torch.float32, torch.float64):
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in leaves())
        if dtype == torch.float32:
            o = backend("naive")(q, k, v)
        else:
            hidden = torch.ones(20, 20, dtype=torch.bool, device=DEVICE).triu(1)
            o = (q @ k.mT * 0.3).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
        found.append(torch.autograd.grad(dq.square().sum(), (q, k, v)))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)
