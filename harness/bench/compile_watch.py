"""How often torch.compile compiles during a case, and how long compiling and autotuning take."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any


class CompileWatch:
    """Counts compilations and their seconds from Dynamo's callbacks, and our kernels' autotuning.

    Dynamo takes as long to import as torch, so it is observed only once something else has
    imported it; until then nothing can have been compiled.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.count = 0
        self.autotune_seconds = 0.0
        self._started = 0.0
        self._watching = False
        self._callbacks: Any = None

    def start(self, event: Any) -> None:
        self._started = time.perf_counter()
        if event.callback_trigger.name in ("DYNAMO", "LAZY_BACKWARD"):
            self.count += 1

    def end(self, event: Any) -> None:
        self.seconds += time.perf_counter() - self._started

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        tuned_before = _autotune_seconds()
        self._watching = True
        self.attach()
        try:
            yield
        finally:
            self._watching = False
            if self._callbacks is not None:
                self._callbacks.remove_start_callback(self.start)
                self._callbacks.remove_end_callback(self.end)
                self._callbacks = None
            self.autotune_seconds += _autotune_seconds() - tuned_before

    def attach(self) -> None:
        """Register with Dynamo, if it has been imported by now."""
        dynamo = sys.modules.get("torch._dynamo.callback")
        if self._watching and self._callbacks is None and dynamo is not None:
            self._callbacks = dynamo.callback_handler
            self._callbacks.register_start_callback(self.start)
            self._callbacks.register_end_callback(self.end)


def _autotune_seconds() -> float:
    """Seconds that kernels.flash has spent on autotuning in this process."""
    configs = sys.modules.get("kernels.flash.any_gpu.configs")
    return configs.autotune_seconds() if configs is not None else 0.0
