"""Attention backends: the base class of every choice of ``attention=``, and its roles.

:class:`AttentionBackend` is what all backends have in common. A backend inherits a role for each
thing that it can do:

- :class:`Attention` attends to whole sequences, dense or packed, forward and backward.
  :class:`DenseAttention` is the same for a kernel that takes dense batches alone, and
  :class:`DelegatedAttention` for a choice that leaves each call to another backend.
- :class:`Decoding` attends from new tokens to a cache.
- :class:`parallel.context.attention.SequenceParallelAttention` attends to sequences that are split
  over several ranks.

``isinstance(backend, Decoding)`` asks whether a backend has a role. ``backend.role(Decoding)``
gives it in that role, and raises ValueError where it has another. Shapes are those of
:mod:`kernels.problem`.

A backend outside this project is a dataclass in a module that ``ATTNBENCH_PLUGINS`` names::

    @attention_backend("mine")
    @dataclass(kw_only=True, slots=True)
    class Mine(Attention):
        def attend(self, q, k, v, spec): ...
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from kernels import accounting, autograd, merge, packed, sinks
from kernels.decoding import DecodeProblem
from kernels.problem import MASKS, AttentionProblem, AttentionSpec
from kernels.query_gradient import QueryBlock, QueryGradient, QueryGradientMemory
from kernels.registry import Registry, joined_later
from kernels.rotary import Rotary

BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention", decorator="attention_backend", packages=("kernels.backends",)
)

attention_backend = BACKENDS.register

BackendT = TypeVar("BackendT", bound="AttentionBackend")


@dataclass(kw_only=True, slots=True)
class AttentionBackend:
    """One choice of ``attention=``; the fields of a subclass are its options."""

    name: str

    role_in_words: ClassVar[str] = "is an attention backend"
    """Completes the error ``attention=NAME: no backend that ...``."""

    @property
    def compiles(self) -> bool:
        """Whether its first call goes through torch.compile, which takes seconds."""
        return False

    def role(self, role: type[BackendT]) -> BackendT:
        """This backend in a role. Raises ValueError if it has another."""
        if not isinstance(self, role):
            raise ValueError(f"attention={self.name}: no backend that {role.role_in_words}")
        return self

    def version(self) -> str | None:
        """Version of the library that computes, or None where that is not installed."""
        return str(torch.__version__)

    def libraries(self) -> tuple[str, ...]:
        """Distributions beside torch whose code computes, as they are named on PyPI."""
        return ()

    def supports(self, problem: AttentionProblem) -> str | None:
        """None if this backend can solve ``problem`` here, else the reason why not, in one line.

        May query the device and look for libraries; never raises. Callers ask
        :meth:`why_unsupported`, which asks this of masks that ``takes`` names alone.
        """
        return "attends from a cache only, with task=decode or task=generate"

    def why_unsupported(self, problem: AttentionProblem) -> str | None:
        """None if this backend can solve ``problem`` here, else the reason why not, in one line."""
        return self.supports(problem)

    def supports_decode(self, problem: DecodeProblem) -> str | None:
        """:meth:`supports` for a step from a cache."""
        return "attends to whole sequences, and not from a cache"

    def choice(self, problem: AttentionProblem) -> str:
        """Name of the backend that solves a supported ``problem``: this one, unless it picks."""
        return self.name

    def keeps_scores(self, problem: AttentionProblem) -> bool:
        """Whether the S x S probabilities stay in memory for backward; predicts the memory."""
        return False

    def unwritten(self, methods: str) -> NotImplementedError:
        """What to raise for a call that a subclass should have written methods for."""
        home = type(self)
        return NotImplementedError(
            f"attention={self.name}: {home.__module__}.{home.__name__} must define {methods}; "
            "its base class says with which arguments"
        )

    def noting(self, notes: dict[str, Any]) -> AbstractContextManager[None]:
        """A context around the calls of a case; notes what they show, for the case's record."""
        return nullcontext()


@dataclass(kw_only=True, slots=True)
class Attention(AttentionBackend):
    """The role of attending to whole sequences.

    A backend implements :meth:`forward` and :meth:`backward` with an explicit lse, from which
    everything else follows; or, where its library hides the lse, :meth:`attend` alone, and then
    it cannot run inside a ring. Each takes a packed batch where :meth:`supports` says so.
    """

    role_in_words: ClassVar[str] = "attends to whole sequences"

    window: int | None = joined_later(None)
    """Sliding window: a query sees its own key and the window - 1 before it (without a causal mask
    as many after it); None hides nothing."""
    prefix_len: int = joined_later(0)
    """Prefix-LM: the first keys of a sequence, which every query sees; needs a causal mask."""
    softcap: float | None = joined_later(None)
    """Bound of the scores, softcap tanh(score / softcap), as Gemma 2 has it; None leaves them."""
    sinks: bool = joined_later(False)
    """A learned logit for each query head in the softmax, without a value, as gpt-oss has it."""

    takes: ClassVar[frozenset[str]] = frozenset()
    """Which of ``kernels.problem.MASKS``, and ``shift`` and ``value_dim``, its calls may ask for;
    harnesses refuse the others before they ask :meth:`supports`."""
    takes_causal_rectangles: ClassVar[bool] = True
    """Whether a causal mask may have more keys than queries, aligned to the bottom right."""

    @property
    def gives_lse(self) -> bool:
        """Whether it has :meth:`forward` and :meth:`backward`; a class attribute may replace it."""
        return type(self).forward is not Attention.forward

    def supports(self, problem: AttentionProblem) -> str | None:
        return None

    def why_unsupported(self, problem: AttentionProblem) -> str | None:
        for name in problem.asks_for():
            if name not in self.takes_here(problem):
                part = "task" if name == "value_dim" else "attention"
                return f"takes no {part}.{name}={getattr(problem, name)}"
        return self.supports(problem)

    def takes_here(self, problem: AttentionProblem) -> frozenset[str]:
        """:attr:`takes`, where it depends on the problem."""
        return self.takes

    def mask_options(self) -> dict[str, Any]:
        """The options of ``kernels.problem.MASKS``, as fields of an AttentionProblem."""
        return {name: getattr(self, name) for name in MASKS}

    def check_mask_options(self) -> None:
        """Raise ValueError, naming the full key, unless the options of a mask make sense."""
        if self.window is not None and self.window < 1:
            raise ValueError(f"attention.window={self.window}: must be at least 1")
        if self.prefix_len < 0:
            raise ValueError(f"attention.prefix_len={self.prefix_len}: must be at least 0")
        if self.prefix_len and self.window is not None:
            raise ValueError(
                f"attention.prefix_len={self.prefix_len}: cannot be combined with "
                f"attention.window={self.window}; leave one of them out"
            )
        if self.softcap is not None and not 0 < self.softcap < float("inf"):
            raise ValueError(f"attention.softcap={self.softcap}: must be a positive number")

    def rounds_scores(self, problem: AttentionProblem) -> bool:
        """Whether scores are rounded to the problem's dtype, as matrices in memory are.

        Kernels that keep them in registers do not; results are held to what either can reach.
        """
        return False

    def backward_workspace(self, problem: AttentionProblem) -> float:
        """Predicted bytes of a backward pass beside its arguments and its results."""
        return 0.0

    def forward_workspace(self, problem: AttentionProblem) -> float:
        """The same of a forward pass."""
        return 0.0

    def peak_memory(self, problem: AttentionProblem) -> dict[str, float] | None:
        """Predicted peak bytes of a pass by category, or None where that is not predicted.

        A pass is forward, and with gradients backward, on contiguous tensors [B, H, S, D]; for a
        packed batch the problem is one sequence of all its tokens, [T, H, D].
        """
        if problem.needs_grad:
            workspace = self.backward_workspace(problem)
            if problem.sinks:
                workspace = max(workspace, sinks.gradient_workspace(problem))
        else:
            workspace = self.forward_workspace(problem)
        values = accounting.kernel_peak(problem, workspace=workspace)
        if problem.sinks and not problem.needs_grad:
            values["output_with_sinks"] = values["output"]
        return values

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, H, S, D], k and v [B, H_kv, S_k, D] -> o [B, H, S, D] and lse [B, H, S] float32.

        Over the keys alone: sinks, which :func:`kernels.sinks.add` puts in, are the caller's.
        """
        if type(self).attend is Attention.attend:
            raise self.unwritten("forward() and backward(), or attend()")
        raise NotImplementedError(f"attention={self.name} gives no log-sum-exp")

    def backward(
        self,
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        spec: AttentionSpec,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients (dq, dk, dv), in the shapes of q, k and v.

        Args:
            o, lse: over these keys, or over more of them, or with sinks: probabilities are
                exp(score - lse) either way.
        """
        if type(self).forward is not Attention.forward:
            raise self.unwritten("backward()")
        raise NotImplementedError(f"attention={self.name} gives no log-sum-exp")

    def forward_into(
        self,
        o: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """:meth:`forward` that fills o, such as rows of a larger tensor, and gives lse alone."""
        part, lse = self.forward(q, k, v, spec)
        o.copy_(part)
        return lse

    def backward_into(
        self,
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        spec: AttentionSpec,
    ) -> None:
        """:meth:`backward` that fills dq, dk and dv."""
        found = self.backward(do, q, k, v, o, lse, spec)
        for into, part in zip(gradients, found, strict=True):
            into.copy_(part)

    def query_gradient(
        self,
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        blocks: Sequence[QueryBlock],
    ) -> QueryGradient | None:
        """What takes the place of :meth:`backward` for several blocks of keys, and of adding up.

        None where the kernel keeps no sums of dq in float32, or cannot go on with them over these
        blocks.

        Args:
            do, q, o, lse: of a dense batch, as in :meth:`backward`, over the keys of all blocks.
            k: [B, H_kv, S, D], of which shapes and dtype are taken; no block has more keys.
            blocks: all of them, in the order in which they will be added.
        """
        return None

    def query_gradient_memory(
        self, problem: AttentionProblem, blocks: Sequence[QueryBlock]
    ) -> QueryGradientMemory | None:
        """What :meth:`query_gradient` takes, predicted without a device; None where it is None.

        Args:
            problem: of the whole sequence; its queries are those of the blocks.
        """
        return None

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """Differentiable attention, with sinks: shapes as in :meth:`forward`, gives o alone."""
        return autograd.attend(self, q, k, v, spec)

    def attend_with_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`forward` with the sinks of ``spec``, in o and in lse."""
        o, lse = self.forward(q, k, v, spec)
        return (o, lse) if spec.sinks is None else sinks.add(o, lse, spec.sinks)

    def forward_onto(
        self,
        o: torch.Tensor,
        lse: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over more keys, merged with (o, lse) of those seen before.

        Args:
            o: float32, normalised by ``lse``; lse: float32. Shapes as in :meth:`forward`.

        Returns:
            The float32 (o, lse) over both sets of keys; the arguments may be overwritten.
        """
        part_o, part_lse = self.forward(q, k, v, spec)
        if spec.packing is None:
            return merge.merge(o, lse, part_o, part_lse)
        o_HTD, lse = merge.merge(o.transpose(0, 1), lse, part_o.transpose(0, 1), part_lse)
        return o_HTD.transpose(0, 1), lse


@dataclass(kw_only=True, slots=True)
class DenseAttention(Attention):
    """Attention by a kernel of dense batches; a packed batch is a call for each of its sequences.

    A subclass implements :meth:`dense_forward` and :meth:`dense_backward`.
    """

    def peak_memory(self, problem: AttentionProblem) -> dict[str, float] | None:
        """Not predicted for packed batches, of which each sequence is a call."""
        return None if problem.packed else Attention.peak_memory(self, problem)

    def dense_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`forward` for a dense batch."""
        raise self.unwritten("dense_forward()")

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
        """:meth:`backward` for a dense batch."""
        raise self.unwritten("dense_backward()")

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if spec.packing is None:
            return self.dense_forward(q, k, v, spec)
        return packed.forward_each(self.dense_forward, q, k, v, spec)

    def backward(
        self,
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        spec: AttentionSpec,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if spec.packing is None:
            return self.dense_backward(do, q, k, v, o, lse, spec)
        return packed.backward_each(self.dense_backward, do, q, k, v, o, lse, spec)


@dataclass(kw_only=True, slots=True)
class DelegatedAttention(Attention):
    """Attention that leaves each call to another backend."""

    def delegate(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        *,
        with_lse: bool,
    ) -> Attention:
        """The backend that takes this call; one with an explicit log-sum-exp if ``with_lse``.

        The forward and the backward of one call have the same delegate.
        """
        raise self.unwritten("delegate()")

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        return self.delegate(q, k, v, spec, with_lse=False).attend(q, k, v, spec)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.delegate(q, k, v, spec, with_lse=True).forward(q, k, v, spec)

    def backward(
        self,
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        spec: AttentionSpec,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chosen = self.delegate(q, k, v, spec, with_lse=True)
        return chosen.backward(do, q, k, v, o, lse, spec)

    def forward_onto(
        self,
        o: torch.Tensor,
        lse: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self.delegate(q, k, v, spec, with_lse=True)
        return chosen.forward_onto(o, lse, q, k, v, spec)

    def forward_into(
        self,
        o: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        return self.delegate(q, k, v, spec, with_lse=True).forward_into(o, q, k, v, spec)

    def backward_into(
        self,
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        spec: AttentionSpec,
    ) -> None:
        chosen = self.delegate(q, k, v, spec, with_lse=True)
        chosen.backward_into(gradients, do, q, k, v, o, lse, spec)

    def query_gradient(
        self,
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        blocks: Sequence[QueryBlock],
    ) -> QueryGradient | None:
        """That of the backend which takes the calls of all blocks, if it is one."""
        first, *others = (
            self.delegate(
                q[:, :, block.start : block.stop],
                k[:, :, : block.num_keys],
                k[:, :, : block.num_keys],
                block.spec,
                with_lse=True,
            )
            for block in blocks
        )
        if any(other.name != first.name for other in others):
            return None
        return first.query_gradient(do, q, k, o, lse, blocks)


@dataclass(kw_only=True, slots=True)
class Decoding(AttentionBackend):
    """The role of attending from a few new tokens of each sequence to a cache."""

    role_in_words: ClassVar[str] = "attends from a cache"

    def supports_decode(self, problem: DecodeProblem) -> str | None:
        return None

    def decode_choice(self, problem: DecodeProblem) -> str:
        """Name of the backend that takes the steps: this one, unless it picks."""
        return self.name

    def rounds_scores_in_steps(self, problem: DecodeProblem) -> bool:
        """:meth:`Attention.rounds_scores` for a step from a cache."""
        return False

    @property
    def latent_block_size(self) -> int | None:
        """The only size of a latent cache's blocks that it can read; None if any will do."""
        return None

    def decode_workspace(self, problem: DecodeProblem) -> float:
        """Predicted bytes of a step beside the cache, its arguments and its results."""
        return 0.0

    def decoder(
        self, problem: DecodeProblem, cache: Any, *, rotary: Rotary | None, scale: float
    ) -> Any:
        """Steps over a cache: a :class:`kernels.decoding.Decoder`, or a LatentDecoder.

        Args:
            problem: a supported one; its ``max_len`` may be exceeded later.
            cache: from :mod:`kernels.caches`.
            rotary: angles of as many positions as the cache has places; None rotates nothing.
        """
        raise self.unwritten("decoder()")
