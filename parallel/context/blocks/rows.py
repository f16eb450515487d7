"""Selections of tokens: the rows that one attention call reads, and writes its results to.

Rows of a dense batch are a slice of [B, H, S, D] along S; rows of a packed batch are indices
into [T, H, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """Some tokens of tensors that differ in the number of heads alone."""

    @property
    def whole(self) -> bool:
        """Whether these are all tokens, in order."""
        ...

    @property
    def count(self) -> int:
        """How many rows these are."""
        ...

    @property
    def slices(self) -> Sequence[slice] | None:
        """The rows along S of a dense batch, one slice after another; None in a packed one."""
        ...

    def take(self, x: Tensor) -> Tensor:
        """The rows of q, k, v, o or a gradient."""
        ...

    def put(self, x: Tensor, part: Tensor) -> None:
        """Write the rows, in x's dtype."""
        ...

    def add(self, x: Tensor, part: Tensor) -> None:
        """Add to the rows, in x's dtype."""
        ...

    def take_lse(self, lse: Tensor) -> Tensor: ...

    def put_lse(self, lse: Tensor, part: Tensor) -> None: ...


@dataclass(slots=True, frozen=True)
class DenseRows:
    """A slice along S of [B, H, S, D] and of a log-sum-exp [B, H, S]."""

    rows: slice
    whole: bool

    @property
    def count(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def slices(self) -> Sequence[slice] | None:
        return (self.rows,)

    def take(self, x: Tensor) -> Tensor:
        return x if self.whole else x[:, :, self.rows]

    def put(self, x: Tensor, part: Tensor) -> None:
        copy_unless_same(self.take(x), part)

    def add(self, x: Tensor, part: Tensor) -> None:
        self.take(x).add_(part)

    def take_lse(self, lse: Tensor) -> Tensor:
        return self.take(lse)

    def put_lse(self, lse: Tensor, part: Tensor) -> None:
        copy_unless_same(self.take(lse), part)


@dataclass(slots=True, frozen=True)
class PackedRows:
    """Tokens of [T, H, D] and of a log-sum-exp [H, T], by index.

    Within one of ``parts`` no index appears twice; a token in several parts receives the sum of
    their additions.
    """

    parts: tuple[Tensor, ...]
    """int64 indices; not used if :attr:`whole`."""
    whole: bool
    index: Tensor = field(init=False, repr=False, compare=False)
    """All parts end to end."""

    def __post_init__(self) -> None:
        sizes = [len(part) for part in self.parts]
        index = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        object.__setattr__(self, "index", index)
        # The same memory.
        object.__setattr__(self, "parts", index.split(sizes))

    @property
    def count(self) -> int:
        return len(self.index)

    @property
    def slices(self) -> Sequence[slice] | None:
        return None

    def take(self, x: Tensor) -> Tensor:
        return x if self.whole else x.index_select(0, self.index)

    def put(self, x: Tensor, part: Tensor) -> None:
        if self.whole:
            copy_unless_same(x, part)
        else:
            x.index_copy_(0, self.index, part.to(x.dtype))

    def add(self, x: Tensor, part: Tensor) -> None:
        if self.whole:
            x.add_(part)
            return
        sizes = [len(index) for index in self.parts]
        for index, rows in zip(self.parts, part.split(sizes), strict=True):
            x.index_add_(0, index, rows.to(x.dtype))

    def take_lse(self, lse: Tensor) -> Tensor:
        return lse if self.whole else lse.index_select(1, self.index)

    def put_lse(self, lse: Tensor, part: Tensor) -> None:
        if self.whole:
            copy_unless_same(lse, part)
        else:
            lse.index_copy_(1, self.index, part)


def copy_unless_same(view: Tensor, part: Tensor) -> None:
    """Copy, unless a kernel has updated the accumulator in place."""
    same = view.data_ptr() == part.data_ptr() and view.stride() == part.stride()
    if not same:
        view.copy_(part)
