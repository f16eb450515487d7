"""What a launcher is: where and how the cases of a plan run."""

from __future__ import annotations

from dataclasses import dataclass

from harness.case import Case
from harness.record import RecordStore
from harness.runner import Progress, RunOptions
from kernels.registry import Registry

LAUNCHERS: Registry[type[Launcher]] = Registry("launcher", packages=("harness.launchers",))

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

    def launch(
        self, cases: list[Case], options: RunOptions, store: RecordStore, progress: Progress
    ) -> None:
        """Run the cases and write their records; return when no more can be expected here."""
        raise NotImplementedError
