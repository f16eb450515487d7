"""A timeline of split attention: spans of computing and waiting on each rank, and bytes sent.

Noted in the record as ``timeline``, by traced pass and rank. Tracing records events between
kernels, so the traced passes come after the measured ones and are not timed.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch

from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.measure.attention_calls import AttentionCall
from harness.measure.passes import autocast
from parallel.context.blocks.tracing import NO_TRACING, RecordingTracer
from parallel.context.bound import SplitAttention

TRACED_PASSES = 3


def note_timeline(case: Case, bench: Bench, call: AttentionCall, attention: SplitAttention) -> None:
    """Trace passes on all ranks and note their timelines, once, in a case's last round."""
    if not bench.in_last_round:
        return
    bench.stage("tracing")
    q, k, v = call.inputs()
    do = call.output_gradient(q)
    passes = []
    for _ in range(TRACED_PASSES):
        bench.barrier()
        attention.tracer = recorder = RecordingTracer(bench.device)
        sent = {}
        with autocast(case), torch.set_grad_enabled(call.problem.needs_grad):
            o = call.attend(q, k, v)
        sent["forward"] = recorder.sent_bytes
        if call.problem.needs_grad:
            recorder.phase, recorder.sent_bytes = "backward", 0
            torch.autograd.grad(o, (q, k, v), do)
            sent["backward"] = recorder.sent_bytes
        attention.tracer = NO_TRACING
        passes.append(bench.gather(_rank_timeline(recorder, sent)))
    bench.outcome.notes["timeline"] = passes


def _rank_timeline(recorder: RecordingTracer, sent: dict[str, int]) -> dict[str, Any]:
    """One rank's pass: ``spans`` of [phase, kind, step, start_ms, end_ms], and bytes by phase."""
    spans = [
        [round(value, 6) if isinstance(value, float) else value for value in astuple(span)]
        for span in recorder.spans()
    ]
    return {"spans": spans, "sent_bytes": sent}
