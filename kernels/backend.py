"""What an attention backend is, and the problem it is asked to solve.

Tensors are ``[batch, heads, seq, head_dim]`` (B, H, S, D); lse, the natural-log
log-sum-exp of the scaled scores, is float32 ``[B, H, S]``. Causal masks are aligned to the
bottom right: with S_q queries and S_k keys, query i sees keys 0 .. i + S_k - S_q. A query that
sees no key has output zero, lse minus infinity, and no gradient.

A packed batch has sequences of different lengths end to end, ``[tokens, heads, head_dim]``
(T, H, D) with lse ``[H, T]``, and a :class:`Packing` that says where each begins.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kernels.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from kernels.decode.rotary import Rotary
    from kernels.decoding import DecodeProblem

BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention", decorator="attention_backend", packages=("kernels.backends",)
)

attention_backend = BACKENDS.register


@dataclass(kw_only=True, slots=True, frozen=True)
class AttentionProblem:
    """One attention call in numbers: what a backend is asked whether it supports."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``: what the kernel sees, after autocast."""
    device: str
    """``cpu`` or ``cuda``."""
    causal: bool
    needs_grad: bool
    packed: bool = False
    """Sequences of different lengths end to end; q_len and kv_len are then the longest."""
    cp: int = 1
    """Ranks that the sequence is split over; lengths are those of the whole sequence."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Packing:
    """Where each sequence of a packed batch begins, as FlashAttention's ``cu_seqlens``."""

    cu_seqlens_q: Tensor
    """int32 [N + 1] on the tensors' device: sequence n has query tokens [n] up to [n + 1]."""
    cu_seqlens_k: Tensor
    """The same for keys; causal masks are aligned to the bottom right of each sequence."""
    max_q_len: int
    """Length of the longest sequence of queries, known to the host without a copy."""
    max_kv_len: int

    def slices(self) -> list[tuple[slice, slice]]:
        """Query and key tokens of each sequence; waits for the device."""
        q_ends, k_ends = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        return [
            (slice(q_ends[n], q_ends[n + 1]), slice(k_ends[n], k_ends[n + 1]))
            for n in range(len(q_ends) - 1)
        ]


@dataclass(kw_only=True, slots=True)
class AttentionBackend:
    """Attention on one device. A subclass is one choice of ``attention=``; its fields are options.

    A backend implements :meth:`forward` and :meth:`backward` with an explicit lse, from which
    everything else follows; or, where its library hides the lse, :meth:`attend` alone, and then
    ``gives_lse`` is False and it cannot run inside a ring. The packed methods, and continuing
    from an accumulator, are derived ones here that a kernel may replace by better ones.
    """

    name: str

    @property
    def gives_lse(self) -> bool:
        """Whether it has :meth:`forward` and :meth:`backward`; a class attribute may replace it."""
        return True

    @property
    def splits_sequence(self) -> bool:
        """Whether it can run over several ranks that hold parts of a sequence each."""
        return False

    @property
    def compiles(self) -> bool:
        """Whether its first call goes through torch.compile, which takes seconds."""
        return False

    def version(self) -> str | None:
        """Version of the library that computes, or None where that is not installed."""
        import torch

        return str(torch.__version__)

    def choice(self, problem: AttentionProblem) -> str:
        """Name of the backend that solves a supported ``problem``: this one, unless it picks."""
        return self.name

    def supports(self, problem: AttentionProblem) -> str | None:
        """None if this backend can solve ``problem`` here, else the reason why not, in one line.

        May query the device and look for libraries; never raises.
        """
        return None

    def noting(self, notes: dict[str, Any]) -> AbstractContextManager[None]:
        """Around the calls of a case: notes what is found out while they run, for its record."""
        return nullcontext()

    def keeps_scores(self, problem: AttentionProblem) -> bool:
        """Whether the S x S probabilities stay in memory for backward; predicts the memory."""
        return False

    def backward_workspace(self, problem: AttentionProblem) -> float:
        """Predicted bytes of a backward pass beside what it is given and what it gives."""
        return 0.0

    def bind(self, group: ProcessGroup, device: torch.device) -> AbstractContextManager[Any]:
        """This attention over ranks that hold parts of sequences, where it splits them."""
        raise NotImplementedError

    def kernel_of(self, problem: AttentionProblem) -> str:
        """Name of the kernel that computes, where sequences are split."""
        raise NotImplementedError

    def transport_of(self, problem: AttentionProblem) -> str:
        """Name of what brings other ranks' keys here, where sequences are split."""
        raise NotImplementedError

    def peak_memory(self, problem: AttentionProblem) -> dict[str, float]:
        """Predicted peak bytes on one rank by category, where sequences are split."""
        raise NotImplementedError

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """q [B, H, S, D], k and v [B, H_kv, S_k, D] -> o [B, H, S, D] and lse [B, H, S] float32."""
        raise NotImplementedError

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients (dq, dk, dv), in the shapes of q, k and v."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        """Differentiable attention: shapes as in :meth:`forward`, gives o alone."""
        from kernels.autograd import AttentionFunction

        return AttentionFunction.apply(q, k, v, self, causal, scale)

    def forward_onto(
        self,
        o: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Attention over more keys, merged with (o, lse) of those seen before.

        Args:
            o: float32 [B, H, S, D], normalised by ``lse``; lse: float32 [B, H, S].

        Returns:
            The float32 (o, lse) over both sets of keys; the arguments may be overwritten.
        """
        from kernels.merge import merge

        return merge(o, lse, *self.forward(q, k, v, causal=causal, scale=scale))

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """q [T, H, D], k and v [T_k, H_kv, D] -> o [T, H, D] and lse [H, T] float32."""
        from kernels.packed import forward_each

        return forward_each(self, q, k, v, packing, causal=causal, scale=scale)

    def forward_packed_onto(
        self,
        o: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packing: Packing,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """:meth:`forward_onto` over a packed batch: float32 o [T, H, D] and lse [H, T]."""
        from kernels.merge import merge

        part_o, part_lse = self.forward_packed(q, k, v, packing, causal=causal, scale=scale)
        merged_o, merged_lse = merge(o.transpose(0, 1), lse, part_o.transpose(0, 1), part_lse)
        return merged_o.transpose(0, 1), merged_lse

    def backward_packed(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        packing: Packing,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients (dq, dk, dv) of :meth:`forward_packed`, in the shapes of q, k and v."""
        from kernels.packed import backward_each

        return backward_each(self, do, q, k, v, o, lse, packing, causal=causal, scale=scale)

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, *, causal: bool, scale: float
    ) -> Tensor:
        """Differentiable :meth:`forward_packed`, gives o alone."""
        from kernels.autograd import PackedAttentionFunction

        return PackedAttentionFunction.apply(q, k, v, packing, self, causal, scale)

    def supports_decode(self, problem: DecodeProblem) -> str | None:
        """None if this backend can take such steps from a cache here, else why not, in one line."""
        return "attends to whole sequences, and not from a cache"

    def decode_choice(self, problem: DecodeProblem) -> str:
        """Name of the backend that takes the steps: this one, unless it picks."""
        return self.name

    @property
    def latent_block_size(self) -> int | None:
        """The only size of a latent cache's blocks that it can read; None if any will do."""
        return None

    def decode_workspace(self, problem: DecodeProblem) -> float:
        """Predicted bytes of a step beside the cache, what it is given and what it gives."""
        return 0.0

    def decoder(
        self, problem: DecodeProblem, cache: Any, *, rotary: Rotary | None, scale: float
    ) -> Any:
        """Steps over a cache: a :class:`kernels.decoding.Decoder`, or of latents.

        Args:
            problem: a supported one, of which ``max_len`` may be exceeded later.
            cache: from :mod:`kernels.caches`.
            rotary: of as many positions as the cache has places; None rotates nothing.
        """
        raise NotImplementedError


BackendT = TypeVar("BackendT", bound=AttentionBackend)
