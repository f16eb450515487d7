"""The launcher interface: a launcher decides where and how the cases of a plan run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from harness.cases.case import Case
from harness.run.rounds import case_group
from harness.run.rounds.options import RunOptions
from harness.store.record import RecordStore
from kernels.registry import Registry

if TYPE_CHECKING:
    # Every command reads the launchers, and few launch anything.
    from harness.predictions.capacity import Machine
    from harness.run.progress import Progress
    from harness.run.rounds.case_group import Grouping
    from harness.run.warm_workers import Workers


class LaunchError(ValueError):
    """The cases cannot run as requested; the message is one line with the remedy."""


@dataclass(kw_only=True, slots=True)
class PendingCases:
    """The cases of a plan without a final record, and what a launcher needs to run them."""

    cases: list[Case]
    options: RunOptions
    store: RecordStore
    progress: Progress
    command: str
    predict: Callable[[Case], float]
    """A rough prediction of a case's seconds."""
    grouping: Grouping = field(default_factory=lambda: case_group.by_comparison)
    """Which cases take turns, where this host measures them."""
    workers: Workers | None = None
    """Of several runs of this host, which whoever made them closes; None for some of its own."""


LAUNCHERS: Registry[type[Launcher]] = Registry(
    "launcher", decorator="launcher", packages=("harness.run",)
)

launcher = LAUNCHERS.register


@dataclass(kw_only=True, slots=True)
class Launcher:
    """A choice of ``launcher=``. It takes all cases at once, so that it can submit a job array."""

    name: str

    measures_here: ClassVar[bool] = True
    """Whether cases run on the host that plans them, so that its environment is theirs."""

    private_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys that are left out where the command is written down."""

    def resolve_device(self, device: str) -> str:
        """Turn the user's ``device=``, which may be ``auto``, into ``cpu`` or ``cuda``.

        Raises ValueError if there is no such device.
        """
        raise NotImplementedError

    def reaches(self, machine: Machine) -> Machine:
        """What it can use of a machine: one host of it, unless it starts ranks on several."""
        return machine

    def validate(self, cases: list[Case]) -> None:
        """Raise ValueError if the cases cannot run here, before anything starts."""

    def launch(self, pending: PendingCases) -> list[str]:
        """Run the cases and write their records, or submit them to run elsewhere.

        Returns an empty list once all records are written; otherwise the lines to show the user
        instead of a report.
        """
        raise NotImplementedError
