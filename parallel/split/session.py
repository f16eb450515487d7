"""What the ranks of a group have agreed on, and the schemes that are bound to it.

The ranks compare their calls before the first collective of each new kind of call: a rank that
cannot go on, or that was called with something else than the others, makes all of them raise the
same line, where their collectives would hang or mix data. What was compared once is remembered, so
that later calls of the same kind cost nothing.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Hashable
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from parallel.context.attention import SequenceParallelAttention
from parallel.context.bound import SplitAttention
from parallel.context.heads.agreement import agree

COMPARED = ("new", "every")
"""Choices of ``compare=``: at each new kind of call, or before every call."""

_KINDS_KEPT = 256
"""Kinds of calls; a training run packs each batch anew, and its layers share the packing."""

T = TypeVar("T")


class Session:
    """The calls of one process group.

    Attributes:
        rank: this process among the ranks of the group.
        num_ranks: processes of the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._device = _device_of(group)
        self._kinds: dict[Hashable, Any] = {}
        self._bound: dict[Hashable, SplitAttention] = {}
        self._open = contextlib.ExitStack()

    def agreed(
        self, kind: Hashable, check: Callable[[], T], facts: Callable[[], str], *, compare: str
    ) -> T:
        """The result of ``check`` for this kind of call, once all ranks agree on it.

        Args:
            kind: identifies the call, and so the result of its check.
            check: raises where this rank cannot go on; starts no collective.
            facts: tells the kind of call in words, which must be equal on all ranks.
            compare: one of :data:`COMPARED`.

        Raises ValueError on all ranks if one of them cannot go on, or their facts differ.
        """
        if kind in self._kinds and compare != "every":
            found: T = self._kinds[kind]
            return found
        try:
            if compare not in COMPARED:
                raise ValueError(f"compare={compare!r}: must be one of {', '.join(COMPARED)}")
            found = self._kinds[kind] if kind in self._kinds else check()
        # Whatever it is: the others wait for this rank's word.
        except Exception as error:
            self.refuse(error)
        agree(self.group, self._device, facts())
        # In order of arrival, which is the same on all ranks, so that they forget alike.
        if kind not in self._kinds and len(self._kinds) >= _KINDS_KEPT:
            self._kinds.pop(next(iter(self._kinds)))
        self._kinds[kind] = found
        return found

    def refuse(self, reason: str | Exception) -> NoReturn:
        """Raise ValueError here, and on the ranks that compare their calls meanwhile."""
        agree(self.group, self._device, "", _in_a_line(reason))
        raise AssertionError("a complaint raises")

    def bound(
        self, scheme: SequenceParallelAttention, options: Hashable, device: torch.device
    ) -> SplitAttention:
        """The scheme over this group, bound when first used and kept; all ranks have agreed."""
        key = (scheme.name, options, device)
        if key not in self._bound:
            self._bound[key] = self._open.enter_context(scheme.bind(self.group, device))
        return self._bound[key]

    def close(self) -> None:
        """Leave the schemes' contexts, and free what they hold."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: Any) -> None:
        self._kinds.clear()
        self._bound.clear()
        # They may not wait for the other ranks after an error.
        self._open.__exit__(*error)


# Functions without a handle, like those of torch.distributed, need a place for what is kept.
_SESSIONS: dict[int, Session] = {}


def session_of(group: dist.ProcessGroup | None) -> Session:
    """The session of a group, or of the whole world. Raises ValueError where there is none."""
    group = resolved(group)
    found = _SESSIONS.get(id(group))
    if found is None:
        if not _SESSIONS:
            atexit.register(_forget_destroyed)
        _forget_destroyed()
        # The session keeps its group alive, so that no other gets its id.
        found = _SESSIONS[id(group)] = Session(group)
    return found


def release(group: dist.ProcessGroup | None = None) -> None:
    """Free what the functions of :mod:`parallel.split` keep for a group; the next call makes it
    anew. All ranks call it together.
    """
    session = _SESSIONS.pop(id(resolved(group)), None)
    if session is not None:
        session.close()


def resolved(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the whole world. Raises ValueError where this process is not in it."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("no process group: call torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError("group: must be a process group that this process is a member of")
    return group


def _forget_destroyed() -> None:
    """Leave the sessions of groups that are no more."""
    for key, session in list(_SESSIONS.items()):
        if _is_destroyed(session.group):
            # With the world went what its schemes would release.
            with contextlib.suppress(Exception):
                _SESSIONS.pop(key).close()


def _is_destroyed(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return True
    return False


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where the group's ranks compare statements: on the host, if they can do so there."""
    if any(device.type == "cpu" for device in group._device_types):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _in_a_line(reason: str | Exception) -> str:
    if isinstance(reason, ValueError):
        reason = str(reason)
    text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
    return " ".join(text.split())
