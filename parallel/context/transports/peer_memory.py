"""One buffer on every rank that the other ranks of the host can read directly.

On CUDA it is PyTorch's symmetric memory (torch.distributed._symmetric_memory): a copy out of a
peer's buffer is a memcpy over NVLink, which the GPU's copy engines run while its SMs compute.
On a CPU it is a file in memory that all ranks map, so that the same transports run, and are
tested, without a GPU. No multicast and no multimem operations are used.
"""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

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


CHANNELS = 2
"""Barriers of different channels may be under way at once, on different streams."""

_ALIGNMENT = 16
"""The signals behind the buffer begin at a multiple of this many bytes."""


class CudaPeerMemory(PeerViews):
    """Symmetric memory of the current device; made by all ranks of the group together.

    A barrier counts up one word on each peer and waits for one from each: memory operations of
    the stream, which run on no SM. PyTorch's own barrier is a kernel that spins until the last
    rank has come, on an SM that attention wants. At 16,384 tokens on four H200s, where a pass
    takes 6 ms, that cost 0.15 ms, and made this transport slower than messages.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        # Not in every build of torch.
        import torch.distributed._symmetric_memory as symmetric

        super().__init__()
        self.num_bytes = num_bytes
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._first_signal = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        whole = self._first_signal + CHANNELS * self._num_ranks * _Signal.BYTES
        before = torch.cuda.memory_allocated(device)
        self._own = symmetric.empty(whole, dtype=torch.uint8, device=device)
        # Versions differ in whether symmetric memory comes out of the allocator's pools.
        self.outside_bytes = max(0, num_bytes - (torch.cuda.memory_allocated(device) - before))
        self._own[self._first_signal :].zero_()
        # These zeros are queued behind what this rank computes. A peer that has gone ahead would
        # signal a barrier here before they are written, and its signal would be lost.
        torch.cuda.synchronize(device)
        self._handle: Any = symmetric.rendezvous(self._own, group)
        self._signals = [self._make_signals(channel) for channel in range(CHANNELS)]
        self._passed = [0] * CHANNELS

    def _make_signals(self, channel: int) -> ctypes.Array[_Signal]:
        """The memory operations of a barrier: signal every peer, then wait for every peer."""
        peers = [peer for peer in range(self._num_ranks) if peer != self._rank]
        signals = (_Signal * (2 * len(peers)))()
        for number, peer in enumerate(peers):
            there = self._address(peer, channel, sender=self._rank)
            here = self._address(self._rank, channel, sender=peer)
            signals[number] = _Signal(operation=_Signal.WRITE, address=there)
            signals[len(peers) + number] = _Signal(operation=_Signal.WAIT, address=here)
        return signals

    def _address(self, rank: int, channel: int, sender: int) -> int:
        """The address of the word in ``rank``'s memory that ``sender`` writes."""
        at = self._first_signal + (channel * self._num_ranks + sender) * _Signal.BYTES
        word: Tensor = self._handle.get_buffer(rank, (_Signal.BYTES,), torch.uint8, at)
        return word.data_ptr()

    def make(self, rank: int, offset: int, like: Tensor) -> Tensor:
        element = like.element_size()
        assert offset % element == 0, "offsets are aligned"
        view: Tensor = self._handle.get_buffer(rank, like.shape, like.dtype, offset // element)
        return view

    def barrier(self, channel: int) -> None:
        self._passed[channel] += 1
        signals = self._signals[channel]
        for signal in signals:
            signal.value = self._passed[channel]
        stream = torch.cuda.current_stream(self._own.device).cuda_stream
        code = _driver().cuStreamBatchMemOp_v2(
            ctypes.c_void_p(stream), ctypes.c_uint(len(signals)), signals, ctypes.c_uint(0)
        )
        if code:
            raise RuntimeError(
                f"the CUDA driver refuses to signal between GPUs (cuStreamBatchMemOp: {code}); "
                "attention.transport=send_recv, or all_gather, does without"
            )


class _Signal(ctypes.Structure):
    """CUstreamBatchMemOpParams of the CUDA driver: write a word, or wait until one is as large.

    A write comes after what the stream did before it, for all devices; a wait compares so that
    a count may wrap around (CU_STREAM_WAIT_VALUE_GEQ).
    """

    WAIT, WRITE = 1, 2
    BYTES = 4

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
    )


@functools.cache
def _driver() -> Any:
    """The driver's library, which is loaded already where there is a CUDA device."""
    return ctypes.CDLL("libcuda.so.1")


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

    @property
    def outside_bytes(self) -> int:
        """Bytes on this rank that PyTorch's allocator of device memory does not count."""
        return sum(memory.outside_bytes for memory in self._memory.values())

    def get(self, purpose: str, num_bytes: int) -> PeerMemory:
        """At least ``num_bytes`` on each rank."""
        found = self._memory.get(purpose)
        if found is None or found.num_bytes < num_bytes:
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
        return found
