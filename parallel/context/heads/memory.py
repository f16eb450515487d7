"""Predicted memory of attention between two exchanges of heads.

The walk follows :class:`parallel.context.heads.head_attention.HeadAttention` and the exchange of
its transport call by call, and counts the tensors that they allocate and free. What attends between
the exchanges, a kernel or a ring, says itself what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kernels import AttentionProblem
from parallel.context.blocks.layouts import Layout
from parallel.context.heads.split import HeadSplit
from parallel.context.memory.ledger import Ledger
from parallel.context.memory.sizes import LocalSizes

AttendedPeak = Callable[[int, int], dict[str, float] | None]
"""Bytes by part at the peak of attention in so many query and key heads; None if not predicted."""

_HELD_BY_THE_WALK = ("inputs", "output", "lse", "output_gradient")
"""Parts of an attended peak that the walk counts for all heads of a rank."""


def peak(
    problem: AttentionProblem,
    layout: Layout,
    split: HeadSplit,
    attended: AttendedPeak,
    *,
    num_groups: int = 1,
    published: bool = False,
) -> dict[str, float] | None:
    """Bytes by part at the peak of a pass on the fullest of the ranks that exchange heads.

    Args:
        layout: how sequences are split over all ranks.
        attended: what is between the exchanges; its inputs are some heads of what came in.
        num_groups: groups in which a rank attends with its heads.
        published: whether ranks read each other's memory, instead of sending messages.
    """
    sizes = LocalSizes(problem=problem, layout=layout)
    shares = split.in_groups(num_groups)
    walks = _PublishedWalk if published else _Walk
    found = []
    for rank in range(split.num_ranks):
        groups = []
        for number in range(rank * num_groups, (rank + 1) * num_groups):
            pieces = shares.pieces(number)
            peaks = [attended(_length(piece.q), _length(piece.kv)) for piece in pieces]
            known = [parts for parts in peaks if parts is not None]
            if len(known) < len(peaks):
                return None
            groups.append(
                _Group(
                    sizes=sizes,
                    num_ranks=split.num_ranks,
                    num_q_heads=len(shares.q_heads(number)),
                    num_kv_heads=len(shares.kv_heads(number)),
                    peaks=known,
                )
            )
        walk = walks(sizes, split.num_ranks, shares, groups)
        found.append(walk.backward() if problem.needs_grad else walk.forward())
    return max(found, key=lambda parts: sum(parts.values()))


@dataclass(kw_only=True, slots=True, frozen=True)
class _Group:
    """Heads that a rank attends with at a time; sizes in bytes."""

    sizes: LocalSizes
    num_ranks: int
    num_q_heads: int
    num_kv_heads: int
    peaks: list[dict[str, float]]
    """Of each of its kernel calls."""

    @property
    def q(self) -> float:
        """q, or o, in these heads of what the rank's neighbours and itself hold."""
        problem = self.sizes.problem
        return self.sizes.q * self.num_q_heads * self.num_ranks / problem.num_heads

    @property
    def kv(self) -> float:
        """k and v together, likewise."""
        problem = self.sizes.problem
        return self.sizes.kv * self.num_kv_heads * self.num_ranks / problem.num_kv_heads

    @property
    def inputs(self) -> float:
        return self.q + self.kv

    @property
    def lse(self) -> float:
        return self.q * self.sizes.lse / self.sizes.q


class _Walk:
    """One rank's pass, over messages."""

    def __init__(
        self, sizes: LocalSizes, num_ranks: int, shares: HeadSplit, groups: list[_Group]
    ) -> None:
        self._sizes, self._num_ranks = sizes, num_ranks
        self._shares, self._groups = shares, groups
        self._ledger = Ledger()

    @property
    def _whole(self) -> float:
        return sum(group.inputs for group in self._groups)

    @property
    def _whole_q(self) -> float:
        return sum(group.q for group in self._groups)

    @property
    def _copied_kv(self) -> float:
        """Bytes of the local k and v, each head as often as there are groups that read it."""
        shares = self._shares
        copies = sum(len(shares.kv_heads(number)) for number in range(shares.num_ranks))
        return self._sizes.kv * copies / shares.num_kv_heads

    @property
    def _reorders(self) -> bool:
        """Whether heads first is another order in memory than that of a batch."""
        return self._sizes.problem.packed or self._sizes.problem.batch_size > 1

    def _joining(self, size: float) -> float:
        """Bytes that are allocated where parts of these bytes are joined: of a packed batch in the
        order in which they came and in that of their positions."""
        return size * (2 if self._sizes.problem.packed else 1)

    def forward(self) -> dict[str, float]:
        ledger = self._ledger
        ledger.hold(inputs=self._sizes.q + self._sizes.kv)
        self._start_inputs()
        for number, group in enumerate(self._groups):
            self._join_inputs(group)
            for place, parts in enumerate(group.peaks):
                # Results of the pieces before, whose log-sum-exp is let go.
                own = {name: size for name, size in parts.items() if name != "inputs"}
                done = sum(one.q for one in self._groups[:number])
                ledger.hold(whole_output=done + group.q * place / len(group.peaks))
                with ledger.during(**own):
                    pass
            joined = 2 if len(group.peaks) > 1 else 1
            ledger.hold(whole_output=done + group.q * joined)
            self._send_output(group)
            ledger.hold(whole_output=done + group.q)
            if number + 1 < len(self._groups):
                ledger.add(whole_inputs=-group.inputs)
        self._collect_output()
        return ledger.peak

    def _start_inputs(self) -> None:
        sent = self._sizes.q + self._copied_kv
        self._ledger.hold(sent=sent, received=self._whole)

    def _join_inputs(self, group: _Group) -> None:
        ledger, share = self._ledger, group.inputs / self._whole
        ledger.add(sent=-share * (self._sizes.q + self._copied_kv))
        joining = self._joining(group.kv / 2) - group.kv / 2
        ledger.add(whole_inputs=group.inputs + joining)
        ledger.add(whole_inputs=-joining, received=-group.inputs)

    def _send_output(self, group: _Group) -> None:
        ledger, share = self._ledger, group.q / self._whole_q
        ledger.add(sent=self._joining(group.q))
        ledger.add(sent=group.q - self._joining(group.q), received=share * self._sizes.q)

    def _collect_output(self) -> None:
        if self._reorders or len(self._groups) > 1:
            self._ledger.hold(output=self._sizes.q)

    def backward(self) -> dict[str, float]:
        sizes, ledger = self._sizes, self._ledger
        ledger.hold(
            inputs=sizes.q + sizes.kv,
            output=sizes.q,
            output_gradient=sizes.q,
            whole_inputs=self._whole,
            whole_output=self._whole_q,
            lse=sum(group.lse for group in self._groups),
        )
        self._start_output_gradient()
        # Autograd runs the last group first.
        for group in reversed(self._groups):
            self._join_output_gradient(group)
            for place, parts in enumerate(group.peaks):
                own = {name: size for name, size in parts.items() if name not in _HELD_BY_THE_WALK}
                # Gradients of the pieces before are added up in tensors of all heads.
                with ledger.during(whole_gradients=group.inputs if place else 0.0, **own):
                    pass
            ledger.add(
                whole_inputs=-group.inputs,
                whole_output=-group.q,
                lse=-group.lse,
                whole_output_gradient=-group.q,
            )
            self._send_gradients(group)
        self._collect_gradients()
        return ledger.peak

    def _start_output_gradient(self) -> None:
        copied = self._reorders or len(self._groups) > 1
        self._ledger.hold(sent=self._sizes.q if copied else 0.0, received=self._whole_q)

    def _join_output_gradient(self, group: _Group) -> None:
        ledger, joining = self._ledger, self._joining(group.q)
        ledger.add(whole_output_gradient=joining)
        ledger.add(whole_output_gradient=group.q - joining, received=-group.q)
        if len(self._groups) == 1:
            ledger.free("sent")

    def _send_gradients(self, group: _Group) -> None:
        ledger, share = self._ledger, group.inputs / self._whole
        ledger.add(whole_gradients=group.inputs)
        with ledger.during(cut_gradients=group.inputs):
            ledger.add(sent=group.inputs)
        ledger.add(received=share * (self._sizes.q + self._copied_kv))

    def _collect_gradients(self) -> None:
        ledger, q = self._ledger, self._sizes.q
        ledger.free("sent")
        ledger.hold(gradients=q * (2 if self._reorders else 1))
        ledger.hold(gradients=q)
        self._sum_gradients(twice=self._reorders)

    def _sum_gradients(self, *, twice: bool) -> None:
        """dk and dv, from those of all groups that have a key head."""
        own = self._sizes.kv / 2
        summed = own * self._sizes.wide if self._shares.shares_kv_heads else 0.0
        for _ in ("dk", "dv"):
            with self._ledger.during(gradients=own * (2 if twice else 1), summed=summed):
                pass
            self._ledger.add(gradients=own)


class _PublishedWalk(_Walk):
    """One rank's pass, over memory that peers read.

    What arrives is in its place, except of packed batches of many sequences, whose tokens are
    sorted besides; a packed problem, of which one sequence is known, is taken for one of few.
    """

    @property
    def _published(self) -> float:
        """The buffers of all inputs, and of one group's results."""
        needs_grad = self._sizes.problem.needs_grad
        shares, ranks = self._shares, range(self._shares.num_ranks)
        q = self._sizes.q * self._num_ranks / shares.num_heads
        kv = self._sizes.kv * self._num_ranks / shares.num_kv_heads if needs_grad else 0.0
        results = (q * len(shares.q_heads(n)) + kv * len(shares.kv_heads(n)) for n in ranks)
        return self._sizes.q + self._sizes.kv + max(results)

    def _start_inputs(self) -> None:
        self._ledger.hold(published=self._published, whole_inputs=self._whole)

    def _join_inputs(self, group: _Group) -> None:
        pass

    def _send_output(self, group: _Group) -> None:
        self._ledger.hold(output=self._sizes.q)

    def _collect_output(self) -> None:
        pass

    def _start_output_gradient(self) -> None:
        self._ledger.hold(published=self._published, whole_output_gradient=self._whole_q)

    def _join_output_gradient(self, group: _Group) -> None:
        pass

    def _send_gradients(self, group: _Group) -> None:
        self._ledger.add(whole_gradients=group.inputs)
        self._ledger.hold(gradients=self._sizes.q + self._copied_kv)

    def _collect_gradients(self) -> None:
        if self._shares.shares_kv_heads:
            self._sum_gradients(twice=False)


def _length(heads: slice) -> int:
    return int(heads.stop - heads.start)
