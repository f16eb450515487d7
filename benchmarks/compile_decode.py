"""Compiles the decode kernels for sm_90a, which needs no GPU: registers, spills, shared memory.

Run as ``python -m benchmarks.compile_decode [VARIANT ...]`` in the repository, with triton
installed and TRITON_INTERPRET unset. Prints one row for each variant, with the tiles that an
H200 gets, and exits with 1 if one needs more shared memory than a Hopper GPU has, if the Gluon
kernel spills registers or its matmuls are serialised, or if :mod:`kernels.launching.driver` has
another idea of a kernel's parameters than its code: then Triton launches it, which takes longer.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from benchmarks.compile_hopper import HOPPER, assembler_report, parameters_differ
from kernels.decode import configs
from kernels.decode.call import Call
from kernels.decode.dense import launch as dense_launch
from kernels.decode.dense.kernel import flash_decode_kernel
from kernels.decode.latent import append
from kernels.decode.latent import launch as latent_launch
from kernels.decode.latent.append_kernel import latent_append_kernel
from kernels.decode.latent.hopper_kernel import hopper_latent_kernel
from kernels.decode.latent.kernel import latent_decode_kernel
from kernels.decode.latent.merge_kernel import merge_kernel

SHARED_MEMORY_BYTES = 227 * 1024

FLASH = Call(
    device=torch.device("cpu"), dtype=torch.bfloat16, batch_size=16, num_heads=32, num_kv_heads=8,
    new=1, head_dim=128, capacity=32768, page=0, rotary_dim=128,
)  # fmt: skip
LATENT = Call(
    device=torch.device("cpu"), dtype=torch.bfloat16, batch_size=32, num_heads=128, num_kv_heads=1,
    new=1, head_dim=512, capacity=16384, page=0, rope_dim=64,
)  # fmt: skip

VARIANTS = {
    "flash": FLASH,
    "flash_paged64": replace(FLASH, page=64),
    "flash_paged16": replace(FLASH, page=16),
    "flash_d64": replace(FLASH, head_dim=64, rotary_dim=64),
    "flash_d256": replace(FLASH, head_dim=256, rotary_dim=256),
    "flash_fp32": replace(FLASH, dtype=torch.float32),
    "flash_mqa_128_heads": replace(FLASH, num_heads=128, num_kv_heads=1),
    "latent": LATENT,
    "latent_16_heads": replace(LATENT, num_heads=16),
    "latent_fp32": replace(LATENT, dtype=torch.float32),
    "hopper_latent": LATENT,
    "hopper_latent_paged64_3_new": replace(LATENT, page=64, new=3),
    "merge": LATENT,
    "append": replace(LATENT, rotary_dim=64),
    "append_paged64_3_new": replace(LATENT, rotary_dim=64, page=64, new=3),
    "append_fp32": replace(LATENT, rotary_dim=64, dtype=torch.float32),
    "append_no_rotary": LATENT,
}

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compile_variant(name: str) -> tuple[Any, str]:
    """The compiled kernel, and what it was compiled with."""
    call = VARIANTS[name]
    kind = name.split("_")[0]
    if kind == "hopper":
        constants = {
            "NEW": call.new, "PAGE": call.page, "BLOCK_B": 32, "ROW_TILES": 2, "num_warps": 4,
        }  # fmt: skip
        return _compile(hopper_latent_kernel, call, constants, {"num_warps": 4})
    if kind == "merge":
        constants = {
            "NEW": 1, "BLOCK_B": 32, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": 512, "ROW_TILES": 2,
            "MERGE_PIECES": 4, "MERGE_ROWS": 4,
        }  # fmt: skip
        return _compile(merge_kernel, call, constants, {"num_warps": 4})
    if kind == "append":
        constants = dict(append.append_constants(call, True, True))
        options = {"num_warps": constants.pop("num_warps")}
        return _compile(latent_append_kernel, call, constants, options)
    row = configs.shape_class(kind, call)
    rule = configs.flash_rule if kind == "flash" else configs.latent_rule
    pinned = configs._pinned()["NVIDIA H200"].get(row)
    tiles = pinned or rule(call, SHARED_MEMORY_BYTES)
    if kind == "flash":
        constants = dict(dense_launch.flash_constants(call, tiles, False))
        kernel = flash_decode_kernel
    else:
        constants = dict(latent_launch.latent_constants(call, tiles))
        kernel = latent_decode_kernel
    options = {
        option: constants.pop(option)
        for option in ("num_warps", "num_stages", "maxnreg")
        if option in constants
    }
    return _compile(kernel, call, constants, options)


def _compile(
    kernel: Any, call: Call, constants: dict[str, Any], options: dict[str, int]
) -> tuple[Any, str]:
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else _type(name, TYPES[call.dtype]) for name in names
    }
    # As Triton finds them when it looks at what torch allocated.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or "stride" in name
    }
    source = (GluonASTSource if kernel is hopper_latent_kernel else ASTSource)(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        aligned,
    )
    tiles = " ".join(
        f"{key} {constants[key]}" for key in ("BLOCK_M", "BLOCK_N") if key in constants
    )
    what = " ".join(f"{key} {value}" for key, value in options.items())
    return triton.compile(source, target=HOPPER, options=options), f"{tiles} {what}".strip()


def _type(name: str, dtype: str) -> str:
    """Triton's name for the type of one argument."""
    if name.endswith("_desc"):
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        columns = 64 if "rope" in name else 256
        return f"tensordesc<{dtype}[64, {columns}],{layout!r}>"
    if name in ("lengths_ptr", "table_ptr", "counters_ptr", "lengths_after_ptr"):
        return "*i32"
    if name in ("cos_ptr", "sin_ptr", "pieces_ptr"):
        return "*fp32"
    if name.endswith("_ptr"):
        return f"*{dtype}"
    return "fp32" if name in ("scale_log2", "unit_scale") else "i32"


def main() -> int:
    failed = False
    for name in sys.argv[1:] or list(VARIANTS):
        compiled, what = compile_variant(name)
        report = assembler_report(compiled.asm["ptx"]).splitlines()
        spills = next(line.strip() for line in report if "spill" in line)
        registers = next(line.split("Used ")[1].split(",")[0] for line in report if "Used" in line)
        slow = [line.strip() for line in report if "serialized" in line]
        differ = parameters_differ(compiled)
        shared = compiled.metadata.shared
        failed = failed or shared > SHARED_MEMORY_BYTES or bool(differ)
        if name.startswith("hopper"):
            failed = failed or bool(slow) or " 0 bytes spill stores" not in spills
        print(
            f"{name:<28} {what:<52} {shared / 1024:6.1f} KiB shared  {registers}  {spills}",
            *slow,
            *differ,
        )
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
