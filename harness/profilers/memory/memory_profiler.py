"""``profile=memory``: every allocation of one step, as a snapshot, a timeline and a table.

Each rank leaves two files beside the record: the snapshot, for the viewer at
pytorch.org/memory_viz, and a page with the timeline for any browser. The record has the fullest
rank's profile: the fields of :mod:`~harness.profilers.memory.summary` and
:mod:`~harness.profilers.memory.step_recorder`, ``page_points``, ``peak_bytes_by_rank``, and where
the task has a formula ``predicted``, bytes by part, and ``residual_stream_bytes``.
"""

from __future__ import annotations

import pickle
from dataclasses import asdict, dataclass
from typing import ClassVar

from harness.bench.bench import Bench
from harness.bench.program import Program
from harness.cases.case import Case
from harness.cases.column import CaseColumn, note
from harness.cases.profiler import Profiler, profiler
from harness.profilers.memory import page, step_recorder, summary
from models import accounting


@profiler("memory")
@dataclass(kw_only=True, slots=True)
class MemoryProfiler(Profiler):
    """A timeline of allocated memory."""

    max_events: int = 20_000
    """Most points of the page's timeline, and most allocations that it names."""
    points: int = 400
    """Most points of the timeline in the record."""
    largest: int = 10
    """Most kinds of allocations at the peak in the record; equal ones are one kind."""

    columns: ClassVar[tuple[CaseColumn, ...]] = (
        CaseColumn(name="memory_profile", read=note("memory_profile")),
    )

    def validate(self, case: Case) -> None:
        for key in ("max_events", "points", "largest"):
            value = getattr(self, key)
            if value < 1:
                raise ValueError(f"profile.{key}={value}: must be at least 1")

    def run(self, case: Case, bench: Bench, program: Program) -> None:
        bench.stage("profiling")
        recorder = step_recorder.StepRecorder(case, bench, program)
        bench.barrier()
        snapshot = recorder.record()
        bench.stage("reading the profile")
        timeline = recorder.timeline(snapshot)
        with bench.artifact(f"memory-rank{bench.rank}.snapshot.pickle").open("wb") as file:
            pickle.dump(snapshot, file)
        note = recorder.note | summary.summarise(timeline, points=self.points, largest=self.largest)
        predicted = case.task.predicted_step_memory(case)
        if predicted is not None and case.model is not None:
            note["predicted"] = asdict(predicted)
            parameter = next((tensor for _, tensor in recorder.parameters()), None)
            note["residual_stream_bytes"] = accounting.residual_stream_bytes(
                case.model,
                batch_size=case.batch_size,
                seq_len=-(-case.seq_len // case.parallel.cp),
                element_bytes=parameter.element_size() if parameter is not None else 4,
            )
        path = bench.artifact(f"memory-rank{bench.rank}.html")
        note["page_points"] = page.write_page(path, timeline, case.title, self.max_events)
        ranks = bench.gather(note)
        # The fullest rank decides what fits.
        fullest = max(range(len(ranks)), key=lambda rank: ranks[rank]["peak_bytes"])
        peaks = [rank["peak_bytes"] for rank in ranks]
        bench.outcome.notes["memory_profile"] = ranks[fullest] | {"peak_bytes_by_rank": peaks}
