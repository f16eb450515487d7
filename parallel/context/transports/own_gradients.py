"""dk and dv of a rank's own keys: what it computes itself, and the parts of other ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from parallel.context.blocks.halo import Halo
from parallel.context.blocks.loops import Contribution, Visit
from parallel.context.blocks.rows import Rows
from parallel.context.transports.all_gather import sum_of_contributions


class OwnGradients:
    """Sums over ranks, in the order in which parts are added, each row rounded once.

    Args:
        visit: of this rank's own keys.
        contributions: its calls.
        halo: the rows to which other ranks add; None for all. If one call gave all gradients, and
            a row gets one part more at most, parts are added to them as they are: the sum of two
            is made in float32 and rounded by one kernel. Else all rows are summed in float32,
            which writes and reads each several times, and takes as long as a third of the kernels.
    """

    def __init__(
        self, visit: Visit, contributions: Sequence[Contribution], halo: Halo | None
    ) -> None:
        once = halo is not None and halo.asked_once
        if once and len(contributions) == 1 and contributions[0].call.kv.whole:
            self._totals = (contributions[0].dk, contributions[0].dv)
        else:
            self._totals = (
                sum_of_contributions(visit.k, contributions, "dk").contiguous(),
                sum_of_contributions(visit.v, contributions, "dv").contiguous(),
            )

    def add(self, rows: Rows | None, parts: Sequence[Tensor]) -> None:
        """Add another rank's (dk, dv) of some rows; None for all."""
        for total, part in zip(self._totals, parts, strict=True):
            if rows is None:
                total.add_(part)
            else:
                rows.add(total, part)

    def result(self) -> tuple[Tensor, Tensor]:
        """(dk, dv), in float32 or rounded to the dtype of the keys."""
        return self._totals
