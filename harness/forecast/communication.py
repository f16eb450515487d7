"""Communication of a training step over several ranks, and how much of it computing hides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.cases.case import Case
from harness.forecast.schedule import Exchange
from harness.predictions import training
from parallel.collectives import bus_factor

if TYPE_CHECKING:
    from harness.forecast.machines import Machine

MESSAGE_BYTES = 25 * 2**20
"""Size of one message of gradients, where a strategy does not say."""

DEFAULT_VISIBLE = 0.5
"""Share of its own time that communication adds to a step under an unmeasured strategy."""

VISIBLE_ERROR = 0.35
"""Standard error of that share, relative, measured or not."""

UNMEASURED_RANKS_ERROR = 0.2
"""Log error of a collective among numbers of ranks that were not measured."""


def of_case(machine: Machine, case: Case) -> tuple[Exchange, ...]:
    """Exchanges of gradients and parameters among the data ranks."""
    ranks = case.parallel.data_ranks
    found = []
    for name, size in training.traffic_bytes(case).items():
        messages = max(1.0, size / MESSAGE_BYTES)
        ms, note = collective_ms(machine, name, ranks, size / messages)
        visible = next(
            (
                item.visible
                for item in machine.calibration.exposures
                if item.strategy == case.parallel.name
            ),
            None,
        )
        if visible is None:
            visible, note = DEFAULT_VISIBLE, f"{case.parallel.name} was not measured"
        total = messages * ms
        found.append(
            Exchange(
                name=f"communication ({name})",
                phase="backward",
                visible_ms=visible * total,
                hidden_ms=max(0.0, 1 - visible) * total,
                error_ms=VISIBLE_ERROR * visible * total,
                launches=messages,
                note=note,
            )
        )
    return tuple(found)


def collective_ms(machine: Machine, name: str, ranks: int, size: float) -> tuple[float, str | None]:
    """Milliseconds of one collective operation on ``size`` bytes, and a note if extrapolated."""
    sent = size * bus_factor(name, ranks)
    for measured in sorted(range(2, 65), key=lambda number: abs(number - ranks)):
        law = machine.law(f"collective/{name}/{measured}")
        if law is not None:
            # A switch carries all ranks at the rate of two: bytes on each link decide.
            note = None if measured == ranks else f"{name} was measured on {measured} ranks"
            return law((sent,)).ms, note
    return 0.0, f"{name} was not measured"
