"""``task=decode``: decoding steps from a cache, which an inference server takes for each token.

A step rotates the new queries and keys, appends keys and values to the cache, and attends to it,
in one or more layers with a cache each. The cache's lengths do not grow while passes are measured,
so that all measure the same step. In a mixed batch the step also prefills prompts of other
sequences, as a server with continuous batching does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from harness.bench import copy_bandwidth, launches, matmul_rate
from harness.bench.bench import Bench
from harness.bench.phase_timer import PhaseTimer
from harness.bench.program import Program
from harness.cases import format as fmt
from harness.cases.case import Case
from harness.cases.column import CaseColumn, Point, note, option
from harness.cases.requirements import (
    require_at_least,
    require_choice,
    require_head_groups,
    require_one_process,
    require_several,
)
from harness.cases.task import Task, Work, task
from harness.measure import profiling
from harness.predictions.decoding import (
    decode_work,
    input_and_output_bytes,
    mixed_batch_work,
    prefill_memory,
)
from harness.store.record import Record
from harness.tasks.decoding import decode_call, decode_check, prefill_call
from harness.tasks.decoding.shared_options import (
    LENGTHS,
    cache_of,
    decode_workspace,
    prompt_attention,
    require_block_size,
    require_blocks,
    require_rotary,
)
from harness.tasks.lengths import ragged_cache_lengths
from kernels import BACKENDS, Attention, AttentionProblem, Decoding
from kernels.caches import CacheShape
from kernels.decoding import DecodeProblem
from kernels.launching import graphs


def _prompts(record: Record) -> str:
    task = record.case["task"]
    prompts = task.get("prompts", 0)
    return f"{prompts} x {task['prompt_len']:,}" if prompts else "none"


@task("decode")
@dataclass(kw_only=True, slots=True)
class Decode(Task):
    """New tokens against caches. Phases: decode; in a mixed batch prefill and step too."""

    num_heads: int = 16
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads for grouped queries; None means one per query head."""
    head_dim: int = 64
    """Width of one head (d); of latent attention without its rotary part."""
    kv_lora_rank: int = 512
    """Rank of the latents (r), with cache=latent."""
    rope_head_dim: int = 64
    """Width of the rotary part of a key, with cache=latent."""
    new_tokens: int = 1
    """Tokens that each sequence gains: one, or several in speculative decoding."""
    lengths: str = "equal"
    """Caches of ``equal`` lengths of seq_len, or ``ragged`` ones of that mean."""
    rotary: str = "interleaved"
    """Features that are rotated together: ``interleaved`` pairs, ``halves`` of a head, ``none``."""
    num_layers: int = 1
    """Layers of a step, each with its own cache."""
    prompts: int = 0
    """Prompts that are prefilled in the same step, as sequences of their own."""
    prompt_len: int = 512
    """Tokens of each prompt, where there are prompts."""
    prefill_attention: str = "auto"
    """The attention that prompts go through, where there are prompts."""
    cuda_graph: bool = False
    """Capture the step once and replay it."""
    warmup_steps: int = 10
    """Untimed passes before measuring."""
    measure_steps: int = 100
    """Timed passes."""

    takes_masks: ClassVar[bool] = False
    uses: ClassVar[frozenset[str]] = frozenset({"cache", "profile"})
    profiled_phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    gives_shape: ClassVar[bool] = True
    compared_phases: ClassVar[tuple[str, ...]] = ("decode", "step")
    columns: ClassVar[tuple[CaseColumn, ...]] = (
        CaseColumn(
            name="new_tokens",
            read=option("new_tokens", otherwise=1),
            point=Point(
                header="new tokens",
                describe=fmt.unless(1, "{:.0f} new tokens"),
                format=fmt.integer,
                after="cache",
            ),
        ),
        CaseColumn(
            name="layers",
            read=option("num_layers", otherwise=1),
            point=Point(
                header="layers",
                describe=fmt.unless(1, "{:.0f} layers"),
                format=fmt.integer,
                after="lengths",
            ),
        ),
        CaseColumn(
            name="prompts",
            read=_prompts,
            point=Point(
                header="prompts", describe=fmt.unless("none", "with prompts {}"), after="layers"
            ),
        ),
        CaseColumn(name="decode", read=note("decode")),
    )

    def validate(self, case: Case) -> None:
        require_one_process(case)
        require_choice("task.lengths", self.lengths, LENGTHS)
        sizes = ("num_heads", "num_kv_heads", "head_dim", "kv_lora_rank", "rope_head_dim")
        for key in (*sizes, "new_tokens", "num_layers", "prompt_len", "measure_steps"):
            value = getattr(self, key)
            if value is not None:
                require_at_least(f"task.{key}", value, 1)
        require_at_least("task.prompts", self.prompts, 0)
        require_at_least("task.warmup_steps", self.warmup_steps, 0)
        require_choice("task.prefill_attention", self.prefill_attention, BACKENDS.names())
        require_head_groups(self.num_heads, self.num_kv_heads)
        key = "rope_head_dim" if cache_of(case).is_latent else "head_dim"
        require_rotary(self.rotary, key, getattr(self, key))
        if self.lengths == "ragged":
            require_several("task.lengths=ragged", case.batch_size, "sequence")
        self._validate_cache(case)

    def _validate_cache(self, case: Case) -> None:
        cache = cache_of(case)
        if cache.is_latent and self.num_kv_heads is not None:
            raise ValueError(
                f"task.num_kv_heads={self.num_kv_heads}: cache=latent keeps one latent for all "
                "heads; leave it out"
            )
        if self.prompts and self.cuda_graph:
            raise ValueError(
                f"task.cuda_graph=true: a graph replays one batch, and task.prompts={self.prompts} "
                "makes it dynamic; use task.prompts=0 or task.cuda_graph=false"
            )
        if self.prompts and cache.is_latent:
            raise ValueError(
                f"task.prompts={self.prompts}: prompts are prefilled into keys and values; use "
                "cache=contiguous or cache=paged"
            )
        require_block_size(case)
        require_blocks(case, [length + self._room for length in self.cache_lengths(case)])

    @property
    def _room(self) -> int:
        """Room for new tokens: a graph is checked twice, the second time at greater lengths."""
        return self.new_tokens * (2 if self.cuda_graph else 1)

    def words(self) -> list[str]:
        found = [f"t{self.new_tokens}"] if self.new_tokens > 1 else []
        found += [self.lengths] if self.lengths != "equal" else []
        found += [f"{self.num_layers}_layers"] if self.num_layers > 1 else []
        found += [f"prompts{self.prompts}x{self.prompt_len}"] if self.prompts else []
        return found + (["cuda_graph"] if self.cuda_graph else [])

    def num_passes(self) -> int:
        return self.warmup_steps + self.measure_steps

    def cache_lengths(self, case: Case) -> list[int]:
        """Tokens that each sequence's cache holds before a step."""
        if self.lengths == "ragged":
            return ragged_cache_lengths(case.batch_size, case.seq_len, case.seed)
        return [case.seq_len] * case.batch_size

    def decode_problem(self, case: Case) -> DecodeProblem:
        cache = cache_of(case)
        heads = 1 if cache.is_latent else self.num_kv_heads or self.num_heads
        return DecodeProblem(
            batch_size=case.batch_size,
            num_heads=self.num_heads,
            num_kv_heads=heads,
            head_dim=self.head_dim,
            new_tokens=self.new_tokens,
            max_len=max(self.cache_lengths(case)) + self._room,
            dtype=case.precision.compute,
            device=case.device,
            block_size=cache.tokens_per_block,
            kv_lora_rank=self.kv_lora_rank if cache.is_latent else 0,
            rope_head_dim=self.rope_head_dim if cache.is_latent else 0,
            rotary=self.rotary,
            cuda_graph=self.cuda_graph,
        )

    def cache_shape(self, case: Case) -> CacheShape:
        problem = self.decode_problem(case)
        return CacheShape(
            num_layers=self.num_layers,
            batch_size=case.batch_size,
            max_len=problem.max_len,
            num_kv_heads=problem.num_kv_heads,
            head_dim=1 if problem.is_latent else problem.head_dim,
            kv_lora_rank=problem.kv_lora_rank,
            rope_head_dim=problem.rope_head_dim,
            dtype=problem.dtype,
        )

    def attention_problem(self, case: Case) -> AttentionProblem:
        """The step as an attention call of few queries and many keys."""
        problem = self.decode_problem(case)
        return AttentionProblem(
            batch_size=case.batch_size,
            num_heads=problem.num_heads,
            num_kv_heads=problem.num_kv_heads,
            q_len=self.new_tokens,
            kv_len=problem.max_len,
            head_dim=problem.head_dim + problem.rope_head_dim,
            dtype=problem.dtype,
            device=problem.device,
            causal=True,
            needs_grad=False,
        )

    def prefill_problem(self, case: Case) -> AttentionProblem:
        """The packed attention call over all prompts of a mixed batch."""
        return AttentionProblem(
            batch_size=self.prompts,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            q_len=self.prompt_len,
            kv_len=self.prompt_len,
            head_dim=self.head_dim,
            dtype=case.precision.compute,
            device=case.device,
            causal=True,
            needs_grad=False,
            packed=True,
        )

    def prefill_backend(self) -> Attention:
        return prompt_attention(self.prefill_attention)

    def why_unsupported(self, case: Case) -> str | None:
        if self.cuda_graph and case.device != "cuda":
            return "CUDA graphs exist on CUDA devices only"
        reason = case.attention.supports_decode(self.decode_problem(case))
        if reason is None and self.prompts:
            return self.prefill_backend().why_unsupported(self.prefill_problem(case))
        return reason

    def attention_choice(self, case: Case) -> str:
        return case.attention.role(Decoding).decode_choice(self.decode_problem(case))

    def work(self, case: Case) -> dict[str, Work]:
        decode = decode_work(self.decode_problem(case), self.cache_lengths(case), self.num_layers)
        if not self.prompts:
            return {"decode": decode}
        return mixed_batch_work(decode, self.prefill_problem(case), self.num_layers)

    def predicted_memory(self, case: Case) -> dict[str, float] | None:
        """Bytes at the peak of a step; not of a CUDA graph, whose pool has a granularity."""
        if self.cuda_graph:
            return None
        problem, shape = self.decode_problem(case), self.cache_shape(case)
        cache = cache_of(case)
        values = {
            "cache": float(cache.storage_bytes(shape)),
            "index": float(cache.index_bytes(shape)),
            **input_and_output_bytes(problem),
            "rotary table": 4.0 * problem.max_len * (problem.rope_head_dim or problem.head_dim),
            "workspace": decode_workspace(case, problem),
        }
        if self.prompts:
            prompts = self.prefill_problem(case)
            lengths = [self.prompt_len] * self.prompts
            parts = prefill_memory(prompts, lengths, rotary=self.rotary)
            held = replace(shape, batch_size=self.prompts, max_len=self.prompt_len)
            values["prompts"] = sum(parts.values()) + cache.storage_bytes(held)
        return values

    def run(self, case: Case, bench: Bench) -> None:
        roof = {
            "copy_bandwidth_gb_s": copy_bandwidth.copy_bandwidth_gb_s(bench),
            "matmul_tflops": matmul_rate.matmul_tflops(bench, case.precision.compute),
        }
        bench.stage("set-up")
        bench.release_memory()
        with torch.no_grad():
            call = decode_call.DecodeCall(
                self.decode_problem(case),
                case.attention.role(Decoding),
                cache_of(case),
                self.cache_shape(case),
                self.cache_lengths(case),
                bench.device,
                seed=case.seed,
            )
            call.plan()
            step = graphs.GraphedStep(call.step) if self.cuda_graph else call.step
            bench.stage("checking")
            attention = case.attention.role(Decoding)
            rounds_scores = attention.rounds_scores_in_steps(self.decode_problem(case))
            checks = decode_check.DecodeCheck(case, bench, call, rounds_scores=rounds_scores)
            if bench.in_first_round:
                self._check_before(call, step, checks)
            checks.begin()
            self._measure(case, bench, step, checks)
            if bench.in_last_round:
                bench.stage("counting kernels")
                counted = launches.count_launches(step, bench.device)
                bench.outcome.notes["decode"] = {**roof, **counted}

    def _check_before(
        self,
        call: decode_call.DecodeCall,
        step: Callable[[], Any],
        checks: decode_check.DecodeCheck,
    ) -> None:
        """Check two steps; the second of a graph at greater lengths, which a replay has to read."""
        checks.begin()
        checks.check(step())
        if self.cuda_graph:
            call.cache.places.advance(self.new_tokens)
            checks.begin()
        checks.check(step())
        if self.cuda_graph:
            call.cache.places.rewind(self.new_tokens)

    def _prefill(self, case: Case, bench: Bench) -> prefill_call.PrefillCall:
        """The prompts of a mixed batch, in sequences and caches of their own."""
        call = prefill_call.PrefillCall(
            self.prefill_problem(case),
            self.prefill_backend(),
            cache_of(case),
            [self.prompt_len] * self.prompts,
            bench.device,
            rotary=self.rotary,
            num_layers=self.num_layers,
        )
        if bench.in_first_round:
            call.check(case, bench)
        return call

    def _measure(
        self,
        case: Case,
        bench: Bench,
        step: Callable[[], Any],
        checks: decode_check.DecodeCheck,
    ) -> None:
        prefill = self._prefill(case, bench) if self.prompts else None
        results: dict[str, Any] = {}
        draws = itertools.count(1)

        def decode_alone(timer: PhaseTimer) -> None:
            results.clear()
            with timer.phase("decode"):
                outputs = step()
            results["decode"] = outputs

        def mixed(timer: PhaseTimer) -> None:
            assert prefill is not None
            results.clear()
            with timer.phase("step"):
                with timer.phase("prefill"):
                    prompts = prefill.step()
                with timer.phase("decode"):
                    outputs = step()
            results.update(prefill=prompts, decode=outputs)

        def check() -> None:
            checks.check(results["decode"])
            if prefill is not None:
                prefill.check_results(case, bench, results["prefill"], draw=next(draws))

        measured = decode_alone if prefill is None else mixed
        bench.measure(
            measured,
            warmup=self.warmup_steps,
            passes=self.measure_steps,
            flush_cache=True,
            check=check,
        )
        results.clear()
        profiling.profile_if_asked(case, bench, Program(step=measured))
