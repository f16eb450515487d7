"""Whether many passes of flash attention give the same bits, and how exact they are, on a GPU.

Run as ``python -m benchmarks.repeatability [--passes 1000] [--record FILE.csv] [--shapes NAME..]``
in the repository, where names are those that it prints, up to a blank: ``1x16x8192x192/128``.
Each shape runs forward and backward as often as asked, on the same inputs, and every o, dq, dk and
dv is compared bit for bit with the first. Errors are norms relative to float64 over the first key
head, beside those of PyTorch's math path in the same dtype.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.flash import flash_attention
from kernels.reference import relative_error

NAMES = ("o", "dq", "dk", "dv")


@dataclass(kw_only=True, slots=True, frozen=True)
class Shape:
    """One call."""

    batch_size: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    value_dim: int | None = None
    """Of values with fewer columns than head_dim."""
    causal: bool = True
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        heads = f"{self.heads}:{self.kv_heads}" if self.heads != self.kv_heads else f"{self.heads}"
        mask = "causal" if self.causal else "full"
        columns = f"{self.head_dim}/{self.value_dim}" if self.value_dim else f"{self.head_dim}"
        return f"{self.batch_size}x{heads}x{self.tokens}x{columns} {mask} {self.dtype}"


def _of(*sizes: int, **others: object) -> Shape:
    batch_size, heads, kv_heads, tokens, head_dim = sizes
    return Shape(
        batch_size=batch_size,
        heads=heads,
        kv_heads=kv_heads,
        tokens=tokens,
        head_dim=head_dim,
        **others,  # type: ignore[arg-type]
    )


SHAPES = (
    *(_of(1, 16, 16, 16384, d) for d in (64, 128)),
    *(_of(4, 16, 16, 4096, d) for d in (64, 128)),
    _of(8, 12, 12, 1024, 64),
    _of(1, 32, 8, 8192, 128),
    _of(2, 32, 8, 5000, 128),
    _of(3, 24, 4, 3001, 96),
    _of(2, 16, 2, 12345, 64),
    _of(1, 8, 8, 8192, 256),
    _of(1, 16, 16, 8192, 192),
    _of(1, 16, 16, 8192, 192, value_dim=128),
    _of(1, 16, 16, 16384, 128, causal=False),
    _of(2, 8, 8, 4096, 128, dtype="float16"),
    _of(1, 4, 4, 2048, 128, dtype="float32"),
)


def passes(shape: Shape, count: int, tensors: list[Tensor]) -> tuple[list[Tensor], list[str]]:
    """The results of the first pass, and the names of those that ever differed."""
    q, k, v, do = tensors
    first: list[Tensor] = []
    same = torch.ones(len(NAMES), dtype=torch.bool, device=q.device)
    for _ in range(count):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = flash_attention(*leaves, causal=shape.causal)
        found = [o.detach(), *torch.autograd.grad(o, leaves, do)]
        if not first:
            first = found
        # Stays on the device: to ask each pass would wait for it.
        same &= torch.stack(
            [
                (a.view(_bits(a)) == b.view(_bits(b))).all()
                for a, b in zip(found, first, strict=True)
            ]
        )
    return first, [name for name, equal in zip(NAMES, same.tolist(), strict=True) if not equal]


def _bits(x: Tensor) -> torch.dtype:
    return torch.int32 if x.dtype == torch.float32 else torch.int16


def errors(
    shape: Shape, tensors: list[Tensor], got: list[Tensor]
) -> tuple[list[float], list[float]]:
    """Relative errors of these results and of PyTorch's math path, over the first key head."""
    group = shape.heads // shape.kv_heads
    heads = (group, 1, 1, group)
    part = [x[:1, :number] for x, number in zip(tensors, heads, strict=True)]
    exact = _math(shape, [x.double() for x in part])
    math = _math(shape, part)
    ours = [x[:1, :number] for x, number in zip(got, (group, group, 1, 1), strict=True)]
    return tuple(  # type: ignore[return-value]
        [relative_error(x, y) for x, y in zip(results, exact, strict=True)]
        for results in (ours, math)
    )


def _math(shape: Shape, tensors: list[Tensor]) -> list[Tensor]:
    """o, dq, dk, dv by PyTorch's math path, one query head at a time."""
    q, k, v, do = tensors
    o, dq, dk, dv = (torch.empty_like(do), torch.empty_like(q), *map(torch.zeros_like, (k, v)))
    for head in range(q.shape[1]):
        leaves = [x.detach().requires_grad_() for x in (q[:, head : head + 1], k, v)]
        with sdpa_kernel(SDPBackend.MATH):
            out = scaled_dot_product_attention(*leaves, is_causal=shape.causal)
        o[:, head : head + 1] = out.detach()
        found = torch.autograd.grad(out, leaves, do[:, head : head + 1])
        dq[:, head : head + 1] = found[0]
        dk += found[1]
        dv += found[2]
    return [o, dq, dk, dv]


def row(shape: Shape, count: int) -> dict[str, object]:
    """One row of the record."""
    generator = torch.Generator("cuda").manual_seed(1)

    def randn(heads: int, columns: int) -> Tensor:
        sizes = (shape.batch_size, heads, shape.tokens, columns)
        x = torch.randn(sizes, device="cuda", generator=generator)
        return x.to(getattr(torch, shape.dtype))

    of_keys, of_values = shape.head_dim, shape.value_dim or shape.head_dim
    tensors = [
        *(randn(shape.heads, of_keys), randn(shape.kv_heads, of_keys)),
        *(randn(shape.kv_heads, of_values), randn(shape.heads, of_values)),
    ]
    start = time.perf_counter()
    got, different = passes(shape, count, tensors)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    ours, math = errors(shape, tensors, got)
    found: dict[str, object] = {"shape": str(shape), "passes": count}
    found["different"] = " ".join(different) or "none"
    for name, a, b in zip(NAMES, ours, math, strict=True):
        found |= {f"{name}_error": f"{a:.3g}", f"{name}_math": f"{b:.3g}"}
    found["worst_ratio"] = f"{max(a / b for a, b in zip(ours, math, strict=True)):.2f}"
    return found | {"seconds": f"{seconds:.1f}"}


def main() -> int:
    """Print the table, and write it where asked; exit status 1 if any bits differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=1000)
    parser.add_argument("--record", type=Path)
    names = [str(shape).split()[0] for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", choices=names, default=names, metavar="NAME")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.repeatability: torch sees no CUDA device", file=sys.stderr)
        return 2
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    rows = []
    for shape in (x for x in SHAPES if str(x).split()[0] in options.shapes):
        rows.append(row(shape, options.passes))
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        if options.record:
            # After each shape, so that whoever interrupts keeps what there is.
            with options.record.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, [*rows[0], *facts])
                writer.writeheader()
                writer.writerows([found | facts for found in rows])
    return int(any(found["different"] != "none" for found in rows))


if __name__ == "__main__":
    raise SystemExit(main())
