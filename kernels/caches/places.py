"""Places of tokens in a cache: allocation of blocks, lengths and block tables.

The host decides, and keeps its own copy of lengths and block tables, so that no check waits for
the device. What kernels read (lengths, int32 [B]; block table, int32 [B, blocks]) lies on the
device and is only ever changed in place, so that a CUDA graph that was captured over it stays
right. Every check comes before the first change: a ValueError leaves all as it was.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

Slots = tuple[Tensor, Tensor]
"""Two indices of a token: sequence and position, or block and place inside it."""


class Places:
    """Places in rows: each sequence has its own ``max_len`` places, one after another."""

    block_size: int | None = None
    block_table: Tensor | None = None

    def __init__(self, batch_size: int, max_len: int, device: torch.device | str) -> None:
        for name, value in (("batch_size", batch_size), ("max_len", max_len)):
            if value < 1:
                raise ValueError(f"cache: {name}={value}: must be at least 1")
        self.batch_size = batch_size
        self.max_len = max_len
        self.device = torch.device(device)
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self._lengths = [0] * batch_size
        self._written = [0] * batch_size

    @property
    def host_lengths(self) -> list[int]:
        """Tokens in each sequence, as the host knows them."""
        return list(self._lengths)

    @property
    def longest(self) -> int:
        return max(self._lengths)

    @property
    def capacity(self) -> int:
        """Places of a sequence that can be indexed: ``max_len``, or whole blocks of it."""
        return self.max_len

    def reserve(self, num_tokens: int | Sequence[int]) -> None:
        """Make sure that each sequence has room for its next tokens.

        Raises ValueError, with nothing changed, if one has not.
        """
        self._require_room(self._counts(num_tokens))

    def advance(self, num_tokens: int | Sequence[int]) -> None:
        """Count tokens that were written behind each sequence's last."""
        counts = self._counts(num_tokens)
        self._require_room(counts)
        self._require_places(counts)
        self._lengths = [old + new for old, new in zip(self._lengths, counts, strict=True)]
        self.note_written(0)
        if isinstance(num_tokens, int):
            self.lengths += num_tokens
        else:
            self.lengths += torch.tensor(counts, dtype=torch.int32, device=self.device)

    def rewind(self, num_tokens: int) -> None:
        """Forget the last tokens of every sequence, whose places it keeps.

        Raises ValueError, with nothing changed, for a negative number or if one has fewer.
        """
        if num_tokens < 0:
            raise ValueError(f"cache: num_tokens={num_tokens}: must be at least 0")
        if num_tokens > min(self._lengths):
            raise ValueError(f"cache: a sequence holds fewer than {num_tokens} tokens to forget")
        self._lengths = [length - num_tokens for length in self._lengths]
        self.lengths -= num_tokens

    def fill(self, lengths: Sequence[int]) -> None:
        """Set the lengths of all sequences; the caller writes the tokens.

        Raises ValueError, with nothing changed, if an empty cache has no room for them.
        """
        self._require_room_when_empty(self._counts(lengths))
        self.clear()
        self.reserve(lengths)
        self.advance(lengths)

    def clear(self) -> None:
        """Forget all tokens."""
        self._lengths = [0] * self.batch_size
        self.lengths.zero_()

    def note_written(self, num_tokens: int) -> None:
        """Remember that a step writes so many tokens behind each sequence's last."""
        self._written = [
            max(old, length + num_tokens)
            for old, length in zip(self._written, self._lengths, strict=True)
        ]

    def take_left_behind(self, num_tokens: int) -> Slots | None:
        """Slots that hold forgotten tokens behind the next ``num_tokens``; the caller clears them.

        Those of rows, which nobody else writes. None if there are none.
        """
        ends = [length + num_tokens for length in self._lengths]
        left = [
            torch.stack((torch.full((written - end,), sequence), torch.arange(end, written)))
            for sequence, (end, written) in enumerate(zip(ends, self._written, strict=True))
            if written > end
        ]
        if not left:
            return None
        self._written = [min(pair) for pair in zip(ends, self._written, strict=True)]
        sequences, positions = torch.cat(left, dim=1).to(self.device)
        return self.slots(sequences, positions)

    def slots(self, sequences: Tensor, positions: Tensor) -> Slots:
        """Indices of tokens at integer ``positions`` of ``sequences``, of one shape."""
        return sequences, positions

    def of_sequence(self, sequence: int, num_tokens: int) -> Slots:
        """Slots of the first tokens of one sequence."""
        positions = torch.arange(num_tokens, device=self.device)
        return self.slots(torch.full_like(positions, sequence), positions)

    def _counts(self, num_tokens: int | Sequence[int]) -> list[int]:
        counts = [num_tokens] * self.batch_size if isinstance(num_tokens, int) else [*num_tokens]
        if len(counts) != self.batch_size:
            raise ValueError(
                f"cache: tokens for {len(counts)} sequences, and it holds {self.batch_size}"
            )
        if min(counts) < 0:
            raise ValueError(f"cache: num_tokens={min(counts)}: must be at least 0")
        return counts

    def _require_room(self, counts: list[int]) -> None:
        for sequence, (held, new) in enumerate(zip(self._lengths, counts, strict=True)):
            if held + new > self.max_len:
                raise ValueError(
                    f"cache is full: sequence {sequence} holds {held} of max_len={self.max_len} "
                    f"tokens, {new} more do not fit"
                )

    def _require_room_when_empty(self, lengths: list[int]) -> None:
        for sequence, length in enumerate(lengths):
            if length > self.max_len:
                raise ValueError(
                    f"cache: lengths[{sequence}]={length}: must be at most max_len={self.max_len}"
                )

    def _require_places(self, counts: list[int]) -> None:
        """Raise ValueError if tokens would be counted that have no place yet."""


class BlockAllocator:
    """A free list of blocks; what is freed last is given out first, while caches may have it."""

    def __init__(self, num_blocks: int, *, seed: int | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"cache: num_blocks={num_blocks}: must be at least 1")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))[::-1]
        if seed is not None:
            random.Random(seed).shuffle(self._free)
        self._is_free = [True] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take free blocks. Raises ValueError, taking none, if there are too few."""
        if count > len(self._free):
            raise ValueError(
                f"cache is full: {count} more blocks are needed and {len(self._free)} of "
                f"num_blocks={self.num_blocks} are free"
            )
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._is_free[block] = False
        return taken

    def take_exactly(self, blocks: Sequence[int]) -> None:
        """These blocks. Raises ValueError, taking none, if one does not exist or is taken."""
        for place, block in enumerate(blocks):
            if not 0 <= block < self.num_blocks:
                raise ValueError(
                    f"block_table: block {block} does not exist; num_blocks={self.num_blocks}"
                )
            if not self._is_free[block] or block in blocks[:place]:
                raise ValueError(f"block_table: block {block} stands in it twice or is in use")
        wanted = set(blocks)
        self._free = [block for block in self._free if block not in wanted]
        for block in blocks:
            self._is_free[block] = False

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free blocks. Raises ValueError, freeing none, if one is free already."""
        for place, block in enumerate(blocks):
            if self._is_free[block] or block in blocks[:place]:
                raise ValueError(f"block {block} is given back twice")
        for block in blocks:
            self._is_free[block] = True
            self._free.append(block)


class BlockPlaces(Places):
    """Places in blocks: a sequence takes a block of ``block_size`` when its last one is full."""

    def __init__(
        self,
        batch_size: int,
        max_len: int,
        block_size: int,
        device: torch.device | str,
        *,
        num_blocks: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(batch_size, max_len, device)
        if block_size < 1:
            raise ValueError(f"cache.block_size={block_size}: must be at least 1")
        self.block_size: int = block_size
        self.max_blocks = -(-max_len // block_size)
        self.allocator = BlockAllocator(
            batch_size * self.max_blocks if num_blocks is None else num_blocks, seed=seed
        )
        # An entry that no sequence owns is never read by length, and block 0 always exists.
        shape = (batch_size, self.max_blocks)
        self.block_table: Tensor = torch.zeros(shape, dtype=torch.int32, device=device)
        self._blocks: list[list[int]] = [[] for _ in range(batch_size)]

    @property
    def capacity(self) -> int:
        return self.max_blocks * self.block_size

    @property
    def blocks(self) -> list[list[int]]:
        """Blocks of each sequence in order, as the host knows them."""
        return [list(owned) for owned in self._blocks]

    def reserve(self, num_tokens: int | Sequence[int]) -> None:
        counts = self._counts(num_tokens)
        self._require_room(counts)
        missing = [
            self._blocks_for(held + new) - len(owned)
            for held, new, owned in zip(self._lengths, counts, self._blocks, strict=True)
        ]
        taken = self.allocator.take(sum(max(0, number) for number in missing))
        rows: list[int] = []
        columns: list[int] = []
        values: list[int] = []
        # In turns, as sequences that grow together take them.
        while any(number > 0 for number in missing):
            for sequence, number in enumerate(missing):
                if number > 0:
                    rows.append(sequence)
                    columns.append(len(self._blocks[sequence]))
                    values.append(taken[len(values)])
                    self._blocks[sequence].append(values[-1])
                    missing[sequence] -= 1
        if values:
            where = torch.tensor([rows, columns], device=self.device)
            written = torch.tensor(values, dtype=torch.int32, device=self.device)
            self.block_table[where[0], where[1]] = written

    def adopt(self, block_table: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Take over blocks that somebody else filled: those of each sequence, in order.

        Raises ValueError, with nothing changed, for a block that does not exist or stands in the
        table twice, for blocks that are too few or too many for a sequence's tokens, and for
        more tokens than ``max_len``.
        """
        lengths = self._counts(lengths)
        # The last block may have room for more than that.
        Places._require_room_when_empty(self, lengths)
        if len(block_table) != self.batch_size:
            raise ValueError(
                f"block_table: {len(block_table)} rows for {self.batch_size} sequences"
            )
        for sequence, (row, length) in enumerate(zip(block_table, lengths, strict=True)):
            if not self._blocks_for(length) <= len(row) <= self.max_blocks:
                raise ValueError(
                    f"block_table: sequence {sequence} has {len(row)} blocks of {self.block_size} "
                    f"for {length} tokens, and at most {self.max_blocks}"
                )
        fresh = BlockAllocator(self.allocator.num_blocks)
        fresh.take_exactly([block for row in block_table for block in row])
        self.allocator = fresh
        self._blocks = [list(row) for row in block_table]
        self._lengths = list(lengths)
        padded = [[*row, *[0] * (self.max_blocks - len(row))] for row in block_table]
        self.block_table.copy_(torch.tensor(padded, dtype=torch.int32))
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))

    def release(self, sequence: int) -> None:
        """Forget one sequence and give back its blocks."""
        if not 0 <= sequence < self.batch_size:
            raise ValueError(
                f"cache: sequence={sequence}: must be at least 0 and less than {self.batch_size}"
            )
        self.allocator.give_back(self._blocks[sequence])
        self._blocks[sequence] = []
        self._lengths[sequence] = 0
        self.lengths[sequence] = 0
        self.block_table[sequence] = 0

    def clear(self) -> None:
        for owned in self._blocks:
            self.allocator.give_back(owned)
        self._blocks = [[] for _ in range(self.batch_size)]
        self.block_table.zero_()
        super().clear()

    def slots(self, sequences: Tensor, positions: Tensor) -> Slots:
        blocks = self.block_table[sequences, positions // self.block_size]
        return blocks.long(), positions % self.block_size

    def _require_room_when_empty(self, lengths: list[int]) -> None:
        super()._require_room_when_empty(lengths)
        needed = sum(map(self._blocks_for, lengths))
        if needed > self.allocator.num_blocks:
            raise ValueError(
                f"cache: lengths need {needed} blocks of {self.block_size}; must be at most "
                f"num_blocks={self.allocator.num_blocks}"
            )

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    def _require_places(self, counts: list[int]) -> None:
        for sequence, (held, new) in enumerate(zip(self._lengths, counts, strict=True)):
            if self._blocks_for(held + new) > len(self._blocks[sequence]):
                raise ValueError(
                    f"cache: sequence {sequence} has no block for its next {new} tokens; "
                    "reserve them first"
                )
