"""A barrier between GPUs of one host, made of memory operations of their streams.

A rank writes a word into each peer's memory and waits until each peer has written one into its
own: no SM takes part, where a kernel that spins until the last rank has come would hold one that
attention wants. What each operation writes and awaits is always the same, so that a CUDA graph
may hold it and be replayed: a rank takes back, with zeros, the words that it has waited for.

A peer may reach its next barrier before this rank has taken back its word, so barriers take turns
with two sets of words. It cannot be two barriers ahead: it waits in between for a word that this
rank writes after it has taken back the first. A captured pass begins with the first set wherever
it is replayed, so every pass makes an even number of barriers (:meth:`StreamBarrier.settle`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

WORD_BYTES = 4
"""Bytes of one word; all of them are zero before the first barrier."""

_SETS = 2

_WAIT, _WRITE = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32."""


class MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams of the CUDA driver: write a word, or wait until one is as large.

    A write comes after what the stream did before it, for all devices (CU_STREAM_WAIT_VALUE_GEQ
    and CU_STREAM_WRITE_VALUE_DEFAULT are both flags of zero).
    """

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
    )

    @property
    def waits(self) -> bool:
        """Whether the stream stops here until the word is as large as ``value``."""
        return self.operation == _WAIT


def num_words(num_ranks: int) -> int:
    """Words in each rank's memory for one :class:`StreamBarrier`."""
    return _SETS * num_ranks


class StreamBarrier:
    """A barrier that ranks pass again and again, in the order of one stream or of streams joined.

    Args:
        rank: this rank, of ``num_ranks``.
        address: of a word in a rank's memory, by rank and number below :func:`num_words`.
    """

    def __init__(self, rank: int, num_ranks: int, address: Callable[[int, int], int]) -> None:
        peers = [peer for peer in range(num_ranks) if peer != rank]
        self._operations = [
            self._make(
                peers, [number * num_ranks + peer for peer in range(num_ranks)], rank, address
            )
            for number in range(_SETS)
        ]
        self._next = 0

    @staticmethod
    def _make(
        peers: list[int], words: list[int], rank: int, address: Callable[[int, int], int]
    ) -> ctypes.Array[MemoryOperation]:
        """Tell every peer, wait for every peer, take their words back; ``words`` are by sender."""
        told = [(_WRITE, address(peer, words[rank]), 1) for peer in peers]
        awaited = [(_WAIT, address(rank, words[peer]), 1) for peer in peers]
        taken_back = [(_WRITE, address(rank, words[peer]), 0) for peer in peers]
        steps = told + awaited + taken_back
        return (MemoryOperation * len(steps))(
            *(MemoryOperation(operation=o, address=a, value=v) for o, a, v in steps)
        )

    def take_turn(self) -> ctypes.Array[MemoryOperation]:
        """The operations of the next barrier."""
        operations = self._operations[self._next]
        self._next = (self._next + 1) % _SETS
        return operations

    def enqueue(self, stream: int) -> None:
        """Have a CUDA stream, by its handle, meet the other ranks' here."""
        operations = self.take_turn()
        code = _driver().cuStreamBatchMemOp_v2(
            ctypes.c_void_p(stream),
            ctypes.c_uint(len(operations)),
            operations,
            ctypes.c_uint(0),
        )
        if code:
            raise RuntimeError(
                f"the CUDA driver refuses to signal between GPUs (cuStreamBatchMemOp: {code}); "
                "attention.transport=send_recv, all_gather or all_to_all does without"
            )

    def settle(self, stream: int) -> None:
        """Meet once more if the number of barriers is odd so far; called at a pass's end."""
        if self._next:
            self.enqueue(stream)


@functools.cache
def _driver() -> Any:
    """The driver's library, which is loaded already where there is a CUDA device."""
    return ctypes.CDLL("libcuda.so.1")
