"""Compares pipelines of the Hopper kernel of latent attention, each in a process of its own.

Run as ``python -m benchmarks.decode_kernels --latent-variants [--shape mla ...]``. All are compiled
first, beside each other and without being launched. Then each is checked and timed alone, by
``python -m benchmarks.latent_variants NUMBER SHAPE ...``, which is killed after ``LIMIT_S``: a
pipeline whose barriers wait for each other would hold the device, and the others, for ever.
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kernels.decode.hopper_latent import PIPELINE, Pipeline

LIMIT_S = 25
"""Of one process, whose imports, random caches and some hundred calls take half as long."""

VARIANTS = (
    PIPELINE,
    replace(PIPELINE, order="after"),
    replace(PIPELINE, order="last"),
    replace(PIPELINE, resident=False),
    replace(PIPELINE, order="after", resident=False),
    replace(PIPELINE, chunk=128),
    replace(PIPELINE, order="last", chunk=128),
    replace(PIPELINE, overlap=False),
    Pipeline(chunk=256, order="after", resident=False, overlap=False),
)


def compare(shapes: list[str]) -> None:
    """Prints a line for each variant and shape, or that it ran out of time."""
    start = time.perf_counter()
    numbers = range(len(VARIANTS))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda number: _run(number, shapes, "--compile"), numbers))
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    for number in numbers:
        _run(number, shapes)


def _run(number: int, shapes: list[str], *options: str) -> None:
    command = [sys.executable, "-m", "benchmarks.latent_variants", *options, str(number), *shapes]
    limit_s = 4 * LIMIT_S if options else LIMIT_S
    try:
        code = subprocess.run(command, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"{VARIANTS[number]}: killed after {limit_s} s", flush=True)
    else:
        if code:
            print(f"{VARIANTS[number]}: exit code {code}", flush=True)


def _measure(variant: Pipeline, name: str) -> None:
    """One line: time of a call, TFLOP/s, and the error of the last sequence."""
    from benchmarks.decode_kernels import SHAPES, milliseconds, prepare

    shape = SHAPES[name]
    step = prepare(shape, None, "hopper")
    got = step.run()[-1, :, 0].double()
    wanted = step.expected()
    error = float((got - wanted).norm() / wanted.norm())
    time_ms = milliseconds(step.run, repeats=30)
    print(
        f"{name:<12} {variant!s:<78} {1e3 * time_ms:7.1f} us "
        f"{shape.flops / time_ms / 1e9:6.1f} TFLOP/s  error {error:.1e}",
        flush=True,
    )


def _compile(name: str) -> None:
    """Leaves the kernels in Triton's cache on disk; nothing is launched."""
    from triton.runtime.jit import KernelInterface

    from benchmarks.decode_kernels import SHAPES, prepare

    KernelInterface.__getitem__ = lambda kernel, grid: (  # type: ignore[method-assign]
        lambda *args, **kwargs: kernel.run(*args, grid=grid, warmup=True, **kwargs)
    )
    # Fewer tokens, whose numbers divide by what the others do.
    prepare(replace(SHAPES[name], tokens=4096), None, "hopper").run()


def main() -> None:
    from kernels.decode import hopper_latent

    arguments = sys.argv[1:]
    compiles = arguments[0] == "--compile"
    number, *shapes = arguments[compiles:]
    hopper_latent.PIPELINE = VARIANTS[int(number)]
    for name in shapes:
        if compiles:
            _compile(name)
        else:
            _measure(hopper_latent.PIPELINE, name)


if __name__ == "__main__":
    main()
