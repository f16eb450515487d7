"""PyTorch's scaled_dot_product_attention, with each of its kernels as a choice.

The public function hides the log-sum-exp. Where a kernel's own operator gives it in full, the
explicit :meth:`Sdpa.forward` and :meth:`Sdpa.backward` call that operator, which is what the
public function calls too: then the kernel can run inside a ring, and sinks are added by the
log-sum-exp. PyTorch passes no window and no softcap on to these kernels.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kernels import accounting
from kernels.backend import Decoding, DenseAttention, attention_backend
from kernels.decoding import DecodeProblem, gathered_bytes
from kernels.libraries import sdpa_decode, sdpa_operators
from kernels.problem import AttentionProblem, AttentionSpec
from kernels.registry import Look
from kernels.rotary import Rotary

SDPA_KERNELS = {
    "auto": None,
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}

KERNELS_WITH_LSE = ("flash", "cudnn")
"""The efficient kernel's log-sum-exp is padded to a multiple of 32 rows; math has none."""


_SUM_WIDTHS = {"flash": 32, "efficient": 64, "cudnn": 1}
"""Heads' widths of the sums of dq are rounded up to multiples of this."""

_NUM_COPIES = {"flash": 2, "efficient": 1, "cudnn": 0}
"""Copies that the backward pass makes of tensors as large as o."""


@attention_backend("sdpa", look=Look(colour="#88CCEE", marker="D"), kernel="auto")
@attention_backend("sdpa_flash", look=Look(colour="#0072B2", marker="v"), kernel="flash")
@attention_backend("sdpa_efficient", look=Look(colour="#56B4E9", marker="P"), kernel="efficient")
@attention_backend("sdpa_cudnn", look=Look(colour="#E69F00", marker="X"), kernel="cudnn")
@attention_backend("sdpa_math", look=Look(colour="#DDCC77", marker="^"), kernel="math")
@dataclass(kw_only=True, slots=True)
class Sdpa(DenseAttention, Decoding):
    """torch.nn.functional.scaled_dot_product_attention, restricted to one kernel if asked."""

    takes: ClassVar[frozenset[str]] = frozenset(("sinks",))
    takes_causal_rectangles: ClassVar[bool] = False

    kernel: str = "auto"
    """auto (PyTorch picks), flash (FlashAttention-2), efficient (xFormers), cudnn, or math."""

    @property
    def gives_lse(self) -> bool:
        return self.kernel in KERNELS_WITH_LSE

    def takes_here(self, problem: AttentionProblem) -> frozenset[str]:
        sinks = self.takes if self.gives_lse else frozenset()
        # PyTorch's copy of FlashAttention-2 has kernels of one width alone.
        return sinks if self.kernel == "flash" else sinks | {"value_dim"}

    def __post_init__(self) -> None:
        if self.kernel not in SDPA_KERNELS:
            raise ValueError(
                f"attention.kernel={self.kernel}: must be one of {', '.join(SDPA_KERNELS)}"
            )

    def supports(self, problem: AttentionProblem) -> str | None:
        if problem.packed:
            return "takes no packed batch of different lengths"
        if problem.causal and problem.q_len != problem.kv_len:
            return "PyTorch aligns a causal mask to the top left when lengths differ"
        if problem.device == "cpu":
            if self.kernel in ("efficient", "cudnn"):
                return f"PyTorch's {self.kernel} attention runs on CUDA devices only"
            return None
        return None if self.kernel in ("auto", "math") else self._why_not_on_cuda(problem)

    def keeps_scores(self, problem: AttentionProblem) -> bool:
        return problem.needs_grad and self.kernel == "math"

    def backward_workspace(self, problem: AttentionProblem) -> float:
        """Bytes of one number a row, rowsum(o * do), of float32 sums of dq, and of copies.

        Sums have the kernel's rounded width of a head. FlashAttention-2 and cuDNN give dk and dv
        of every query head, of which those of a group are added up afterwards. FlashAttention
        takes o and do as [B, S, H, D], the efficient kernel do, and copies what lies otherwise.
        """
        kernel = self._predicted_kernel(problem)
        if problem.device != "cuda" or kernel == "math":
            return 0.0
        size = accounting.tensor_bytes(problem)
        width = accounting.rounded(problem.head_dim, _SUM_WIDTHS[kernel])
        workspace = size.lse * (1 + width)
        group_size = problem.num_heads // problem.num_kv_heads
        if group_size > 1:
            workspace += (size.k + size.v) * group_size
        if problem.num_heads > 1:
            workspace += _NUM_COPIES[kernel] * size.o
        return workspace

    def peak_memory(self, problem: AttentionProblem) -> dict[str, float] | None:
        """Of the backward pass, or of the forward pass where FlashAttention-2 splits the keys."""
        kernel = self._predicted_kernel(problem)
        if kernel == "math" or problem.device != "cuda":
            return None
        peak = DenseAttention.peak_memory(self, problem)
        if kernel != "flash" or peak is None:
            return peak
        forward = accounting.split_forward_peak(problem)
        return forward if sum(forward.values()) > sum(peak.values()) else peak

    def _predicted_kernel(self, problem: AttentionProblem) -> str:
        """The kernel; for auto what PyTorch 2.11 takes on Hopper, without asking the device."""
        if self.kernel != "auto":
            return self.kernel
        return "efficient" if problem.dtype == "float32" else "cudnn"

    def _why_not_on_cuda(self, problem: AttentionProblem) -> str | None:
        """PyTorch's own verdict on tensors of this kind, in its own words."""
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"

        can_use = {
            "flash": torch.backends.cuda.can_use_flash_attention,
            "efficient": torch.backends.cuda.can_use_efficient_attention,
            "cudnn": torch.backends.cuda.can_use_cudnn_attention,
        }[self.kernel]

        def tensor(heads: int, width: int) -> torch.Tensor:
            # The verdict depends on dtype, head_dim and heads; a short sequence costs nothing.
            seq = min(problem.q_len, 128)
            shape = (1, seq, heads, width)
            dtype = getattr(torch, problem.dtype)
            x = torch.empty(shape, device="cuda", dtype=dtype, requires_grad=problem.needs_grad)
            return x.transpose(1, 2)

        q, k, v = (
            tensor(problem.num_heads, problem.head_dim),
            tensor(problem.num_kv_heads, problem.head_dim),
            tensor(problem.num_kv_heads, problem.v_dim),
        )
        grouped = problem.num_heads != problem.num_kv_heads
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, problem.causal, grouped)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if can_use(params, debug=True):
                return None
        reasons = [str(item.message).split(" (Triggered internally")[0] for item in caught]
        # The first lines of the verdict introduce it; the last one names the obstacle.
        return reasons[-1] if reasons else f"PyTorch's {self.kernel} attention refuses it"

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        if spec.sinks is not None:
            return DenseAttention.attend(self, q, k, v, spec)
        arguments: dict[str, Any] = {
            "is_causal": spec.causal,
            "scale": spec.scale,
            "enable_gqa": q.shape[1] != k.shape[1],
        }
        kernel = SDPA_KERNELS[self.kernel]
        if kernel is None:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **arguments)
        # PyTorch refuses other layouts where no other kernel may stand in; supports() cannot, since
        # layouts are no part of a problem.
        if self.kernel != "math":
            q, k, v = (sdpa_operators.with_adjacent_entries(x) for x in (q, k, v))
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, kernel)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **arguments)

    def dense_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sdpa_operators.forward(self._operator(q), q, k, v, spec)

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
        return sdpa_operators.backward(self._operator(q), do, q, k, v, o, lse, spec)

    def supports_decode(self, problem: DecodeProblem) -> str | None:
        if problem.is_latent:
            return "takes keys and values, not latents"
        if self.kernel in ("auto", "math"):
            return None
        # Masks hide what lies behind a sequence's last token, and two kernels take none.
        if self.kernel == "efficient" and problem.device == "cuda":
            return None
        return f"PyTorch's {self.kernel} attention takes no mask by lengths; use sdpa"

    def decode_workspace(self, problem: DecodeProblem) -> float:
        return gathered_bytes(problem)

    def decoder(
        self, problem: DecodeProblem, cache: Any, *, rotary: Rotary | None, scale: float
    ) -> sdpa_decode.SdpaDecoder:
        kernel = SDPA_KERNELS[self.kernel]
        return sdpa_decode.SdpaDecoder(problem, cache, kernel, rotary=rotary, scale=scale)

    def _operator(self, q: torch.Tensor) -> str:
        if not self.gives_lse:
            raise NotImplementedError(f"attention.kernel={self.kernel} gives no log-sum-exp")
        return "flash_for_cpu" if q.device.type == "cpu" else self.kernel
