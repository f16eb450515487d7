"""Compiles the Hopper kernels for sm_90a, which needs no GPU: registers, spills, shared memory.

Run as ``python -m benchmarks.compile_hopper [KERNEL ...] [HEAD_DIM ...] [masks]`` in the
repository, with triton installed and TRITON_INTERPRET unset; a HEAD_DIM of ``192/128`` has values
of 128 columns. Integers are compiled as a launch
specialises multiples of 16, and one query head on each key head where none share; ``masks``
compiles for windows, prefixes and caps instead of plain masks. Prints one row for each kernel and
variant, with a hash of its PTX without lines of debugging, so that rows of two trees with one
Triton say whether an edit changed what is compiled; and exits with 1 if ptxas serialised the
matmuls of any: then nothing runs beside them, whatever the source says. And if a multiprocessor has
no room for as many small programs as is counted on, or their copies take places that matmuls may
still read. And if :mod:`kernels.launching.driver` has another idea of a kernel's parameters than
its code: then Triton launches it, which takes longer. And if programs that share a group read sums
without an acquire: compilers drop one whose result is not used. And if a row kernel behind the
backward pass spills.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from kernels.flash.hopper import backward as hopper_backward
from kernels.flash.hopper import backward_narrow as hopper_backward_narrow
from kernels.flash.hopper import backward_schedule, program_size
from kernels.flash.hopper import backward_wide as hopper_backward_wide
from kernels.flash.hopper import forward as hopper_forward
from kernels.flash.hopper import forward_small as hopper_forward_small
from kernels.flash.hopper import schedule as hopper_schedule
from kernels.flash.hopper.plans import FINISHED_ROWS
from kernels.flash.hopper.program_size import ProgramSize
from kernels.flash.hopper.rows import finish_dq
from kernels.launching.driver import Parameters

LARGE = ProgramSize(consumers=2, tiles=1)
HOPPER = GPUTarget("cuda", 90, 32)
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"

SCALARS = {"scale": "fp32", "scale_log2": "fp32"}

KERNELS = {
    "forward": (hopper_forward.flash_forward, hopper_schedule.FORWARD),
    "backward": (hopper_backward.flash_backward, hopper_schedule.BACKWARD),
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Variant:
    """The constants that a kernel is compiled for."""

    kernel: str
    head_dim: int
    value_dim: int | None = None
    """Columns of values where they are fewer than head_dim."""
    dtype: str
    causal: bool
    packed: bool
    shared: bool = False
    """Whether programs of the backward kernel share a group, and add up dK and dV."""
    size: ProgramSize = LARGE
    """Of a program of the forward kernel."""
    mask: str = "plain"
    """As ``MASK`` of the forward kernel."""
    softcap: float = 0.0
    unmasked: bool = True
    """Whether the backward kernel has a loop without a mask."""
    order: str = "none"
    """As ``ORDER`` of the backward kernel."""
    apart: bool = False
    """Whether the backward kernel adds halves of a turn apart, of 128 columns."""
    onto: bool = False
    """Whether the backward kernel adds to sums of dq of other keys."""

    @property
    def is_rolled(self) -> bool:
        """As backward_schedule.halves_rolled."""
        if self.shared or self.mask == "window":
            return True
        return self.order == "heads" and not self.apart

    @property
    def panels(self) -> int:
        """Tiles that queries and keys lie in."""
        return hopper_schedule.NARROW_PANELS if self.value_dim is not None else 1

    @property
    def stored_values(self) -> int:
        """Columns of values in shared memory."""
        if self.value_dim is not None:
            return hopper_schedule.NARROW_COLUMNS
        return hopper_schedule.columns(self.head_dim).stored

    @property
    def stored(self) -> int:
        """Columns of a tile of queries or keys in shared memory."""
        if self.value_dim is not None:
            return hopper_schedule.PANEL_COLUMNS
        return hopper_schedule.columns(self.head_dim).stored


def compile_variant(variant: Variant) -> Any:
    """The compiled kernel, as Triton returns it."""
    function, schedules = KERNELS[variant.kernel]
    columns = hopper_schedule.columns(variant.head_dim)
    if variant.kernel == "backward" and columns.stored > 128:
        function = hopper_backward_wide.flash_backward_wide
        if variant.value_dim is not None:
            function = hopper_backward_narrow.flash_backward_narrow
    schedule = schedules[columns.stored]
    if variant.value_dim is not None:
        schedule = hopper_schedule.NARROW_FORWARD
        if variant.kernel == "backward":
            schedule = hopper_schedule.NARROW_BACKWARD
    tile = schedule.tile
    if variant.size.is_small:
        function, tile = hopper_forward_small.flash_forward_small, variant.size.key_tile
    names = function.arg_names
    stored = variant.stored
    constants = {
        "BLOCK_K": tile,
        "HEAD_DIM": variant.head_dim,
        "VALUE_DIM": variant.value_dim or variant.head_dim,
        # Panels together, or what sums of dq have.
        "BLOCK_D": columns.stored if variant.kernel == "backward" else stored * variant.panels,
        "BLOCK_V": variant.stored_values,
        "PANELS": variant.panels,
        "MAIN": columns.main,
        "TAIL": columns.tail,
        "STAGES": schedule.stages,
        "CONSUMERS": variant.size.consumers,
        "TILES": variant.size.tiles,
        "RESIDENT": schedule.resident,
        "APART": variant.apart and columns.stored == 128,
        "ROLLED": columns.main == 128 and variant.is_rolled,
        "UNMASKED": variant.unmasked,
        "ORDER": variant.order,
        "SHARED": variant.shared,
        "ONTO": variant.onto,
        "CAUSAL": variant.causal,
        "MASK": variant.mask,
        "SOFTCAP": variant.softcap,
        "PACKED": variant.packed,
        "num_warps": 4,
    }
    constants |= _ones(variant)
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {
        name: "constexpr" if name in constants else _type(name, variant, tile) for name in names
    }
    # As Triton finds them when it looks at what torch allocated, and at lengths of whole tiles.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*")
        or (signature[name] == "i32" and not function.params[index].do_not_specialize)
    }
    source = GluonASTSource(
        function,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        aligned,
    )
    return triton.compile(source, target=HOPPER, options={"num_warps": 4})


def _ones(variant: Variant) -> dict[str, int]:
    """Arguments that are 1 at a launch, which Triton makes constants."""
    if variant.kernel == "forward":
        return {}
    alone = {"group_size": 1} if not variant.shared else {}
    return {"num_members": 1, **alone}


def compile_finish(head_dim: int, sums: int, value_dim: int | None = None) -> Any:
    """rows.finish_dq of a causal mask in bfloat16, as the backward pass launches it."""
    names = finish_dq.arg_names
    width = hopper_schedule.columns(head_dim).stored
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": width,
        "BLOCK_Q": FINISHED_ROWS,
        "TURN": hopper_schedule.backward_rows_of(head_dim, value_dim),
        "PACKED": False,
        "CAUSAL": True,
        "MASK": "plain",
        "SUMS": sums,
    }
    types = {"sums_ptr": "*fp32", "dq_ptr": "*bf16", "cu_seqlens_q": "*i32", "cu_seqlens_k": "*i32"}
    signature = {
        name: "constexpr" if name in constants else (types | SCALARS).get(name, "i32")
        for name in names
    }
    source = ASTSource(
        finish_dq, signature, {(names.index(name),): value for name, value in constants.items()}
    )
    return triton.compile(source, target=HOPPER, options={"num_warps": max(4, width // 32)})


def _type(name: str, variant: Variant, tile: int) -> str:
    """Triton's name for the type of one argument."""
    if name == "stat_desc":
        layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        return f"tensordesc<fp32[1, {tile}],{layout!r}>"
    if name.endswith("_desc"):
        # Tiles that stream by have the schedule's rows, tiles that stay a warpgroup's.
        streams = ("q_desc", "do_desc") if variant.kernel == "backward" else ("k_desc", "v_desc")
        rows = tile if name in streams else hopper_schedule.ROWS
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
        stored = variant.stored_values if name in ("v_desc", "do_desc") else variant.stored
        return f"tensordesc<{variant.dtype}[1, 1, {rows}, {stored}],{layout!r}>"
    if name in ("lse_ptr", "dq_sums", "key_sums"):
        return "*fp32"
    if name in ("counts", "key_counts"):
        return "*i32"
    if name.endswith("_ptr"):
        return f"*{variant.dtype}"
    if name.startswith("cu_seqlens"):
        return "*i32"
    return SCALARS.get(name, "i32")


def assembler_report(ptx: str) -> str:
    """The report of ptxas on registers, spills and wgmma."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [PTXAS, "-v", "--gpu-name=sm_90a", path, "-o", path.with_suffix(".cubin")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def code_hash(ptx: str) -> str:
    """Ten digits over the instructions of a PTX, without source lines, labels and comments."""
    code = re.split(r"\n\s*\.section\s+\.debug", ptx)[0]
    code = re.sub(r"//.*|^\s*\.(?:loc|file)\b.*$", "", code, flags=re.MULTILINE)
    code = re.sub(r"\$L__(?:tmp|func_begin|func_end|info)\w+:?", "", code)
    lines = [line.strip() for line in code.splitlines() if line.strip()]
    return hashlib.sha1("\n".join(lines).encode(), usedforsecurity=False).hexdigest()[:10]


def spills_in(report: str) -> str:
    """The line of a report of ptxas that says what a kernel spills."""
    return next(line.strip() for line in report.splitlines() if "spill" in line)


def parameter_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel in ``ptx``."""
    entry = ptx[ptx.index(".entry") :]
    found = re.findall(r"\.param\s+(?:\.align \d+ )?\.[busf](\d+)[^,\[)]*(?:\[(\d+)\])?", entry)
    return [int(bits) // 8 * int(count or 1) for bits, count in found]


def launched_sizes(compiled: Any) -> list[int]:
    """Bytes of each parameter, as a launch without Triton would pass them."""
    arguments: list[Any] = []
    for kind in compiled.src.signature.values():
        if kind.startswith("*"):
            arguments.append(torch.empty(0))
        elif kind.startswith("tensordesc"):
            rank = kind[: kind.index("]")].count(",") + 1
            arguments.append(SimpleNamespace(shape=[1] * rank, strides=[1] * rank, padding="zero"))
        else:
            arguments.append(0)
    return Parameters(compiled, arguments).sizes


def parameters_differ(compiled: Any) -> list[str]:
    """A line if a launch without Triton would pass other parameters than the kernel has."""
    wanted, passed = parameter_sizes(compiled.asm["ptx"]), launched_sizes(compiled)
    return [] if wanted == passed else [f"parameters of {wanted} bytes: {passed} would be passed"]


DIVIDED = ("bands", "halves", "sections")
"""Orders in which several programs have the turns of a tile of keys."""


def plain_variants(kernel: str, head_dim: int, value_dim: int | None = None) -> list[Variant]:
    variants = [
        Variant(
            kernel=kernel,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=dtype,
            causal=causal,
            packed=not causal,
        )
        for dtype, causal in (("bf16", True), ("fp16", False))
    ]
    if kernel == "backward":
        variants.append(replace(variants[0], shared=True))
        if hopper_schedule.columns(head_dim).stored == 128:
            variants.append(replace(variants[0], order="heads"))
        variants.append(replace(variants[0], order="heads", apart=True))
        variants.append(replace(variants[0], order="keys", apart=True))
        if head_dim <= 128:
            variants.append(replace(variants[0], order="bands", apart=True, shared=True))
            variants.append(replace(variants[0], order="halves", apart=True, shared=True))
        if head_dim > 64:
            variants.append(replace(variants[0], order="sections", shared=True))
        variants.append(replace(variants[0], shared=True, onto=True))
        variants.append(replace(variants[0], causal=False, onto=True))
    else:
        variants += other_programs(variants[0])
        variants += small_programs(variants[1])
    return variants


def masked_variants(kernel: str, head_dim: int, value_dim: int | None = None) -> list[Variant]:
    causal, full, *_ = plain_variants(kernel, head_dim, value_dim)
    variants = [
        replace(causal, mask="prefix"),
        replace(causal, mask="window"),
        replace(full, mask="window"),
        replace(causal, softcap=50.0),
        replace(causal, mask="window", softcap=50.0),
    ]
    columns = hopper_schedule.columns(head_dim).stored
    if kernel == "backward" and columns <= 128:
        variants.append(replace(causal, mask="window", unmasked=False))
    elif kernel == "forward":
        variants += other_programs(variants[1])
    return variants


def unguarded(ptx: str) -> list[str]:
    """A line if a small program starts copies behind matmuls before all of its warps have met.

    The other warps' matmuls may still read the place that a copy takes.
    """
    is_open = False
    for line in ptx.splitlines():
        if "wgmma.wait_group" in line:
            is_open = True
        elif "bar.sync" in line:
            is_open = False
        elif "cp.async.bulk.tensor" in line and is_open:
            return ["a copy starts before all warps are done with its place"]
    return []


def other_programs(variant: Variant) -> list[Variant]:
    """The forward kernel with programs of the other sizes that it may have."""
    stored = hopper_schedule.columns(variant.head_dim).stored
    window = None if variant.mask == "plain" else 128
    sizes = [size for size in program_size.sizes(stored, window) if not size.is_small]
    return [replace(variant, size=size) for size in sizes if size != variant.size] + small_programs(
        variant
    )


def small_programs(variant: Variant) -> list[Variant]:
    stored = hopper_schedule.columns(variant.head_dim).stored
    return [
        replace(variant, size=ProgramSize(1, 1, key_tile))
        for width, key_tile in program_size.RESIDENTS
        if width == stored
    ]


def too_large(compiled: Any, variant: Variant, report: str) -> list[str]:
    """A line if a multiprocessor has no room for as many small programs as RESIDENTS says."""
    stored = hopper_schedule.columns(variant.head_dim).stored
    residents = program_size.RESIDENTS[stored, variant.size.key_tile]
    (registers,) = map(int, re.findall(r"Used (\d+) registers", report))
    # Registers are given to warps by 256, and each program takes 1 KiB of shared memory besides.
    by_registers = 65536 // (4 * (-(-32 * registers // 256) * 256))
    by_memory = 228 * 1024 // (compiled.metadata.shared + 1024)
    found = min(by_registers, by_memory)
    if found >= residents:
        return []
    return [f"{registers} registers: room for {found} programs, not {residents}"]


def main() -> int:
    failed = False
    words = sys.argv[1:]
    variants_of = masked_variants if "masks" in words else plain_variants
    widths = [word for word in words if word[0].isdigit()]
    kernels = [x for x in words if x not in (*widths, "masks")] or list(KERNELS)
    if unknown := [x for x in kernels if x not in KERNELS]:
        print(f"compile_hopper: no kernel {unknown[0]}: {', '.join(KERNELS)}", file=sys.stderr)
        return 2
    dims = [tuple(map(int, word.split("/"))) for word in widths] or [(64,), (128,)]
    for kernel in kernels:
        for head_dim, *value_dim in dims:
            for variant in variants_of(kernel, head_dim, *value_dim):
                compiled = compile_variant(variant)
                report = assembler_report(compiled.asm["ptx"])
                lines = [line.strip() for line in report.splitlines()]
                spills = spills_in(report)
                slow = [line for line in lines if "serialized" in line]
                slow += parameters_differ(compiled)
                if variant.size.is_small:
                    slow += too_large(compiled, variant, report)
                    slow += unguarded(compiled.asm["ptx"])
                if variant.shared and "atom.global.gpu.acquire" not in compiled.asm["ptx"]:
                    slow.append("nothing is acquired before sums are read")
                failed = failed or bool(slow)
                print(
                    f"{kernel:<14} d {'/'.join(map(str, (head_dim, *value_dim))):<7} "
                    f"{variant.dtype} "
                    f"{'causal' if variant.causal else 'full':<7}"
                    f"{'packed' if variant.packed else 'dense':<7}"
                    f"{'shared' if variant.shared else '':<7}"
                    f"{'turned' if variant.order == 'heads' else '':<7}"
                    f"{'in part' if variant.order == 'keys' else '':<8}"
                    f"{variant.order if variant.order in DIVIDED else '':<9}"
                    f"{'onto' if variant.onto else '':<5}"
                    f"{variant.size.name:<5}"
                    f"{variant.mask if variant.mask != 'plain' else '':<7}"
                    f"{'cap' if variant.softcap else '':<4}"
                    f"{'' if variant.unmasked else 'short':<6}"
                    f"{compiled.metadata.shared / 1024:4.0f} KiB shared  {spills}"
                    f"  PTX {code_hash(compiled.asm['ptx'])}",
                    *slow,
                    sep="\n    ",
                    flush=True,
                )
    if "backward" in kernels and variants_of is plain_variants:
        for head_dim, *value_dim in dims:
            # Each band has a sum, and above 128 columns there are no bands.
            most = backward_schedule.MOST_BANDS if head_dim <= 128 else 2
            for sums in sorted({1, 2, most}):
                spills = spills_in(
                    assembler_report(compile_finish(head_dim, sums, *value_dim).asm["ptx"])
                )
                failed = failed or " 0 bytes spill stores" not in spills
                print(f"finish_dq      d {head_dim:<4} {sums} sums  {spills}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
