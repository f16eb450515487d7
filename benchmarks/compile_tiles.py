"""Compiles the any-GPU kernels for GPUs that are not here: registers, spills, shared memory.

Run as ``python -m benchmarks.compile_tiles FILE.csv [ARCHITECTURE ...]`` in the repository, with
triton installed and TRITON_INTERPRET unset; it needs no GPU. For each architecture (80 is an A100,
86 an RTX 3090, 89 an RTX 4090, 90 an H100 or H200), kernel and class of shapes it compiles the
tiles that :mod:`kernels.flash.any_gpu.configs` would take there by its rule, which are the
prediction for a GPU that no search has seen.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.flash.any_gpu import configs, launch
from kernels.flash.any_gpu.backward import backward_dkv_kernel, backward_dq_kernel
from kernels.flash.any_gpu.forward import forward_kernel
from kernels.flash.call.problem import Problem

SHARED_MEMORY_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""What one program may use, by compute capability (CUDA C++ programming guide, table of technical
specifications)."""

KERNELS = {
    "forward": forward_kernel,
    "backward_dkv": backward_dkv_kernel,
    "backward_dq": backward_dq_kernel,
}

COLUMNS = (
    "architecture", "triton", "kernel", "precision", "head_dim", "mask", "block_q", "block_k",
    "num_warps", "num_stages", "registers", "stack_bytes", "shared_bytes",
)  # fmt: skip

Variant = tuple[int, str, str, int, bool]
"""Architecture, kernel, precision, head_dim, and whether causal."""


def problem_of(precision: str, head_dim: int, causal: bool) -> Problem:
    """A call of long sequences, as far as tiles depend on it."""
    return Problem(
        device=torch.device("cuda"),
        dtype=torch.bfloat16 if precision == "bfloat16" else torch.float32,
        batch_size=1,
        num_heads=16,
        num_kv_heads=16,
        q_len=8192,
        kv_len=8192,
        head_dim=head_dim,
        causal=causal,
        packed=False,
        accumulates=False,
        precision="ieee" if precision == "bfloat16" else precision,
    )


def row_of(variant: Variant) -> dict[str, Any]:
    """The rule's tiles of a variant, and what the compiler made of them."""
    architecture, kernel, precision, head_dim, causal = variant
    problem = problem_of(precision, head_dim, causal)
    tiles = configs.candidates(kernel, problem, SHARED_MEMORY_BYTES[architecture])[0]
    constants = launch._constants(problem, tiles) | {
        "SCALE_SIGN": 1,
        "ACCUMULATE": False,
        "GIVES_REST": precision != "bfloat16",
        "cu_seqlens_q_ptr": None,
        "cu_seqlens_k_ptr": None,
        **dict.fromkeys(("window", "prefix_len", "shift", "chunk_rows", "softcap")),
    }
    names = KERNELS[kernel].arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    short = "bf16" if precision == "bfloat16" else "fp32"
    signature = {name: "constexpr" if name in constants else _type(name, short) for name in names}
    # As Triton finds them when it looks at what torch allocated.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or ("stride" in name and name not in constants)
    }
    source = ASTSource(
        KERNELS[kernel],
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        aligned,
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
    )
    registers, stack_bytes = _resources(compiled.asm["cubin"])
    values = (
        architecture, triton.__version__, kernel, precision, head_dim,
        "causal" if causal else "full", tiles.block_q, tiles.block_k, tiles.num_warps,
        tiles.num_stages, registers, stack_bytes, compiled.metadata.shared,
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def _type(name: str, short: str) -> str:
    if name.startswith(("lse", "rest", "row_lse", "row_dots")) and name.endswith("_ptr"):
        return "*fp32"
    if name.endswith("_ptr"):
        return f"*{short}"
    return "fp32" if "scale" in name else "i32"


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes that it spills, which are those of its stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump does not say what the kernel uses: {report}")
    return int(found[1]), int(found[2])


def main() -> int:
    path, *chosen = sys.argv[1:]
    architectures = [int(text) for text in chosen] or list(SHARED_MEMORY_BYTES)
    classes = [("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 256), ("bf16x6", 64),
               ("bf16x6", 128)]  # fmt: skip
    variants = [
        (architecture, kernel, precision, head_dim, causal)
        for architecture, (precision, head_dim), kernel, causal in product(
            architectures, classes, KERNELS, (True, False)
        )
    ]
    with (
        ProcessPoolExecutor(mp_context=get_context("spawn")) as pool,
        open(path, "w", encoding="utf-8", newline="") as file,
    ):
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in pool.map(row_of, variants):
            writer.writerow(row)
            file.flush()
            print(*row.values())
    return 0


if __name__ == "__main__":
    sys.exit(main())
