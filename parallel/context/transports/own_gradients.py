"""dk and dv of a rank's own keys: what it computes itself, and the parts of other ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from parallel.context.blocks.loops import Contribution, Visit
from parallel.context.blocks.partial_sum import PartialSum
from parallel.context.blocks.rows import Rows
from parallel.context.transports.all_gather import sum_of_contributions


class OwnGradients:
    """Sums in float32 over ranks, in the order in which parts are added.

    Args:
        visit: of this rank's own keys.
        contributions: its calls.
        shared: a slice of a dense batch with all rows to which other ranks add; None if these are
            many. Else, if one call gave all gradients, only these rows are summed in float32.
    """

    def __init__(
        self, visit: Visit, contributions: Sequence[Contribution], shared: slice | None
    ) -> None:
        self._sums: list[PartialSum] = []
        if shared is not None and len(contributions) == 1 and contributions[0].call.kv.whole:
            only = contributions[0]
            self._sums = [PartialSum(x, shared) for x in (only.dk, only.dv)]
            return
        self._wide = (
            sum_of_contributions(visit.k, contributions, "dk").contiguous(),
            sum_of_contributions(visit.v, contributions, "dv").contiguous(),
        )

    def add(self, rows: Rows | None, parts: Sequence[Tensor]) -> None:
        """Add another rank's (dk, dv) of some rows; None for all."""
        if self._sums:
            for own, part in zip(self._sums, parts, strict=True):
                own.add(_slices_of(rows), part)
            return
        for total, part in zip(self._wide, parts, strict=True):
            if rows is None:
                total.add_(part)
            else:
                rows.add(total, part)

    def result(self) -> tuple[Tensor, Tensor]:
        """(dk, dv), in float32 or rounded to the dtype of the keys."""
        if not self._sums:
            return self._wide
        dk, dv = (own.result() for own in self._sums)
        return dk, dv


def _slices_of(rows: Rows | None) -> Sequence[slice]:
    found = None if rows is None else rows.slices
    assert found is not None, "what other ranks share are some rows of a dense batch"
    return found
