"""FlashAttention-2 in Triton, forward and backward, in tiles that never leave the chip.

Loop structure: a program owns one tile of queries and walks over the key tiles, keeping a
running largest score, softmax denominator and output (CS336 assignment 2, Algorithm 1).
Backward on any GPU makes two such walks, one program per key tile for dk and dv and one per
query tile for dq, so that no two programs add to the same number; on Hopper it makes one, over
the queries, and programs add to dq in a fixed order. Tiles that the mask empties are skipped,
and tiles that it leaves whole compare no indices. The kernels, and what chooses between
implementations of them, are in :mod:`kernels.flash`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar

import torch

from kernels.backend import Attention, attention_backend
from kernels.flash.call import arguments
from kernels.flash.call import problem as problem_facts
from kernels.problem import MASKS, AttentionProblem, AttentionSpec
from kernels.query_gradient import QueryBlock, QueryGradient, QueryGradientMemory
from kernels.registry import Look, joined_later
from kernels.toolchain import why_not_triton

# Triton is optional: modules that import it are imported inside functions.

MAX_HEAD_DIM = 256

IMPLEMENTATIONS = ("auto", "hopper", "plain")
"""The names of kernels.flash.dispatch, whose import would load Triton; a test compares them."""

AUTOGRAD = ("auto", "native", "python")
"""The names of kernels.flash.function, likewise."""

PRECISIONS = ("auto", "ieee", "bf16x6", "tf32")
"""The names of kernels.flash.call.problem, likewise."""


@attention_backend("flash_triton", look=Look(colour="#D55E00", marker=">"))
@dataclass(kw_only=True, slots=True)
class FlashTriton(Attention):
    """Triton kernels for dense, packed, grouped and causal attention, with an explicit lse."""

    takes: ClassVar[frozenset[str]] = frozenset((*MASKS, "shift", "value_dim"))

    implementation: str = "auto"
    """auto (the fastest that can run), hopper (compute capability 9.0), or plain (any CUDA GPU)."""
    float32_precision: str = "auto"
    """Float32 matmuls: ieee, bf16x6 (as exact, on tensor cores), tf32, or auto to follow
    torch.get_float32_matmul_precision(): tf32, or at highest the faster exact one."""
    autotune: bool = False
    """Whether to search for tile sizes, and remember them, where no table has an answer."""
    autograd: str = joined_later("auto")
    """Gradients: native (a compiled node), python, or auto (native where a C++ compiler can build
    it)."""

    def __post_init__(self) -> None:
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"attention.implementation={self.implementation}: "
                f"must be one of {', '.join(IMPLEMENTATIONS)}"
            )
        if self.float32_precision not in PRECISIONS:
            raise ValueError(
                f"attention.float32_precision={self.float32_precision}: "
                f"must be one of {', '.join(PRECISIONS)}"
            )
        if self.autograd not in AUTOGRAD:
            raise ValueError(
                f"attention.autograd={self.autograd}: must be one of {', '.join(AUTOGRAD)}"
            )

    def version(self) -> str | None:
        try:
            return f"triton {metadata.version('triton')}"
        except metadata.PackageNotFoundError:
            return None

    def libraries(self) -> tuple[str, ...]:
        return ("triton",)

    def supports(self, problem: AttentionProblem) -> str | None:
        reason = why_not_triton(problem.device)
        if reason is not None:
            return reason
        if problem.head_dim > MAX_HEAD_DIM:
            return f"head_dim is at most {MAX_HEAD_DIM}, not {problem.head_dim}"
        if problem.dtype not in ("float32", "float16", "bfloat16"):
            return f"takes float32, float16 and bfloat16, not {problem.dtype}"
        return self._why_no_implementation(problem)

    def _why_no_implementation(self, problem: AttentionProblem) -> str | None:
        from kernels.flash import dispatch, native

        index = torch.cuda.current_device() if problem.device == "cuda" else None
        splits = self.float32_precision == "bf16x6" and problem.dtype == "float32"
        facts = problem_facts.Problem(
            device=torch.device(problem.device, index),
            dtype=getattr(torch, problem.dtype),
            batch_size=problem.batch_size,
            num_heads=problem.num_heads,
            num_kv_heads=problem.num_kv_heads,
            q_len=problem.q_len,
            kv_len=problem.kv_len,
            head_dim=problem.head_dim,
            causal=problem.causal,
            packed=problem.packed,
            accumulates=False,
            # The only one that some devices do not have.
            precision="bf16x6" if splits else "ieee",
            window=problem.window,
            prefix_len=problem.prefix_len,
            shift=problem.shift,
            softcap=problem.softcap,
            value_dim=problem.value_dim,
        )
        reason = dispatch.why_not(facts, self.implementation)
        if reason is None and self.autograd == "native" and (why := native.why_not()) is not None:
            reason = f"autograd=native: {why}"
        return reason

    @contextmanager
    def noting(self, notes: dict[str, Any]) -> Iterator[None]:
        """What the options leave open: whether gradients ran through the compiled node, how
        float32 was multiplied, and where the tiles of the any-GPU kernels come from."""
        from kernels.flash import dispatch, native
        from kernels.flash.any_gpu import configs, launch

        before, float32_before = native.num_calls(), dispatch.float32_calls()
        # What an earlier case remembered would not be chosen, and so not counted, again.
        launch.forget_tiles()
        native.forget()
        origins_before = configs.origins()
        yield
        if chosen := configs.origins() - origins_before:
            notes["tiles"] = ", ".join(sorted(chosen))
        if native.num_calls() > before:
            notes["autograd"] = "native"
        if ran := dispatch.float32_calls() - float32_before:
            notes["float32_precision"] = ", ".join(sorted(ran))

    def backward_workspace(self, problem: AttentionProblem) -> float:
        """Bytes of buffers for the Hopper kernels; of those for any GPU two numbers a row, and the
        gradients of chunks where loops are cut.

        In float32 three: the forward pass keeps a second number of each row's lse.
        """
        if not self._predicted_hopper(problem):
            row_bytes = 12.0 if problem.dtype == "float32" else 8.0
            rows = problem.batch_size * problem.num_heads * problem.q_len
            if problem.device == "cpu":
                # Nothing is cut there, and the formula would load torch.
                return row_bytes * rows
            from kernels.flash.any_gpu import chunks

            of_chunks = chunks.backward_workspace(problem, self.float32_precision)
            return row_bytes * rows + of_chunks
        from kernels.flash.call.problem import reduced_mask
        from kernels.flash.hopper import backward_memory

        mask = reduced_mask(problem.mask, problem.q_len, problem.kv_len)
        return backward_memory.backward_workspace(
            batch_size=problem.batch_size,
            num_heads=problem.num_heads,
            num_kv_heads=problem.num_kv_heads,
            q_len=problem.q_len,
            kv_len=problem.kv_len,
            head_dim=problem.head_dim,
            value_dim=problem.value_dim,
            causal=problem.causal,
            window=mask.window,
            hides_more=bool(mask.prefix_len or mask.shift),
            packed=problem.packed,
        )

    def forward_workspace(self, problem: AttentionProblem) -> float:
        """Bytes of the results of chunks where loops of the any-GPU kernels are cut."""
        if problem.device == "cpu" or self._predicted_hopper(problem):
            return 0.0
        from kernels.flash.any_gpu import chunks

        return chunks.forward_workspace(problem, self.float32_precision)

    def query_gradient_memory(
        self, problem: AttentionProblem, blocks: Sequence[QueryBlock]
    ) -> QueryGradientMemory | None:
        if not self._predicted_hopper(problem):
            return None
        from kernels.flash.hopper import backward_memory

        return backward_memory.query_gradient_memory(
            batch_size=problem.batch_size,
            num_heads=problem.num_heads,
            num_kv_heads=problem.num_kv_heads,
            head_dim=problem.head_dim,
            value_dim=problem.value_dim,
            blocks=blocks,
        )

    def _predicted_hopper(self, problem: AttentionProblem) -> bool:
        """Whether the Hopper kernels would run the backward pass, without asking the device."""
        half = problem.dtype in ("bfloat16", "float16") and problem.head_dim % 8 == 0
        if not half or self.implementation == "plain" or problem.device != "cuda":
            return False
        if problem.value_dim is None:
            return True
        from kernels.flash.hopper import schedule

        return schedule.why_not_narrow(problem.head_dim, problem.value_dim) is None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from kernels.flash import operator

        return operator.forward(self._call(q, k, v, spec))

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
        from kernels.flash import operator

        return operator.backward(self._call(q, k, v, spec), do, o, lse)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        from kernels.flash import function

        o: torch.Tensor = function.attend(q, k, v, spec, self._options())
        return o

    def forward_onto(
        self,
        o: torch.Tensor,
        lse: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A dense kernel starts from (o, lse) itself, unless a faster one does not know how to."""
        from kernels.flash import operator

        if spec.packing is not None or self._runs_on_hopper(q, k, v, spec):
            return Attention.forward_onto(self, o, lse, q, k, v, spec)
        return operator.forward(self._call(q, k, v, spec), accumulator=(o, lse))

    def forward_into(
        self,
        o: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Without a copy, outside of torch.compile."""
        if torch.compiler.is_compiling():
            return Attention.forward_into(self, o, q, k, v, spec)
        from kernels.flash import dispatch

        return dispatch.forward_into(self._call(q, k, v, spec), o)

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
        """Without a copy, outside of torch.compile."""
        if torch.compiler.is_compiling():
            Attention.backward_into(self, gradients, do, q, k, v, o, lse, spec)
            return
        from kernels.flash import dispatch

        dispatch.backward_into(self._call(q, k, v, spec), gradients, do, o, lse)

    def query_gradient(
        self,
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        blocks: Sequence[QueryBlock],
    ) -> QueryGradient | None:
        """By the Hopper kernels, which sum dq in float32 anyway."""
        if q.device.type != "cuda" or torch.compiler.is_compiling():
            return None
        from kernels.flash import dispatch

        return dispatch.query_gradient(do, q, k, o, lse, blocks, self._options())

    def _runs_on_hopper(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> bool:
        """Whether the Hopper kernels, which take no accumulator, would run a plain call."""
        if self.implementation == "plain" or q.device.type != "cuda":
            return False
        if torch.compiler.is_compiling():
            return False
        from kernels.flash import dispatch

        return dispatch.why_not(self._call(q, k, v, spec).problem(), "hopper") is None

    def _call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> arguments.FlashCall:
        return arguments.FlashCall(q=q, k=k, v=v, spec=spec, options=self._options())

    def _options(self) -> arguments.FlashOptions:
        return arguments.FlashOptions(
            precision=self.float32_precision,
            implementation=self.implementation,
            autotune=self.autotune,
            autograd=self.autograd,
        )
