"""Ranks compare what they were called with, before a collective that would hang or mix data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import AttentionSpec
from parallel.context.blocks.kept import MOST_KEPT, identity_of

_LONGEST = 1024
"""Bytes of a rank's statement that are compared; of longer ones the beginning and a checksum."""


def mask_in_words(spec: AttentionSpec) -> str:
    """What a call asks for that ranks must have in common, beside shapes."""
    words = ["causal" if spec.causal else "full"]
    if spec.window is not None:
        words.append(f"window={spec.window}")
    if spec.prefix_len:
        words.append(f"prefix_len={spec.prefix_len}")
    if spec.softcap is not None:
        words.append(f"softcap={spec.softcap}")
    if spec.sinks is not None:
        words.append(f"sinks {list(spec.sinks.shape)}")
    return ", ".join(words)


def kind_of_call(tensors: Sequence[Tensor], spec: AttentionSpec) -> tuple[Any, ...]:
    """All that :func:`facts_of_call` tells, and the packing's identity and device: a key, which is
    made in each call and takes a tenth of the time.
    """
    packing = spec.packing
    starts = None if packing is None else packing.cu_seqlens_q
    return (
        None if starts is None else identity_of(starts),
        *((x.shape, x.dtype) for x in tensors),
        tensors[0].device,
        *(spec.causal, spec.window, spec.prefix_len, spec.softcap),
        None if spec.sinks is None else spec.sinks.shape,
    )


def facts_of_call(tensors: Sequence[Tensor], spec: AttentionSpec) -> str:
    """What ranks were called with, in words, beside their packing."""
    shapes = ", ".join(f"{list(x.shape)} {str(x.dtype)[6:]}" for x in tensors)
    return f"{shapes}, {mask_in_words(spec)}"


_MOST_AGREED = 64 * MOST_KEPT
"""Many more than calls with a kept value (:class:`parallel.context.blocks.kept.Kept`), which are
not looked up here."""


class Agreements:
    """The last calls that the ranks of a group have agreed on.

    The call that was made longest ago is forgotten first. All ranks make the same calls, and so
    forget alike: none compares a call that another takes for known.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._facts: dict[str, None] = {}

    def require(self, device: torch.device, facts: str, complaint: str | None = None) -> None:
        """:func:`agree`, unless the ranks have agreed on these facts before."""
        if complaint is not None or facts not in self._facts:
            agree(self._group, device, facts, complaint)
        self.repeat(facts)

    def repeat(self, facts: str) -> None:
        """Note that a call is made again; to be called on all ranks, or on none."""
        self._facts.pop(facts, None)
        self._facts[facts] = None
        if len(self._facts) > _MOST_AGREED:
            self._facts.pop(next(iter(self._facts)))


def agree(
    group: dist.ProcessGroup, device: torch.device, facts: str, complaint: str | None = None
) -> None:
    """Compare statements between the ranks of a group; a collective, which waits for all ranks.

    Args:
        facts: what this rank was called with; must be equal on all ranks.
        complaint: why this rank cannot go on, in one line.

    Raises ValueError on every rank, with the first rank's complaint, or with the first that differs
    from rank 0.
    """
    found = _gathered(group, device, f"!{complaint}" if complaint else f"={facts}")
    for rank, said in enumerate(found):
        if said.startswith("!"):
            raise ValueError(f"rank {rank}: {said[1:]}")
    for rank, said in enumerate(found):
        if said != found[0]:
            raise ValueError(
                f"ranks disagree on what they attend to: rank 0 has {found[0][1:]}, "
                f"rank {rank} has {said[1:]}"
            )


def _gathered(group: dist.ProcessGroup, device: torch.device, statement: str) -> list[str]:
    """The statement of every rank, in rank order; as bytes in a tensor, nothing is unpickled."""
    own = torch.zeros(_LONGEST, dtype=torch.uint8)
    data = torch.frombuffer(bytearray(_shortened(statement)), dtype=torch.uint8)
    own[: len(data)] = data
    own = own.to(device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    return [bytes(part.tolist()).rstrip(b"\0").decode(errors="replace") for part in every]


def _shortened(statement: str) -> bytes:
    data = statement.encode()
    if len(data) <= _LONGEST:
        return data
    digest = hashlib.sha256(data).hexdigest()
    return data[: _LONGEST - len(digest) - 4] + f"... {digest}".encode()
