"""attention=auto: the first backend of a stated order that can solve the problem here.

The order, best first, depends on the device (:data:`CHAINS`). On Hopper it follows the times
that were measured on an H200, forward and backward together. Libraries that are not installed
are passed over, and so are kernels that refuse a dtype, a head_dim, a mask or a packed batch,
and, where a ring asks for the log-sum-exp, those that hide it. Triton's interpreter is never
chosen on a CPU. The choice follows from the problem and the machine alone, and every record
says what it was.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch

from kernels.backend import (
    BACKENDS,
    Attention,
    Decoding,
    DelegatedAttention,
    attention_backend,
)
from kernels.decoding import DecodeProblem
from kernels.problem import MASKS, AttentionProblem, AttentionSpec
from kernels.registry import Look
from kernels.rotary import Rotary

_ON_ANY_GPU = ("sdpa_flash", "flex", "sdpa", "naive", "flash_torch")

CHAINS: dict[str, tuple[str, ...]] = {
    "sm_90": (
        "flash_attn_4",
        "flash_attn_3",
        # Faster than cuDNN on long sequences, the same at 1,024 tokens (results/h200).
        "flash_triton",
        "sdpa_cudnn",
        "flash_attn_2",
        *_ON_ANY_GPU,
    ),
    "newer GPUs": ("flash_attn_4", "sdpa_cudnn", "flash_triton", "flash_attn_2", *_ON_ANY_GPU),
    "older GPUs": ("flash_attn_2", "flash_triton", "sdpa_cudnn", *_ON_ANY_GPU),
    "CPU": ("sdpa", "sdpa_flash", "naive", "flash_torch"),
}
"""Names of backends, best first. flash_torch ends each chain: slow, and takes everything. Gradients
of most values narrower than keys are an exception (:func:`choose`)."""

DECODE_CHAINS: dict[str, tuple[str, ...]] = {
    # Version 3 before 2, and latents by FlashMLA where it is installed: Megatron-LM's order.
    "sm_90": (
        *("flash_attn_3", "flash_attn_2", "flash_decode", "flashinfer", "sdpa", "standard"),
        *("flash_mla", "mla_absorbed"),
    ),
    "other GPUs": (
        *("flash_attn_2", "flash_decode", "flashinfer", "sdpa", "standard"),
        *("flash_mla", "mla_absorbed"),
    ),
    "CPU": ("sdpa", "standard", "mla_absorbed"),
}
"""Chains for decoding. standard takes any keys and values, mla_absorbed takes any latents."""


@attention_backend("auto", look=Look(colour="#000000", marker="8"))
@dataclass(kw_only=True, slots=True)
class Auto(DelegatedAttention, Decoding):
    """Delegates each call to the first backend of its chain that supports it."""

    takes: ClassVar[frozenset[str]] = frozenset((*MASKS, "shift", "value_dim"))

    def choice(self, problem: AttentionProblem) -> str:
        return choose(problem).name

    def noting(self, notes: dict[str, Any]) -> AbstractContextManager[None]:
        """The notes of flash_triton, the only backend in a chain that makes some."""
        return BACKENDS["flash_triton"].target(name="flash_triton").noting(notes)

    def rounds_scores_in_steps(self, problem: DecodeProblem) -> bool:
        return choose_decode(problem).rounds_scores_in_steps(problem)

    def rounds_scores(self, problem: AttentionProblem) -> bool:
        chosen = (choose(problem, with_lse=with_lse) for with_lse in (False, True))
        return any(backend.rounds_scores(problem) for backend in chosen)

    def decode_choice(self, problem: DecodeProblem) -> str:
        return choose_decode(problem).decode_choice(problem)

    def decoder(
        self, problem: DecodeProblem, cache: Any, *, rotary: Rotary | None, scale: float
    ) -> Any:
        return choose_decode(problem).decoder(problem, cache, rotary=rotary, scale=scale)

    def delegate(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        *,
        with_lse: bool,
    ) -> Attention:
        """The choice for these tensors; to torch.compile, a constant of the compiled code."""
        needs_grad = with_lse or (
            torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        )
        if spec.packing is None:
            (batch_size, num_heads, q_len, head_dim), kv_len = q.shape, k.shape[2]
        else:
            batch_size = spec.packing.cu_seqlens_q.shape[0] - 1
            _, num_heads, head_dim = q.shape
            q_len, kv_len = spec.packing.max_q_len, spec.packing.max_kv_len
        # Imports torch._dynamo, in more than a second, which most workers do without.
        from kernels import tracing

        return tracing.constant(
            _choose_for,
            (batch_size, num_heads, k.shape[1], q_len, kv_len, head_dim, v.shape[-1]),
            q.dtype,
            q.device.type,
            (spec.causal, spec.window, spec.prefix_len, spec.shift),
            (spec.softcap, spec.sinks is not None),
            needs_grad,
            spec.packing is not None,
            with_lse,
        )


def _choose_for(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    mask: tuple[bool, int | None, int, int],
    logits: tuple[float | None, bool],
    needs_grad: bool,
    packed: bool,
    with_lse: bool,
) -> Attention:
    causal, window, prefix_len, shift = mask
    softcap, has_sinks = logits
    batch_size, num_heads, num_kv_heads, q_len, kv_len, head_dim, v_dim = sizes
    problem = AttentionProblem(
        batch_size=batch_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        causal=causal,
        needs_grad=needs_grad,
        packed=packed,
        window=window,
        prefix_len=prefix_len,
        shift=shift,
        softcap=softcap,
        sinks=has_sinks,
        value_dim=None if v_dim == head_dim else v_dim,
    )
    return choose(problem, with_lse=with_lse)


@lru_cache(maxsize=1024)
def choose(problem: AttentionProblem, *, with_lse: bool = False) -> Attention:
    """The first backend of the chain that supports the problem, and, if asked, gives its lse."""
    chain = chain_of(problem.device)
    if problem.needs_grad and "sdpa_cudnn" in chain and _is_narrow(problem):
        # Ahead of flash_triton by a guess: these widths were not measured.
        chain = (chain[0], "sdpa_cudnn", *chain[1:])
    for name in chain:
        if name not in BACKENDS:
            continue
        entry = BACKENDS[name]
        backend = entry.target(name=name, **entry.preset).role(Attention)
        if (backend.gives_lse or not with_lse) and backend.why_unsupported(problem) is None:
            return backend
    raise AssertionError(f"flash_torch refuses nothing, and yet {problem}")


def _is_narrow(problem: AttentionProblem) -> bool:
    """Whether values are narrower than keys, and not in 16 bits those of latent attention.

    With keys of 192 columns and values of 128 flash_triton takes 0.96 of flash-attn-4's time for
    both passes, and 0.88 of cuDNN's (results/h200-kernels/narrow_values.txt).
    """
    widths = problem.head_dim, problem.value_dim
    return problem.value_dim is not None and (problem.dtype == "float32" or widths != (192, 128))


@lru_cache(maxsize=1024)
def choose_decode(problem: DecodeProblem) -> Decoding:
    """The first backend of the chain that can take such steps from a cache."""
    for name in decode_chain_of(problem.device):
        entry = BACKENDS[name]
        backend = entry.target(name=name, **entry.preset).role(Decoding)
        if backend.supports_decode(problem) is None:
            return backend
    raise AssertionError(f"the last two of every chain refuse nothing, and yet {problem}")


def decode_chain_of(device: str) -> tuple[str, ...]:
    """The chain for ``cpu``, or for the GPU that this process uses."""
    if device == "cpu":
        return DECODE_CHAINS["CPU"]
    return DECODE_CHAINS["sm_90" if chain_of(device) == CHAINS["sm_90"] else "other GPUs"]


def chain_of(device: str) -> tuple[str, ...]:
    """The chain for ``cpu``, or for the GPU that this process uses."""
    if device == "cpu":
        return CHAINS["CPU"]
    major, _ = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if major == 9:
        return CHAINS["sm_90"]
    return CHAINS["newer GPUs" if major > 9 else "older GPUs"]
