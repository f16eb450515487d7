"""``task=prefill``: prompts of different lengths, as an inference server reads them.

All prompts go through rotary embedding, into the cache and through attention, packed end to end
or padded to the longest. Work is counted without the padding, so that padding lowers the rates.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from harness.bench.bench import Bench
from harness.bench.phase_timer import PhaseTimer
from harness.bench.program import Program
from harness.cases.case import Case
from harness.cases.requirements import (
    require_at_least,
    require_choice,
    require_head_groups,
    require_one_process,
    require_several,
)
from harness.cases.task import Task, Work, task
from harness.measure import profiling
from harness.predictions.decoding import prefill_memory
from harness.tasks.decoding import prefill_call
from harness.tasks.decoding.shared_options import cache_of, require_blocks, require_rotary
from harness.tasks.lengths import ragged_cache_lengths
from kernels import Attention, AttentionProblem, accounting
from kernels.caches import CacheShape

PACKINGS = ("equal", "ragged", "padded")


@task("prefill")
@dataclass(kw_only=True, slots=True)
class Prefill(Task):
    """Prompts of seq_len tokens on average. Phases: prefill, and attention as a part of it."""

    num_heads: int = 16
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads for grouped queries; None means one per query head."""
    head_dim: int = 64
    """Width of one head (d)."""
    packing: str = "ragged"
    """Packed prompts of ``equal`` or ``ragged`` lengths, or the ragged ones ``padded``."""
    rotary: str = "interleaved"
    """Features that are rotated together: ``interleaved`` pairs, ``halves`` of a head, ``none``."""
    warmup_steps: int = 5
    """Untimed passes before measuring."""
    measure_steps: int = 20
    """Timed passes."""

    takes_masks: ClassVar[bool] = False
    uses: ClassVar[frozenset[str]] = frozenset({"cache", "profile"})
    profiled_phases: ClassVar[tuple[str, ...]] = ("prefill",)
    gives_shape: ClassVar[bool] = True
    compared_phases: ClassVar[tuple[str, ...]] = ("prefill",)

    def validate(self, case: Case) -> None:
        require_one_process(case)
        require_choice("task.packing", self.packing, PACKINGS)
        for key in ("num_heads", "num_kv_heads", "head_dim", "measure_steps"):
            value = getattr(self, key)
            if value is not None:
                require_at_least(f"task.{key}", value, 1)
        require_at_least("task.warmup_steps", self.warmup_steps, 0)
        require_head_groups(self.num_heads, self.num_kv_heads)
        require_rotary(self.rotary, "head_dim", self.head_dim)
        if self.packing != "equal":
            require_several(f"task.packing={self.packing}", case.batch_size, "prompt")
        cache = cache_of(case)
        if cache.is_latent:
            raise ValueError(
                "cache=latent: prompts are prefilled into keys and values; use cache=contiguous or "
                "cache=paged"
            )
        require_blocks(case, self.held_lengths(case))

    def words(self) -> list[str]:
        return [self.packing]

    def num_passes(self) -> int:
        return self.warmup_steps + self.measure_steps

    def lengths(self, case: Case) -> list[int]:
        """Tokens of each prompt."""
        if self.packing == "equal":
            return [case.seq_len] * case.batch_size
        found = ragged_cache_lengths(case.batch_size, case.seq_len, case.seed)
        return [max(1, length) for length in found]

    def held_lengths(self, case: Case) -> list[int]:
        """Tokens of each prompt in the cache: with their padding."""
        lengths = self.lengths(case)
        return [max(lengths)] * len(lengths) if self.packing == "padded" else lengths

    def attention_problem(self, case: Case) -> AttentionProblem:
        longest = max(self.lengths(case))
        return AttentionProblem(
            batch_size=case.batch_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            q_len=longest,
            kv_len=longest,
            head_dim=self.head_dim,
            dtype=case.precision.compute,
            device=case.device,
            causal=True,
            needs_grad=False,
            packed=self.packing != "padded",
        )

    def work(self, case: Case) -> dict[str, Work]:
        problem = self.attention_problem(case)
        parts = [
            replace(problem, batch_size=1, q_len=length, kv_len=length)
            for length in self.lengths(case)
        ]
        work = Work(
            flops=sum(map(accounting.forward_flops, parts)),
            bytes=sum(map(accounting.forward_bytes, parts)),
            tokens=sum(self.lengths(case)),
        )
        return {"attention": work, "prefill": work}

    def predicted_memory(self, case: Case) -> dict[str, float] | None:
        problem, held = self.attention_problem(case), self.held_lengths(case)
        shape = CacheShape(
            num_layers=1,
            batch_size=case.batch_size,
            max_len=problem.kv_len,
            num_kv_heads=problem.num_kv_heads,
            head_dim=problem.head_dim,
            dtype=problem.dtype,
        )
        cache = cache_of(case)
        return {
            "cache": float(cache.storage_bytes(shape)),
            "index": float(cache.index_bytes(shape)),
            **prefill_memory(problem, held, rotary=self.rotary),
        }

    def run(self, case: Case, bench: Bench) -> None:
        bench.stage("set-up")
        bench.release_memory()
        with torch.no_grad():
            call = prefill_call.PrefillCall(
                self.attention_problem(case),
                case.attention.role(Attention),
                cache_of(case),
                self.lengths(case),
                bench.device,
                rotary=self.rotary,
            )
            if bench.in_first_round:
                call.check(case, bench)

            results: list[torch.Tensor] = []
            draws = itertools.count(1)

            def step(timer: PhaseTimer) -> None:
                results.clear()
                with timer.phase("prefill"):
                    o_THD = call.step(timer.phase)
                results.append(o_THD)

            bench.measure(
                step,
                warmup=self.warmup_steps,
                passes=self.measure_steps,
                flush_cache=True,
                check=lambda: call.check_results(case, bench, results[0], draw=next(draws)),
            )
            results.clear()
            profiling.profile_if_asked(case, bench, Program(step=step))
