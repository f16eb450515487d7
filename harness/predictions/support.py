"""Whether a machine that may not be here computes what a case asks: its attention, its capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness.cases.case import Case, label
from harness.cases.task import Task
from harness.predictions.capacity import Machine, ranks_on_each_host
from kernels import AttentionBackend, AttentionProblem
from parallel.context.attention import SYMMETRIC, SequenceParallelAttention
from parallel.context.heads.split import SplitsHeads


class Support:
    """Whether the question's machine computes cases, asked once for all that are alike."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._known: dict[tuple[int, AttentionProblem, int, int], str | None] = {}
        """By the attention's identity: the plan or question that asks keeps it alive."""
        self._absent: dict[int, str | None] = {}
        self._captures: dict[tuple[int, str, str], str | None] = {}

    def why_not(self, case: Case) -> str | None:
        """Why the machine cannot run a case; None if it can."""
        return self.why_not_captured(case, case.task) or self._why_not_attention(case)

    def why_not_captured(self, case: Case, task: Task) -> str | None:
        """Why a case's strategy or device rules out ``task``, which CUDA graphs capture.

        None for a task that nothing captures.
        """
        if not getattr(task, "cuda_graph", False):
            return None
        # Attention makes no difference, and takes long to ask.
        key = (id(case.parallel), task.name, case.device)
        if key not in self._captures:
            captured: Any = task
            reason = _refused(case, captured)
            # What a launched task is refused for as well is not the capture's.
            of_both = reason == _refused(case, replace(captured, cuda_graph=False))
            self._captures[key] = None if of_both else reason
        return self._captures[key]

    def _why_not_attention(self, case: Case) -> str | None:
        problem = replace(case.attention_problem, batch_size=1)
        key = (id(case.attention), problem, case.parallel.tp, case.world_size)
        if key not in self._known:
            reason = self._why_not_peers(case) or self._ask(case.attention, problem)
            self._known[key] = f"attention={label(case.attention)}: {reason}" if reason else None
        return self._known[key]

    def _ask(self, attention: AttentionBackend, problem: AttentionProblem) -> str | None:
        if self._machine.is_here:
            return attention.why_unsupported(problem)
        problem = _on_fewer_ranks(attention, problem)
        reason = _asked(attention, problem)
        if reason is None or (attention.version() is None and not _splits(attention)):
            return reason
        # The host that plans lacks the device; what it says of the plainest problem as well says
        # nothing about this one.
        if id(attention) not in self._absent:
            plain = _plainest(problem)
            absent = _asked(attention, plain)
            # A reason that a CPU hears as well is not about the absent device.
            if absent == _asked(attention, replace(plain, device="cpu")):
                absent = None
            self._absent[id(attention)] = absent
        return None if reason == self._absent[id(attention)] else reason

    def _why_not_peers(self, case: Case) -> str | None:
        """Reads of peers' memory stay on one host, which the host that plans cannot tell."""
        own = getattr(case.attention, "transport", None)
        if own != SYMMETRIC:
            return None
        on_each = ranks_on_each_host(case.world_size, self._machine.gpus_per_host)
        if case.has_sequences_on_one_host(on_each or 1):
            return None
        return f"attention.transport={own} needs all ranks that share a sequence on one host"


MOST_RANKS = 64
"""Ranks whose blocks are asked for one by one, of a square of them."""


def _on_fewer_ranks(attention: AttentionBackend, problem: AttentionProblem) -> AttentionProblem:
    """A problem whose blocks have the same sizes, on fewer ranks where those are many.

    Of blocks of keys alone: whether heads can be split depends on all ranks.
    """
    if problem.cp <= MOST_RANKS or not isinstance(attention, SequenceParallelAttention):
        return problem
    if isinstance(attention, SplitsHeads):
        return problem
    tokens = MOST_RANKS * attention.layout(problem.cp).local_len(problem.q_len)
    return replace(problem, cp=MOST_RANKS, q_len=tokens, kv_len=tokens)


def _splits(attention: AttentionBackend) -> bool:
    return isinstance(attention, SequenceParallelAttention)


def _asked(attention: AttentionBackend, problem: AttentionProblem) -> str | None:
    return _heard(lambda: attention.why_unsupported(problem))


def _refused(case: Case, task: Task) -> str | None:
    """Why a task does not run a case; None if it does."""
    return _heard(lambda: task.why_unsupported(replace(case, task=task)))


def _heard(ask: Callable[[], str | None]) -> str | None:
    """What a backend says where its device may be absent, which some only find by using it."""
    try:
        return ask()
    except (AssertionError, RuntimeError):
        return None


def _plainest(problem: AttentionProblem) -> AttentionProblem:
    length = 1024 * problem.cp
    return replace(
        problem,
        num_heads=8 * problem.cp,
        num_kv_heads=8 * problem.cp,
        q_len=length,
        kv_len=length,
        head_dim=64,
        dtype="bfloat16",
    )
