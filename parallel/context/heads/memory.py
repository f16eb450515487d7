"""Predicted memory of attention between two exchanges of heads.

The walk follows :class:`parallel.context.heads.head_attention.HeadAttention` and its
:class:`parallel.context.heads.exchange.Exchange` call by call, and counts the tensors that they
allocate and free. What attends between the exchanges, a kernel or a ring, says itself what it
holds.
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
    problem: AttentionProblem, layout: Layout, split: HeadSplit, attended: AttendedPeak
) -> dict[str, float] | None:
    """Bytes by part at the peak of a pass on the fullest of the ranks that exchange heads.

    Args:
        layout: how sequences are split over all ranks.
        attended: what is between the exchanges; its inputs are some heads of what came in.
    """
    sizes = LocalSizes(problem=problem, layout=layout)
    found = []
    for rank in range(split.num_ranks):
        pieces = split.pieces(rank)
        peaks = [attended(_length(piece.q), _length(piece.kv)) for piece in pieces]
        known = [parts for parts in peaks if parts is not None]
        if len(known) < len(peaks):
            return None
        walk = _Walk(sizes, split, rank)
        found.append(walk.backward(known) if problem.needs_grad else walk.forward(known))
    return max(found, key=lambda parts: sum(parts.values()))


@dataclass(slots=True)
class _Walk:
    """One rank's pass."""

    sizes: LocalSizes
    split: HeadSplit
    rank: int

    @property
    def _whole_q(self) -> float:
        """Bytes of q, or of o, in the rank's heads of what its neighbours and itself hold."""
        own = len(self.split.q_heads(self.rank))
        return self.sizes.q * own * self.split.num_ranks / self.split.num_heads

    @property
    def _whole_kv(self) -> float:
        """The same of k and v together."""
        own = len(self.split.kv_heads(self.rank))
        return self.sizes.kv * own * self.split.num_ranks / self.split.num_kv_heads

    @property
    def _copied_kv(self) -> float:
        """Bytes of the local k and v, each head as often as there are ranks that read it."""
        ranks = range(self.split.num_ranks)
        copies = sum(len(self.split.kv_heads(rank)) for rank in ranks)
        return self.sizes.kv * copies / self.split.num_kv_heads

    @property
    def _whole_lse(self) -> float:
        return self._whole_q * self.sizes.lse / self.sizes.q

    @property
    def _reorders(self) -> bool:
        """Whether heads first is another order in memory than that of a batch."""
        return self.sizes.problem.packed or self.sizes.problem.batch_size > 1

    def _joining(self, size: float) -> float:
        """Bytes that are allocated where parts of these bytes are joined: of a packed batch in the
        order in which they came and in that of their positions."""
        return size * (2 if self.sizes.problem.packed else 1)

    def forward(self, peaks: list[dict[str, float]]) -> dict[str, float]:
        sizes, ledger = self.sizes, Ledger()
        whole = self._whole_q + self._whole_kv
        ledger.hold(inputs=sizes.q + sizes.kv)
        ledger.hold(sent=sizes.q + self._copied_kv, received=whole)
        ledger.free("sent")
        joining = self._joining(self._whole_kv / 2) - self._whole_kv / 2
        ledger.hold(whole_inputs=whole + joining)
        ledger.hold(whole_inputs=whole)
        ledger.free("received")
        for number, parts in enumerate(peaks):
            # Results of the pieces before, whose log-sum-exp is let go.
            own = {name: size for name, size in parts.items() if name != "inputs"}
            share = number / len(peaks)
            ledger.hold(whole_output=self._whole_q * share)
            with ledger.during(**own):
                pass
        joined = 2 if len(peaks) > 1 else 1
        ledger.hold(whole_output=self._whole_q * joined)
        self._send_output(ledger)
        return ledger.peak

    def _send_output(self, ledger: Ledger) -> None:
        ledger.hold(sent=self._joining(self._whole_q))
        ledger.hold(sent=self._whole_q, received=self.sizes.q)
        if self._reorders:
            ledger.hold(output=self.sizes.q)

    def backward(self, peaks: list[dict[str, float]]) -> dict[str, float]:
        sizes, ledger = self.sizes, Ledger()
        whole = self._whole_q + self._whole_kv
        ledger.hold(
            inputs=sizes.q + sizes.kv,
            output=sizes.q,
            output_gradient=sizes.q,
            whole_inputs=whole,
            whole_output=self._whole_q,
            lse=self._whole_lse,
        )
        ledger.hold(sent=sizes.q if self._reorders else 0.0, received=self._whole_q)
        ledger.hold(whole_output_gradient=self._joining(self._whole_q))
        ledger.hold(whole_output_gradient=self._whole_q)
        ledger.free("sent", "received")
        for number, parts in enumerate(peaks):
            own = {name: size for name, size in parts.items() if name not in _HELD_BY_THE_WALK}
            # Gradients of the pieces before are added up in tensors of all heads.
            with ledger.during(whole_gradients=whole if number else 0.0, **own):
                pass
        ledger.free("whole_inputs", "whole_output", "lse", "whole_output_gradient")
        self._send_gradients(ledger)
        return ledger.peak

    def _send_gradients(self, ledger: Ledger) -> None:
        sizes, whole = self.sizes, self._whole_q + self._whole_kv
        ledger.hold(whole_gradients=whole)
        ledger.hold(cut_gradients=whole)
        ledger.hold(sent=whole)
        ledger.free("cut_gradients")
        ledger.hold(received=sizes.q + self._copied_kv)
        ledger.free("sent")
        ledger.hold(gradients=sizes.q * (2 if self._reorders else 1))
        ledger.hold(gradients=sizes.q)
        own = sizes.kv / 2
        summed = own * sizes.wide if self.split.shares_kv_heads else 0.0
        for _ in ("dk", "dv"):
            with ledger.during(gradients=own * (2 if self._reorders else 1), summed=summed):
                pass
            ledger.add(gradients=own)


def _length(heads: slice) -> int:
    return int(heads.stop - heads.start)
