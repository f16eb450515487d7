"""A side stream that runs as late as CUDA's streams allow, for transports over symmetric memory.

On a CPU there are no streams, and a copy is done when the next line begins. Here barriers and
copies of the side stream wait in a queue until the computing stream waits for an event behind
them, and some ranks are slower than others, so that a pass which reads, overwrites or frees too
early is wrong on a CPU as well.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from parallel.context.transports.peer_memory import HostPeerMemory


class LateStream:
    """The side stream's barriers and copies in one queue; the computing stream runs at once.

    Args:
        delay: seconds of this rank before each copy.
        module: the transport's, whose names of events and of the side stream are replaced.
        copy: where a function is, and its name, that copies into its first argument.
    """

    def __init__(self, delay: float, module: ModuleType, copy: tuple[Any, str]) -> None:
        self.num_barriers = 0
        self.num_freed = 0
        """Tensors that were gone when a copy into them ran."""
        self._delay = delay
        self._module = module
        self._copy = copy
        self._aside = False
        self._queue: list[Callable[[], None]] = []

    @property
    def num_left(self) -> int:
        """What no event that was waited for stands behind."""
        return len(self._queue)

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        late, barrier, copy = self, HostPeerMemory.barrier, getattr(*self._copy)

        class Event:
            def __init__(self, device: torch.device) -> None:
                self._behind = late._queue[-1] if late._queue else None

            def wait(self) -> None:
                assert not late._aside, "on a CPU the side stream begins when it is given work"
                while self._behind in late._queue:
                    late._queue.pop(0)()

        @contextlib.contextmanager
        def aside(*_: Any) -> Iterator[None]:
            late._aside = True
            try:
                yield
            finally:
                late._aside = False

        def meet(memory: HostPeerMemory, channel: int) -> None:
            late.num_barriers += 1
            assert late._aside, "computing waits for no other rank"
            late._queue.append(lambda: barrier(memory, channel))

        def copied(into: Tensor, out: Tensor, **options: Any) -> Any:
            if not late._aside:
                return copy(into, out, **options)
            held = weakref.ref(into)

            def run() -> None:
                time.sleep(late._delay)
                target = held()
                late.num_freed += target is None
                if target is not None:
                    copy(target, out, **options)

            late._queue.append(run)
            return into

        with (
            patch.object(self._module, "StreamEvent", Event),
            patch.object(self._module, "aside", aside),
            patch.object(*self._copy, copied),
            patch.object(HostPeerMemory, "barrier", meet),
        ):
            yield
