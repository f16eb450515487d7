"""CUDA side streams, and the events with which streams wait for each other.

On a CPU there are none: what would run on a side stream runs at once, and events are passed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class StreamEvent:
    """This moment on the current stream, for other streams to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Hold the current stream until the moment has passed; the host goes on."""
        if self._event is not None:
            self._event.wait()


class SideStream:
    """A stream for work that must not wait for the current stream's computing.

    Args:
        priority: -1 is high, for work that must not queue behind the thread blocks of a long
            kernel.
    """

    def __init__(self, device: torch.device, *, priority: int = 0) -> None:
        self.device = device
        on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=priority) if on_cuda else None

    @property
    def runs_beside(self) -> bool:
        """Whether work on the stream overlaps with computing."""
        return self._stream is not None

    def after_current(self) -> contextlib.AbstractContextManager[None]:
        """Launch on this stream, after all that the current stream has been given so far."""
        return self.after(StreamEvent(self.device))

    @contextlib.contextmanager
    def after(self, *events: StreamEvent) -> Iterator[None]:
        """Launch on this stream, after the events have passed."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            for event in events:
                event.wait()
            yield
