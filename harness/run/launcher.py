"""What a launcher is: where and how the cases of a plan run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.cases.case import Case
from harness.run.options import RunOptions
from harness.run.progress import Progress
from harness.store.record import RecordStore
from kernels.registry import Registry


class LaunchError(ValueError):
    """Cases that cannot be run as the user asks; the message is one line with the remedy."""


@dataclass(kw_only=True, slots=True)
class PendingCases:
    """The cases that are left of a plan, and what launchers need to run them."""

    cases: list[Case]
    options: RunOptions
    store: RecordStore
    progress: Progress
    command: str
    predict: Callable[[Case], float]
    """Seconds that a case takes, roughly."""


LAUNCHERS: Registry[type[Launcher]] = Registry(
    "launcher", decorator="launcher", packages=("harness.run",)
)

launcher = LAUNCHERS.register


@dataclass(kw_only=True, slots=True)
class Launcher:
    """A choice of ``launcher=``. It takes the whole list, so that it may be one job array."""

    name: str

    def resolve_device(self, device: str) -> str:
        """``cpu`` or ``cuda`` for the user's ``device=``, which may be ``auto``.

        Raises ValueError if the user asks for a device that is not there.
        """
        raise NotImplementedError

    def validate(self, cases: list[Case]) -> None:
        """Raise ValueError if the cases cannot run here, before anything starts."""

    def launch(self, pending: PendingCases) -> list[str]:
        """Run the cases and write their records, or see to it that it is done elsewhere.

        Returns nothing when no more records can be expected, and otherwise what to tell the
        user in place of a report, line by line.
        """
        raise NotImplementedError
