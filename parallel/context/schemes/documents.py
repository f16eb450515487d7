"""attention=documents: documents of a packed batch, placed whole on ranks where they can be.

The other schemes split every sequence of a packed batch over all ranks, and send all keys to all
of them. Here ranks get equal numbers of tokens and close to equal work as well, but of whole
documents and parts of a few (:mod:`parallel.context.documents.placement`), and a key travels only
to ranks with later tokens of its document: for 64 documents of log-normal lengths on four ranks
that is a few percent of all keys. The name is that of what is placed; papers speak of
document-aware or per-document sharding (WLB-LLM, Wang et al. 2025; MagiAttention's dispatch).

The placement balances a causal mask. Without a mask results are the same, documents on one rank
cost in proportion, and parts of one document cost by their tokens, so that balance is coarser.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.distributed as dist

from kernels import AttentionProblem, attention_backend
from kernels.backends.auto import choose
from kernels.problem import MASKS
from kernels.registry import Look
from parallel.context import bound
from parallel.context.attention import SYMMETRIC, TransportedAttention
from parallel.context.documents import document_attention
from parallel.context.documents.exchange import AllToAllRows
from parallel.context.documents.layout import WHY_NOT_DENSE, Documents
from parallel.context.documents.symmetric import SymmetricRows

DIAGONALS = {"auto": None, "joined": True, "first": False}
KEEP_KEYS = {"auto": None, "always": True, "never": False}


@attention_backend("documents", look=Look(colour="#332288", marker="P", place=18))
@dataclass(kw_only=True, slots=True)
class DocumentParallelAttention(TransportedAttention):
    """A kernel over whole documents and parts of others, with the keys that these need."""

    transport: str = "auto"
    """How keys travel: one collective each way (all_to_all), or copies out of peers' memory
    (symmetric), which auto chooses where GPUs can."""
    diagonals: str = "auto"
    """Scores between a part's own queries and keys: ``first``, while keys of other ranks are on
    their way, merged later by log-sum-exp; or ``joined``, when they are here, in one call for each
    query. auto joins them on ranks that wait for fewer keys than they would merge queries."""
    keep_keys: str = "auto"
    """Whether other ranks' keys are kept for the backward pass (``always``) or come again
    (``never``); auto keeps them if no rank receives more keys than it has."""

    transports: ClassVar[tuple[str, ...]] = ("all_to_all", SYMMETRIC)
    takes: ClassVar[frozenset[str]] = frozenset(MASKS)

    def __post_init__(self) -> None:
        TransportedAttention.__post_init__(self)
        for key, value, choices in (
            ("diagonals", self.diagonals, DIAGONALS),
            ("keep_keys", self.keep_keys, KEEP_KEYS),
        ):
            if value not in choices:
                raise ValueError(f"attention.{key}={value}: must be one of {', '.join(choices)}")

    def layout(self, num_ranks: int) -> Documents:
        return Documents(num_ranks=num_ranks)

    def choice(self, problem: AttentionProblem) -> str:
        if problem.cp == 1:
            return self.on_one_device.choice(problem)
        kernel, transport = self.kernel_of(problem), self.transport_of(problem)
        return f"{self.name}(kernel={kernel}, transport={transport})"

    def kernel_of(self, problem: AttentionProblem) -> str:
        if self.kernel != "auto":
            return self.kernel
        return choose(replace(problem, cp=1, sinks=False), with_lse=True).name

    def why_not_split(self, problem: AttentionProblem) -> str | None:
        if not problem.packed:
            return WHY_NOT_DENSE
        if problem.q_len != problem.kv_len:
            return "queries and keys of a split document are the same tokens, equally many"
        if problem.window is not None and not problem.causal:
            return (
                f"attention.window={problem.window}: needs a causal mask here; without one use "
                "ring or llama3"
            )
        reason = self.why_not_transport(problem)
        if reason is not None:
            return reason
        if self.diagonals == "first" and not problem.mask.is_plain:
            return "attention.diagonals=first: has no window and no prefix; leave it out"
        kernel = self.on_one_device
        # Where it gives the lse, sinks are put in from the outside.
        problem = replace(problem, sinks=problem.sinks and not kernel.gives_lse)
        if self.diagonals == "first" and not kernel.gives_lse:
            return (
                f"attention.kernel={self.kernel} gives no log-sum-exp, by which diagonals are "
                "merged; use attention.diagonals=joined"
            )
        reason = kernel.why_unsupported(replace(problem, cp=1))
        if reason is None and problem.causal and not (problem.mask.is_plain and self._merges()):
            # Part of a document's queries, and its keys up to the last of them.
            reason = kernel.why_unsupported(
                replace(problem, cp=1, q_len=max(1, problem.q_len // 2))
            )
        return reason and f"attention.kernel={self.kernel}: {reason}"

    def _merges(self) -> bool:
        """Whether diagonals can be merged, and need not be in one call with other keys."""
        return self.on_one_device.gives_lse and self.diagonals != "joined"

    def split_peak_memory(self, problem: AttentionProblem) -> dict[str, float] | None:
        """Not predicted."""
        return None

    @contextlib.contextmanager
    def bind(
        self, group: dist.ProcessGroup, device: torch.device
    ) -> Iterator[bound.SplitAttention]:
        reads = group.size() > 1 and self.reads_peers(group, device)
        yield document_attention.DocumentAttention(
            self.on_one_device,
            self.layout(group.size()),
            group,
            SymmetricRows(group, device) if reads else AllToAllRows(group),
            document_attention.Choices(
                joined=DIAGONALS[self.diagonals], keeps_keys=KEEP_KEYS[self.keep_keys]
            ),
        )
