"""What is known of the job that a group of workers has, and who is to blame if the group breaks."""

from __future__ import annotations

import signal

from harness.run.children import events
from harness.run.children.rank import RankProcess
from harness.run.children.reply import Reply

LAST_S = 5.0
"""How long a worker whose events have ended has to end as well."""


class JobWatch:
    """The group's last job: its number, and the ranks that have begun with it."""

    def __init__(self, ranks: list[RankProcess]) -> None:
        self._ranks = ranks
        self._number = 0
        """Events of earlier jobs are late."""
        self._began: set[int] = set()
        """The ranks that have begun with it."""
        self._staged: set[int] = set()
        """The ranks that have come to a stage of it."""

    def next(self) -> int:
        """The number of a further job, with which no rank has begun."""
        self._number += 1
        self._began.clear()
        self._staged.clear()
        return self._number

    def had_begun(self, rank_index: int) -> bool:
        """Whether a rank's end can be the case's doing.

        Not if the rank had not begun with it. In a worker that measured other cases, the time
        before the first stage is spent on what they left; in a new one it is the case's own.
        """
        return rank_index in self._staged or (rank_index in self._began and self._number == 1)

    def blame(self, rank_index: int, how: str, reply: Reply) -> None:
        """End the group because of one rank, and the case with it unless it had not begun."""
        reply.healthy = False
        who = f"rank {rank_index}" if len(self._ranks) > 1 else "the worker"
        if not self.had_begun(rank_index):
            reply.lost = f"{who} {how} before the case began"
        elif reply.fault is None:
            reply.fault = "failed"
            reply.message = f"{who} {how} while {self._ranks[rank_index].stage}"

    def note_death(self, rank_index: int, reply: Reply) -> None:
        reply.healthy = False
        if any(outcome["rank"] == rank_index for outcome in reply.outcomes):
            return
        how = self.how_it_ended(rank_index)
        # NCCL's watchdog aborts a rank whose peer has gone; the peer's own words say why.
        is_cause = self._ranks[rank_index].returncode(LAST_S) != -signal.SIGABRT or not any(
            outcome["status"] != "ok" for outcome in reply.outcomes
        )
        if is_cause:
            self.blame(rank_index, how, reply)

    def note_timeout(self, reply: Reply, timeout_s: float) -> None:
        reply.healthy = False
        idle = [index for index in range(len(self._ranks)) if not self.had_begun(index)]
        if idle:
            self.blame(idle[0], f"did not answer within timeout_s={timeout_s:g}", reply)
            return
        reply.fault = "timeout"
        reply.last_stages = [rank.stage for rank in self._ranks]
        stages = ", ".join(
            f"rank {index} in {stage}" for index, stage in enumerate(reply.last_stages)
        )
        where = stages if len(self._ranks) > 1 else f"while {reply.last_stages[0]}"
        reply.message = f"exceeded timeout_s={timeout_s:g} ({where})"

    def note_silence(self, reply: Reply) -> None:
        """Name the ranks that did not answer the others' vote."""
        heard = {outcome["rank"] for outcome in reply.outcomes}
        silent = [index for index in range(len(self._ranks)) if index not in heard]
        if idle := [index for index in silent if not self.had_begun(index)]:
            self.blame(idle[0], "did not answer the others' vote", reply)
            return
        where = ", ".join(f"rank {index} (in {reply.last_stages[index]})" for index in silent)
        reply.message = f"no answer to the other ranks' vote from {where or 'any rank'}"

    def of_this_job(self, event: events.Event) -> events.Event | None:
        """An event of this job, or junk in its place; None for those of earlier jobs."""
        if isinstance(event, events.Ready | events.Junk):
            return event
        if event.job > self._number:
            return events.Junk("wrote of a job that it was not given")
        if isinstance(event, events.Result):
            ranks = sorted(outcome["rank"] for outcome in event.outcomes)
            everyone = list(range(len(self._ranks)))
            if not (ranks == everyone or (set(ranks) < set(everyone) and not event.healthy)):
                return events.Junk("wrote a result without one outcome for each rank")
        return event if event.job == self._number else None

    def take_note(self, rank_index: int, event: events.Event) -> None:
        if isinstance(event, events.Began):
            self._began.add(rank_index)
        elif isinstance(event, events.Stage):
            self._staged.add(rank_index)
            self._ranks[rank_index].stage = event.stage

    def how_it_ended(self, rank_index: int) -> str:
        rank = self._ranks[rank_index]
        code = rank.returncode(LAST_S)
        if code is None:
            return rank.gone
        if code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name
        hint = {
            "SIGKILL": ", often the kernel's out-of-memory killer",
            "SIGSEGV": ", a segmentation fault",
        }.get(name, "")
        return f"was killed by signal {-code} ({name}{hint})"


def misfit(event: events.Event) -> str:
    """What a worker did, by an event that it should not have sent."""
    return event.reason if isinstance(event, events.Junk) else "wrote an event out of turn"
