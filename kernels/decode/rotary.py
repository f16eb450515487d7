"""The angles of rotary position embedding (Su et al. 2021, equation 34), as a call brings them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, frozen=True)
class Rotary:
    """Rotates the first ``rotary_dim`` entries of queries and keys by their position's angles."""

    cos: Tensor
    """float32 [max_positions, rotary_dim / 2]."""
    sin: Tensor
    """Like cos."""
    interleaved: bool = False
    """Entry 2i is paired with 2i + 1 (GPT-J); else entry i with i + rotary_dim / 2 (GPT-NeoX)."""

    @property
    def rotary_dim(self) -> int:
        """How many entries of a head are rotated."""
        return 2 * self.cos.shape[1]
