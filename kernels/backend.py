"""What an attention backend is, and the problem it is asked to solve.

Tensors are ``[batch, heads, seq, head_dim]`` (B, H, S, D); lse, the natural-log
log-sum-exp of the scaled scores, is float32 ``[B, H, S]``. Causal masks are aligned to the
bottom right: with S_q queries and S_k keys, query i sees keys 0 .. i + S_k - S_q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from kernels.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS: Registry[type[AttentionBackend]] = Registry("attention", packages=("kernels",))

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


@dataclass(kw_only=True, slots=True)
class AttentionBackend:
    """Attention on one device. A subclass is one choice of ``attention=``; its fields are options.

    A backend implements :meth:`forward` and :meth:`backward` with an explicit lse, from which
    :meth:`attend` follows; or, where its library hides the lse, :meth:`attend` alone, and then
    ``gives_lse`` is False and it cannot run inside a ring.
    """

    name: str

    gives_lse: ClassVar[bool] = True
    compiles: ClassVar[bool] = False
    """Whether its first call goes through torch.compile, which takes seconds."""

    def supports(self, problem: AttentionProblem) -> str | None:
        """None if this backend can solve ``problem`` here, else the reason why not, in one line.

        May query the device and look for libraries; never raises.
        """
        return None

    def keeps_scores(self, problem: AttentionProblem) -> bool:
        """Whether the S x S probabilities stay in memory for backward; predicts the memory."""
        return False

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
        from kernels._autograd import AttentionFunction

        return AttentionFunction.apply(q, k, v, self, causal, scale)


BackendT = TypeVar("BackendT", bound=AttentionBackend)
