"""The host's time for one forward and backward pass of flash attention: Python's node, or C++'s.

    python -m benchmarks.bench_native

Without a GPU: microseconds of the host, where kernels are made of nothing and launches reach a C
function that returns. With a Hopper GPU: the real ones, beside cuDNN through PyTorch's SDPA, with
the host's time and the GPU's, in rounds that take turns.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

ROUNDS = 15

Step = Callable[[], Any]


class Empty(torch.autograd.Function):
    """What Python's autograd takes by itself."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return do, do, do


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8,12,1024,64", help="batch, heads, tokens, head_dim")
    shape = [int(n) for n in parser.parse_args().shape.split(",")]
    if torch.cuda.is_available():
        on_a_gpu(shape)
    else:
        on_a_cpu()


def step(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Any:
    return torch.autograd.grad(attend(q, k, v), (q, k, v), do)


def inputs(shape: list[int], device: str) -> list[Tensor]:
    made = [torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(4)]
    return [x.requires_grad_(place < 3) for place, x in enumerate(made)]


def on_a_cpu() -> None:
    import pytest
    from emulated_kernels import emulate

    from kernels.flash import flash_attention, native

    monkeypatch = pytest.MonkeyPatch()
    gpu = emulate(monkeypatch, batch=1)
    for kernel in gpu.kernels.values():
        kernel.compute = lambda values: None
    driver = driver_that_does_nothing()
    # As of the real one, whose functions are ctypes' too.
    for name in ("cuLaunchKernelEx", "cuTensorMapReplaceAddress"):
        monkeypatch.setattr(gpu.driver, name, getattr(driver, name))
    address = ctypes.cast(driver.cuLaunchKernelEx, ctypes.c_void_p).value
    monkeypatch.setattr(native, "_addresses", lambda: (address,) * 5)
    # Small, since memory of a CPU comes from the operating system.
    given = inputs([1, 2, 16, 64], "cpu")
    attend = partial(flash_attention, causal=True)
    rows = {
        "an empty autograd.Function": Empty.apply,
        "flash_triton, autograd=python": partial(attend, autograd="python"),
        "flash_triton, autograd=native": partial(attend, autograd="auto"),
        "SDPA's math on a CPU, for scale": partial(scaled_dot_product_attention, is_causal=True),
    }
    steps = {name: partial(step, f, *given) for name, f in rows.items()}
    times = in_turns(steps, 300, synchronize=lambda: None)
    print(f"{'us of the host for forward and backward':40}")
    for name, (host, _) in times.items():
        print(f"{name:40} {host:8.1f}")


def driver_that_does_nothing() -> Any:
    source = "".join(
        f'extern "C" int {name}() {{ return 0; }}\n'
        for name in ("cuLaunchKernelEx", "cuTensorMapReplaceAddress")
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nothing.so"
        subprocess.run(
            ["g++", "-shared", "-fPIC", "-O2", "-x", "c++", "-", "-o", path],
            input=source, text=True, check=True,
        )  # fmt: skip
        library = ctypes.CDLL(str(path))
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    library.cuTensorMapReplaceAddress.argtypes = [ctypes.c_void_p] * 2
    return library


def on_a_gpu(shape: list[int]) -> None:
    from kernels.flash import flash_attention, native

    given = inputs(shape, "cuda")
    attend = partial(flash_attention, causal=True)

    def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    rows = {
        "an empty autograd.Function": Empty.apply,
        "flash_triton, autograd=python": partial(attend, autograd="python"),
        "flash_triton, autograd=native": partial(attend, autograd="native"),
        "SDPA, cuDNN": cudnn,
    }
    steps = {name: partial(step, f, *given) for name, f in rows.items()}
    start = time.perf_counter()
    for _ in range(3):
        steps["flash_triton, autograd=native"]()
    torch.cuda.synchronize()
    print(f"compiled and learnt in {time.perf_counter() - start:.1f} s")
    assert native.attend(*given[:3], True, shape[-1] ** -0.5) is not None
    # The choice of SDPA's kernel is made before the clock starts: changing it takes time too.
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        times = in_turns(steps, 50, synchronize=torch.cuda.synchronize)
    print(f"{shape} bf16 causal, us for forward and backward{'host':>12} {'all':>8}")
    for name, (host, everything) in times.items():
        print(f"{name:46} {host:14.1f} {everything:8.1f}")


def in_turns(
    steps: dict[str, Step], number: int, synchronize: Callable[[], None]
) -> dict[str, tuple[float, float]]:
    """Medians over rounds of (us until the host has issued a step, us until it is done)."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(ROUNDS + 2):
        for name, run in steps.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(number):
                run()
            issued = time.perf_counter()
            synchronize()
            done = time.perf_counter()
            # What comes first compiles, and warms up.
            if turn >= 2:
                found[name].append(((issued - start) / number * 1e6, (done - start) / number * 1e6))
    return {
        name: (statistics.median(h for h, _ in rows), statistics.median(a for _, a in rows))
        for name, rows in found.items()
    }


if __name__ == "__main__":
    main()
