"""Strategies and the ones that they name as their peers, with which tables compare them too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from parallel import STRATEGIES


def peer_groups(strategies: Sequence[Mapping[str, Any]]) -> Iterator[tuple[list[int], list[int]]]:
    """Places of a peer and of those that name it, once for each values of the options of both.

    Args:
        strategies: the options of each, its name among them, as a case's ``parallel`` has them.
    """
    names = [options["name"] for options in strategies]
    for name in sorted(set(names) & set(STRATEGIES.names())):
        own = STRATEGIES[name].target
        if own.peer is None:
            continue
        peer = STRATEGIES[own.peer].target
        shared = sorted(
            {option.name for option in fields(own)}
            & {option.name for option in fields(peer)} - {"name"}
        )
        groups: dict[str, tuple[list[int], list[int]]] = {}
        for place, options in enumerate(strategies):
            if names[place] in (name, own.peer):
                alike = repr([options.get(option) for option in shared])
                groups.setdefault(alike, ([], []))[names[place] == name].append(place)
        for _, (peers, candidates) in sorted(groups.items()):
            if peers and candidates:
                yield peers, candidates
