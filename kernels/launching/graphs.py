"""A step captured once as a CUDA graph and replayed for other inputs of the same shapes.

A graph holds the addresses of what it reads and writes. Inputs are copied into tensors of its
own before each replay; a cache, its lengths and its block table are read where they lie, so that
they may change between replays, in place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

WARM_UP_CALLS = 3
"""Before capture, on the stream that captures: kernels compile, libraries allocate workspaces."""


@cache
def capture_stream(device_index: int) -> torch.cuda.Stream:
    """The one stream of this process on which steps are captured.

    cuBLAS has a workspace for each stream, which PyTorch keeps: a new stream for each capture
    would cost 32 MiB each time.
    """
    return torch.cuda.Stream(device_index)


class GraphedStep:
    """``step(*inputs)`` as one launch.

    Args:
        step: launches kernels on the current stream and returns tensors; it must wait for
            nothing on the host, and give the same result when it is called twice.
        inputs: an example of each input, on a CUDA device.
    """

    def __init__(self, step: Callable[..., Any], *inputs: Tensor) -> None:
        self._inputs = tuple(x.clone() for x in inputs)
        self._graph, self._outputs = capture(lambda: step(*self._inputs))

    def __call__(self, *inputs: Tensor) -> Any:
        """The step on these inputs; the next call overwrites what this one returns.

        Raises ValueError, before anything is changed, for other shapes than were captured.
        """
        require_static(self._inputs, inputs)
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        self._graph.replay()
        return self._outputs


def capture(
    step: Callable[[], Any],
    *,
    warm_up: Callable[[], Any] | None = None,
    pool: Any = None,
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of ``step()``, and what it returned.

    Args:
        step: as of :class:`GraphedStep`.
        warm_up: called before instead of ``step``, which then is called once.
        pool: of a graph that is replayed before this one each time, and shares its memory.
    """
    stream = capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            (warm_up or step)()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=_error_mode()):
        result = step()
    return graph, result


def _error_mode() -> str:
    """Which threads' calls may spoil a capture.

    NCCL's watchdog asks for the state of earlier collectives from a thread of its own, which would.
    """
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return "thread_local" if several else "global"


def require_static(captured: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> None:
    """Raise ValueError unless a step is given what its graph was captured with."""
    if len(given) != len(captured):
        raise ValueError(f"a CUDA graph of {len(captured)} inputs was given {len(given)}")
    for mine, other in zip(captured, given, strict=True):
        if mine.shape != other.shape:
            raise ValueError(
                f"a CUDA graph replays one batch: it was captured for {tuple(mine.shape)} and "
                f"given {tuple(other.shape)}; a dynamic batch runs without it"
            )
