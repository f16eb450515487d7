"""The choice ``checkpoint=``: which activations are recomputed in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from harness.cases.requirements import require_at_least, require_choice

CHECKPOINT_SCOPES = ("none", "block", "every_k", "selective")


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    """Activations that the backward pass recomputes; values live in ``conf/checkpoint/*.yaml``."""

    scope: str = "none"
    """``none``, those of each ``block``, of ``every_k``-th block, or ``selective`` by operator."""
    every: int = 2
    """k of ``every_k``: one block in k is checkpointed."""

    def __post_init__(self) -> None:
        require_choice("checkpoint.scope", self.scope, CHECKPOINT_SCOPES)
        require_at_least("checkpoint.every", self.every, 1)
        if self.scope != "every_k" and self.every != 2:
            raise ValueError(
                f"checkpoint.every={self.every}: counts blocks for checkpoint=every_k alone; "
                "leave it out"
            )

    @property
    def label(self) -> str:
        return f"every_{self.every}" if self.scope == "every_k" else self.scope

    @property
    def blocks(self) -> int:
        """k, if one block in k is computed again, in whole or in part."""
        return self.every if self.scope == "every_k" else 1
