"""``task=flop_balance``: FLOPs of causal attention on each rank of a sequence layout, counted.

The counts are taken from the blocks of scores that the schemes of context-parallel attention
compute (:mod:`parallel.context.blocks.balance`). No device is needed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.cases.column import CaseColumn, note, option
from harness.cases.requirements import require_at_least, require_choice
from harness.cases.task import Task, Work, mask_options, task
from kernels import AttentionProblem, accounting
from kernels.registry import joined_later
from parallel.context.blocks.balance import COUNTS, Balance, count_flops
from parallel.context.blocks.layouts import LAYOUTS, Contiguous, Layout, Zigzag
from parallel.context.heads.balance import share_by_heads
from parallel.context.heads.nested import Nested
from parallel.context.heads.split import HeadSplit

_COUNT_BYTES = 8

BY_HEADS: dict[str, type[Layout]] = {
    "heads": Contiguous,
    "heads_contiguous": Contiguous,
    "heads_zigzag": Zigzag,
}
"""Layouts over groups of ranks that exchange heads: ``ulysses``, ``ulysses_ring`` and
``ulysses_zigzag``; with ``heads`` there is one group of all ranks."""


@task("flop_balance")
@dataclass(kw_only=True, slots=True)
class FlopBalance(Task):
    """FLOPs per rank, chunk and ring step of a forward pass over one sequence of seq_len, with
    ``attention.window=`` or ``attention.prefix_len=`` where they are set."""

    layout: str = "zigzag"
    """How the sequence is split: contiguous, zigzag or striped; or heads, where each rank attends
    with some of the heads, or heads_contiguous and heads_zigzag, where groups of ranks do so with
    the parts of these layouts."""
    ranks: int = 8
    """Ranks that it is split over."""
    ulysses: int = joined_later(0)
    """Ranks of a group that exchange heads, a divisor of task.ranks; 0 is all of them with heads
    alone, and otherwise half."""
    num_heads: int = 32
    """Query heads."""
    head_dim: int = 128
    """Width of one head (d)."""
    block_q: int = 128
    """Queries in a tile of the kernel, for counting tiles."""
    block_k: int = 128
    """Keys in a tile of the kernel."""

    gives_shape: ClassVar[bool] = True
    columns: ClassVar[tuple[CaseColumn, ...]] = (
        CaseColumn(name="balance", read=note("balance")),
        CaseColumn(name="balance_layout", read=option("layout")),
        CaseColumn(name="balance_ranks", read=option("ranks")),
    )
    measures: ClassVar[bool] = False

    def validate(self, case: Case) -> None:
        require_choice("task.layout", self.layout, [*LAYOUTS, *BY_HEADS])
        self._validate_groups()
        for key in ("ranks", "num_heads", "head_dim", "block_q", "block_k"):
            require_at_least(f"task.{key}", getattr(self, key), 1)
        if case.world_size > 1:
            raise ValueError(
                f"parallel.{next(iter(case.parallel.axes))}: task=flop_balance counts in "
                "one process; say task.ranks="
            )
        for key in ("softcap", "sinks"):
            if mask_options(case.attention).get(key):
                raise ValueError(f"attention.{key}: changes no pair that task=flop_balance counts")
        multiple = self._layout().multiple
        if case.seq_len % multiple:
            raise ValueError(
                f"seq_len={case.seq_len}: must be a multiple of {multiple} for task.layout="
                f"{self.layout} on task.ranks={self.ranks}"
            )

    def _validate_groups(self) -> None:
        if self.layout not in BY_HEADS:
            if self.ulysses:
                raise ValueError(
                    f"task.ulysses={self.ulysses}: task.layout={self.layout} exchanges no heads; "
                    "leave it out"
                )
            return
        if self.ulysses < 0 or self.ranks % self._inner_degree:
            raise ValueError(
                f"task.ulysses={self.ulysses}: must divide task.ranks={self.ranks}, or be 0"
            )
        if self.layout == "heads" and self._inner_degree != self.ranks:
            raise ValueError(
                f"task.ulysses={self.ulysses}: with task.layout=heads all task.ranks={self.ranks} "
                "exchange heads; leave it out, or use heads_contiguous or heads_zigzag"
            )
        if self.num_heads < self._inner_degree:
            raise ValueError(
                f"task.num_heads={self.num_heads}: must be at least the {self._inner_degree} ranks "
                "that exchange heads"
            )

    @property
    def _inner_degree(self) -> int:
        """Ranks that attend with some of the heads each."""
        if self.layout not in BY_HEADS:
            return 1
        return self.ulysses or (self.ranks if self.layout == "heads" else max(1, self.ranks // 2))

    def _outer(self) -> Layout:
        """The layout by whose blocks scores are computed."""
        layout = BY_HEADS.get(self.layout) or LAYOUTS[self.layout]
        return layout(num_ranks=self.ranks // self._inner_degree)

    def _layout(self) -> Layout:
        """The layout of tokens over ranks."""
        outer = self._outer()
        if outer.num_ranks == self.ranks:
            return outer
        return Nested(num_ranks=self.ranks, outer=outer)

    def words(self) -> list[str]:
        groups = [f"{self.ulysses}_a_group"] if self.ulysses else []
        return [self.layout, f"{self.ranks}_ranks", *groups]

    def num_passes(self) -> int:
        return 0

    def attention_problem(self, case: Case) -> AttentionProblem:
        return AttentionProblem(
            batch_size=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            q_len=case.seq_len,
            kv_len=case.seq_len,
            head_dim=self.head_dim,
            dtype=case.precision.compute,
            device=case.device,
            causal=True,
            needs_grad=False,
            **self._mask(case),
        )

    def _mask(self, case: Case) -> dict[str, Any]:
        """``attention.window=`` and ``attention.prefix_len=``, which hide pairs or show more."""
        options = mask_options(case.attention)
        return {key: options[key] for key in ("window", "prefix_len") if key in options}

    def work(self, case: Case) -> dict[str, Work]:
        flops = accounting.forward_flops(self.attention_problem(case)) / self.ranks
        return {"forward": Work(flops=flops)}

    def predicted_memory(self, case: Case) -> dict[str, float]:
        """The counts, which are all that is held."""
        return {"counts": float(len(COUNTS) * self.ranks**2 * _COUNT_BYTES)}

    def balance(self, case: Case) -> Balance:
        by_group = count_flops(
            self._outer(),
            case.seq_len,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            block_q=self.block_q,
            block_k=self.block_k,
            **self._mask(case),
        )
        if self.layout not in BY_HEADS:
            return by_group
        split = HeadSplit(
            num_ranks=self._inner_degree, num_heads=self.num_heads, num_kv_heads=self.num_heads
        )
        return share_by_heads(by_group, split)

    def run(self, case: Case, bench: Bench) -> None:
        bench.stage("counting")
        bench.outcome.notes["balance"] = asdict(self.balance(case))
