"""``task=generate``: the whole model generates, prefill first and then greedy decoding steps.

A pass is one prefill and output_len - 1 decoding steps, each a sample of its phase. The logits
of whole generations and what they leave in the cache are checked against the same model without
one, and steps of the decoder over random caches against float64.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from harness.bench import copy_bandwidth, launches
from harness.bench.bench import Bench
from harness.bench.phase_timer import PhaseTimer
from harness.bench.program import Program
from harness.cases.case import Case
from harness.cases.column import CaseColumn, note
from harness.cases.precision import DTYPE_BYTES
from harness.cases.requirements import (
    require_at_least,
    require_choice,
    require_one_process,
    require_several,
)
from harness.cases.task import Task, Work, task
from harness.measure import passes, profiling
from harness.tasks.decoding import decode_call, decode_check, generate_check
from harness.tasks.decoding.shared_options import (
    LENGTHS,
    cache_of,
    decode_workspace,
    prompt_attention,
    require_block_size,
    require_blocks,
)
from harness.tasks.lengths import ragged_cache_lengths
from kernels import BACKENDS, Attention, AttentionProblem, Decoding
from kernels.accounting import attended_pairs
from kernels.caches import CacheShape
from kernels.decoding import DecodeProblem
from models import accounting, generation, transformer
from models.config import ModelConfig
from models.decoding import cache_shape, decode_problem

KEPT_LOGITS = 2**28
"""Logits of all steps that the first check holds at most."""


@task("generate")
@dataclass(kw_only=True, slots=True)
class Generate(Task):
    """Greedy generation from random prompts of seq_len tokens. Phases: prefill, decode."""

    output_len: int = 32
    """Tokens to generate for each prompt; the prefill gives the first."""
    lengths: str = "equal"
    """Prompts of ``equal`` lengths of seq_len, or ``ragged`` ones of that mean."""
    prefill_attention: str = "auto"
    """The attention that prompts go through."""
    cuda_graph: bool = False
    """Capture the decoding step once and replay it."""
    warmup_steps: int = 1
    """Untimed passes before measuring."""
    measure_steps: int = 3
    """Timed passes, of output_len - 1 decoding steps each."""

    takes_masks: ClassVar[bool] = False
    uses: ClassVar[frozenset[str]] = frozenset({"model", "cache", "profile"})
    profiled_phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    compared_phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    columns: ClassVar[tuple[CaseColumn, ...]] = (
        CaseColumn(name="generate", read=note("generate")),
    )
    takes_latents: ClassVar[bool] = True

    def validate(self, case: Case) -> None:
        require_one_process(case)
        require_choice("task.lengths", self.lengths, LENGTHS)
        require_choice("task.prefill_attention", self.prefill_attention, BACKENDS.names())
        require_at_least("task.output_len", self.output_len, 2)
        require_at_least("task.warmup_steps", self.warmup_steps, 0)
        require_at_least("task.measure_steps", self.measure_steps, 1)
        if self.lengths == "ragged":
            require_several("task.lengths=ragged", case.batch_size, "prompt")
        model, cache = model_of(case), cache_of(case)
        if model.kv_lora_rank is None and cache.is_latent:
            raise ValueError(
                f"cache=latent: model={model.name} keeps keys and values; set model.kv_lora_rank, "
                "or use cache=contiguous or cache=paged"
            )
        if model.kv_lora_rank is not None and not cache.is_latent:
            raise ValueError(
                f"cache={cache.name}: model.kv_lora_rank={model.kv_lora_rank} keeps latents; use "
                "cache=latent"
            )
        require_block_size(case)
        require_blocks(case, [length + self.output_len for length in self.prompt_lengths(case)])

    def words(self) -> list[str]:
        found = [f"out{self.output_len}"]
        found += [self.lengths] if self.lengths != "equal" else []
        return found + (["cuda_graph"] if self.cuda_graph else [])

    def num_passes(self) -> int:
        return self.warmup_steps + self.measure_steps

    def prompt_lengths(self, case: Case) -> list[int]:
        """Tokens of each prompt."""
        if self.lengths == "ragged":
            found = ragged_cache_lengths(case.batch_size, case.seq_len, case.seed)
            return [max(1, length) for length in found]
        return [case.seq_len] * case.batch_size

    def max_len(self, case: Case) -> int:
        """Tokens that a sequence has room for."""
        return max(self.prompt_lengths(case)) + self.output_len

    def cache_shape(self, case: Case) -> CacheShape:
        return cache_shape(
            model_of(case),
            batch_size=case.batch_size,
            max_len=self.max_len(case),
            dtype=case.precision.compute,
        )

    def decode_problem(self, case: Case) -> DecodeProblem:
        return decode_problem(
            model_of(case),
            batch_size=case.batch_size,
            max_len=self.max_len(case),
            dtype=case.precision.compute,
            device=case.device,
            block_size=cache_of(case).tokens_per_block,
            cuda_graph=self.cuda_graph,
        )

    def attention_problem(self, case: Case) -> AttentionProblem:
        """The attention call over all prompts together."""
        model, lengths = model_of(case), self.prompt_lengths(case)
        return AttentionProblem(
            batch_size=case.batch_size,
            num_heads=model.num_heads,
            num_kv_heads=model.kv_heads,
            q_len=max(lengths),
            kv_len=max(lengths),
            head_dim=model.head_dim,
            dtype=case.precision.compute,
            device=case.device,
            causal=True,
            needs_grad=False,
            packed=len(set(lengths)) > 1,
        )

    def prefill_backend(self) -> Attention:
        return prompt_attention(self.prefill_attention)

    def why_unsupported(self, case: Case) -> str | None:
        if self.cuda_graph and case.device != "cuda":
            return "CUDA graphs exist on CUDA devices only"
        reason = case.attention.supports_decode(self.decode_problem(case))
        return reason or self.prefill_backend().why_unsupported(self.attention_problem(case))

    def attention_choice(self, case: Case) -> str:
        return case.attention.role(Decoding).decode_choice(self.decode_problem(case))

    def work(self, case: Case) -> dict[str, Work]:
        """Work of the prefill, and of a decoding step in the middle of the output."""
        model, lengths = model_of(case), self.prompt_lengths(case)
        size = DTYPE_BYTES[case.precision.compute]
        count = accounting.count_parameters(model)
        pair_flops = 4.0 * model.num_heads * model.head_dim * model.num_layers
        held = sum(lengths) + case.batch_size * self.output_len / 2
        # Only the last token of each prompt goes through the head.
        per_token = 2.0 * (count.attention + count.feed_forward)
        head = 2.0 * count.head * case.batch_size
        pairs = sum(attended_pairs(length, length, causal=True) for length in lengths)
        shape = self.cache_shape(case)
        weights = size * count.linear
        return {
            "prefill": Work(
                flops=per_token * sum(lengths) + head + pair_flops * pairs,
                bytes=weights + shape.bytes_per_token * float(sum(lengths)),
                tokens=sum(lengths),
            ),
            "decode": Work(
                flops=per_token * case.batch_size + head + pair_flops * held,
                bytes=weights + shape.bytes_per_token * held,
                tokens=case.batch_size,
            ),
        }

    def predicted_memory(self, case: Case) -> dict[str, float] | None:
        """Bytes at the peak, which is in the prefill: its activations beside weights and cache."""
        model, shape, cache = model_of(case), self.cache_shape(case), cache_of(case)
        size, tokens = DTYPE_BYTES[case.precision.compute], sum(self.prompt_lengths(case))
        parameters = accounting.num_parameters(model) * DTYPE_BYTES[case.precision.parameters]
        # At the widest place of a block: the residual stream and its norm beside the three
        # inner tensors of the feed-forward layer, or q, k, v, rotated once more, and o.
        inner = max(3 * model.d_ff, 7 * model.d_model)
        return {
            "parameters": float(parameters),
            "cache": float(cache.storage_bytes(shape) + cache.index_bytes(shape)),
            "activations": float(size * tokens * (2 * model.d_model + inner)),
            "workspace": decode_workspace(case, self.decode_problem(case)),
        }

    def _compared_steps(self, case: Case) -> range:
        """The steps whose logits the first check keeps: all, unless they are too many to hold."""
        elements = case.batch_size * model_of(case).vocab_size * self.output_len
        return range(self.output_len - 1, -1, -max(1, -(-elements // KEPT_LOGITS)))

    def _check_decoder(self, case: Case, bench: Bench) -> None:
        """Check steps of the decoder alone, over random caches in the middle of the output."""
        bench.stage("checking")
        problem, attention = self.decode_problem(case), case.attention.role(Decoding)
        call = decode_call.DecodeCall(
            problem,
            attention,
            cache_of(case),
            replace(self.cache_shape(case), num_layers=1),
            [length + self.output_len // 2 for length in self.prompt_lengths(case)],
            bench.device,
            seed=case.seed,
        )
        call.plan()
        rounds_scores = attention.rounds_scores_in_steps(problem)
        checks = decode_check.DecodeCheck(case, bench, call, rounds_scores=rounds_scores)
        checks.begin()
        for _ in range(2):
            checks.check(call.step())

    def run(self, case: Case, bench: Bench) -> None:
        if bench.in_first_round:
            with torch.no_grad():
                self._check_decoder(case, bench)
        bandwidth = copy_bandwidth.copy_bandwidth_gb_s(bench)
        bench.stage("set-up")
        bench.release_memory()
        torch.manual_seed(case.seed)
        config, prefill = model_of(case), self.prefill_backend()
        model = transformer.Transformer(
            config, prefill, device=bench.device, dtype=getattr(torch, case.precision.parameters)
        )
        given = [
            torch.randint(config.vocab_size, (length,), device=bench.device)
            for length in self.prompt_lengths(case)
        ]
        prompts = generation.Prompts.of(given)
        generator = generation.Generator(
            model,
            case.attention.role(Decoding),
            prefill,
            cache_of(case),
            batch_size=case.batch_size,
            max_len=self.max_len(case),
            dtype=case.precision.compute,
            cuda_graph=self.cuda_graph,
        )

        with torch.no_grad(), passes.autocast(case):
            checks = generate_check.GenerationCheck(case, bench, model, generator, given)
            made = generate_check.Generated()

            def generate(timer: PhaseTimer, kept: Container[int]) -> None:
                made.clear()
                with timer.phase("prefill"):
                    logits_BV = generator.prefill(prompts)
                    tokens_B = logits_BV.argmax(dim=-1)
                made.add(logits_BV, tokens_B, keep=0 in kept)
                for number in range(1, self.output_len):
                    with timer.phase("decode"):
                        logits_BV = generator.step(tokens_B)
                        tokens_B = logits_BV.argmax(dim=-1)
                    made.add(logits_BV, tokens_B, keep=number in kept)

            def step(timer: PhaseTimer) -> None:
                generate(timer, (self.output_len - 1,))

            if bench.in_first_round:
                bench.stage("checking")
                generate(PhaseTimer(bench.device), self._compared_steps(case))
                checks.check(made)
            bench.measure(
                step,
                warmup=self.warmup_steps,
                passes=self.measure_steps,
                check=lambda: checks.check(made),
            )
            made.clear()
            profiling.profile_if_asked(case, bench, Program(step=step, model=model))
            if bench.in_last_round:
                bench.stage("counting kernels")
                tokens_B = generator.prefill(prompts).argmax(dim=-1)

                def again() -> None:
                    generator.step(tokens_B)
                    generator.cache.places.rewind(1)

                again()
                counted = launches.count_launches(again, bench.device)
                bench.outcome.notes["generate"] = {"copy_bandwidth_gb_s": bandwidth, **counted}


def model_of(case: Case) -> ModelConfig:
    assert case.model is not None, "generate uses a model"
    return case.model
