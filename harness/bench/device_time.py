"""Times a step on the device alone: the host enqueues each phase whole before the device begins it.

A kernel that spins keeps the device busy meanwhile. What an ordinary pass takes longer than such a
held pass, the device waited for its host.

On several ranks a held pass would also wait for the peers' holds, so none is taken there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Protocol

import torch

from harness.bench.outcome import Outcome
from harness.bench.phase_timer import PhaseTimer

SPIN_CYCLES_PER_MS = 3_000_000
"""Cycles of the SM clock, which no GPU so far exceeds: a hold lasts at least as long as asked."""

BUDGET_MS = 50.0
"""Time for held passes in one round, beyond the fewest."""

MOST_PASSES = 20

COULD_WAIT = 0.02
"""The host's share of a pass below which the device cannot have waited for it noticeably: it
never waits longer than the host takes to enqueue the pass."""

LONGEST_FACTOR = 8.0
LONGEST_HOLD_MS = 200.0
"""The device is held neither this many times as long as its host usually takes, nor this long."""

IDLE_PASSES = 3

SPARE_MS = 0.1
"""Added to every hold, for what the host does before it reaches the phase."""


class Hold(Protocol):
    """Keeps a device busy while its host enqueues work."""

    def start(self, at_least_ms: float) -> None:
        """Wait until the device is idle, then keep it busy for that long."""
        ...

    def is_running(self) -> bool:
        """Whether the device is still kept busy."""
        ...


class Spin:
    """Holds a CUDA device by a kernel that counts cycles."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended = torch.cuda.Event()

    def start(self, at_least_ms: float) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda._sleep(int(at_least_ms * SPIN_CYCLES_PER_MS))
        self._ended.record()

    def is_running(self) -> bool:
        return not self._ended.query()


class HeldTimer(PhaseTimer):
    """Times phases that the device begins only once the host has enqueued them whole.

    A phase within another belongs to that one: it is timed, but the device is not held again. A
    phase that is never enqueued in time, however long the hold, is given up.

    Args:
        host_ms: the host's usual time to enqueue each phase; of a phase that is absent, 0.
    """

    def __init__(self, device: torch.device, hold: Hold, host_ms: Mapping[str, float]) -> None:
        super().__init__(device)
        self.holder: dict[str, str] = {}
        """Of every phase, the outermost one that it belongs to, or itself."""
        self.given_up: set[str] = set()
        """Outermost phases that could not be held."""
        self._hold, self._host_ms = hold, host_ms
        self._factors: dict[str, float] = {}
        self._outermost: str | None = None
        self._was_late = False

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._held(name), super().phase(name):
            yield

    @contextlib.contextmanager
    def phases(self, whole: str) -> Iterator[Callable[[str], None]]:
        with self._held(whole), super().phases(whole) as begins:

            def noted(name: str) -> None:
                self.holder[name] = self._outermost or whole
                begins(name)

            yield noted

    @contextlib.contextmanager
    def _held(self, name: str) -> Iterator[None]:
        if self._outermost is not None:
            self.holder[name] = self._outermost
            yield
            return
        self.holder[name] = self._outermost = name
        hold_ms = self._factors.setdefault(name, 2.0) * self._host_ms.get(name, 0.0) + SPARE_MS
        if name not in self.given_up:
            self._hold.start(hold_ms)
        try:
            yield
        finally:
            self._outermost = None
        if name not in self.given_up and not self._hold.is_running():
            self._was_late = True
            self._factors[name] *= 2
            if self._factors[name] > LONGEST_FACTOR or 2 * hold_ms > LONGEST_HOLD_MS:
                self.given_up.add(name)

    def was_late(self) -> bool:
        """Whether since the last call the host has not finished a phase during its hold."""
        late, self._was_late = self._was_late, False
        return late


def num_held_passes(pass_ms: float, host_ms: float) -> int:
    """How many held passes to take in a round, from the time of a pass and that of its host."""
    fewest = 3 if host_ms > COULD_WAIT * pass_ms else 1
    affordable = int(BUDGET_MS / (pass_ms + 2 * host_ms + SPARE_MS))
    return min(max(fewest, affordable), MOST_PASSES)


def note_device_time(
    outcome: Outcome,
    step: Callable[[PhaseTimer], None],
    device: torch.device,
    hold: Hold,
    *,
    synchronize: Callable[[], None],
    before_pass: Callable[[], object] = lambda: None,
    whole_step: str | None = None,
) -> None:
    """Take held passes of a step that was measured, and note their times.

    Args:
        before_pass: called before each pass, such as to empty a cache.
        whole_step: name of the phase that includes all others by the host's clock, if there is
            one; its time on the device is the sum of theirs.
    """
    pass_ms, pass_host_ms = _of_a_pass(outcome.samples_ms), _of_a_pass(outcome.host_ms)
    usual_ms = {name: median(times) for name, times in outcome.host_ms.items() if times}
    timer = HeldTimer(device, hold, usual_ms)
    found = time_held(
        step,
        timer,
        num_held_passes(pass_ms, pass_host_ms),
        synchronize=synchronize,
        before_pass=before_pass,
        whole_step=whole_step,
    )
    outcome.device_ms |= found
    if timer.given_up:
        outcome.notes["never_held"] = sorted(timer.given_up)


def _of_a_pass(times_ms: Mapping[str, list[float]]) -> float:
    """About the milliseconds of one pass: those of the longest phase, by its total."""
    passes = min((len(times) for times in times_ms.values() if times), default=1)
    return max((sum(times) for times in times_ms.values()), default=0.0) / passes


def time_held(
    step: Callable[[PhaseTimer], None],
    timer: HeldTimer,
    passes: int,
    *,
    synchronize: Callable[[], None],
    before_pass: Callable[[], object] = lambda: None,
    whole_step: str | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of each phase on the device alone, in ``passes`` passes of ``step``.

    A pass in which the host was late is repeated with a longer hold. Phases that no hold is long
    enough for are left out, and with them ``whole_step``: the host waits for the device within
    them, or they are more than the launch queue takes (about 1,024 kernels), where it has to wait
    until the hold ends.
    """
    found: dict[str, list[float]] = {}
    done = 0
    while done < passes:
        before_pass()
        step(timer)
        synchronize()
        samples = timer.collect()
        if timer.was_late():
            continue
        held = {
            name: times
            for name, times in samples.items()
            if timer.holder[name] not in timer.given_up
        }
        if not held:
            break
        if whole_step is not None and not timer.given_up:
            outermost = [times for name, times in held.items() if timer.holder[name] == name]
            held[whole_step] = [sum(map(sum, outermost))]
        for name, times in held.items():
            found.setdefault(name, []).extend(times)
        done += 1
    return found


def note_host_time(
    outcome: Outcome,
    step: Callable[[PhaseTimer], None],
    device: torch.device,
    *,
    wait_for_all: Callable[[], object],
    whole_step: str,
) -> None:
    """Note the host's time to enqueue each phase in a few passes that begin on idle devices.

    Passes that were measured in a row do not tell it: the launch queue fills up, and then the
    host waits in it for the device.
    """
    timer = PhaseTimer(device)
    whole_ms = []
    for _ in range(IDLE_PASSES):
        wait_for_all()
        started = time.perf_counter()
        step(timer)
        whole_ms.append((time.perf_counter() - started) * 1e3)
    wait_for_all()
    outcome.host_ms |= timer.collect_with_host()[1] | {whole_step: whole_ms}
