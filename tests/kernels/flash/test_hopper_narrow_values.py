"""Values of fewer columns than keys on the Hopper kernels: what is launched, and what is refused.

The kernels' own source runs in test_hopper_protocol and test_hopper_backward_protocol; here they
are emulated in float64, from the descriptors, strides and constants of their launches.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from emulated_kernels import emulate
from torch import Tensor

from kernels.flash.call.arguments import BackwardPass, ForwardPass
from kernels.flash.call.problem import Problem, describe
from kernels.flash.hopper import backward_memory, launch, plans

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

SCALE = 0.1


def inputs(
    heads: int, kv_heads: int, q_len: int, kv_len: int, value_dim: int = 128
) -> tuple[Tensor, ...]:
    """q, k, v and do of two sequences, as a transformer stores them: [B, S, H, D] underneath."""
    torch.manual_seed(0)
    sizes = ((q_len, heads, 192), (kv_len, kv_heads, 192), (kv_len, kv_heads, value_dim))
    return tuple(
        torch.randn(2, *size).to(torch.bfloat16).transpose(1, 2)
        for size in (*sizes, (q_len, heads, value_dim))
    )


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """o, dq, dk, dv in float64 by autograd."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ keys.mT * SCALE
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
        scores = scores.masked_fill(~visible.tril(k.shape[2] - q.shape[2]), -torch.inf)
    o = scores.softmax(-1) @ values
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do.double())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len", "kv_len", "value_dim"),
    [(4, 4, 130, 130, 128), (4, 2, 100, 300, 128), (4, 4, 512, 512, 128), (2, 1, 70, 70, 64)],
)
def test_launches(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    value_dim: int,
    causal: bool,
) -> None:
    gpu = emulate(monkeypatch, batch=2)
    q, k, v, do = inputs(heads, kv_heads, q_len, kv_len, value_dim)
    problem = describe(q, k, v, causal=causal)
    assert (problem.v_dim, problem.head_dim) == (value_dim, 192)
    o = torch.full_like(do, torch.nan)
    lse = torch.full((2, heads, q_len), torch.nan)
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    launch.forward(ForwardPass(problem=problem, q=q, k=k, v=v, o=o, lse=lse, scale=SCALE))
    launch.backward(
        BackwardPass(
            problem=problem, do=do, q=q, k=k, v=v, o=o, lse=lse, dlse=None, dq=dq, dk=dk, dv=dv,
            scale=SCALE,
        )
    )  # fmt: skip
    launched = {name for name, kernel in gpu.kernels.items() if kernel.by_triton}
    assert launched == {"flash_forward", "row_statistics", "flash_backward_wide", "finish_dq"}
    expected = exact(q, k, v, do, causal)
    for what, got, wanted in zip(("o", "dq", "dk", "dv"), (o, dq, dk, dv), expected, strict=True):
        error = float((got.double() - wanted).norm())
        assert error <= 5e-3 * float(wanted.norm()), f"{what}: {error:.3g}"


def test_tiles_are_those_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three panels of 64 columns in the forward pass; values of 128 columns in both."""
    emulate(monkeypatch, batch=2)
    q, k, v, do = inputs(4, 2, 100, 300)
    problem = describe(q, k, v, causal=True)
    lse = torch.empty(2, 4, 100)
    forward = plans.plan_forward(
        ForwardPass(problem=problem, q=q, k=k, v=v, o=do, lse=lse, scale=SCALE)
    )
    constants = forward.constants
    assert [constants[name] for name in ("BLOCK_D", "PANELS", "BLOCK_V")] == [192, 3, 128]
    shapes = [make(x).block_shape for make, x in zip(forward.descriptors, (q, k, v), strict=True)]
    assert shapes == [[1, 1, 64, 64], [1, 1, 128, 64], [1, 1, 128, 128]]
    call = BackwardPass(
        problem=problem, do=do, q=q, k=k, v=v, o=do, lse=lse, dlse=None, dq=q, dk=k, dv=v,
        scale=SCALE,
    )  # fmt: skip
    main = plans.plan_backward(call).main
    shapes = [
        make(x).block_shape for make, x in zip(main.descriptors[:4], (q, do, k, v), strict=True)
    ]
    assert shapes == [[1, 1, 64, columns] for columns in (256, 128, 256, 128)]


@pytest.mark.parametrize(
    ("heads", "causal", "window"),
    [((64, 64), True, None), ((64, 16), True, None), ((8, 2), False, None), ((10, 10), True, 64)],
)
def test_workspace_is_as_predicted(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], causal: bool, window: int | None
) -> None:
    """But for the counts, of 4 bytes for 64 rows."""
    emulate(monkeypatch, batch=2)
    sizes = ((heads[0], 192), (heads[1], 192), (heads[1], 128), (heads[0], 128))
    q, k, v, do = (torch.empty(2, n, 1024, width, dtype=torch.bfloat16) for n, width in sizes)
    plan = plans.plan_backward(
        BackwardPass(
            problem=describe(q, k, v, causal=causal, window=window), do=do, q=q, k=k, v=v, o=do,
            lse=torch.empty(2, heads[0], 1024), dlse=None, dq=q, dk=k, dv=v, scale=SCALE,
        )
    )  # fmt: skip
    allocated = sum(math.prod(shape) * dtype.itemsize for shape, dtype in plan.workspace)
    predicted = backward_memory.backward_workspace(
        batch_size=2, num_heads=heads[0], num_kv_heads=heads[1], q_len=1024, kv_len=1024,
        head_dim=192, value_dim=128, causal=causal, window=window,
    )  # fmt: skip
    assert predicted < allocated < 1.001 * predicted


class TestWhatIsRefused:
    def reason(self, head_dim: int, value_dim: int) -> str | None:
        return launch.schedule.why_not_narrow(head_dim, value_dim)

    def test_takes_what_latent_attention_has(self) -> None:
        assert self.reason(192, 128) is None
        assert self.reason(136, 64) is None

    @pytest.mark.parametrize(
        ("head_dim", "value_dim"), [(128, 64), (96, 64), (256, 128), (192, 136), (192, 100)]
    )
    def test_says_why_not(
        self, monkeypatch: pytest.MonkeyPatch, head_dim: int, value_dim: int
    ) -> None:
        monkeypatch.setattr(launch.any_gpu, "INTERPRETED", False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        q = torch.empty(1, 2, 8, head_dim, dtype=torch.bfloat16)
        problem: Problem = describe(q, q, q[..., :value_dim], causal=True)
        reason = launch.why_not(replace(problem, device=torch.device("cuda", 0)))
        assert reason is not None
        assert f"value_dim {value_dim} of head_dim {head_dim}" in reason
        assert "\n" not in reason
