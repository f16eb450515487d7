"""The plan of a request: the cases left to measure, and a prediction of the time they take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.cases.case import Case
from harness.cases.hardware import find_hardware
from harness.cases.plugins import choices_of, plugins_of
from harness.render.registries import FIGURES, TABLES
from harness.request.compose import Request
from harness.request.staleness import Staleness, environment_here, staleness_of
from harness.run.rounds.interleaving import comparison_groups
from harness.run.rounds.options import RunOptions, most_seconds
from harness.store.attempts import Records
from harness.store.record import Record, RecordStore, is_final
from harness.store.rounds import RoundStore
from harness.store.sweep_plan import SweepPlan
from models.accounting import num_parameters

# Rough rates for predicting the time left; progress rescales them by measured times.
SETUP_S = 0.6
MODEL_S, BILLION_PARAMETERS_S, RANKS_S = 1.2, 0.3, 1.2
"""What a training step on GPUs takes besides: to build a model, by its size, and for ranks to meet.
With the two for compilers below they are fitted to 385 steps on H100s and H200s, half of which take
0.6 to 1.2 times what is predicted, and nine of ten 0.3 to 2.2 times (benchmarks.bench_plan). The
compilation of Triton's kernels, tens of seconds where no cache has them, is left out."""
COMPILE_S = {"cpu": 12.0, "cuda": 8.0}
COMPILED_LAYER_S, COMPILED_AGAIN_S = 1.3, 1.5
"""For each layer of a model that is compiled as a whole; and each round, from the cache."""
EFFICIENCY = 0.35
CPU_FLOPS_PER_CORE = 40e9
FALLBACK_GPU_FLOPS = 100e12
MEMORY_BYTES_PER_S = {"cpu": 10e9, "cuda": 1e12}
"""Rate of copies; a low estimate."""
LINK_BYTES_PER_S = {"cpu": 0.5e9, "cuda": 50e9}
"""Rate of gloo on one host and of NCCL; low estimates."""


STALE, IN_TURNS, BEGUN = "stale", "in turns with stale", "unfinished rounds"
"""Why ``remeasure=stale`` measures a recorded case again, as a plan says it."""


@dataclass(kw_only=True, slots=True)
class PlannedCases:
    """The cases of a request, split by whether a record of them stands already."""

    todo: list[Case] = field(default_factory=list)
    done: list[Record] = field(default_factory=list)
    staleness: Staleness = field(default_factory=Staleness)
    """Of recorded cases, whether those that are measured again or those that are not."""
    why_again: dict[str, str] = field(default_factory=dict)
    """Of the recorded cases that ``remeasure=stale`` measures again, by id."""


def plan_cases(request: Request, records: Records, device_name: str = "") -> PlannedCases:
    """Compare a request with the records that exist, and them with the code and the host of now.

    Args:
        device_name: of the GPU that cases on CUDA run on here.
    """
    options = request.options
    by_id = {case.id: case for case in request.cases}
    final = {case_id: records[case_id] for case_id in by_id if _stands(case_id, records, options)}
    # A host that only submits says nothing of those that measure.
    here = environment_here(device_name) if final and request.launcher.measures_here else None
    plan = PlannedCases(staleness=staleness_of(final.values(), here))
    plan.why_again = _why_again(request, plan.staleness, final)
    again = {"none": set(), "stale": set(plan.why_again)}.get(options.remeasure)
    for case_id, case in by_id.items():
        if case_id in final and again is not None and case_id not in again:
            plan.done.append(final[case_id])
        else:
            plan.todo.append(case)
    return plan


def _why_again(
    request: Request, staleness: Staleness, final: Mapping[str, Record]
) -> dict[str, str]:
    """:data:`STALE`, :data:`IN_TURNS` or :data:`BEGUN`, by the id of a recorded case.

    A ratio needs rounds that both cases took in turns, so that the cases of its comparison that
    have a time are measured with a stale one. Not with one whose library this host lacks: its old
    record will go on to count, and would be compared with new ones.
    """
    found = dict.fromkeys(staleness.stale, STALE)
    if not request.options.in_turns:
        return found
    timed = {case_id for case_id, record in final.items() if record.status == "ok"}
    for group in comparison_groups(request.cases) if found else []:
        case_ids = {case.id for case in group}
        if case_ids & staleness.measurable:
            found = dict.fromkeys(case_ids & timed, IN_TURNS) | found
    # A run that was stopped may have recorded the stale case before those in turns with it.
    begun = RoundStore(RecordStore(request.options.results)).begun()
    return dict.fromkeys(begun & timed, BEGUN) | found


def _stands(case_id: str, records: Records, options: RunOptions) -> bool:
    """Whether neither the record that counts nor a newer attempt asks for another one."""
    attempts = (records.get(case_id), records.newest(case_id))
    return all(record is not None and is_final(record, retry=options.retry) for record in attempts)


def predicted_seconds(case: Case, device_name: str = "", rounds: int = 1) -> float:
    """Predict a case's time, roughly: FLOPs, bytes it sends, models to build, and compilation.

    Each of ``rounds`` sets up and warms up anew, and after the first compiles what no cache has.
    """
    work = case.task.work(case)
    flops = work["step"].flops if "step" in work else sum(item.flops for item in work.values())
    rate = CPU_FLOPS_PER_CORE * (os.cpu_count() or 1)
    if case.device == "cuda":
        hardware = find_hardware(device_name)
        peak = hardware.peak_tflops.get(case.precision.peak) if hardware else None
        rate = EFFICIENCY * peak * 1e12 if peak else FALLBACK_GPU_FLOPS
    # Decoding is bound by the bytes that it moves.
    moved = sum(item.bytes or 0.0 for item in work.values())
    sent = sum(item.sent_bytes or 0.0 for item in work.values())
    seconds_per_pass = (
        max(flops / rate, moved / MEMORY_BYTES_PER_S[case.device])
        + sent / LINK_BYTES_PER_S[case.device]
    )
    warmup = getattr(case.task, "warmup_steps", 0)
    num_passes = case.task.num_passes() + (rounds - 1) * warmup
    seconds = rounds * SETUP_S + num_passes * seconds_per_pass
    if case.device == "cuda" and case.model is not None and "compile" in case.task.uses:
        parameters = num_parameters(case.model, case.attention_variant)
        seconds += rounds * (MODEL_S + parameters / 1e9 * BILLION_PARAMETERS_S)
        seconds += rounds * RANKS_S if case.world_size > 1 else 0.0
        if case.compile is not None and case.compile.scope == "model":
            seconds += COMPILED_LAYER_S * case.model.num_layers
        if case.compiles:
            seconds += (rounds - 1) * COMPILED_AGAIN_S
    if case.attention.compiles or case.task.compiles(case):
        seconds += COMPILE_S[case.device]
    return seconds


def further_rounds_s(options: RunOptions, first_rounds_s: float) -> float:
    """The most time that rounds added by ``until=decided`` take."""
    return most_seconds(options, first_rounds_s) if options.until_decided else 0.0


def sweep_plan(request: Request) -> SweepPlan:
    """The plan that is stored for `attnbench-report`, which makes tables and figures from it."""
    return SweepPlan(
        label=request.label,
        name=request.sweep.name,
        title=request.sweep.title,
        about=request.sweep.about,
        command=request.command,
        scale=request.scale,
        tables=request.sweep.tables,
        figures=request.sweep.figures,
        case_ids=[case.id for case in request.cases],
        plugins=plugins_of(
            [
                *choices_of(case.to_dict() for case in request.cases),
                *((TABLES, name) for name in request.sweep.tables),
                *((FIGURES, name) for name in request.sweep.figures),
            ]
        ),
    )
