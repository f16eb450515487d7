"""Runs task=generate: checks what a cached model says, then measures prefill and steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harness.bench.bench import Bench, PhaseTimer
from harness.bench.copy_bandwidth import copy_bandwidth_gb_s
from harness.bench.launches import count_launches
from harness.bench.program import Program
from harness.cases.case import Case
from harness.measure.check import require_accurate
from harness.measure.passes import autocast
from kernels import Decoding
from kernels.reference import relative_error
from models.generation import Generator, Prompts
from models.transformer import Transformer

if TYPE_CHECKING:
    from harness.tasks.decoding.generate import Generate

CHECKED_STEPS = 4

BLOCKS_TOLERANCE = 3.0
"""Times the tolerance of one attention call: two ways through all blocks round differently."""


def run(task: Generate, case: Case, bench: Bench) -> None:
    from harness.tasks.decoding.generate import cache_of, model_of

    bandwidth = copy_bandwidth_gb_s(bench)
    bench.stage("set-up")
    bench.release_memory()
    torch.manual_seed(case.seed)
    config, prefill = model_of(case), task.prefill_backend()
    model = Transformer(
        config, prefill, device=bench.device, dtype=getattr(torch, case.precision.parameters)
    )
    given = [
        torch.randint(config.vocab_size, (length,), device=bench.device)
        for length in task.prompt_lengths(case)
    ]
    prompts = Prompts.of(given)
    generator = Generator(
        model,
        case.attention.role(Decoding),
        prefill,
        cache_of(case),
        batch_size=case.batch_size,
        max_len=task.max_len(case),
        dtype=case.precision.compute,
        cuda_graph=task.cuda_graph,
    )

    with torch.no_grad(), autocast(case):
        if bench.in_first_round:
            _check(case, bench, model, generator, given)

        def step(timer: PhaseTimer) -> None:
            with timer.phase("prefill"):
                tokens_B = generator.prefill(prompts).argmax(dim=-1)
            for _ in range(task.output_len - 1):
                with timer.phase("decode"):
                    tokens_B = generator.step(tokens_B).argmax(dim=-1)

        bench.measure(step, warmup=task.warmup_steps, passes=task.measure_steps)
        if case.profile is not None and bench.in_last_round:
            case.profile.run(case, bench, Program(step=step, model=model))
        if bench.in_last_round:
            bench.stage("counting kernels")
            tokens_B = generator.prefill(prompts).argmax(dim=-1)

            def again() -> None:
                generator.step(tokens_B)
                generator.cache.places.rewind(1)

            again()
            counted = count_launches(again, bench.device)
            bench.outcome.notes["generate"] = {"copy_bandwidth_gb_s": bandwidth, **counted}


def _check(
    case: Case, bench: Bench, model: Transformer, generator: Generator, prompts: Sequence[Tensor]
) -> None:
    """Logits of the last sequence from the cache against those of the model without one."""
    bench.stage("checking")
    tokens_B = (logits_BV := generator.prefill(Prompts.of(prompts))).argmax(dim=-1)
    from_cache, tokens = [logits_BV[-1].clone()], [prompts[-1]]
    for _ in range(CHECKED_STEPS):
        if generator.cache.places.longest == generator.cache.places.max_len:
            break
        tokens.append(tokens_B[-1:].clone())
        logits_BV = generator.step(tokens_B)
        from_cache.append(logits_BV[-1].clone())
        tokens_B = logits_BV.argmax(dim=-1)
    whole = torch.cat(tokens)
    positions = torch.arange(len(whole), device=whole.device)
    expected = model(whole[None], positions)[0, len(prompts[-1]) - 1 :]
    error = relative_error(torch.stack(from_cache), expected.double())
    require_accurate(
        case,
        bench,
        {"logits": error},
        reference="the model without a cache",
        times_tolerance=BLOCKS_TOLERANCE,
    )
