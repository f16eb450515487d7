"""The host's time for one forward and backward pass of flash attention: Python's node, or C++'s.

Run as ``python -m benchmarks.bench_native [--shape BATCH,HEADS,TOKENS,HEAD_DIM]`` on a Hopper GPU.
Prints microseconds until the host has issued both passes, and until the GPU has done them, in
rounds that take turns, beside cuDNN through PyTorch's SDPA and an autograd function that does
nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.flash import flash_attention, native
from kernels.flash.call.arguments import DEFAULT_OPTIONS, FlashOptions

ROUNDS = 15

Step = Callable[[], Any]


class Empty(torch.autograd.Function):
    """A node that does nothing: the time of Python's autograd by itself."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return do, do, do


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_native", description=__doc__)
    parser.add_argument("--shape", default="8,12,1024,64", help="batch, heads, tokens, head_dim")
    shape = [int(n) for n in parser.parse_args().shape.split(",")]
    if not torch.cuda.is_available():
        print("bench_native: needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    compare(shape)
    return 0


def step(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Any:
    return torch.autograd.grad(attend(q, k, v), (q, k, v), do)


def compare(shape: list[int]) -> None:

    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    given = [x.requires_grad_(place < 3) for place, x in enumerate(made)]
    attend = partial(flash_attention, causal=True)

    def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    rows = {
        "an empty autograd.Function": Empty.apply,
        "flash_triton, autograd=python": partial(attend, options=FlashOptions(autograd="python")),
        "flash_triton, autograd=native": partial(attend, options=FlashOptions(autograd="native")),
        "SDPA, cuDNN": cudnn,
    }
    steps = {name: partial(step, f, *given) for name, f in rows.items()}
    start = time.perf_counter()
    for _ in range(3):
        steps["flash_triton, autograd=native"]()
    torch.cuda.synchronize()
    print(f"compiled and learnt in {time.perf_counter() - start:.1f} s")
    assert native.attend(*given[:3], True, shape[-1] ** -0.5, DEFAULT_OPTIONS) is not None
    # The choice of SDPA's kernel is made before the clock starts: changing it takes time too.
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        times = in_turns(steps, 50)
    print(f"{shape} bf16 causal, us for forward and backward{'host':>12} {'all':>8}")
    for name, (host, everything) in times.items():
        print(f"{name:46} {host:14.1f} {everything:8.1f}")


def in_turns(steps: dict[str, Step], number: int) -> dict[str, tuple[float, float]]:
    """Medians over rounds of (us until the host has issued a step, us until it is done)."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(ROUNDS + 2):
        for name, run in steps.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(number):
                run()
            issued = time.perf_counter()
            torch.cuda.synchronize()
            done = time.perf_counter()
            # What comes first compiles, and warms up.
            if turn >= 2:
                found[name].append(((issued - start) / number * 1e6, (done - start) / number * 1e6))
    return {
        name: (statistics.median(h for h, _ in rows), statistics.median(a for _, a in rows))
        for name, rows in found.items()
    }


if __name__ == "__main__":
    sys.exit(main())
