"""The blocks of a fully sharded model: those that a user names, and the parameters of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from torch import nn

Blocks: TypeAlias = Sequence[nn.Module | type[nn.Module] | str] | type[nn.Module] | str
"""Modules, or classes of modules, which may be given by name."""


def named_blocks(module: nn.Module, blocks: Blocks) -> list[nn.Module]:
    """The blocks, with all outermost modules of a class in place of a class.

    Raises:
        ValueError: no module is of a class.
    """
    given = [blocks] if isinstance(blocks, type | str) else list(blocks)
    found: list[nn.Module] = []
    for block in given:
        if isinstance(block, nn.Module):
            found.append(block)
            continue
        matches = list(_outermost(module, block))
        if not matches:
            name = block if isinstance(block, str) else block.__name__
            raise ValueError(f"blocks: no module inside {type(module).__name__} is a {name}")
        found += matches
    return found


def _outermost(module: nn.Module, kind: type[nn.Module] | str) -> Iterator[nn.Module]:
    for child in module.children():
        names = {base.__name__ for base in type(child).__mro__}
        if kind in names if isinstance(kind, str) else isinstance(child, kind):
            yield child
        else:
            yield from _outermost(child, kind)


def what_stays_whole(
    sizes: Sequence[Sequence[int]],
    *,
    outside: Sequence[Sequence[int]],
    replicate_below: int,
    names_blocks: bool,
) -> str | None:
    """A warning, where a fully sharded model holds more than its user may expect; else None.

    Args:
        sizes: elements of each parameter, by buffers.
        outside: those that are sharded and belong to no block.
        replicate_below: parameters of fewer elements are not sharded.
        names_blocks: the user did, and knows.
    """
    all_sizes = [size for members in sizes for size in members]
    if all_sizes and max(all_sizes) < replicate_below:
        return (
            f"FSDP shards nothing: the largest of {len(all_sizes)} parameters has "
            f"{max(all_sizes):,} elements, fewer than replicate_below={replicate_below:,}; every "
            f"rank holds all {sum(all_sizes):,}"
        )
    unit = [size for members in outside for size in members]
    in_blocks = sum(s for s in all_sizes if s >= replicate_below) - sum(unit)
    if in_blocks == 0 and len(unit) > 1 and not names_blocks:
        return (
            f"FSDP found no blocks: no ModuleList or Sequential holds layers, so that {len(unit)} "
            f"parameters of {sum(unit):,} elements are gathered as one and stay whole through "
            "forward and backward; name the layers or their class in blocks="
        )
    return None


def parameters_of_blocks(
    module: nn.Module, blocks: Sequence[nn.Module]
) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
    """The parameters that each block alone uses, and all others of the module.

    Raises:
        ValueError: a block is not in the module, or is in another one.
    """
    known = set(module.modules())
    users: dict[nn.Parameter, set[int]] = {}
    outside_of_blocks = -1
    for number, block in enumerate(blocks):
        if block not in known:
            raise ValueError(f"blocks[{number}] is not in the module: give modules inside it")
        inner = set(block.modules())
        nested = [other for other, b in enumerate(blocks) if b in inner and other != number]
        if nested:
            raise ValueError(
                f"blocks[{nested[0]}] is in blocks[{number}]: give blocks that lie side by side"
            )
        for parameter in block.parameters():
            users.setdefault(parameter, set()).add(number)
    in_blocks = {inner for block in blocks for inner in block.modules()}
    for other in known - in_blocks:
        for parameter in other.parameters(recurse=False):
            users.setdefault(parameter, set()).add(outside_of_blocks)
    inside: list[list[nn.Parameter]] = [[] for _ in blocks]
    outside: list[nn.Parameter] = []
    # In the module's order, which is the same on all ranks.
    for parameter in module.parameters():
        owners = users[parameter]
        alone = len(owners) == 1 and outside_of_blocks not in owners
        (inside[min(owners)] if alone else outside).append(parameter)
    return inside, outside
