"""Runs task=decode: checks a step, measures it, counts its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from harness.bench.bench import Bench, PhaseTimer
from harness.bench.copy_bandwidth import copy_bandwidth_gb_s
from harness.bench.launches import count_launches
from harness.bench.matmul_rate import matmul_tflops
from harness.bench.program import Program
from harness.cases.case import Case
from harness.measure.check import require_accurate
from harness.tasks.decoding.decode_call import DecodeCall
from kernels import Decoding
from kernels.launching.graphs import GraphedStep

if TYPE_CHECKING:
    from harness.tasks.decoding.decode import Decode


def run(task: Decode, case: Case, bench: Bench) -> None:
    from harness.tasks.decoding.decode import cache_of

    roof = {
        "copy_bandwidth_gb_s": copy_bandwidth_gb_s(bench),
        "matmul_tflops": matmul_tflops(bench, case.precision.compute),
    }
    bench.stage("set-up")
    bench.release_memory()
    with torch.no_grad():
        call = DecodeCall(
            task.decode_problem(case),
            case.attention.role(Decoding),
            cache_of(case),
            task.cache_shape(case),
            task.cache_lengths(case),
            bench.device,
            seed=case.seed,
        )
        call.plan()
        step: Callable[[], Any] = GraphedStep(call.step) if task.cuda_graph else call.step
        if bench.in_first_round:
            bench.stage("checking")
            _check(case, bench, call, step, again=task.cuda_graph)
        prefill = _prefill(task, case, bench)
        _measure(task, case, bench, step, prefill)
        if bench.in_last_round:
            bench.stage("counting kernels")
            counted = count_launches(step, bench.device)
            bench.outcome.notes["decode"] = {**roof, **counted}


def _check(
    case: Case, bench: Bench, call: DecodeCall, step: Callable[[], Any], *, again: bool
) -> None:
    """Compare a step with float64; ``again`` once lengths have changed, as a replay must see."""
    new_tokens = call.problem.new_tokens
    errors: dict[str, float] = {}
    for advanced in (False, True) if again else (False,):
        if advanced:
            call.cache.places.advance(new_tokens)
        before = call.history()
        found = call.errors(step(), before)
        errors = {name: max(error, errors.get(name, 0.0)) for name, error in found.items()}
        if advanced:
            call.cache.places.rewind(new_tokens)
    require_accurate(case, bench, errors)


def _prefill(task: Decode, case: Case, bench: Bench) -> Callable[[], Any] | None:
    """The prompts of a mixed batch, in sequences and caches of their own."""
    if not task.prompts:
        return None
    from harness.tasks.decoding.decode import cache_of
    from harness.tasks.decoding.prefill_call import PrefillCall

    call = PrefillCall(
        task.prefill_problem(case),
        task.prefill_backend(),
        cache_of(case),
        [task.prompt_len] * task.prompts,
        bench.device,
        rotary=task.rotary,
        num_layers=task.num_layers,
    )
    if bench.in_first_round:
        call.check(case, bench)
    return call.step


def _measure(
    task: Decode,
    case: Case,
    bench: Bench,
    step: Callable[[], Any],
    prefill: Callable[[], Any] | None,
) -> None:
    def decode_alone(timer: PhaseTimer) -> None:
        with timer.phase("decode"):
            step()

    def mixed(timer: PhaseTimer) -> None:
        assert prefill is not None
        with timer.phase("step"):
            with timer.phase("prefill"):
                prefill()
            with timer.phase("decode"):
                step()

    measured = decode_alone if prefill is None else mixed
    bench.measure(measured, warmup=task.warmup_steps, passes=task.measure_steps, flush_cache=True)
    if case.profile is not None and bench.in_last_round:
        case.profile.run(case, bench, Program(step=measured))
