"""cuDNN's attention through its own Python package, nvidia-cudnn-frontend.

``attention=sdpa_cudnn`` calls cuDNN through PyTorch, which picks the first plan of its heuristics
and aligns causal masks to the top left. Here a graph is built by cuDNN's package, with masks
aligned to the bottom right, windows, a deterministic mode, and the newest graphs that the package
knows; sinks are added from the outside. The kernels are those of libcudnn itself: the package
nvidia-cudnn-cu12 or -cu13 that PyTorch brings, unless a newer one is installed over it or
LD_LIBRARY_PATH has another. Checks follow ``include/cudnn_frontend/node`` of
github.com/NVIDIA/cudnn-frontend, version 1.24.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import ClassVar

import torch

from kernels import accounting
from kernels.backend import DenseAttention, attention_backend
from kernels.libraries import cudnn_graphs
from kernels.libraries.adapter import DTYPES, capability, why_not_head_dim
from kernels.problem import AttentionProblem, AttentionSpec
from kernels.registry import Look

DISTRIBUTION = "nvidia-cudnn-frontend"
INSTALL = f"pip install {DISTRIBUTION}"

OLDEST = (1, 18)
"""The first version that was read; it has all the arguments that are given."""

AT_ODDS = ((1, 23), (1, 26))
"""First and last version that set an attribute of reshapes whatever libcudnn there is; met with
1.24 beside libcudnn 9.19 (github.com/NVIDIA/cudnn-frontend/pull/466)."""
RESHAPE_MODES = 92200
"""The first libcudnn that knows the attribute."""


@attention_backend("cudnn_frontend", look=Look(colour="#BBCC33", marker="8"))
@dataclass(kw_only=True, slots=True)
class CudnnFrontend(DenseAttention):
    """Package nvidia-cudnn-frontend, 1.18 or later, with the libcudnn that it finds."""

    takes: ClassVar[frozenset[str]] = frozenset(("window", "sinks", "shift"))

    deterministic: bool = False
    """Gradients bit for bit the same in every call; on Hopper cuDNN keeps S x S of them for it."""

    def version(self) -> str | None:
        try:
            return metadata.version(DISTRIBUTION)
        except metadata.PackageNotFoundError:
            return None

    def libraries(self) -> tuple[str, ...]:
        return (DISTRIBUTION, "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")

    def takes_here(self, problem: AttentionProblem) -> frozenset[str]:
        # Its bounds are not negative. No block of a ring has such a one.
        bounds = [side for side in problem.mask.sides if side is not None]
        return self.takes if min(bounds, default=0) >= 0 else self.takes - {"shift"}

    def supports(self, problem: AttentionProblem) -> str | None:
        if problem.device != "cuda":
            return "runs on CUDA devices only"
        if problem.dtype not in DTYPES:
            return f"takes {' and '.join(DTYPES)}, not {problem.dtype}"
        if problem.packed:
            return "takes no packed batch of different lengths"
        if problem.causal and problem.q_len > problem.kv_len:
            return "cuDNN's causal mask takes no more queries than keys"
        if problem.window is not None and problem.q_len > problem.kv_len:
            return "cuDNN's window takes no more queries than keys"
        return _why_not_installed() or _why_not_here(problem, self.deterministic)

    def backward_workspace(self, problem: AttentionProblem) -> float:
        """As of ``sdpa_cudnn``: a number a row, float32 sums of dq, dk and dv of every query head.

        In the deterministic mode dP [B, H, S, S_k] as well, of lengths rounded up to 64.
        """
        size = accounting.tensor_bytes(problem)
        workspace = size.lse * (1 + problem.head_dim)
        group_size = problem.num_heads // problem.num_kv_heads
        if group_size > 1:
            workspace += (size.k + size.v) * group_size
        if self.deterministic:
            pairs = accounting.rounded(problem.q_len, 64) * accounting.rounded(problem.kv_len, 64)
            workspace += 2.0 * problem.batch_size * problem.num_heads * pairs
        return workspace

    def dense_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return cudnn_graphs.forward(q, k, v, spec)

    def dense_backward(
        self,
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        spec: AttentionSpec,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # A ring keeps o in float32; the graph has one dtype for all.
        do, o = do.to(q.dtype), o.to(q.dtype)
        deterministic = self.deterministic
        return cudnn_graphs.backward(do, q, k, v, o, lse, spec, deterministic=deterministic)


def _why_not_installed() -> str | None:
    """None if the package can be imported, finds libcudnn and is recent enough."""
    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return f"{DISTRIBUTION} is not installed: {INSTALL}"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(str(number) for number in OLDEST)
        return f"{DISTRIBUTION} {version} is too old, {oldest} is needed: {INSTALL}"
    try:
        # Fails where the package finds no libcudnn.
        library = int(cudnn_graphs.load().backend_version())
    except Exception as error:
        return f"{DISTRIBUTION} cannot be used ({_one_line(error)})"
    number = tuple(int(part) for part in version.split(".")[:2])
    if AT_ODDS[0] <= number <= AT_ODDS[1] and library < RESHAPE_MODES:
        major, minor = library // 10000, library // 100 % 100
        return (
            f"{DISTRIBUTION} {version} builds no graph with libcudnn {major}.{minor}, which must "
            f"be 9.22 or newer for it: pip install '{DISTRIBUTION}>=1.27'"
        )
    return None


def _why_not_here(problem: AttentionProblem, deterministic: bool) -> str | None:
    major, minor = capability()
    if major < 8:
        return f"needs compute capability 8.0 (Ampere), this device has {major}.{minor}"
    reason = why_not_head_dim(problem.head_dim, 256 if major == 9 else 128)
    return reason or _why_no_graph(problem, deterministic, torch.cuda.current_device())


@lru_cache(maxsize=1024)
def _why_no_graph(problem: AttentionProblem, deterministic: bool, device: int) -> str | None:
    """cuDNN's own verdict on contiguous tensors of these sizes, in its own words."""
    dtype = getattr(torch, problem.dtype)

    def laid_out(name: str) -> cudnn_graphs.Layout:
        heads = problem.num_kv_heads if name.endswith(("k", "v")) else problem.num_heads
        length = problem.kv_len if name.endswith(("k", "v")) else problem.q_len
        width = 1 if name == "lse" else problem.head_dim
        shape = (problem.batch_size, heads, length, width)
        return cudnn_graphs.layout(torch.empty(shape, dtype=dtype, device="meta"))

    passes = [cudnn_graphs.FORWARD]
    if problem.needs_grad:
        passes.append(cudnn_graphs.BACKWARD)
    for names in passes:
        key = cudnn_graphs.GraphKey(
            names=names,
            layouts=tuple(laid_out(name) for name in names),
            dtype=dtype,
            device=device,
            mask=problem.mask,
            scale=problem.head_dim**-0.5,
            deterministic=deterministic and names == cudnn_graphs.BACKWARD,
        )
        try:
            cudnn_graphs.check(key)
        except Exception as error:
            return f"cuDNN has no graph for it ({_one_line(error)})"
    return None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
