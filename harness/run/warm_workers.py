"""The workers of a run: kept warm from case to case, and started anew for another round."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from harness.cases.case import Case
from harness.run.rounds.options import RunOptions
from harness.run.workers import worker_group as groups

if TYPE_CHECKING:
    # Plans predict how long workers take to start, and start none.
    from harness.run.nodes.hosts import Hosts
    from harness.run.rounds.record_builder import RecordBuilder
    from harness.run.workers.worker_group import WorkerGroup

START_S = {"cpu": 3.0, "cuda": 6.0}
"""To start a worker; NCCL takes about as long again."""

ROUNDS_OF_GPUS = 2
"""Rounds of one case that the same processes measure on several GPUs, which take 5 to 15 s to start
with NCCL."""


class Workers:
    """At most one group of workers at a time, and the folder of what all of them compile.

    Args:
        on_start: called whenever a group is started.
    """

    def __init__(
        self, options: RunOptions, hosts: Hosts | None, on_start: Callable[[], object]
    ) -> None:
        self.start_s = 0.0
        """How long the last group took to start."""
        # Unlike those of earlier runs, whose rounds may be joined with those of this one.
        self.process = time.time_ns() // 1_000_000
        """The number of the group; see :class:`harness.store.record.Round`."""
        self._options = options
        self._hosts = hosts
        self._on_start = on_start
        self._caches = tempfile.TemporaryDirectory(prefix="attnbench-")
        self._group: WorkerGroup | None = None

    def serve(self, options: RunOptions, on_start: Callable[[], object]) -> None:
        """Go on with another run; its group is a new one if it starts otherwise."""
        if _start_options(options) != _start_options(self._options):
            self.end()
        self._options, self._on_start = options, on_start

    def for_round(self, run: RecordBuilder) -> WorkerGroup:
        """A group for the next round of a case: a new one, if this has measured enough of them."""
        if run.processes.count(self.process) >= rounds_per_process(
            self._options, run.case.device, run.case.world_size
        ):
            self.end()
        return self.for_case(run.case)

    def starts_in(self, rounds: int, case: Case) -> int:
        """How often processes start, at most, for so many further rounds of a case."""
        together = rounds_per_process(self._options, case.device, case.world_size)
        return 0 if together == sys.maxsize else math.ceil(rounds / together)

    def for_case(self, case: Case) -> WorkerGroup:
        """The group, started anew unless it has the case's number of ranks and its device."""
        group = self._group
        if group is None or (group.world_size, group.device) != (case.world_size, case.device):
            self.end()
            self._on_start()
            self.process += 1
            began_s = time.monotonic()
            group = self._group = groups.WorkerGroup(
                device=case.device,
                world_size=case.world_size,
                **_start_options(self._options),
                caches=self._caches.name,
                hosts=self._hosts,
                dynamo=case.uses_dynamo,
            )
            self.start_s = time.monotonic() - began_s
        return group

    def end(self) -> None:
        """End the group, if there is one."""
        if self._group is not None:
            group, self._group = self._group, None
            group.close()

    def close(self) -> None:
        """End the group and remove what it has compiled."""
        self.end()
        self._caches.cleanup()


def _start_options(options: RunOptions) -> dict[str, Any]:
    """What processes are told when they start, and cannot be told later."""
    return {
        "results": options.results,
        "timeout_s": options.timeout_s,
        "vote_timeout_s": options.vote_timeout_s,
    }


def rounds_per_process(options: RunOptions, device: str, world_size: int) -> int:
    """How many rounds of a case the same processes measure."""
    if options.fresh_rounds is None and device == "cuda" and world_size > 1:
        return ROUNDS_OF_GPUS
    return sys.maxsize if options.fresh_rounds is False else 1


def predicted_starts_s(cases: Sequence[Case], options: RunOptions) -> float:
    """Predict how long workers take to start: once for each number of ranks, or each round of it.

    Sweeps of over two minutes a round start them a little more often; see
    :data:`harness.run.runner.BATCH_S`.
    """
    seconds = 0.0
    for device, ranks in {(case.device, case.world_size) for case in cases}:
        split = ranks > 1 and device == "cuda"
        starts = math.ceil(options.interleave / rounds_per_process(options, device, ranks))
        seconds += starts * START_S[device] * (2 if split else 1)
    return seconds
