"""One buffer on every rank that the other ranks of the host can read directly.

On CUDA it is PyTorch's symmetric memory (torch.distributed._symmetric_memory): a copy out of a
peer's buffer is a memcpy over NVLink, which the GPU's copy engines run while its SMs compute.
On a CPU it is a file in memory that all ranks map, so that the same transports run, and are
tested, without a GPU. No multicast and no multimem operations are used.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.context.transports.stream_barrier import WORD_BYTES, StreamBarrier, num_words
from parallel.streams import SideStream


class PeerMemory(Protocol):
    """``num_bytes`` on each rank of a group, readable by all of them."""

    num_bytes: int
    outside_bytes: int
    """Bytes of the buffer that PyTorch's allocator of device memory does not count."""

    def of_rank(self, rank: int, offset: int, like: Tensor) -> Tensor:
        """A view of ``rank``'s buffer, ``offset`` bytes in, contiguous in the shape of ``like``."""
        ...

    def barrier(self, channel: int) -> None:
        """Order memory between ranks, on the current stream.

        Writes that any rank's stream made before its barrier of this channel are visible to
        every rank's stream after it.
        """
        ...

    def settle(self, channel: int) -> None:
        """End a pass's barriers of a channel, so that a CUDA graph of the pass can be replayed."""
        ...


_VIEWS_KEPT = 256
"""Views of one buffer: a few for each rank and shape of batch."""


class PeerViews:
    """Views of every rank's buffer, made once: each costs several calls, and a pass has dozens."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, torch.Size, torch.dtype], Tensor] = {}

    def of_rank(self, rank: int, offset: int, like: Tensor) -> Tensor:
        """:meth:`PeerMemory.of_rank`."""
        key = (rank, offset, like.shape, like.dtype)
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= _VIEWS_KEPT:
                self._made.pop(next(iter(self._made)))
            # In inference mode it would be a tensor that no later training step may write to.
            with torch.inference_mode(False):
                found = self._made[key] = self.make(rank, offset, like)
        return found

    def make(self, rank: int, offset: int, like: Tensor) -> Tensor:
        """A view that was not there."""
        raise NotImplementedError


def aligned(num_bytes: int) -> int:
    """The least multiple of 256 that is as large: where the next tensor begins in a buffer."""
    return -(-num_bytes // 256) * 256


CHANNELS = 2
"""Barriers of different channels may be under way at once, on different streams."""

_ALIGNMENT = 16
"""The words of barriers behind the buffer begin at a multiple of this many bytes."""


class CudaPeerMemory(PeerViews):
    """Symmetric memory of the current device; made by all ranks of the group together.

    Its barriers are a :class:`StreamBarrier` for each channel. PyTorch's own is a kernel that spins
    until the last rank has come, on an SM that attention wants. At 16,384 tokens on four H200s,
    where a pass takes 6 ms, that cost 0.15 ms, and made this transport slower than messages.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        # Not in every build of torch.
        import torch.distributed._symmetric_memory as symmetric

        super().__init__()
        self.num_bytes = num_bytes
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._first_word = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        whole = self._first_word + CHANNELS * num_words(self._num_ranks) * WORD_BYTES
        before = torch.cuda.memory_allocated(device)
        self._own = symmetric.empty(whole, dtype=torch.uint8, device=device)
        # Versions differ in whether symmetric memory comes out of the allocator's pools.
        self.outside_bytes = max(0, num_bytes - (torch.cuda.memory_allocated(device) - before))
        self._own[self._first_word :].zero_()
        # These zeros are queued behind what this rank computes. A peer that has gone ahead would
        # write a word here before they are written, and its word would be lost.
        torch.cuda.synchronize(device)
        self._handle: Any = symmetric.rendezvous(self._own, group)
        self._barriers = [self._make_barrier(channel) for channel in range(CHANNELS)]

    def _make_barrier(self, channel: int) -> StreamBarrier:
        first = self._first_word + channel * num_words(self._num_ranks) * WORD_BYTES

        def address(rank: int, number: int) -> int:
            at = first + number * WORD_BYTES
            word: Tensor = self._handle.get_buffer(rank, (WORD_BYTES,), torch.uint8, at)
            return word.data_ptr()

        return StreamBarrier(self._rank, self._num_ranks, address)

    def make(self, rank: int, offset: int, like: Tensor) -> Tensor:
        element = like.element_size()
        assert offset % element == 0, "offsets are aligned"
        view: Tensor = self._handle.get_buffer(rank, like.shape, like.dtype, offset // element)
        return view

    def barrier(self, channel: int) -> None:
        self._barriers[channel].enqueue(self._stream)

    def settle(self, channel: int) -> None:
        self._barriers[channel].settle(self._stream)

    @property
    def _stream(self) -> int:
        return torch.cuda.current_stream(self._own.device).cuda_stream


class HostPeerMemory(PeerViews):
    """A file per rank, mapped by all ranks of one host; barriers are those of the group."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes = num_bytes
        self.outside_bytes = 0
        self._group = group
        shared = Path("/dev/shm")
        with tempfile.NamedTemporaryFile(
            prefix="attnbench-", dir=shared if os.access(shared, os.W_OK) else None
        ) as file:
            os.ftruncate(file.fileno(), num_bytes)
            names: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(names, file.name, group=group)
            self._buffers = [
                torch.from_file(name, shared=True, size=num_bytes, dtype=torch.uint8)
                for name in names
            ]
            # A file may be unlinked once all ranks have mapped it.
            dist.barrier(group)

    def make(self, rank: int, offset: int, like: Tensor) -> Tensor:
        part = self._buffers[rank][offset : offset + like.numel() * like.element_size()]
        return part.view(like.dtype).view(like.shape)

    def barrier(self, channel: int) -> None:
        dist.barrier(self._group)

    def settle(self, channel: int) -> None:
        """Nothing: no graph holds these barriers."""


class PeerBuffers:
    """Keeps one :class:`PeerMemory` per purpose between calls, and grows it where needed.

    Allocation is a collective operation: ranks ask for the same sizes in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # High priority: a sum must not queue behind the thread blocks of a long kernel.
        self.fetching, self.reducing = (SideStream(device, priority=-1) for _ in range(2))
        """Streams of all passes: memory that one of them has used stays with it for the next."""
        self._group = group
        self._device = device
        self._memory: dict[str, PeerMemory] = {}
        self._in_graphs: list[PeerMemory] = []
        """Memory that captured passes read and write at each replay, whatever has replaced it."""

    @property
    def outside_bytes(self) -> int:
        """Bytes on this rank that PyTorch's allocator of device memory does not count."""
        held = {id(memory): memory for memory in (*self._memory.values(), *self._in_graphs)}
        return sum(memory.outside_bytes for memory in held.values())

    def get(self, purpose: str, num_bytes: int) -> PeerMemory:
        """At least ``num_bytes`` on each rank.

        Raises RuntimeError where a CUDA graph is captured and there is less: memory is made by
        all ranks together, in a pass of the same shapes before.
        """
        found = self._memory.get(purpose)
        captures = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if found is None or found.num_bytes < num_bytes:
            if captures:
                raise RuntimeError(
                    "split attention is captured in a CUDA graph before a call of its shapes has "
                    "run: call it once, forward and backward, on all ranks, and capture then"
                )
            if found is not None:
                # Transfers in flight, here and on other ranks, may still read the old buffer.
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                dist.barrier(self._group)
                del self._memory[purpose], found
            # As of views: an evaluation may come before the first training step.
            with torch.inference_mode(False):
                if self._device.type == "cuda":
                    found = CudaPeerMemory(self._group, num_bytes, self._device)
                else:
                    found = HostPeerMemory(self._group, num_bytes)
            self._memory[purpose] = found
        if captures and found not in self._in_graphs:
            self._in_graphs.append(found)
        return found
