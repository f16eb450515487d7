"""Attention alone: q, k, v through one backend, forward and backward.

The CS336 text's pytorch_attention problem, and what kernels are compared by. Every pass runs
forward, then backward on its result; both are timed apart and together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.case import Case, require_at_least, require_choice
from harness.task import Task, Work, task
from kernels import AttentionProblem, accounting

if TYPE_CHECKING:
    import torch

    from harness.bench import Bench, PhaseTimer

MODES = ("forward", "forward_backward")


@task("attention")
@dataclass(kw_only=True, slots=True)
class Attention(Task):
    """One attention call. Phases: forward, and with gradients backward and forward_backward."""

    mode: str = "forward_backward"
    """``forward`` without gradients, or ``forward_backward``."""
    num_heads: int = 16
    """Query heads; 1 removes the head dimension."""
    num_kv_heads: int | None = None
    """Key and value heads for grouped queries; None means one per query head."""
    head_dim: int = 64
    """Width of one head (d)."""
    causal: bool = True
    """Whether a query sees only the keys up to its own position."""
    warmup_steps: int = 10
    """Untimed passes before measuring."""
    measure_steps: int = 100
    """Timed passes."""

    def validate(self, case: Case) -> None:
        require_choice("task.mode", self.mode, MODES)
        for key in ("num_heads", "num_kv_heads", "head_dim", "measure_steps"):
            value = getattr(self, key)
            if value is not None:
                require_at_least(f"task.{key}", value, 1)
        require_at_least("task.warmup_steps", self.warmup_steps, 0)
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"task.num_kv_heads={self.num_kv_heads}: must divide "
                f"task.num_heads={self.num_heads}"
            )
        if case.world_size > 1:
            raise ValueError(
                f"parallel={case.parallel.name}: task=attention runs on one device; "
                "use parallel=none, or task=train_step"
            )

    def num_passes(self) -> int:
        return self.warmup_steps + self.measure_steps

    def attention_problem(self, case: Case) -> AttentionProblem:
        return AttentionProblem(
            batch_size=case.batch_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            q_len=case.seq_len,
            kv_len=case.seq_len,
            head_dim=self.head_dim,
            dtype=case.precision.compute,
            device=case.device,
            causal=self.causal,
            needs_grad=self.mode != "forward",
        )

    def work(self, case: Case) -> dict[str, Work]:
        problem = self.attention_problem(case)
        tokens = case.batch_size * case.seq_len
        forward = Work(
            flops=accounting.forward_flops(problem),
            bytes=accounting.forward_bytes(problem),
            tokens=tokens,
        )
        if self.mode == "forward":
            return {"forward": forward}
        backward = Work(
            flops=accounting.backward_flops(problem),
            bytes=accounting.backward_bytes(problem),
            tokens=tokens,
        )
        both = Work(
            flops=forward.flops + backward.flops,
            bytes=accounting.forward_bytes(problem) + accounting.backward_bytes(problem),
            tokens=tokens,
        )
        return {"forward": forward, "backward": backward, "forward_backward": both}

    def predicted_memory(self, case: Case) -> dict[str, float]:
        problem = self.attention_problem(case)
        return accounting.memory(problem, keeps_scores=case.attention.keeps_scores(problem))

    def run(self, case: Case, bench: Bench) -> None:
        import torch

        from harness.check import autocast, check_attention, random_qkv

        check_attention(case, bench, sequence_major=False)
        bench.vote()

        bench.stage("set-up")
        problem = self.attention_problem(case)
        scale = problem.head_dim**-0.5
        bench.release_memory()
        baseline = bench.allocated_bytes()
        q, k, v = random_qkv(problem, bench.device, sequence_major=False)

        def attend() -> torch.Tensor:
            with autocast(case), torch.set_grad_enabled(problem.needs_grad):
                return case.attention.attend(q, k, v, causal=problem.causal, scale=scale)

        if self.mode == "forward":

            def forward(timer: PhaseTimer) -> None:
                with timer.phase("forward"):
                    attend()

            bench.measure(
                forward, warmup=self.warmup_steps, passes=self.measure_steps, flush_cache=True
            )
            return

        bench.note_before_backward(attend, inputs=(q, k, v), baseline=baseline)
        do = torch.randn_like(q)

        def forward_backward(timer: PhaseTimer) -> None:
            with timer.phase("forward_backward"):
                with timer.phase("forward"):
                    o = attend()
                with timer.phase("backward"):
                    torch.autograd.grad(o, (q, k, v), do)

        bench.measure(
            forward_backward, warmup=self.warmup_steps, passes=self.measure_steps, flush_cache=True
        )
